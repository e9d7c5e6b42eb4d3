# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Ways in and silent traps: composition of verl's own configs, the schema, and the checks before Ray starts."""

import ast
import functools
import inspect
import itertools
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
from fspo_verl.launch import checks, doctor, hook
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
    assert [record.levelno for record in caplog.records] == [logging.INFO]
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
}


@pytest.mark.parametrize("overrides", BAD)
def test_a_bad_value_is_refused_with_its_full_key(overrides):
    config = launch("+algorithm.policy_loss=fspo", *(f"{POLICY_LOSS}.{override}" for override in overrides.split()))
    for check in (lambda config: validate_config(config, use_reference_policy=False, use_critic=False), hook.check):
        with pytest.raises(Exception, match=re.escape(f"{POLICY_LOSS}.{BAD[overrides]}")):
            check(config)


# --- what a launch is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [*checks.REFUSING, *checks.OF_ANY, *checks.OF_FSPO], ids=lambda check: check.__name__)
def test_a_check_that_crashes_refuses_the_launch_if_it_could_have_refused_it(check, monkeypatch):
    def crash(_launch):
        raise TypeError("on purpose")

    for name in ("REFUSING", "OF_ANY", "OF_FSPO"):
        planted = [crash if one is check else one for one in getattr(checks, name)]
        monkeypatch.setattr(checks, name, planted)
    config = composed_once("+algorithm.policy_loss=fspo")
    (told,) = (one for one in checks.findings(config) if one.id == "check_crashed")
    assert told.severity == ("error" if crash in checks.REFUSING else "warning") and "on purpose" in told.sentence


def test_a_check_yields_errors_if_and_only_if_it_may_refuse():
    tables = (checks.OF_ANY, checks.OF_SOUND_VALUES, checks.OF_FSPO, checks.OF_BASELINES, checks.AT_THE_LOGGER)
    for check in (*checks.REFUSING, *itertools.chain(*tables), *(doctor.not_selected, doctor.batches)):
        calls = [node for node in ast.walk(ast.parse(inspect.getsource(check))) if isinstance(node, ast.Call)]
        assert any(ast.unparse(call.func) == "error" for call in calls) == (check in checks.REFUSING), check


# --- the stock main, as a user starts it -----------------------------------------------------------------------------


def test_main_ppo_refuses_before_ray_starts(tmp_path):
    overrides = ["+algorithm.policy_loss=fspo", f"{POLICY_LOSS}.loss_mode=gspo"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, *BASE]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode != 0 and f"{POLICY_LOSS}.loss_mode=gspo is composed" in run.stderr
    assert "ray init kwargs" not in run.stdout  # what main_ppo prints right before ray.init


def test_steps_between_syncs_of_the_fully_asynchronous_trainer():
    actor, trainer = {"ppo_mini_batch_size": 8, "ppo_epochs": 2}, {"trigger_parameter_sync_step": 4}
    config = {"actor_rollout_ref": {"actor": actor}, "async_training": trainer | {"require_batches": 3}}
    launch = Launch(OmegaConf.create(config))
    assert launch.prompts_per_rollout == 4 * 3 * 8
    assert launch.optimizer_steps_per_rollout == 4 * 3 * 2
