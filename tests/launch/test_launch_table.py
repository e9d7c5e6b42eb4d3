# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A table of launches, composed as verl's main does: each trains what it says, is warned about, or is refused.

A launch that trains something else than it asks for without a word fails here, and so does a sound one that is refused.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from composed import composed, mended
from verl.utils.config import omega_conf_to_dataclass

from fspo_verl.keys import ACTOR
from fspo_verl.keys import POLICY_LOSS as LOSS
from fspo_verl.launch import checks
from fspo_verl.launch.asked import Refused

FSPO, GSPO, GRPO = (f"algorithm.policy_loss={loss}" for loss in ("fspo", "gspo", "grpo"))
OBSERVED = "+algorithm.policy_loss=observed"
SOUND = (
    *("algorithm.adv_estimator=grpo", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", "actor_rollout_ref.rollout.name=vllm"),
    *(
        f"{section}.log_prob_micro_batch_size_per_gpu=2"
        for section in ("actor_rollout_ref.rollout", "actor_rollout_ref.ref")
    ),
    "critic.ppo_micro_batch_size_per_gpu=2",
    *("data.train_batch_size=1024", "actor_rollout_ref.model.path=MODEL"),
)
VERL = "hydra: {searchpath: ['pkg://verl.trainer.config']}\n"


@dataclass
class Launch:
    """A launch and what is to become of it."""

    args: str
    """Overrides after ``-m verl.trainer.main_ppo``; DIR is the folder of the files."""

    verdict: str
    """``trains``, or the names of the checks that warn, or ``refused: `` and the check or a part of Hydra's message."""

    trains: dict = field(default_factory=dict)
    """What the actor's config holds in the end: a dotted key to its value."""

    files: dict = field(default_factory=dict)


def mine(defaults: str, body: str = "{}", more: str = "") -> dict:
    """A user's own config file."""
    return {"mine.yaml": f"{VERL}defaults: [{defaults}]\n{more}actor_rollout_ref: {{actor: {body}}}\n"}


MINE = "--config-path DIR --config-name mine"
IS_FSPO = {"policy_loss.loss_mode": "fspo", "policy_loss.eps": 0.03, "policy_loss.eps_low": None}
IS_VANILLA = {"policy_loss.loss_mode": "vanilla"}
IS_GSPO = {"policy_loss.inner": "gspo", "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"}
BAND = "{policy_loss: {eps_low: 0.004, eps_high: 0.005}}"
USERS_BAND = {"policy_loss.eps_low": 0.004, "policy_loss.eps_high": 0.005}
WIDE = f"{ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28"
NARROW = f"{ACTOR}.clip_ratio_low=3e-4 {ACTOR}.clip_ratio_high=4e-4"
CORRECTION = "algorithm.rollout_correction"
ROLLOUT = "actor_rollout_ref.rollout"
COPY = (
    "{_target_: verl.workers.config.FSDPActorConfig, loss_agg_mode: token-mean, clip_ratio_low: 0.2, "
    "clip_ratio_high: 0.2, policy_loss: {_target_: verl.workers.config.PolicyLossConfig, loss_mode: vanilla}}"
)
DISTIL = (
    "distillation.enabled=true distillation.distillation_loss.use_task_rewards={} distillation.n_gpus_per_node=1 "
    "distillation.nnodes=1"
)
OWN_OPTION = "# @package _global_\ndefaults: [fspo]\nactor_rollout_ref: {actor: {policy_loss: {eps_low: 0.01}}}\n"
OWN_GROUP = "# @package _global_\nactor_rollout_ref: {actor: {policy_loss: {eps_low: 0.1}}}\n"

TRAINS = {  # by what is selected
    "": IS_VANILLA,
    **dict.fromkeys(
        (
            *(FSPO, f"+{FSPO}", f"++{FSPO}", "--config-name fspo_trainer", f"--config-name fspo_trainer +{FSPO}"),
            f"--config-name ppo_megatron_trainer {FSPO}",
            *(f"model_engine=veomni {FSPO}", f"model_engine=torchtitan {FSPO}"),
            f"{FSPO} {LOSS}.loss_mode=fspo",  # which fails without the plugin
            f"{FSPO} {LOSS}.loss_mode=gspo {LOSS}.loss_mode=fspo",
            f"{FSPO} algorithm.adv_estimator=gae critic.model.path=MODEL",
            f"{FSPO} algorithm.adv_estimator=rloo",
            f"{FSPO} actor_rollout_ref.model.lora_rank=32",
            f"{FSPO} {ACTOR}.use_kl_loss=true actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
            f"{FSPO} {CORRECTION}.rollout_is=token",
            f"{FSPO} {DISTIL.format('true')}",
        ),
        IS_FSPO,
    ),
    f"--config-name ppo_megatron_trainer {GSPO}": {"policy_loss.inner": "gspo"},
    f"--config-name fspo_trainer {GSPO}": IS_GSPO,
    f"{LOSS}.loss_mode=fspo": {"policy_loss.loss_mode": "fspo"},
    OBSERVED: {"policy_loss.inner": "vanilla"},
    f"{OBSERVED} {LOSS}.loss_mode=gspo {NARROW} {ACTOR}.loss_agg_mode=seq-mean-token-mean": IS_GSPO,
    "+algorithm.policy_loss=fixed_band": {"policy_loss.length_power": 0.0},
    "+algorithm.policy_loss=no_clip": {"policy_loss.eps": math.inf},
    f"{FSPO} {LOSS}.eps=0.02": {"policy_loss.eps": 0.02},
    f"{FSPO} {LOSS}.eps_high=0.05": {"policy_loss.eps_high": 0.05},
    f"{FSPO} {LOSS}.eps_dual=inf": {"policy_loss.eps_dual": math.inf},
    f"{FSPO} {ACTOR}.loss_agg_mode=token-mean": {"loss_agg_mode": "token-mean"},
    f"{FSPO} {LOSS}.target_clip_rate=0.1 {LOSS}.eps=1": {"policy_loss.target_clip_rate": 0.1},
    f"{GRPO} {ROLLOUT}.top_p=0.9 {ROLLOUT}.logprobs_mode=raw_logprobs": {},
    f"{FSPO} {LOSS}.records_dir=DIR/new": {"policy_loss.records_freq": 1},
}
WARNED = {  # checks that warn, and launches that train all the same
    "lost_selection": ("++algorithm={policy_loss:gspo}",),
    "unregistered_loss": (f"{OBSERVED} {LOSS}.loss_mode=vanila",),
    "band_beyond_use": tuple(
        f"{FSPO} {LOSS}.{field}"
        for field in (
            *("eps=0.2", "eps_low=0.2", "eps_high=0.5", "length_power=1"),
            *(f"eps=0.13 {ROLLOUT}.response_length=8192", f"eps=0.03 {ROLLOUT}.response_length=32768"),
        )
    ),
    "idle_clip_ratio": (f"{FSPO} {WIDE}", f"{FSPO} {ACTOR}.clip_ratio_c=10"),
    "range_of_tokens_for_gspo": (f"{GSPO} {WIDE}",),
    "loss_in_effect": (f"{GRPO} {WIDE}",),  # a note
    "numerical_noise": (
        f"{FSPO} {ACTOR}.use_dynamic_bsz=true",
        f"{GSPO} {ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
    ),
    "weights_of_whole_responses": (f"{FSPO} {ROLLOUT}.response_length=8192 {CORRECTION}.rollout_is=sequence",),
    "mean_over_own_length": (f"{FSPO} {ACTOR}.loss_agg_mode=seq-mean-token-mean",),
    "no_divisor": (
        *(f"{FSPO} {ACTOR}.loss_scale_factor={factor}" for factor in ("null", "1e9")),
        f"{GRPO} {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    "one_step_per_rollout": (f"{FSPO} {ACTOR}.ppo_mini_batch_size=1024",),
    "mismatch_of_engines": (
        f"{FSPO} {CORRECTION}.bypass_mode=true",
        f"{FSPO} {CORRECTION}.loss_type=reinforce {CORRECTION}.bypass_mode=true",
        *(f"{GRPO} {ROLLOUT}.top_p=0.9", f"{FSPO} {ROLLOUT}.calculate_log_probs=false"),
    ),
}
REFUSED = {  # check, or a part of Hydra's message, and what they refuse
    "fspoo": ("algorithm.policy_loss=fspoo", "+algorithm.policy_loss=fspoo"),
    "FSPO": ("+algorithm.policy_loss=FSPO",),
    "Could not override": ("algorithm.policy_lost=fspo",),
    "lost_selection": (
        *("+algorithm/policy_loss=fspo", "+policy_loss=fspo", "+policy_loss.loss_mode=fspo"),
        *("+algorithm.policy_lost=fspo", f"{GSPO} +algorithm.policy_lost=fspo"),
        *("+algorithm.policy_loss_mode=fspo", "+algorithm.policy-loss=fspo", "+actor_rollout_ref.policy_loss=fspo"),
        *("+algorithm.loss_mode=fspo", f"{LOSS}=fspo", "++algorithm={policy_loss:fspo}"),
        *("++algorithm={policy_loss:{loss_mode:fspo}}", "algorithm.adv_estimator=fspo"),
    ),
    "misplaced_fields": tuple(
        f"{FSPO} +{field}"
        for field in ("algorithm.eps_low=0.1", f"{ACTOR}.eps_high=0.1", "algorithm.target_clip_rate=0.1")
    ),
    "eps_hihg": (f"{FSPO} {LOSS}.eps_hihg=0.1",),
    "bad_values": (
        *(f"{OBSERVED} {LOSS}.loss_mode=null", f"{LOSS}.loss_mode=observed"),
        *(f"{FSPO} +{LOSS}.eps_hihg=0.1", f"{LOSS}.loss_mode=fspo +{LOSS}.eps_low=0.1"),
        f"+algorithm.policy_loss=fixed_band {LOSS}.eps=0.1",
        f"{FSPO} {LOSS}.target_clip_rate=10",
        f"+algorithm.policy_loss=no_clip {LOSS}.target_clip_rate=0.1",
    ),
    "target_clip_rate": (f"{GSPO} +{LOSS}.target_clip_rate=0.1",),
    "unreachable_clip_rate": (
        f"{FSPO} {LOSS}.target_clip_rate=0.1 {ACTOR}.ppo_mini_batch_size=1024",
        f"--config-name ppo_megatron_trainer {FSPO} {LOSS}.target_clip_rate=0.1 "
        f"{ACTOR}.megatron.dynamic_context_parallel=true {ACTOR}.megatron.max_seqlen_per_dp_cp_rank=1024",
    ),
    "overridden_group": (
        *(f"{FSPO} {LOSS}.loss_mode={name}" for name in ("gspo", "null")),
        f"{GSPO} {LOSS}.loss_mode=vanilla",
    ),
    "no_divisor": tuple(f"{FSPO} {ACTOR}.loss_scale_factor={factor}" for factor in ("0", "-1")),
    "Invalid loss_agg_mode": (f"{FSPO} {ACTOR}.loss_agg_mode=seq-mean",),
    "dropped_by_distillation": (f"{FSPO} {DISTIL.format('false')}",),
    **{
        f"{LOSS}.{field}=": tuple(f"{loss} {LOSS}.{field}={value}" for value in values)
        for loss, field, values in (
            (FSPO, "length_bins", ("16", "[]", "[16,16]", "[a]")),
            (FSPO, "records_freq", ("1.5", "abc", "0")),
            (FSPO, "records_dir", ("3", "new")),
        )
    },
}
OWN_YAML = {  # what a user's own file does
    "the group before _self_": Launch(
        MINE, "trains", USERS_BAND, mine("ppo_trainer, algorithm.policy_loss: fspo, _self_", BAND)
    ),
    "on top of the packaged config": Launch(MINE, "trains", USERS_BAND, mine("fspo_trainer, _self_", BAND)),
    "its values said again": Launch(
        f"{MINE} {FSPO} {LOSS}.eps_low=0.004 {LOSS}.eps_high=0.005",
        "trains",
        USERS_BAND,
        mine("ppo_trainer, _self_", BAND),
    ),
    **{
        f"{body} and the group": Launch(f"{MINE} {FSPO}", "trains", IS_FSPO, mine("ppo_trainer, _self_", body))
        for body in (
            *("{policy_loss: {loss_mode: gspo}}", COPY, "{ppo_mini_batch_size: 128}"),
            "{loss_agg_mode: token-mean}",  # verl's default
        )
    },
    **{
        f"{body} before the group": Launch(
            f"{MINE} {FSPO}", "refused: lost_to_group", files=mine("ppo_trainer, _self_", body)
        )
        for body in (
            *(BAND, "{policy_loss: {_target_: types.SimpleNamespace}}"),
            COPY.replace("token-mean", "seq-mean-token-mean"),
        )
    },
    "GRPO's range before the grpo baseline": Launch(
        f"{MINE} {GRPO}", "refused: lost_to_group", files=mine("ppo_trainer, _self_", "{clip_ratio_high: 0.28}")
    ),
    "the group after_self": Launch(
        MINE, "refused: lost_to_group", files=mine("ppo_trainer, _self_, algorithm.policy_loss: fspo", BAND)
    ),
    "a group file before ours": Launch(
        f"+experiment=wide {FSPO} hydra.searchpath=[file://DIR]",
        "refused: lost_to_group",
        files={"experiment/wide.yaml": OWN_GROUP},
    ),
    "another loss after the group": Launch(
        MINE,
        "refused: overridden_group",
        files=mine("ppo_trainer, algorithm.policy_loss: fspo, _self_", "{policy_loss: {loss_mode: gspo}}"),
    ),
    "a key of its own": Launch(
        f"{MINE} algorithm.policy_loss=smooth",
        "trains",
        IS_VANILLA,
        mine("ppo_trainer, _self_", more="algorithm: {policy_loss: clipped}\n"),
    ),
    **{
        f"{value} as a value": Launch(
            args, "refused: lost_selection", files=mine("ppo_trainer, _self_", more=f"algorithm: {value}\n")
        )
        for args, value in ((MINE, "{policy_loss: fspo}"), (f"{MINE} {FSPO}", "{policy_loss: clipped}"))
    },
    "misspelt": Launch(MINE, "refused: fspoo", files=mine("ppo_trainer, algorithm.policy_loss: fspoo, _self_")),
    "a range before an option of its own": Launch(
        f"{MINE} --config-dir DIR +algorithm.policy_loss=tight",
        "refused: lost_to_group",
        files=mine("ppo_trainer, _self_", "{policy_loss: {eps_high: 0.005}}")
        | {"algorithm.policy_loss/tight.yaml": OWN_OPTION},
    ),
    "an option of its own": Launch(
        "--config-dir DIR +algorithm.policy_loss=tight",
        "trains",
        {"policy_loss.eps_low": 0.01},
        {"algorithm.policy_loss/tight.yaml": OWN_OPTION},
    ),
}
LAUNCHES = {
    **{args: Launch(args, "trains", trains) for args, trains in TRAINS.items()},
    **{args: Launch(args, check) for check, launches in WARNED.items() for args in launches},
    **{args: Launch(args, f"refused: {words}") for words, launches in REFUSED.items() for args in launches},
    **{f"own YAML: {name}": launch for name, launch in OWN_YAML.items()},
}


def _refused(found: list) -> list:
    return [finding for finding in found if finding.severity == "error"]


def examine(launch: Launch, folder: Path, model: Path) -> tuple[list, dict]:
    """Findings about a launch, and the actor's config as verl builds it where nothing refuses it."""
    for name, text in launch.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("DIR", str(folder)))
    given = launch.args.split()
    keys = [argument.split("=")[0] for argument in given]
    given += [override for override in SOUND if override.split("=")[0] not in keys]
    arguments = [argument.replace("DIR", str(folder)).replace("MODEL", str(model)) for argument in given]

    def look(config):
        found = checks.findings(config)
        if _refused(found):
            return found, {}
        return found, {**vars(omega_conf_to_dataclass(config.actor_rollout_ref.actor))}

    try:
        return composed(arguments, look)
    except Refused as refused:
        return [refused.finding], {}


def mend(wrong: list, launch: Launch, folder: Path, model: Path) -> None:
    """Apply the fix of the first finding until none is left; each takes away at least what it is about."""
    for _ in range(4):
        first, *_ = wrong
        given = [text.replace("DIR", str(folder)) for text in launch.args.split()]
        launch = replace(launch, args=" ".join(mended(first, given)))
        found, _ = examine(launch, folder, model)
        assert first not in found, first
        if not (wrong := [one for one in found if one.severity == first.severity]):
            return
    raise AssertionError(wrong)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_trains_what_it_says_or_says_why_not(name, tmp_path, untrained_model, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")  # no cluster that happens to run here
    launch = LAUNCHES[name]
    expected = launch.verdict.removeprefix("refused: ")
    try:
        found, actor = examine(launch, tmp_path, untrained_model)
    except Exception as error:
        assert launch.verdict.startswith("refused: ") and expected in str(error)
        return
    errors = _refused(found)
    if launch.verdict.startswith("refused: "):
        assert any(expected == finding.id or expected in str(finding) for finding in errors), found
        mend(errors, launch, tmp_path, untrained_model)
        return
    assert not errors
    warnings = [finding for finding in found if finding.severity == "warning"]
    wanted = set() if launch.verdict == "trains" else set(launch.verdict.split())
    assert wanted <= {finding.id for finding in found} and {finding.id for finding in warnings} <= wanted
    for key, value in launch.trains.items():
        section, _, name_there = key.rpartition(".")
        holder = actor[section] if section else actor
        assert (getattr(holder, name_there) if section else holder[name_there]) == value, key
    if warnings:
        mend(warnings, launch, tmp_path, untrained_model)
