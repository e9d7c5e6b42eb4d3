# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a policy loss in verl's metric stream, from the columns of :mod:`fspo_verl.observe.columns`.

A rate over micro-batches of unequal size is no mean of their rates. The ``actor/fspo/*`` metrics are therefore
numerators and denominators, one number per name and call, whatever its rows: the sum over the rows of the call, times
ranks over the rows of the mini-batch. verl takes the mean over ranks and, of what :func:`as_sums` has marked, the sum
over micro-batches. So each becomes a mean over the rows of the mini-batch, however that was cut, and then the mean over
mini-batches, which verl makes of one size. Rows without a response token (padding that verl adds to fill a batch) count
with 0. Quotients are exact; their table is in :mod:`fspo_verl.observe.quotients`. They are divided where the trainer
logs (:mod:`fspo_verl.analysis.live`), and the sums go no further.

The asynchronous trainers take another mean, over the updates between two weight syncs, each weighted by its responses
(or, in the fully asynchronous one, all alike); quotients stay exact as long as these updates have as many.

Names must not contain "min", "max", "sum", "total", "mean" or "avg": verl would reduce by those. The one with "max" is
to be reduced so.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fspo_verl.loss import MAX_LOG_RATIO
from fspo_verl.observe.columns import CLIPPED, TRUNCATED

PREFIX = "actor/fspo/"
SERIES = "fspo/"
"""The prefix of what is logged; see :mod:`fspo_verl.analysis.live`."""
STEP_ROWS = "step_rows_max"
"""Rows over all ranks that a training step has had until the end of this mini-batch: the largest is that of the step,
and turns means over rows into counts."""
LENGTH_BINS = (16, 64, 256, 1024, 4096, 16384)  # default inner edges, in response tokens
NAMES = {
    "reward": "critic/score/mean",
    "response_length": "response_length/mean",
    "shortest": "response_length/min",
    "longest": "response_length/max",
    "clip_rate": "fspo/clip_rate/all",
    "grad_norm": "actor/grad_norm",
    "loss": "actor/pg_loss",
    "nonfinite_responses": "fspo/not_finite",
    "seconds": "timing_s/step",
}
"""Names that readers of a run look for among its metrics."""


def metrics(
    columns: dict[str, np.ndarray],
    length_bins: Sequence[int],
    on_policy: bool,
    rows: int,
    ranks: int = 1,
    step_rows: int | None = None,
) -> dict[str, float]:
    """Metrics of one call of the loss.

    Args:
        columns: ``[B]`` arrays of :mod:`fspo_verl.observe.columns`.
        length_bins: inner edges of the length bins, in response tokens, rising.
        on_policy: the old log-probs are those of the weights of this call.
        rows: rows of the mini-batch over all ranks, padding included.
        ranks: data-parallel ranks.
        step_rows: see :data:`STEP_ROWS`; None takes ``rows``.
    """
    share = ranks / rows
    means = {PREFIX + name: value * share for name, value in sums(columns, length_bins, on_policy).items()}
    return means | {PREFIX + STEP_ROWS: float(step_rows or rows)}


def as_sums(metrics: dict) -> dict:
    """The metrics of a call of verl's ``ppo_loss``, which makes means of all, with those of :func:`metrics` as sums."""
    from verl.utils.metric import AggregationType  # not at the top: a reader of runs may have no verl

    for name, metric in metrics.items():
        if name.startswith(PREFIX):
            is_largest = name == PREFIX + STEP_ROWS
            metric.aggregation = AggregationType.MAX if is_largest else AggregationType.SUM
    return metrics


def sums(columns: dict[str, np.ndarray], length_bins: Sequence[int], on_policy: bool | np.ndarray) -> dict[str, float]:
    """The sums over rows from which every rate is made.

    A new metric is a line here, a rate of it also one of :data:`fspo_verl.observe.quotients.QUOTIENTS`.

    Args:
        on_policy: see :func:`metrics`; of several calls ``[B]``.
    """
    length, advantage = columns["length"], columns["advantage"]
    sequence = (length > 0).astype(np.float64)
    unmoved = sequence * on_policy
    variance = columns["quadratic_variation"] / np.maximum(length, 1)
    responses = sequence * (advantage != 0)
    clipped = sum(columns[name] for name in CLIPPED) * responses
    # What a loss that weighs responses by e^S leaves of them.
    ratio = np.exp(np.minimum(columns["log_ratio"], MAX_LOG_RATIO)) * (responses - clipped)
    better = (advantage > 0).astype(np.float64)
    unmoved_variance = variance @ unmoved
    totals = {
        "sequence_fraction": sequence.sum(),
        "nonfinite_fraction": (columns["finite"] == 0).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio @ ratio,
        "on_policy_fraction": unmoved.sum(),
        "on_policy_sigma_squared": unmoved_variance,
        "moved_fraction": sequence.sum() - unmoved.sum(),
        "moved_sigma_squared": variance @ (sequence - unmoved),
        "better/responses": responses @ better,
        "better/clipped": clipped @ better,
    }
    if "outside" in columns:
        totals["on_policy_outside_fraction"] = columns["outside"] @ unmoved
    if "rollout_length" in columns:
        measured = columns["rollout_length"] > 0
        totals["rollout_length"] = columns["rollout_length"].sum()
        totals["rollout_quadratic_variation"] = columns["rollout_quadratic_variation"][measured].sum()
        totals["rollout_rejected_fraction"] = (measured & (length == 0)).sum()
    if TRUNCATED in columns:
        totals[f"{TRUNCATED}_fraction"] = columns[TRUNCATED] @ sequence
    edges = [1, *length_bins]
    place = np.searchsorted(edges, length, side="right")  # 0: no token
    of_responses, of_clipped = _names_in_bins(tuple(edges))
    totals |= zip(of_responses, np.bincount(place, responses, len(edges) + 1).tolist()[1:], strict=True)
    totals |= zip(of_clipped, np.bincount(place, clipped, len(edges) + 1).tolist()[1:], strict=True)
    return {name: float(value) for name, value in totals.items()}


def _names_in_bins(edges: Sequence[int]) -> tuple[list[str], list[str]]:
    """The names of the sums in each length bin: of responses, and of those that are clipped."""
    names = [*(f"length_{low}_to_{high - 1}" for low, high in pairwise(edges)), f"length_{edges[-1]}_up"]
    return [f"{name}/responses" for name in names], [f"{name}/clipped" for name in names]
