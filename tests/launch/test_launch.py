# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Ways in and silent traps: composition of verl's own configs, the schema, and the checks before Ray starts."""

import ast
import functools
import inspect
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from composed import composed
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass, validate_config

import fspo_verl.configs
from fspo_verl import adaptive
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.launch import checks, hook, resume, view
from fspo_verl.launch.view import KEPT_LOSSES, Launch

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
# What stock verl wants of any launch.
BASE = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "data.train_batch_size=1024",
]


def launch(*overrides):
    """The config that verl's main would be handed for these command-line overrides; Hydra's state stays for a test."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        full = compose("ppo_trainer", overrides=[*overrides, *BASE], return_hydra_config=True)
    HydraConfig.instance().set_config(full)
    return OmegaConf.masked_copy(full, [key for key in full if key != "hydra"])


composed_once = functools.cache(launch)


@pytest.fixture(autouse=True)
def forget_hydra_config():
    yield
    HydraConfig.instance().cfg = None


# --- ways in ---------------------------------------------------------------------------------------------------------


def test_one_override_selects_the_documented_defaults(caplog):
    config = launch("+algorithm.policy_loss=fspo")
    with caplog.at_level(logging.INFO, logger="fspo_verl"):
        hook.check(config)
    assert [record.levelno for record in caplog.records] == [logging.INFO]  # the band
    assert "policy loss fspo: log-ratio band 0 [-0.03, +0.03]*L^0.5" in caplog.text
    packaged = config.actor_rollout_ref.actor.policy_loss
    defaults = FSPOPolicyLossConfig()
    assert {k: v for k, v in packaged.items() if k != "_target_"} == {
        key: defaults[key] for key in packaged if key != "_target_"
    }
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss == FSPOPolicyLossConfig(_target_=actor.policy_loss["_target_"])
    assert (actor.loss_agg_mode, actor.loss_scale_factor) == ("seq-mean-token-sum-norm", 512)


@pytest.mark.parametrize("option", ["fspo", "gspo", "observed"])
@pytest.mark.parametrize(
    "folder, config_name",
    [
        ("trainer.config", "ppo_trainer"),
        ("trainer.config", "ppo_megatron_trainer"),
        ("experimental.fully_async_policy.config", "fully_async_ppo_trainer"),
        ("experimental.fully_async_policy.config", "fully_async_ppo_megatron_trainer"),
        ("experimental.one_step_off_policy.config", "one_step_off_ppo_trainer"),
    ],
)
def test_the_words_of_the_override_select_the_loss_on_every_main(folder, config_name, option):
    def look(config):
        schema = "FSPO" if option == "fspo" else "Observed"
        assert config.actor_rollout_ref.actor.policy_loss._target_ == f"fspo_verl.config.{schema}PolicyLossConfig"
        hook.check(config)

    composed(["--config-name", config_name, f"algorithm.policy_loss={option}"], look, folder)


def test_the_configs_shown_at_the_top_are_the_packaged_ones():
    repository, packaged = Path(__file__).parents[2], Path(fspo_verl.configs.__file__).parent
    shown, used = (
        {file.relative_to(folder): file.read_text() for file in folder.rglob("*.yaml")}
        for folder in (repository / "configs", packaged)
    )
    assert shown == used != {}
    if (repository / ".git").exists():  # an unpacked sdist holds a copy
        assert (repository / "configs").resolve() == packaged.resolve()


# --- bad values, in verl's validate_config and in the checks ----------------------------------------------------------

BAD = {  # overrides, the value that the message names
    "eps=0": "eps=0",
    "normalization=sqrt": "normalization='sqrt'",
    "eps=0.1 eps_low=0.2 eps_high=0.2": "eps=0.1",
    "loss_mode=gspo": "loss_mode='gspo'",
}


@pytest.mark.parametrize("overrides", BAD)
def test_a_bad_value_is_refused_with_its_full_key(overrides):
    config = launch("+algorithm.policy_loss=fspo", *(f"{POLICY_LOSS}.{override}" for override in overrides.split()))
    for check in (lambda config: validate_config(config, use_reference_policy=False, use_critic=False), hook.check):
        with pytest.raises(Exception, match=re.escape(f"{POLICY_LOSS}.{BAD[overrides]}")):
            check(config)


# --- what a launch is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("internal", ["config_loader_impl.create_defaults_list", "config_repository.ConfigRepository"])
def test_a_hydra_with_other_internals_lets_the_loss_train_and_names_what_is_not_checked(
    internal, monkeypatch, caplog, tmp_path
):
    def look(config):
        monkeypatch.delattr(f"hydra._internal.{internal}")
        hook.check(config)

    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: ['pkg://verl.trainer.config']}\ndefaults: [ppo_trainer, _self_]\n"
    )
    composed(["--config-path", str(tmp_path), "--config-name", "mine", "+algorithm.policy_loss=fspo", *BASE], look)
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert any("lost_to_group cannot judge" in text and "this Hydra" in text for text in warned)


@pytest.mark.parametrize(
    "of", [of for of in view.CHECKS if of.needs in ("config", "fspo")], ids=lambda of: of.find.__name__
)
def test_a_check_that_crashes_refuses_the_launch_if_it_could_have_refused_it(of, monkeypatch):
    def crash(_launch):
        raise TypeError("on purpose")

    planted = [one._replace(find=crash) if one is of else one for one in view.CHECKS]
    monkeypatch.setattr(checks, "CHECKS", planted)
    (told,) = (
        one for one in checks.findings(composed_once("+algorithm.policy_loss=fspo")) if one.id == "check_crashed"
    )
    assert told.severity == ("error" if of.may_refuse else "warning") and "on purpose" in told.sentence


@pytest.mark.parametrize("of", view.CHECKS, ids=lambda of: of.find.__name__)
def test_a_check_yields_errors_if_and_only_if_it_may_refuse(of):
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(of.find))) if isinstance(node, ast.Call)]
    assert any(ast.unparse(call.func) in ("error", "severity") for call in calls) == of.may_refuse


# --- the stock main, as a user starts it -----------------------------------------------------------------------------


def test_main_ppo_refuses_before_ray_starts(tmp_path):
    overrides = ["+algorithm.policy_loss=fspo", f"{POLICY_LOSS}.loss_mode=gspo"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, *BASE]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode != 0 and f"{POLICY_LOSS}.loss_mode='gspo'" in run.stderr
    assert "ray init kwargs" not in run.stdout  # what main_ppo prints right before ray.init


def test_steps_between_syncs_of_the_fully_asynchronous_trainer():
    actor, trainer = {"ppo_mini_batch_size": 8, "ppo_epochs": 2}, {"trigger_parameter_sync_step": 4}
    config = {"actor_rollout_ref": {"actor": actor}, "async_training": trainer | {"require_batches": 3}}
    launch = Launch(OmegaConf.create(config))
    assert launch.prompts_per_rollout == 4 * 3 * 8
    assert launch.optimizer_steps_per_rollout == 4 * 3 * 2


# --- resumed runs ----------------------------------------------------------------------------------------------------


def start(folder: Path, *overrides: str, latest: int | None = None, mode: str = "auto") -> list[str]:
    """Check and keep a launch as verl's mains do; returns what is said of a loss that changes at a resume."""
    folder.mkdir(exist_ok=True)
    if latest is not None:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(latest))
        (folder / f"global_step_{latest}").mkdir(exist_ok=True)
    config = composed_once(*overrides).copy()
    config.trainer.update({"save_freq": 20, "default_local_dir": str(folder), "resume_mode": mode})
    launched = Launch(config)
    looked_at = launched.is_ours or launched.resumes_ours  # as checks.findings has it
    found = [*resume.changed_on_resume(launched)] if looked_at else []
    hook.keep_loss_settings(config)
    return [str(finding) for finding in found]


def test_a_loss_that_changes_at_a_resume_is_a_warning(tmp_path):
    fspo, wider = "+algorithm.policy_loss=fspo", f"{POLICY_LOSS}.eps_high=0.05"
    bins = f"{POLICY_LOSS}.length_bins=[7]"  # observation only
    resumes = [  # in this order: the loss, the checkpoint, and how many warnings
        (None, None, 0),
        (bins, 20, 0),
        (wider, 20, 1),
        # That attempt ended before a checkpoint of its own: step 20 was still trained with the narrower band.
        (wider, 20, 1),
        (None, 20, 0),
        (wider, 20, 1),
        # And now it has one: the wider band is what trained step 40.
        (wider, 40, 0),
        (None, 40, 1),
    ]
    for override, latest, warnings in resumes:
        said = start(tmp_path / "run", fspo, *filter(None, [override]), latest=latest)
        assert len(said) == warnings
        if (override, latest, warnings) == (wider, 20, 1):
            assert f"with {wider} (until then 0.03)" in said[0] and f"{POLICY_LOSS}.eps_high=0.03" in said[0]
    step_20 = f"trainer.resume_from_path={tmp_path}/run/global_step_20"
    assert start(tmp_path / "run", fspo, step_20, mode="resume_path") == []


def start_fspo(folder: Path, settings: str, **checkpoint) -> list[str]:
    """:func:`start` of the loss fspo with these fields of its config."""
    fields = (f"{POLICY_LOSS}.{field}" for field in settings.split())
    return start(folder, "+algorithm.policy_loss=fspo", *fields, **checkpoint)


@pytest.mark.parametrize(
    ("before", "after", "back"),
    [
        ("eps=0.02", "eps_low=0.02 eps_high=0.02", None),
        ("eps=0.03", "eps_dual=0.09", None),
        ("eps_dual=inf", "eps=0.03", "eps_dual=inf"),
        ("eps=0.02", "eps=0.04", "eps=null eps_low=0.02 eps_high=0.02 eps_dual=0.06"),
        ("length_power=0.3", "length_power=0.5", "length_power=0.3"),
    ],
)
def test_the_band_in_effect_is_what_a_resume_compares(before, after, back, tmp_path):
    start_fspo(tmp_path / "run", before)
    said = start_fspo(tmp_path / "run", after, latest=20)
    assert bool(said) == bool(back)
    if back:
        assert said[0].endswith("if that is not meant: " + " ".join(f"{POLICY_LOSS}.{o}" for o in back.split()))
        assert start_fspo(tmp_path / "run", f"{after} {back}", latest=20) == []


@pytest.mark.parametrize(
    ("before", "after", "idle", "changed"),
    [
        ("", "", "", ""),
        ("", "eps=0.0625", "eps_low=0.0625 eps_high=0.0625 eps_dual=0.1875", ""),
        ("", "eps_low=0.05 target_clip_rate=0.2", "eps_low=0.05", "target_clip_rate=0.2"),
        ("", "eps_low=0.05 eps_dual=0.3", "eps_low=0.05", "eps_dual=0.3"),
        ("eps_dual=0.5", "eps=0.0625", "eps_low=0.0625 eps_high=0.0625", "eps_dual=0.1875"),
        ("", "eps=0.0625 length_power=0", "", "eps_low=0.0625 eps_high=0.0625 eps_dual=0.1875 length_power=0"),
        ("", "eps_low=0.05 target_clip_rate=null", "", "eps_low=0.05 target_clip_rate=null"),
    ],
)
def test_a_resume_says_which_eps_the_checkpoint_has_instead(before, after, idle, changed, tmp_path):
    start_fspo(tmp_path, f"target_clip_rate=0.1 {before}")
    eps = tmp_path / "global_step_20/actor" / adaptive.FILE
    eps.parent.mkdir(parents=True)
    eps.touch()
    said = start_fspo(tmp_path, f"target_clip_rate=0.1 {after}", latest=20)
    assert len(said) == bool(idle) + bool(changed)
    if idle:
        assert f"remove {eps}" in said[0] and {f"{POLICY_LOSS}.{o}" for o in idle.split()} == set(
            re.findall(r"[^ ,]+=[^ ,]+", said[0])
        )
    if changed:
        assert {f"{POLICY_LOSS}.{o}" for o in changed.split()} == set(re.findall(r"([^ ,]+=[^ ,]+) \(until", said[-1]))


SHAPES_THE_LOSS = {"policy_loss.eps_dual": 0.5, "policy_loss.length_power": 0.4, "policy_loss.target_clip_rate": 0.2}
SHAPES_THE_LOSS |= dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), 0.7)
SHAPES_THE_LOSS |= {"loss_agg_mode": "token-mean", "loss_scale_factor": 7, "entropy_coeff": 0.1}
SHAPES_THE_LOSS |= {"use_kl_loss": True, "kl_loss_coef": 0.7, "kl_loss_type": "mse"}


def test_what_shapes_the_loss_and_nothing_else_is_kept_for_resumes():
    config = launch("+algorithm.policy_loss=fspo")
    before = resume.loss_settings(Launch(config))
    for key, value in (SHAPES_THE_LOSS | {"policy_loss.records_freq": 2, "ppo_epochs": 3}).items():
        other = config.copy()
        OmegaConf.update(other.actor_rollout_ref.actor, key, value)
        after = resume.loss_settings(Launch(other))
        changed = [name for name in before if before[name] != after[name]]
        assert changed == ([key] if key in SHAPES_THE_LOSS else []), key


@pytest.mark.parametrize(("path", "step"), [("/run/global_step_20/", 20), ("/run/x", 0)])
def test_the_step_of_a_checkpoint_that_is_named_by_its_path(path, step):
    trainer = {"resume_mode": "resume_path", "resume_from_path": path, "default_local_dir": "/elsewhere"}
    assert Launch(OmegaConf.create({"trainer": trainer})).resume_point == (Path("/run"), step)


def test_a_resume_that_forgets_the_loss_is_a_warning(tmp_path):
    assert start(tmp_path / "run", "+algorithm.policy_loss=fspo") == []
    (said,) = start(tmp_path / "run", latest=20)
    assert f"{POLICY_LOSS}.loss_mode=vanilla (until then fspo)" in said
    assert start(tmp_path / "stock") == [] and list((tmp_path / "stock").iterdir()) == []  # not our business
    hook.keep_loss_settings(
        launch("+algorithm.policy_loss=fspo", f"trainer.default_local_dir={tmp_path}/none", "trainer.save_freq=-1")
    )
    assert not (tmp_path / "none").exists()  # nothing to resume from


BROKEN = ["[", "[1]", '[{"after_step": 0}]', '[{"after_step": "x", "loss": {}}]']


@pytest.mark.parametrize("text", [None, *BROKEN])
@pytest.mark.parametrize("select", [["+algorithm.policy_loss=fspo"], []], ids=["fspo", "stock"])
def test_a_resume_of_an_unknown_loss_is_said_and_its_loss_kept(text, select, tmp_path):
    if text is not None:
        (tmp_path / KEPT_LOSSES).write_text(text)
    said = start(tmp_path, *select, latest=20)
    if text is None and not select:
        assert said == [] and not (tmp_path / KEPT_LOSSES).exists()  # not our business
        return
    assert len(said) == 1 and f"{KEPT_LOSSES} in {tmp_path} does not say" in said[0]
    assert "resumes after step 20" in said[0] and ".hydra/config.yaml" in said[0]
    assert start(tmp_path, *select, latest=40) == []


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    folder = f"trainer.default_local_dir={tmp_path}/file/run"
    hook.keep_loss_settings(launch("+algorithm.policy_loss=fspo", "trainer.save_freq=20", folder))
    assert "resumed with another loss, no warning will follow" in caplog.text
