# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Step, mini-batch and prompts of a call of a policy loss, which verl's loss contract does not hand on.

Records need all of it; the metrics of numerical noise need the mini-batch. :mod:`fspo_verl.verl_patches` enters a
micro-batch around the function of verl that has its prompts at hand, and tells of each sync of weights.
"""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from fspo_verl.observe.columns import OF_ENGINES, TRUNCATED, mismatch_columns

# verl.utils.dynamic_cp_scheduler.DCP_SAMPLE_IDS: Megatron's dynamic context parallelism has dealt out this batch.
_DEALT = "_dcp_sample_ids"


class Limits(NamedTuple):
    """How many tokens a response may have."""

    response: int
    sequence: float  # with its prompt; inf where it is not known

    @staticmethod
    def of(worker) -> "Limits | None":
        """Return the limits as the rollout config of a worker of verl says; None where it has none."""
        with contextlib.suppress(Exception):  # whatever another verl has there, training goes on
            rollout = worker.config.rollout
            model = worker.actor.model_config.hf_config
            positions = getattr(getattr(model, "text_config", None), "max_position_embeddings", math.inf)
            sequence = rollout.max_model_len or getattr(model, "max_position_embeddings", None) or positions
            # SGLang leaves the last place free.
            return Limits(int(rollout.response_length), sequence - (rollout.name == "sglang"))
        return None


_CURRENT: ContextVar["MicroBatch | None"] = ContextVar("micro_batch", default=None)


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one call of a policy loss, and their place in the training."""

    data: Any  # verl's TensorDict of its ``ppo_loss``
    step: int  # training step, as verl counts it: what lies between two weight syncs
    mini_batch: int  # optimiser step within the training step, from 0
    rank: int  # data-parallel rank
    ranks: int  # data-parallel ranks
    step_rows: int  # of the training step until the end of this mini-batch, over all ranks, padding included
    from_rollout: bool  # the old log-probs are the rollout engine's (verl's bypass mode)
    limits: Limits | None  # None where they are not known

    @cached_property
    def prompts(self) -> list[str]:
        """An id per row, which the responses to one prompt share; empty where verl names none."""
        return list(_get(self.data, "uid") or [])

    @property
    def texts(self) -> list:
        """The text of the prompt, per row: chat messages, or its id where verl does not pass them on."""
        return list(_get(self.data, "raw_prompt") or self.prompts)

    @property
    def staleness(self) -> list[float]:
        """Training steps that the oldest token is behind, per row; NaN where verl does not tell.

        They are those from the weights that sampled it to those that the training step starts from.
        """
        fields = _get(self.data, "extra_fields")
        per_row = fields if isinstance(fields, list) else [fields] * len(self.data)
        first = (row.get("min_global_steps") if isinstance(row, dict) else None for row in per_row)
        return [math.nan if weights is None else float(self.step - 1 - weights) for weights in first]

    def columns(self, log_prob: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the columns of the mismatch, and :data:`columns.TRUNCATED`, as far as they are known.

        Args:
            log_prob: ``[B, T]`` of this call.
        """
        return _mismatch(self.data, self.from_rollout, self.mini_batch, log_prob) | _truncated(self.data, self.limits)


def _get(data, key: str) -> Any:
    """Return a value of a TensorDict as plain Python; None where it has none."""
    import verl.utils.tensordict_utils as tu  # not at the top: a reader of records may have no verl

    return tu.get(data, key)


def current() -> MicroBatch | None:
    """The micro-batch whose loss is being computed; None outside verl's workers."""
    return _CURRENT.get()


@contextlib.contextmanager
def entered(data, dp_group) -> Iterator[None]:
    """Count a micro-batch, the TensorDict of verl's ``ppo_loss``; inside it is the current one."""
    token = _CURRENT.set(_POSITION.advance(data, dp_group))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def synced(step: int | None, worker=None) -> None:
    """Note that a worker of verl sends the weights of a training step to the rollout engines; None: of no step."""
    _POSITION.sync(step, worker)


class _Position:
    """Counts rows into mini-batches and mini-batches into training steps, with what verl tells of both."""

    def __init__(self):
        self.step, self.mini_batch, self.rows = 0, 0, 0
        self.step_rows = 0  # of the mini-batches of the step that have ended, over all ranks
        self.synced: int | None = None  # training step of the weights that the rollout engines have
        self.trained = False  # since then
        self.limits: Limits | None = None  # None where they are not known
        self.from_rollout = False

    def sync(self, step: int | None, worker=None) -> None:
        if worker is not None and self.limits is None:
            self.limits, self.from_rollout = Limits.of(worker), _bypasses(worker)
        if step is None:
            return
        if self.synced is None:
            self.step = step  # before the first update: 0, or the step of the checkpoint
        self.synced, self.trained = step, False

    def advance(self, data, dp_group) -> MicroBatch | None:
        """Count the next micro-batch of this rank, a TensorDict; None where it does not say what it is a part of.

        Megatron's dynamic context parallelism deals responses to ranks that all count as the only one.
        """
        ranks, mini_batch_rows, dealt = (_get(data, key) for key in ("dp_size", "global_batch_size", _DEALT))
        if not ranks or not mini_batch_rows or dealt is not None:
            return None
        step = self._step_of(data)
        if step != self.step:
            self.step, self.mini_batch, self.rows, self.step_rows = step, 0, 0, 0
        self.trained = True
        micro_batch = MicroBatch(
            data,
            step=self.step,
            mini_batch=self.mini_batch,
            rank=torch.distributed.get_rank(dp_group) if torch.distributed.is_initialized() else 0,
            ranks=ranks,
            step_rows=self.step_rows + mini_batch_rows,
            from_rollout=self.from_rollout,
            limits=self.limits,
        )
        self.rows += len(data)
        if self.rows >= mini_batch_rows // ranks:
            self.rows, self.mini_batch, self.step_rows = 0, self.mini_batch + 1, micro_batch.step_rows
        return micro_batch

    def _step_of(self, data) -> int:
        """Return the training step of a micro-batch: it lasts until the next sync, where syncs are seen."""
        drawn_in = "global_steps"  # of each prompt
        if self.trained and (self.synced is not None or drawn_in not in data):
            return self.step
        if drawn_in not in data:
            # An older trainer. One-step-off syncs before a step, others after it: the first update after a sync counts.
            return self.step + 1
        # A v1 trainer syncs at the end of a step. An asynchronous one may have drawn its prompts in an earlier step.
        after_sync = 1 if self.synced is None else self.synced + 1
        return max(after_sync, int(np.max(_get(data, drawn_in))))


_POSITION = _Position()


def _mismatch(data, from_rollout: bool, mini_batch: int, log_prob: torch.Tensor) -> dict:
    """Columns of trainer against rollout engine; none where the engine has not handed on its log-probs.

    Where the old log-probs are the engine's, those of the first optimiser step are the trainer's before the update. In
    later steps the policy has moved, and their responses are not measured: their length is 0.
    """
    if not all(name in data for name in OF_ENGINES):
        return {}
    padded = data.select(*OF_ENGINES).to_padded_tensor()
    old_log_prob, rollout_log_prob, loss_mask = (padded[name] for name in OF_ENGINES)
    if from_rollout:
        old_log_prob, loss_mask = log_prob.detach(), loss_mask * (mini_batch == 0)
    return mismatch_columns(old_log_prob, rollout_log_prob, loss_mask)


def _bypasses(worker) -> bool:
    """Tell whether the old log-probs are the rollout engine's, by the config of the launch, which workers have whole.

    Comparing the log-probs cannot tell: they can be identical by chance.
    """
    from omegaconf import OmegaConf

    key = "${oc.select:algorithm.rollout_correction.bypass_mode,false}"
    with contextlib.suppress(Exception):  # as for the limits
        return bool(OmegaConf.create({"bypasses": key}, parent=worker.config).bypasses)
    return False


def _truncated(data, limits: Limits | None) -> dict[str, torch.Tensor]:
    if limits is None:
        return {}
    prompts, responses = data["prompts"], data["responses"]
    if responses.is_nested:
        prompt_length, length = (tokens.offsets().diff() for tokens in (prompts, responses))
    else:  # an older trainer's
        mask, width = data["attention_mask"], prompts.shape[1]
        prompt_length, length = mask[:, :width].sum(-1), mask[:, width:].sum(-1)
    return {TRUNCATED: (length >= limits.response) | (prompt_length + length >= limits.sequence)}
