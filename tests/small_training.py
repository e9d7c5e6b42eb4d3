# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A task and settings with which an untrained small model trains in seconds, and every part of the loss acts."""

import json
import sys
from importlib import resources
from pathlib import Path

import ledger
from omegaconf import OmegaConf

import fspo_verl_cpu.configs

# The command line that trains with ``fspo_cpu.yaml``.
MAIN = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "fspo_cpu"]
# A random model gets no sum right; a reward that knows nothing of sums still has advantages of both signs.
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return float(len(solution_str) % 2)"
)


def write_task(folder: Path, problems: int) -> Path:
    """Write problems and a reward function."""
    ledger.data_set(problems, seed=0).to_parquet(folder / "problems.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder


def overrides(task: Path, model: Path) -> list[str]:
    """Return the overrides of :data:`MAIN`: 8 x 4 responses of up to 20 tokens a step, in two updates."""
    return [
        f"data.train_files={task / 'problems.parquet'}",
        f"data.val_files={task / 'problems.parquet'}",
        f"reward.custom_reward_function.path={task / 'reward.py'}",
        f"actor_rollout_ref.model.path={model}",
        "data.max_prompt_length=43",
        "data.max_response_length=20",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_model_len=63",
        # Two optimiser steps per rollout, large ones, and a band that the second one leaves.
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.policy_loss.eps=1e-4",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=false",
    ]


def cpu_overrides() -> list[str]:
    """The settings of ``fspo_cpu.yaml`` as overrides that come after those of a script, which cuts batches itself."""
    packaged = [resources.files(fspo_verl_cpu.configs) / name for name in ("fspo_cpu.yaml", "cpu_rollout/hf.yaml")]
    settings = OmegaConf.merge(*(OmegaConf.create(file.read_text()) for file in packaged))
    del settings["defaults"], settings.actor_rollout_ref.actor.use_dynamic_bsz
    del settings.actor_rollout_ref.model.use_remove_padding

    def flat(prefix: str, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from flat(f"{prefix}.{key}" if prefix else key, inner)
        else:
            yield f"++{prefix}={json.dumps(value)}"

    return list(flat("", OmegaConf.to_container(settings)))
