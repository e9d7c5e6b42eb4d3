# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A table of launches, composed as verl's main does: each trains what it says, is warned about, or is refused.

A launch that trains something else than it asks for without a word fails here, and so does a sound one that is refused.
"""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from composed import composed
from remedies import applied
from verl.utils.config import omega_conf_to_dataclass

from fspo_verl.keys import GONE
from fspo_verl.launch import checks, doctor

MAIN = "verl.trainer.main_ppo"
ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
FSPO = "algorithm.policy_loss=fspo"
GSPO = "algorithm.policy_loss=gspo"
GRPO = "algorithm.policy_loss=grpo"
SOUND = (
    *("algorithm.adv_estimator=grpo", f"{ACTOR}.use_dynamic_bsz=true", "actor_rollout_ref.rollout.name=vllm"),
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

LAUNCHES = {
    # --- ways in
    "stock verl": Launch("", "trains", IS_VANILLA),
    "the group": Launch(FSPO, "trains", IS_FSPO),
    "the group, twice plus": Launch("++algorithm.policy_loss=fspo", "refused: policy_loss"),
    "the group with plus": Launch("+algorithm.policy_loss=fspo", "trains", IS_FSPO),
    "the group without plus, on megatron": Launch(
        "--config-name ppo_megatron_trainer algorithm.policy_loss=gspo", "trains", {"policy_loss.inner": "gspo"}
    ),
    "the group without plus, misspelt": Launch("algorithm.policy_loss=fspoo", "refused: fspoo"),
    "a misspelt group without plus": Launch("algorithm.policy_lost=fspo", "refused: Could not override"),
    "the group without plus, on a key of the user's": Launch(
        f"{MINE} algorithm.policy_loss=smooth",
        "trains",
        IS_VANILLA,
        mine("ppo_trainer, _self_", more="algorithm: {policy_loss: clipped}\n"),
    ),
    "FSPO on a key of the user's": Launch(
        f"{MINE} algorithm.policy_loss=fspo",
        "refused: lost_selection",
        files=mine("ppo_trainer, _self_", more="algorithm: {policy_loss: clipped}\n"),
    ),
    "the packaged config": Launch("--config-name fspo_trainer", "trains", IS_FSPO),
    "another option of the packaged config": Launch(
        "--config-name fspo_trainer algorithm.policy_loss=gspo",
        "trains",
        {"policy_loss.inner": "gspo", "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
    ),
    "a plus too many on the packaged config": Launch("--config-name fspo_trainer +" + FSPO, "refused: more than once"),
    "megatron": Launch("--config-name ppo_megatron_trainer " + FSPO, "trains", IS_FSPO),
    "veomni": Launch("model_engine=veomni " + FSPO, "trains", IS_FSPO),
    "torchtitan": Launch("model_engine=torchtitan " + FSPO, "trains", IS_FSPO),
    "loss_mode alone": Launch(f"{LOSS}.loss_mode=fspo", "trains", {"policy_loss.loss_mode": "fspo"}),
    "group and loss_mode, which fails without the plugin": Launch(f"{FSPO} {LOSS}.loss_mode=fspo", "trains", IS_FSPO),
    "observed vanilla": Launch("+algorithm.policy_loss=observed", "trains", {"policy_loss.inner": "vanilla"}),
    "observed gspo": Launch(
        f"+algorithm.policy_loss=observed {LOSS}.loss_mode=gspo {NARROW} {ACTOR}.loss_agg_mode=seq-mean-token-mean",
        "trains",
        {"policy_loss.inner": "gspo"},
    ),
    "the fixed band": Launch("+algorithm.policy_loss=fixed_band", "trains", {"policy_loss.length_power": 0.0}),
    "no clip": Launch("+algorithm.policy_loss=no_clip", "trains", {"policy_loss.eps": math.inf}),
    "an own band": Launch(f"{FSPO} {LOSS}.eps=0.02", "trains", {"policy_loss.eps": 0.02}),
    "an own upper side": Launch(f"{FSPO} {LOSS}.eps_high=0.05", "trains", {"policy_loss.eps_high": 0.05}),
    "no dual clip": Launch(f"{FSPO} {LOSS}.eps_dual=inf", "trains", {"policy_loss.eps_dual": math.inf}),
    "an own aggregation": Launch(f"{FSPO} {ACTOR}.loss_agg_mode=token-mean", "trains", {"loss_agg_mode": "token-mean"}),
    # --- a user's own YAML
    "own YAML, group before _self_": Launch(
        MINE, "trains", USERS_BAND, mine("ppo_trainer, algorithm.policy_loss: fspo, _self_", BAND)
    ),
    "own YAML, group on the command line": Launch(
        f"{MINE} {FSPO}", "refused: lost_to_group", files=mine("ppo_trainer, _self_", BAND)
    ),
    "own YAML, group after _self_": Launch(
        MINE, "refused: lost_to_group", files=mine("ppo_trainer, _self_, algorithm.policy_loss: fspo", BAND)
    ),
    "own YAML, its values said again": Launch(
        f"{MINE} {FSPO} {LOSS}.eps_low=0.004 {LOSS}.eps_high=0.005",
        "trains",
        USERS_BAND,
        mine("ppo_trainer, _self_", BAND),
    ),
    "own YAML, aggregation": Launch(
        f"{MINE} {FSPO}", "refused: lost_to_group", files=mine("ppo_trainer, _self_", "{loss_agg_mode: token-mean}")
    ),
    "own YAML, an own schema": Launch(
        f"{MINE} {FSPO}",
        "refused: lost_to_group",
        files=mine("ppo_trainer, _self_", "{policy_loss: {_target_: types.SimpleNamespace}}"),
    ),
    "own YAML, another loss": Launch(
        f"{MINE} {FSPO}", "trains", IS_FSPO, mine("ppo_trainer, _self_", "{policy_loss: {loss_mode: gspo}}")
    ),
    "own YAML, another loss after the group": Launch(
        MINE,
        "refused: overridden_group",
        files=mine("ppo_trainer, algorithm.policy_loss: fspo, _self_", "{policy_loss: {loss_mode: gspo}}"),
    ),
    "own YAML, a copy of verl's": Launch(f"{MINE} {FSPO}", "trains", IS_FSPO, mine("ppo_trainer, _self_", COPY)),
    "own YAML, a changed copy of verl's": Launch(
        f"{MINE} {FSPO}",
        "refused: lost_to_group",
        files=mine("ppo_trainer, _self_", COPY.replace("token-mean", "seq-mean-token-mean")),
    ),
    "own YAML, GRPO's range under the grpo baseline": Launch(
        f"{MINE} {GRPO}", "refused: lost_to_group", files=mine("ppo_trainer, _self_", "{clip_ratio_high: 0.28}")
    ),
    "own YAML, nothing about the loss": Launch(
        f"{MINE} {FSPO}", "trains", IS_FSPO, mine("ppo_trainer, _self_", "{ppo_mini_batch_size: 128}")
    ),
    "own group file before ours": Launch(
        f"+experiment=wide {FSPO} hydra.searchpath=[file://DIR]",
        "refused: lost_to_group",
        files={
            "experiment/wide.yaml": "# @package _global_\nactor_rollout_ref: {actor: {policy_loss: {eps_low: 0.1}}}\n"
        },
    ),
    "own YAML, a plain value": Launch(
        MINE, "refused: lost_selection", files=mine("ppo_trainer, _self_", more="algorithm: {policy_loss: fspo}\n")
    ),
    "own YAML, optional and misspelt": Launch(
        MINE, "refused: missing_choice", files=mine("ppo_trainer, optional algorithm.policy_loss: fspoo, _self_")
    ),
    "own YAML, misspelt": Launch(
        MINE, "refused: fspoo", files=mine("ppo_trainer, algorithm.policy_loss: fspoo, _self_")
    ),
    "own YAML on top of the packaged config": Launch(MINE, "trains", USERS_BAND, mine("fspo_trainer, _self_", BAND)),
    # --- near misses of the override
    "a slash": Launch("+algorithm/policy_loss=fspo", "refused: lost_selection"),
    "the group's last word": Launch("+policy_loss=fspo", "refused: lost_selection"),
    "a section at the root": Launch("+policy_loss.loss_mode=fspo", "refused: lost_selection"),
    "a misspelt group": Launch("+algorithm.policy_lost=fspo", "refused: lost_selection"),
    "a misspelt group and option": Launch("+algorithm.policy_lost=fsop", "refused: lost_selection"),
    "a misspelt group and a baseline": Launch("+algorithm.policy_lost=gspo", "lost_selection"),
    "a baseline as a value": Launch("++algorithm={policy_loss:gspo}", "lost_selection"),
    "a misspelt option as a value": Launch("++algorithm={policy_loss:gsop}", "refused: lost_selection"),
    "a longer name": Launch("+algorithm.policy_loss_mode=fspo", "refused: lost_selection"),
    "a hyphen": Launch("+algorithm.policy-loss=fspo", "refused: lost_selection"),
    "another section": Launch("+actor_rollout_ref.policy_loss=fspo", "refused: lost_selection"),
    "the loss in the wrong section": Launch("+algorithm.loss_mode=fspo", "refused: lost_selection"),
    "capitals": Launch("+algorithm.policy_loss=FSPO", "refused: FSPO"),
    "a plain value in place of the section": Launch(f"{LOSS}=fspo", "refused: lost_selection"),
    "a forced plain value": Launch("++algorithm={policy_loss:fspo}", "refused: lost_selection"),
    "a forced section": Launch("++algorithm={policy_loss:{loss_mode:fspo}}", "refused: lost_selection"),
    "a misspelt option": Launch("+algorithm.policy_loss=fspoo", "refused: fspoo"),
    "a misspelt loss_mode": Launch(f"{LOSS}.loss_mode=fpso", "unregistered_loss"),
    "a misspelt loss_mode under observation": Launch(
        f"+algorithm.policy_loss=observed {LOSS}.loss_mode=vanila", "unregistered_loss"
    ),
    "no loss_mode": Launch(f"{FSPO} {LOSS}.loss_mode=null", "refused: no_loss_mode"),
    "nothing to observe": Launch(f"{LOSS}.loss_mode=observed", "refused: no_loss_mode"),
    **{
        f"{field} of {loss}": Launch(f"{loss} {LOSS}.{field}", f"refused: {LOSS}.{field.split('=')[0]}=")
        for loss, field in (
            *((FSPO, f"length_bins={bins}") for bins in ("16", "[]", "[16,16]", "[a]")),
            *((FSPO, f"records_freq={freq}") for freq in ("1.5", "abc", "0")),
            *((GRPO, f"records_limit_mb={limit}") for limit in ("abc", "-1")),
            *((FSPO, f"records_dir={folder}") for folder in ("3", "new")),
        )
    },
    "the loss as advantages": Launch("algorithm.adv_estimator=fspo", "refused: loss_as_advantages"),
    "a baseline as advantages": Launch(f"{FSPO} algorithm.adv_estimator=gspo", "refused: loss_as_advantages"),
    # --- bands
    "a band field in the wrong section": Launch(f"{FSPO} +algorithm.eps_low=0.1", "refused: misplaced_fields"),
    "a band field in the actor": Launch(f"{FSPO} +{ACTOR}.eps_high=0.1", "refused: misplaced_fields"),
    "a misspelt band field": Launch(f"{FSPO} +{LOSS}.eps_hihg=0.1", "refused: unknown_fields"),
    "a misspelt band field without plus": Launch(f"{FSPO} {LOSS}.eps_hihg=0.1", "refused: eps_hihg"),
    "a band field without the group": Launch(f"{LOSS}.loss_mode=fspo +{LOSS}.eps_low=0.1", "refused: unknown_fields"),
    "verl's ratio range as eps": Launch(f"{FSPO} {LOSS}.eps=0.2", "band_beyond_use"),
    "verl's ratio range as eps_low": Launch(f"{FSPO} {LOSS}.eps_low=0.2", "band_beyond_use"),
    "a per-token mean with FSPO's eps": Launch(f"{FSPO} {LOSS}.length_power=1", "band_beyond_use"),
    "an eps beside both sides": Launch(f"+algorithm.policy_loss=fixed_band {LOSS}.eps=0.1", "refused: bad_values"),
    "a clip rate to follow": Launch(
        f"{FSPO} {LOSS}.target_clip_rate=0.1 {LOSS}.eps=1", "trains", {"policy_loss.target_clip_rate": 0.1}
    ),
    "a clip rate that is no share": Launch(f"{FSPO} {LOSS}.target_clip_rate=10", "refused: bad_values"),
    "a clip rate to follow from an infinite eps": Launch(
        f"+algorithm.policy_loss=no_clip {LOSS}.target_clip_rate=0.1", "refused: bad_values"
    ),
    "a clip rate in the wrong section": Launch(f"{FSPO} +algorithm.target_clip_rate=0.1", "refused: misplaced_fields"),
    "a clip rate for a baseline": Launch(f"{GSPO} +{LOSS}.target_clip_rate=0.1", "refused: target_clip_rate"),
    "a clip rate where nothing can be clipped": Launch(
        f"{FSPO} {LOSS}.target_clip_rate=0.1 {ACTOR}.ppo_mini_batch_size=1024", "refused: unreachable_clip_rate"
    ),
    "a clip rate under dynamic context parallelism": Launch(
        f"--config-name ppo_megatron_trainer {FSPO} {LOSS}.target_clip_rate=0.1 "
        f"{ACTOR}.megatron.dynamic_context_parallel=true {ACTOR}.megatron.max_seqlen_per_dp_cp_rank=1024",
        "refused: unreachable_clip_rate",
    ),
    # --- fields that are gone
    **{
        f"{plus}{name} for {loss}": Launch(f"{loss} {plus}{LOSS}.{name}=1", f"refused: {instead}")
        for name, instead in GONE.items()
        for plus in ("", "+")
        for loss in (FSPO, GSPO)
    },
    # --- leftovers of other scripts
    "another loss_mode": Launch(f"{FSPO} {LOSS}.loss_mode=gspo", "refused: overridden_group"),
    "another loss_mode, taken back": Launch(f"{FSPO} {LOSS}.loss_mode=gspo {LOSS}.loss_mode=fspo", "trains", IS_FSPO),
    "another loss_mode under a baseline": Launch(f"{GSPO} {LOSS}.loss_mode=vanilla", "refused: overridden_group"),
    "DAPO's range beside fspo": Launch(f"{FSPO} {WIDE}", "idle_clip_ratio"),
    "DAPO's range in the gspo baseline": Launch(f"{GSPO} {WIDE}", "range_of_tokens_for_gspo"),
    "DAPO's range in the grpo baseline": Launch(f"{GRPO} {WIDE}", "loss_in_effect", {"clip_ratio_high": 0.28}),
    "GSPO's aggregation beside fspo": Launch(
        f"{FSPO} {ACTOR}.loss_agg_mode=seq-mean-token-mean", "mean_over_own_length"
    ),
    "a divisor of 0": Launch(f"{FSPO} {ACTOR}.loss_scale_factor=0", "refused: no_divisor"),
    "a negative divisor": Launch(f"{FSPO} {ACTOR}.loss_scale_factor=-1", "refused: no_divisor"),
    "no divisor": Launch(f"{FSPO} {ACTOR}.loss_scale_factor=null", "no_divisor"),
    "no divisor of a baseline": Launch(f"{GRPO} {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "no_divisor"),
    "a divisor that nobody means": Launch(f"{FSPO} {ACTOR}.loss_scale_factor=1e9", "no_divisor"),
    "the longest response where the engine is told": Launch(
        f"{FSPO} actor_rollout_ref.rollout.response_length=81 data.max_response_length=10",
        "longer_than_the_data_say",
        {"loss_scale_factor": 81},
    ),
    "an unknown aggregation": Launch(f"{FSPO} {ACTOR}.loss_agg_mode=seq-mean", "refused: Invalid loss_agg_mode"),
    # --- search paths
    "a hidden file by --config-dir": Launch(
        f"--config-dir DIR {FSPO}", "refused: hidden_files", files={"algorithm.policy_loss/fspo.yaml": "{}\n"}
    ),
    "a hidden file by hydra.searchpath": Launch(
        f"hydra.searchpath=[file://DIR] {FSPO}",
        "refused: hidden_files",
        files={"algorithm.policy_loss/fspo.yaml": "{}\n"},
    ),
    "a hidden file by a YAML's searchpath": Launch(
        f"{MINE} {FSPO}",
        "refused: hidden_files",
        files={
            "mine.yaml": "hydra: {searchpath: ['pkg://verl.trainer.config', 'file://DIR/more']}\n"
            "defaults: [ppo_trainer, _self_]\n",
            "more/algorithm.policy_loss/fspo.yaml": "{}\n",
        },
    ),
    "an own option beside ours": Launch(
        "--config-dir DIR +algorithm.policy_loss=tight",
        "trains",
        {"policy_loss.eps_low": 0.01},
        {
            "algorithm.policy_loss/tight.yaml": "# @package _global_\ndefaults: [fspo]\n"
            "actor_rollout_ref: {actor: {policy_loss: {eps_low: 0.01}}}\n"
        },
    ),
    # --- trainers, engines, advantages
    "GAE": Launch(f"{FSPO} algorithm.adv_estimator=gae critic.model.path=MODEL", "trains", IS_FSPO),
    "leave-one-out advantages": Launch(f"{FSPO} algorithm.adv_estimator=rloo", "trains", IS_FSPO),
    "LoRA": Launch(f"{FSPO} actor_rollout_ref.model.lora_rank=32", "trains", IS_FSPO),
    "a KL term": Launch(
        f"{FSPO} {ACTOR}.use_kl_loss=true actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true", "trains", IS_FSPO
    ),
    "one optimiser step": Launch(f"{FSPO} {ACTOR}.ppo_mini_batch_size=1024", "one_step_per_rollout"),
    "a rollout correction": Launch(f"{FSPO} {CORRECTION}.rollout_is=token", "trains", IS_FSPO),
    "the loss of bypass mode": Launch(
        f"{FSPO} {CORRECTION}.loss_type=reinforce {CORRECTION}.bypass_mode=true", "rollout_log_probs"
    ),
    "engine log-probs": Launch(f"{FSPO} algorithm.rollout_correction.bypass_mode=true", "rollout_log_probs"),
    "nucleus sampling": Launch(f"{GRPO} {ROLLOUT}.top_p=0.9", "mismatch_of_engines"),
    "nucleus sampling, log-probs of the whole distribution": Launch(
        f"{GRPO} {ROLLOUT}.top_p=0.9 {ROLLOUT}.logprobs_mode=raw_logprobs", "trains"
    ),
    "log-probs of the engine are not asked for": Launch(
        f"{FSPO} {ROLLOUT}.calculate_log_probs=false", "mismatch_of_engines"
    ),
    "distillation beside the rewards": Launch(f"{FSPO} {DISTIL.format('true')}", "trains", IS_FSPO),
    "distillation in place of the rewards": Launch(
        f"{FSPO} {DISTIL.format('false')}", "refused: dropped_by_distillation"
    ),
    # --- records and resumes
    "records": Launch(f"{FSPO} {LOSS}.records_dir=DIR/new", "trains", {"policy_loss.records_freq": 1}),
    "records in a relative folder": Launch(f"{FSPO} {LOSS}.records_dir=new", "refused: absolute path"),
    "records of another run": Launch(
        f"{FSPO} {LOSS}.records_dir=DIR", "refused: used_records_dir", files={"step-000001-rank-0000.parquet": ""}
    ),
    "a resume with another band": Launch(
        f"{FSPO} {LOSS}.eps_low=0.02 trainer.default_local_dir=DIR trainer.save_freq=10",
        "changed_on_resume",
        files={
            "latest_checkpointed_iteration.txt": "20",
            "global_step_20/actor/weights": "",
            "policy_loss.json": json.dumps([{"after_step": 0, "loss": {"policy_loss.eps_low": 0.03}}]),
        },
    ),
    "a resume of a run with a field that is gone": Launch(
        f"{FSPO} trainer.default_local_dir=DIR trainer.save_freq=10",
        "changed_on_resume",
        IS_FSPO,
        files={
            "latest_checkpointed_iteration.txt": "20",
            "global_step_20/actor/weights": "",
            "policy_loss.json": json.dumps([{"after_step": 0, "loss": {"policy_loss.mismatch_eps": 0.1}}]),
        },
    ),
    "a resume with the same band": Launch(
        f"{FSPO} trainer.default_local_dir=DIR trainer.save_freq=10",
        "trains",
        IS_FSPO,
        files={
            "latest_checkpointed_iteration.txt": "20",
            "global_step_20/actor/weights": "",
            "policy_loss.json": json.dumps([{"after_step": 0, "loss": {"policy_loss.eps_low": 0.03}}]),
        },
    ),
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

    if "--config-dir" in arguments:  # which Hydra reads on a command line alone
        return doctor.with_config(MAIN, arguments, look)
    return composed(arguments, look)


def mend(errors: list, launch: Launch, folder: Path, model: Path) -> None:
    """Apply the fix of the first error until none is left; each takes away at least what it is about."""
    for _ in range(4):
        first, *_ = errors
        if first.id == "hidden_files":
            (file,) = folder.rglob(first.advice.removeprefix("rename "))
            file.rename(file.with_name("renamed.yaml"))
            launch = replace(launch, files={})
        else:
            given = [text.replace("DIR", str(folder)) for text in launch.args.split()]
            launch = replace(launch, args=" ".join(applied(first.advice, given)))
        found, _ = examine(launch, folder, model)
        assert first not in found, first
        if not (errors := _refused(found)):
            return
    raise AssertionError(errors)


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
    said = {finding.id for finding in found if finding.severity == "warning"}
    named = {finding.id for finding in found}
    wanted = set() if launch.verdict == "trains" else set(launch.verdict.split())
    assert wanted <= named and said <= wanted
    for key, value in launch.trains.items():
        section, _, name_there = key.rpartition(".")
        holder = actor[section] if section else actor
        assert (getattr(holder, name_there) if section else holder[name_there]) == value, key
