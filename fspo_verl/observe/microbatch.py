# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which step, mini-batch and prompts a call of a policy loss is about: verl's loss contract does not say.

Records need all of it; the metrics of numerical noise need the mini-batch. verl (0.9.1) calls a registered loss from
``ppo_loss``, which has prompts and mini-batch at hand but passes on tensors, and tells a worker the training step with
a weight sync alone. It offers no hook at either place. :func:`install` therefore wraps the method
``ActorRolloutRefWorker.update_weights``, and ``ppo_loss`` in the two modules of verl that call it: ``engine_workers``,
from which every engine (FSDP, Megatron, VeOmni, TorchTitan) takes it, and the distillation loss. The wrappers only
look: they read what verl does not pass on, and change nothing. At a weight sync the records of the step are written.
"""

import functools
import logging
import math
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch

from fspo_verl.observe.columns import MASKED, OF_ENGINES, mismatch_columns

logger = logging.getLogger("fspo_verl")

# verl.utils.dynamic_cp_scheduler.DCP_SAMPLE_IDS: Megatron's dynamic context parallelism has dealt out this batch.
_DEALT = "_dcp_sample_ids"

_CURRENT: ContextVar["MicroBatch | None"] = ContextVar("micro_batch", default=None)


class MicroBatch(NamedTuple):
    """The rows of one call of a policy loss."""

    step: int  # training step, as verl counts it: what lies between two weight syncs
    mini_batch: int  # optimiser step within the training step, from 0
    rank: int  # data-parallel rank
    ranks: int  # data-parallel ranks
    prompts: list[str]  # per row; rows with the same id are responses to one prompt. Empty where verl names no ids
    texts: list  # per row, what the prompt says: chat messages, or its id where verl does not pass them on
    staleness: list[float]  # per row, training steps that its oldest token is behind; NaN where verl does not tell
    mismatch: Callable[[], dict[str, torch.Tensor]]  # columns of trainer against rollout engine; empty if not known


def current() -> MicroBatch | None:
    """The micro-batch whose loss is being computed; None outside verl's workers or before :func:`install`."""
    return _CURRENT.get()


def install(at_sync: Callable[[], None]) -> None:
    """Wrap ``ppo_loss`` and ``update_weights`` in a process that has loaded verl's workers, once.

    A worker has loaded them before it builds the config of its loss, from where this is called. A driver builds that
    config too, to check it, and is spared the seconds of their import.

    Args:
        at_sync: called whenever weights go to the rollout engines: at the end of a step, the last one of a run as well.
    """
    engine_workers: Any = sys.modules.get("verl.workers.engine_workers")
    if engine_workers is None or hasattr(getattr(engine_workers, "ppo_loss", None), "counts_micro_batches"):
        return
    try:
        import verl.trainer.distillation.losses as distillation

        ppo_loss, worker = engine_workers.ppo_loss, engine_workers.ActorRolloutRefWorker
        update_weights, position = worker.update_weights, _Position()
    except (ImportError, AttributeError) as error:  # another verl: the loss trains without, as it must
        logger.warning("no records and no metrics of numerical noise with this verl: %s", error)
        return

    @functools.wraps(ppo_loss)
    def counting_ppo_loss(config, model_output, data, dp_group=None):
        token = _CURRENT.set(position.advance(data, dp_group))
        try:
            return ppo_loss(config, model_output, data, dp_group)
        finally:
            _CURRENT.reset(token)

    @functools.wraps(update_weights)  # with what verl's dispatch has noted on the method
    async def counting_update_weights(self, global_steps=None, *args, **kwargs):
        position.sync(global_steps)
        at_sync()
        return await update_weights(self, global_steps, *args, **kwargs)

    counting_ppo_loss.counts_micro_batches = True  # type: ignore[attr-defined]  # a mark on a function
    engine_workers.ppo_loss = distillation.ppo_loss = counting_ppo_loss
    worker.update_weights = counting_update_weights


class _Position:
    """Counts rows into mini-batches and mini-batches into training steps, with what verl tells of both."""

    def __init__(self):
        self.step, self.mini_batch, self.rows = 0, 0, 0
        self.synced: int | None = None  # training step of the weights that the rollout engines have
        self.trained = False  # since then

    def sync(self, step: int | None) -> None:
        """Note that verl sends the weights of a training step to the rollout engines; None: it names no step."""
        if step is None:
            return
        if self.synced is None:
            self.step = step  # before the first update: 0, or the step of the checkpoint
        self.synced, self.trained = step, False

    def advance(self, data, dp_group) -> MicroBatch | None:
        """Count the next micro-batch of this rank, a TensorDict; None where it does not say what it is a part of.

        Megatron's dynamic context parallelism deals responses to ranks that all count as the only one.
        """
        import verl.utils.tensordict_utils as tu

        ranks, mini_batch_rows, dealt = (tu.get(data, key) for key in ("dp_size", "global_batch_size", _DEALT))
        if not ranks or not mini_batch_rows or dealt is not None:
            return None
        step = self._step_of(tu.get(data, "global_steps"))
        if step != self.step:
            self.step, self.mini_batch, self.rows = step, 0, 0
        self.trained = True
        prompts = list(tu.get(data, "uid", []))
        micro_batch = MicroBatch(
            step=self.step,
            mini_batch=self.mini_batch,
            rank=torch.distributed.get_rank(dp_group) if torch.distributed.is_initialized() else 0,
            ranks=ranks,
            prompts=prompts,
            texts=list(tu.get(data, "raw_prompt", prompts)),
            staleness=_staleness(self.step, tu.get(data, "extra_fields"), len(data)),
            mismatch=functools.partial(_mismatch, data),
        )
        self.rows += len(data)
        if self.rows >= mini_batch_rows // ranks:
            self.rows, self.mini_batch = 0, self.mini_batch + 1
        return micro_batch

    def _step_of(self, drawn) -> int:
        """The training step of a micro-batch whose prompts were drawn in these steps, None where they do not tell."""
        if drawn is None:
            # An older trainer. One-step-off syncs before a step, others after it: the first update after a sync counts.
            return self.step if self.trained else self.step + 1
        # A v1 trainer syncs at the end of a step. An asynchronous one may have drawn its prompts in an earlier step.
        after_sync = 1 if self.synced is None else self.synced + 1
        return max(after_sync, int(np.max(drawn)))


def _mismatch(data) -> dict[str, torch.Tensor]:
    """Columns of trainer against rollout engine; none where the engine has not handed on its log-probs."""
    if not all(name in data for name in OF_ENGINES):
        return {}
    padded = data.select(*OF_ENGINES).to_padded_tensor()
    columns = mismatch_columns(*(padded[name] for name in OF_ENGINES))
    return columns | ({MASKED: data[MASKED]} if MASKED in data else {})


def _staleness(step: int, extra_fields, rows: int) -> list[float]:
    """Steps from the weights that sampled a response's first token to those that the training step starts from."""
    per_row = extra_fields if isinstance(extra_fields, list) else [extra_fields] * rows
    first = (fields.get("min_global_steps") if isinstance(fields, dict) else None for fields in per_row)
    return [math.nan if weights is None else float(step - 1 - weights) for weights in first]
