# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Assumptions on verl of the doctor and of the checks before Ray starts."""

import ast
import re
import sys
from pathlib import Path

import pytest
import verl
from omegaconf import OmegaConf
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import auto_set_device

# Programs of verl that train no policy with a policy loss.
OTHER_MAINS = {
    f"verl.trainer.{name}" for name in ("main_eval", "main_generation_server", "sft_trainer", "sft_trainer_ray")
}
# What checks and doctor read.
KEYS = {
    "actor_rollout_ref.actor": (
        *("policy_loss.loss_mode", "loss_agg_mode", "loss_scale_factor", "entropy_coeff"),
        *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
        *("use_kl_loss", "kl_loss_coef", "kl_loss_type", "ppo_mini_batch_size", "ppo_epochs"),
    ),
    "actor_rollout_ref.rollout": ("name", "n"),
    "data": ("train_batch_size", "max_response_length"),
    "trainer": (
        *("save_freq", "default_local_dir"),
        *("use_v1", "v1.trainer_mode", "v1.separate_async.parameter_sync_step"),
    ),
    "algorithm": ("adv_estimator", "rollout_correction.bypass_mode"),
}


def test_every_main_that_trains_a_policy_hands_its_config_to_the_wrapped_function(modules, imported):
    """Lost: a launch by that main is not checked, and the doctor cannot examine it (read)."""
    assert hasattr(auto_set_device, "__wrapped__")
    mains = {name for name, text in modules.items() if "@hydra.main(" in text} - OTHER_MAINS
    assert "verl.trainer.main_ppo" in mains
    for main in mains:
        calls = {ast.unparse(node) for node in ast.walk(ast.parse(modules[main])) if isinstance(node, ast.Call)}
        assert "auto_set_device(config)" in calls, main
        assert "auto_set_device" in imported(main, "verl.utils.device"), main


def test_a_launch_asks_for_the_environment_of_ray_by_the_wrapped_name(imported):
    """Lost: a launch by run_ppo alone is not checked before Ray starts (read)."""
    assert hasattr(get_ppo_ray_runtime_env, "__wrapped__")
    assert "get_ppo_ray_runtime_env" in imported("verl.trainer.main_ppo", "verl.trainer.constants_ppo")


@pytest.fixture(scope="module")
def stock_config():
    return OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")


@pytest.mark.parametrize("key", [f"{section}.{key}" for section, keys in KEYS.items() for key in keys])
def test_the_config_has_the_keys_that_are_checked(key, stock_config):
    """Lost: the check of a key that is gone is off, or its number wrong."""
    section, last = key.rsplit(".", 1)
    assert last in OmegaConf.select(stock_config, section).keys()  # `in` the config skips a value that is to be given


def test_a_worker_without_the_package_builds_no_config(stock_config, monkeypatch):
    """Lost: such a worker trains another loss, or stops after a whole rollout only."""
    actor = stock_config.actor_rollout_ref.actor.copy()
    actor.policy_loss._target_ = "fspo_verl.config.FSPOPolicyLossConfig"
    monkeypatch.setitem(sys.modules, "fspo_verl", None)
    with pytest.raises(Exception, match=f"Error locating target '{actor.policy_loss._target_}'"):
        omega_conf_to_dataclass(actor)


def test_the_asynchronous_trainer_syncs_after_whole_mini_batches(modules):
    """Lost: the optimiser steps that are counted, and the advice on mini-batches, are wrong there (read)."""
    asserted = "assert train_batch_size == parameter_sync_step * ppo_mini_batch_size"
    assert asserted in modules["verl.trainer.ppo.v1.trainer_separate_async"]


def test_the_asynchronous_trainers_take_their_snapshots_by_the_wrapped_name(modules):
    """Lost: an asynchronous run on a CPU never clips, as its old policy follows the new one (read)."""
    assert "fsdp2_sharded_save_to_cpu" in modules["verl.experimental.separation.engine_workers"]


# The modules of verl 0.9.0 to 0.10.0.dev that ask for the loss of bypass mode: trainers, when their workers have built
# theirs. `get("bypass_mode")` asks for the setting, `register_policy_loss("bypass_mode")` names the loss.
BYPASS_LOSS = re.compile(r'apply_bypass_mode\(|(?<!get\()(?<!register_policy_loss\()"bypass_mode"')
ASK_FOR_BYPASS_LOSS = {
    "verl.trainer.ppo.rollout_corr_helper",
    "verl.trainer.ppo.ray_trainer",
    "verl.experimental.separation.ray_trainer",
}


def test_bypass_mode_leaves_the_loss_of_the_workers_alone(modules):
    """Lost: verl's own loss trains in bypass mode, as its documentation has it (verl #4930; read)."""
    assert {name for name, text in modules.items() if BYPASS_LOSS.search(text)} == ASK_FOR_BYPASS_LOSS
    assert 'config.policy_loss.get("loss_mode", "vanilla")' in modules["verl.workers.utils.losses"]
    workers = {name for name, text in modules.items() if name.startswith("verl.workers.") and "loss_mode" in text}
    assert {name for name in workers if not name.startswith("verl.workers.config")} == {"verl.workers.utils.losses"}
