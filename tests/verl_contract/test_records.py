# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Assumptions on verl of records per response."""

import importlib
import inspect

import pytest
from verl.workers.engine_workers import ActorRolloutRefWorker

# The modules that take ppo_loss out of verl.workers.utils.losses, each a name of its own that is wrapped.
BIND_PPO_LOSS = ["verl.workers.engine_workers", "verl.trainer.distillation.losses"]
# Key of a micro-batch, and a module that puts it there.
BATCH_KEYS = {
    "dp_size": "verl.workers.engine.fsdp.transformer_impl",
    "global_batch_size": "verl.trainer.ppo.v1.trainer_base",
    "global_steps": "verl.trainer.ppo.v1.trainer_base",
    "uid": "verl.trainer.ppo.v1.trainer_base",
    "raw_prompt": "verl.trainer.ppo.v1.trainer_base",
    "_dcp_sample_ids": "verl.utils.dynamic_cp_scheduler",
}


@pytest.mark.parametrize("module", BIND_PPO_LOSS)
def test_ppo_loss_takes_the_micro_batch_as_data(module):
    """Lost: step and prompts of a micro-batch are not known, and nothing is recorded."""
    ppo_loss = importlib.import_module(module).ppo_loss
    assert list(inspect.signature(ppo_loss).parameters) == ["config", "model_output", "data", "dp_group"]


def test_every_binding_of_ppo_loss_is_wrapped(modules, imported):
    """Lost: the responses of a module that binds it as well are not recorded (read)."""
    holders = [name for name, text in modules.items() if "ppo_loss" in text]
    assert sorted(h for h in holders if "ppo_loss" in imported(h, "verl.workers.utils.losses")) == sorted(BIND_PPO_LOSS)
    assert "partial(ppo_loss, config=actor_config)" in modules["verl.workers.engine_workers"]


@pytest.mark.parametrize("key", BATCH_KEYS)
def test_a_micro_batch_says_its_step_and_prompts(key, modules):
    """Lost: steps or prompts of the records are wrong, and with them every figure of the report (read)."""
    assert f'"{key}"' in modules[BATCH_KEYS[key]] or f"{key}=" in modules[BATCH_KEYS[key]]


def test_bypass_mode_hands_on_the_engines_log_probs_under_both_names(modules):
    """Lost: in bypass mode mismatch is called noise."""
    assert 'data["old_log_probs"] = data.pop("rollout_log_probs")' in modules["verl.trainer.ppo.v1.trainer_base"]
    assert "config=self.config.actor_rollout_ref," in modules["verl.trainer.ppo.v1.trainer_base"]  # a part of the whole
    helper = modules["verl.trainer.ppo.rollout_corr_helper"]
    assert 'batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]' in helper


def test_weights_go_to_the_rollout_engines_through_one_method():
    """Lost: records of a step are written late."""
    assert inspect.iscoroutinefunction(inspect.unwrap(ActorRolloutRefWorker.update_weights))
