# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The way from the columns of one call of a policy loss to its metrics and records; light to import.

pandas and pyarrow are imported where a run writes records, and nowhere else.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
import verl

import fspo_verl
from fspo_verl.band import Band
from fspo_verl.observe import metrics, microbatch
from fspo_verl.observe.columns import to_numpy, token_columns
from fspo_verl.observe.microbatch import MicroBatch
from fspo_verl.observe.settings import RunSettings, clip_ratios
from fspo_verl.output import ONCE

if TYPE_CHECKING:
    from fspo_verl.observe.records import RecordWriter


def observe(columns: dict, tokens: tuple, config, loss: str, band: Band | None = None) -> tuple[dict, dict]:
    """The columns as arrays, one device synchronisation in all, and their metrics; recorded where the config says.

    Args:
        columns: ``[B]`` tensors of :mod:`fspo_verl.observe.columns`.
        tokens: log_prob, old_log_prob, advantages and response_mask, ``[B, T]``.
        config: verl's ``ActorConfig``.
        loss: the name of the loss that trains.
        band: in force in this call; None for a loss without one.
    """
    micro_batch = microbatch.current()
    on_policy, step_rows = False, None
    if micro_batch is not None:
        columns = columns | micro_batch.columns(tokens[0])
        step_rows = micro_batch.step_rows
        # Whether the weights of this call are those of the old log-probs, as far as that is known.
        on_policy = micro_batch.mini_batch == 0 and not micro_batch.from_rollout
    observation = config.policy_loss
    writer = _writer(config, micro_batch, loss, band)
    if writer is not None and micro_batch is not None and micro_batch.step % observation.records_freq == 0:
        columns = to_numpy(columns | token_columns(*tokens))
        if observation.get("target_clip_rate") is not None and band is not None:
            columns |= {name: np.full(len(columns["length"]), eps) for name, eps in band.half_widths.items()}
        writer.add(columns, micro_batch)
    else:
        columns = to_numpy(columns)
    length_bins = observation.get("length_bins") or metrics.LENGTH_BINS
    rows = config.global_batch_info.get("global_batch_size") or len(columns["length"])
    ranks = config.global_batch_info.get("dp_size") or 1
    return columns, metrics.metrics(columns, length_bins, on_policy, rows, ranks, step_rows)


_WRITERS: dict[str, "RecordWriter"] = {}  # by folder


def flush_records(writes: bool = True) -> None:
    """Have the records of an update written; not where another rank has the same responses, and ``writes`` them."""
    for writer in _WRITERS.values():
        writer.flush(writes)


def _writer(config, micro_batch: MicroBatch | None, loss: str, band: Band | None) -> "RecordWriter | None":
    """The writer of this process for its folder; None without records."""
    observation = config.policy_loss
    path = observation.get("records_dir")
    if path is None:
        return None
    if micro_batch is None or not micro_batch.prompts:
        ONCE.warn(
            "step",
            "records_dir is set, but step or prompts of a micro-batch are not known here (a trainer that calls the "
            "loss outside verl's ppo_loss, or dynamic context parallelism): nothing is recorded.",
        )
        return None
    if path in _WRITERS:
        return _WRITERS[path]
    from fspo_verl.observe.records import RecordWriter

    settings = RunSettings(
        loss=loss,
        band=observation if isinstance(observation, Band) else band,  # of a band that adapts, where it starts
        target_clip_rate=observation.get("target_clip_rate"),
        **clip_ratios(config.get),
        old_log_probs_from_rollout=micro_batch.from_rollout,
        versions={"fspo_verl": fspo_verl.__version__, "verl": verl.__version__, "torch": torch.__version__},
    )
    freq, last = observation.records_freq, getattr(config.get("optim"), "total_training_steps", None) or -1
    last_step = last - last % freq if last > 0 else None
    _WRITERS[path] = RecordWriter(path, settings, micro_batch.step, freq, last_step)
    return _WRITERS[path]
