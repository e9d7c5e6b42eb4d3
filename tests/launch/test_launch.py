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
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.launch import checks, hook, view
from fspo_verl.launch.view import Launch

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
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.INFO]  # the noise of verl's default micro-batches, and the range
    assert "policy loss fspo: log-ratio range 0 [-0.03, +0.03]*L^0.5" in caplog.text
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


def test_a_hydra_with_other_internals_lets_the_loss_train_and_names_what_is_not_checked(monkeypatch, caplog, tmp_path):
    def look(config):
        monkeypatch.delattr("hydra.compose")
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


@pytest.mark.parametrize(("path", "step"), [("/run/global_step_20/", 20), ("/run/x", 0)])
def test_the_step_of_a_checkpoint_that_is_named_by_its_path(path, step):
    trainer = {"resume_mode": "resume_path", "resume_from_path": path, "default_local_dir": "/elsewhere"}
    assert Launch(OmegaConf.create({"trainer": trainer})).resume_point == (Path("/run"), step)
