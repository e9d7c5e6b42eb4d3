# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Optimiser steps of verl's training worker, without Ray and trainer, for benches and for tests of ranks."""

import functools
from collections.abc import Iterable

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.workers import config, engine_workers

from fspo_verl.selftest import worker


def with_advantages(batch: TensorDict, advantages: Iterable[float], step: int = 1) -> TensorDict:
    """A copy of a batch of :mod:`fspo_verl.selftest.worker` as a training step has it, two responses to a prompt."""
    batch, count = batch.copy(), len(batch)
    rows = zip(advantages, batch["responses"].unbind(), strict=True)
    batch["advantages"] = worker.nested(
        float(a) * torch.ones_like(response, dtype=torch.float32) for a, response in rows
    )
    tu.assign_non_tensor_stack(batch, "uid", [f"prompt {row // 2}" for row in range(count)])
    tu.assign_non_tensor_stack(batch, "global_steps", [step] * count)
    return batch


def update(trainer, batch: TensorDict, policy_loss, cut: dict, mini_batch: int, scale: float = 1.0) -> dict[str, float]:
    """Optimiser steps over the rows of this rank, each of ``mini_batch`` rows of all ranks; verl's reduced metrics."""
    actor = config.FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=scale,
        policy_loss=policy_loss,
    )
    trainer.set_loss_fn(functools.partial(engine_workers.ppo_loss, config=actor))
    loader = {"epochs": 1, "seed": 0, "dataloader_kwargs": {"shuffle": False}, "temperature": 1.0}
    tu.assign_non_tensor(batch, **cut, **loader, global_batch_size=mini_batch, mini_batch_size=mini_batch)
    metrics = reduce_metrics(dict(tu.get(trainer.train_mini_batch(batch), "metrics")))
    return {name: float(value) for name, value in metrics.items()}
