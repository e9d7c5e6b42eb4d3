# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which step, mini-batch and prompts a call of a policy loss is about: records need it, verl's loss contract lacks it.

verl (0.9.1) calls a registered loss from ``ppo_loss``, which has all of it at hand but passes on tensors only, and
offers no other hook there. Where records are asked for, :func:`install` therefore wraps the name ``ppo_loss`` in
verl's ``engine_workers`` module, the one place from which every engine (FSDP, Megatron, VeOmni, TorchTitan) takes it.
The wrapper looks and passes on.
"""

import functools
from contextvars import ContextVar
from typing import NamedTuple

import torch

_CURRENT: ContextVar["MicroBatch | None"] = ContextVar("micro_batch", default=None)


class MicroBatch(NamedTuple):
    """The rows of one call of a policy loss."""

    step: int  # training step, as verl counts it
    mini_batch: int  # optimiser step within the training step, from 0
    rank: int  # data-parallel rank
    ranks: int  # data-parallel ranks
    prompts: list[str]  # per row; rows with the same id are responses to the same prompt
    ends_mini_batch: bool  # the last call before the optimiser step


def current() -> MicroBatch | None:
    """The micro-batch whose loss is being computed; None outside verl's workers or before :func:`install`."""
    return _CURRENT.get()


def install() -> None:
    """Wrap ``ppo_loss``; calling it again changes nothing."""
    import verl.workers.engine_workers as engine_workers  # not while verl is being imported

    ppo_loss = engine_workers.ppo_loss
    if hasattr(ppo_loss, "counts_micro_batches"):
        return
    position = _Position()

    @functools.wraps(ppo_loss)
    def counting_ppo_loss(config, model_output, data, dp_group=None):
        token = _CURRENT.set(position.advance(data, dp_group))
        try:
            return ppo_loss(config, model_output, data, dp_group)
        finally:
            _CURRENT.reset(token)

    counting_ppo_loss.counts_micro_batches = True
    engine_workers.ppo_loss = counting_ppo_loss


class _Position:
    """Counts rows into mini-batches and mini-batches into steps, from what verl tells of each micro-batch."""

    def __init__(self):
        self.step, self.mini_batch, self.rows = 0, 0, 0
        self.starts_step = True

    def advance(self, data, dp_group) -> MicroBatch:
        """Take in the next micro-batch of this rank, a TensorDict."""
        import verl.utils.tensordict_utils as tu

        if self.starts_step:
            # The step in which verl drew the prompts: the training step, or (asynchronous) an earlier one.
            drawn = max(map(int, tu.get(data, "global_steps", [0])))
            self.step, self.mini_batch, self.starts_step = max(self.step + 1, drawn), 0, False
        rows, ranks = len(data), tu.get(data, "dp_size")
        self.rows += rows
        ends_mini_batch = self.rows >= tu.get(data, "global_batch_size") // ranks
        position = MicroBatch(
            step=self.step,
            mini_batch=self.mini_batch,
            rank=torch.distributed.get_rank(dp_group) if torch.distributed.is_initialized() else 0,
            ranks=ranks,
            prompts=list(tu.get(data, "uid", [""] * rows)),
            ends_mini_batch=ends_mini_batch,
        )
        if ends_mini_batch:
            self.rows, self.mini_batch = 0, self.mini_batch + 1
            # verl moves the learning rate on after the last mini-batch of a step, and says so with the mini-batch.
            self.starts_step = tu.get(data, "update_lr_scheduler", False)
        return position
