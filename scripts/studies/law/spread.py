# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How the spread of the sequence log-ratio S grows with the length, from the records of a run.

It is that of the responses that have moved (Q > 0). Lengths are response tokens, log-ratios nats.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from bootstrap import bootstrap_totals, pool, sum_by

from fspo_verl.analysis.clip_rates import MIN_BIN_PROMPTS, MIN_COUNT, Estimate, length_cells, length_table, prompts_of


@dataclass(frozen=True)
class LawOfS:
    """What :func:`law_of_s` estimates."""

    sigma: Estimate  # sqrt(mean Q/L): spread of a token's log-ratio
    kappa: Estimate  # mean S / mean(−Q/2): 1 if S drifts by −Q/2, 0 if not at all
    std_slope: Estimate  # of log std(S) against log L; FSPO assumes 0.5
    std_by_length: pd.DataFrame
    """Standard deviation of S around the bin's drift per token: columns low, high, n, value, lower, upper."""


def law_of_s(
    records: pd.DataFrame, edges, rng: np.random.Generator, draws: int = 400, min_count: int = MIN_COUNT
) -> LawOfS:
    """Estimate the law of S over the responses that have moved (Q > 0), with intervals clustered by prompt.

    Per bin, the standard deviation of S is taken around d·L, d = ΣS/ΣL of the bin, so that the drift within a bin does
    not count as spread. ``std_slope`` is the least-squares slope of its logarithm against the logarithm of the bin's
    mean length, each bin weighted with its responses. (Derived here; the quantities are those of
    :class:`fspo_verl.loss.Band`.)

    Bins with fewer than ``min_count`` responses or 10 prompts keep their value in the table, with no interval, and
    take no part in the slope, which is NaN with fewer than two. Without a response that has moved everything is NaN.
    """
    moved = records[records["quadratic_variation"] > 0]
    cell, cells = length_cells(moved["length"], edges)
    columns, cluster = _columns(moved), prompts_of(moved)
    count = sum_by(cluster, [np.ones(len(cell))], cell, cells)[..., 0]
    usable = (count.sum(0) >= min_count) & (np.count_nonzero(count, axis=0) >= MIN_BIN_PROMPTS)

    def statistic(totals):
        with np.errstate(invalid="ignore", divide="ignore"):
            return _statistic(dict(zip(columns, np.moveaxis(totals, -1, 0), strict=True)), usable)

    totals = sum_by(pool(cluster, rng), columns.values(), cell, cells)
    estimate = np.stack(bootstrap_totals(totals, statistic, rng, draws))
    (value, lower, upper), numbers = estimate[:, :cells].copy(), estimate[:, cells:]
    lower[~usable] = upper[~usable] = np.nan
    table = length_table(edges, n=count.sum(0).astype(int), value=value, lower=lower, upper=upper)
    return LawOfS(*(Estimate(*row) for row in numbers.T.tolist()), table)


def _columns(moved: pd.DataFrame) -> dict[str, np.ndarray]:
    """What is summed over responses, each ``[rows]``."""
    length, s, q = (moved[name].to_numpy(np.float64) for name in ("length", "log_ratio", "quadratic_variation"))
    return {
        "n": np.ones(len(moved)),
        "L": length,
        "L2": length**2,
        "S": s,
        "S2": s**2,
        "SL": s * length,
        "Q": q,
        "Q_per_L": q / length,
    }


def _statistic(by_bin: Mapping[str, np.ndarray], usable: np.ndarray) -> np.ndarray:
    """Estimates ``[..., bins + 3]`` from totals ``[..., bins]``: std of S by bin, sigma, kappa, slope."""
    n, drift = by_bin["n"], by_bin["S"] / by_bin["L"]
    squares = by_bin["S2"] - 2 * drift * by_bin["SL"] + drift**2 * by_bin["L2"]
    std = np.sqrt(np.maximum(squares, 0.0) / np.where(n > 1, n - 1, np.nan))
    total = {name: column.sum(-1) for name, column in by_bin.items()}
    numbers = [np.sqrt(total["Q_per_L"] / total["n"]), -2 * total["S"] / total["Q"], _slope(by_bin, std, usable)]
    return np.concatenate([std, np.stack(numbers, -1)], -1)


def _slope(by_bin: Mapping[str, np.ndarray], std: np.ndarray, usable: np.ndarray) -> np.ndarray:
    if usable.sum() < 2:
        return np.full(by_bin["n"].shape[:-1], np.nan)
    weight = by_bin["n"][..., usable]
    x = np.log(by_bin["L"] / by_bin["n"])[..., usable]
    x = x - (weight * x).sum(-1, keepdims=True) / weight.sum(-1, keepdims=True)
    return (weight * x * np.log(std)[..., usable]).sum(-1) / (weight * x * x).sum(-1)
