# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a policy loss in verl's metric stream, from the columns of :mod:`fspo_verl.observe.columns`.

verl reduces a metric by an unweighted mean over micro-batches, data-parallel ranks and mini-batches, which is wrong for
a rate taken over micro-batches of unequal size. The ``actor/fspo/*`` metrics therefore hold one value per row of the
batch, so that verl's mean is the mean over rows, however the batch was cut. Rows without a response token (padding that
verl adds to fill a batch) count with 0. What is not a mean over rows is a quotient of two of them; the table is in
:mod:`fspo_verl.observe.quotients`. The ``on_policy_*`` are 0 on rows of later mini-batches, and where it is not known
that the first one has not moved.

The asynchronous trainers take another mean, over the updates between two weight syncs, each weighted by its responses
(or, in the fully asynchronous one, all alike); that is the mean over rows as long as these updates have as many.

Names must not contain "min", "max", "sum" or "total": verl would reduce by those.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fspo_verl.loss import MAX_LOG_RATIO
from fspo_verl.observe.columns import CLIPPED, MISMATCH, TRUNCATED

PREFIX = "actor/fspo/"
LENGTH_BINS = (16, 64, 256, 1024, 4096, 16384)  # default inner edges, in response tokens
NAMES = {
    "reward": "critic/score/mean",
    "response_length": "response_length/mean",
    "shortest": "response_length/min",
    "longest": "response_length/max",
    "clip_rate": "fspo/clip_rate/all",
    "grad_norm": "actor/grad_norm",
    "loss": "actor/pg_loss",
    "nonfinite_responses": f"{PREFIX}nonfinite_fraction",
    "seconds": "timing_s/step",
}
"""What readers of a run look for among its metrics."""


def metrics(
    columns: dict[str, np.ndarray], length_bins: Sequence[int], rows: int, mini_batch: int, on_policy: bool
) -> dict:
    """Metrics of one call of the loss.

    Args:
        columns: ``[B]`` arrays of :mod:`fspo_verl.observe.columns`.
        length_bins: inner edges of the length bins, in response tokens, rising.
        rows: rows of the mini-batch over all ranks, padding included.
        mini_batch: its number within the step, from 0.
        on_policy: the old log-probs are those of the weights of this call.
    """
    from verl.utils.metric import AggregationType, Metric  # not at the top: a reader of runs may have no verl

    result = {}
    for name, values in row_values(columns, length_bins, rows, mini_batch, on_policy).items():
        result[PREFIX + name] = metric = Metric(AggregationType.MEAN)
        metric.values = values.tolist()  # as extend(), which checks the type of each of some ten thousand floats
    return result


def row_values(
    columns: dict[str, np.ndarray], length_bins: Sequence[int], rows: int, mini_batch: int, on_policy: bool
) -> dict[str, np.ndarray]:
    """The metrics before the mean over rows: name to ``[B]`` array.

    A new metric is a line here, a rate of it also one of :data:`fspo_verl.observe.quotients.QUOTIENTS`.
    """
    length, log_ratio, advantage = (columns[name] for name in ("length", "log_ratio", "advantage"))
    is_sequence = length > 0
    tokens = np.maximum(length, 1)
    ratio = np.exp(np.minimum(log_ratio, MAX_LOG_RATIO)) * is_sequence
    clipped = sum(columns[name] for name in CLIPPED)
    sigma_squared = columns["quadratic_variation"] / tokens
    per_sqrt_length = log_ratio / np.sqrt(tokens)
    values = {
        "sequence_fraction": is_sequence,
        "nonzero_advantage_fraction": advantage != 0,
        "clip_fraction": clipped,
        **{name.replace("clipped", "clip_fraction"): columns[name] for name in CLIPPED},
        "log_ratio": log_ratio,
        "log_ratio_per_token": log_ratio / tokens,
        "log_ratio_per_sqrt_length": per_sqrt_length,
        "log_ratio_per_sqrt_length_squared": per_sqrt_length**2,
        "sigma_squared": sigma_squared,
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "nonfinite_fraction": columns["finite"] == 0,
        "on_policy_fraction": is_sequence * on_policy,
        "on_policy_sigma_squared": sigma_squared * on_policy,
        "rows": np.full(len(length), rows),
        # No mean can count the mini-batches of a step; but the mean of the first M odd numbers is M.
        "step_rows": np.full(len(length), rows * (2 * mini_batch + 1)),
    }
    has_advantage = is_sequence & (advantage != 0)
    counted = {"responses": has_advantage, "clipped": clipped * has_advantage}
    if "outside" in columns:
        values["outside_band_fraction"] = columns["outside"]
        values["on_policy_outside_fraction"] = columns["outside"] * on_policy
        counted["outside"] = columns["outside"] * has_advantage
    if "rollout_length" in columns:
        values |= {name: np.nan_to_num(columns[name]) for name in MISMATCH}  # a row that is not measured has length 0
        values["rollout_rejected_fraction"] = ~is_sequence & (columns["rollout_length"] > 0)
    if TRUNCATED in columns:
        values[f"{TRUNCATED}_fraction"] = columns[TRUNCATED] * is_sequence
    better = advantage > 0
    values |= {f"better/{key}": counted[key] * better for key in ("responses", "clipped")}
    names, in_bin = _bins(length, length_bins)
    for key, value in counted.items():
        values |= zip((f"{name}/{key}" for name in names), value * in_bin, strict=True)
    return dict(zip(values, np.array([*values.values()], dtype=np.float64), strict=True))


def _bins(length: np.ndarray, inner_edges: Sequence[int]) -> tuple[list[str], np.ndarray]:
    """The names of the length bins, and bool ``[bins, B]``: who is in which; rows without a token are in none."""
    edges = [1, *inner_edges]
    names = [f"length_{low}_to_{high - 1}" for low, high in pairwise(edges)]
    number = np.searchsorted(edges, length, side="right")
    return [*names, f"length_{edges[-1]}_up"], number == np.arange(1, len(edges) + 1)[:, None]
