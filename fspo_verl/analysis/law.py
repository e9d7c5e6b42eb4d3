# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The law of the sequence log-ratio S: how its spread and its drift grow with the length, from the records of a run.

It is that of the responses that have moved (Q > 0). Lengths are response tokens, log-ratios nats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from fspo_verl.analysis.clip_rates import MIN_COUNT, enough, length_cells, length_table
from fspo_verl.analysis.resampling import Estimate, bootstrap_totals, clusters, pool, sum_by


class VarianceLaw(NamedTuple):
    """Var(S | L) = constant + linear·L + quadratic·L², nats².

    Independent tokens of one variance have only the linear term. A constant comes from tokens that every response has
    (its last ones), a quadratic term from moves that all tokens of a response share.
    """

    constant: Estimate
    linear: Estimate
    quadratic: Estimate


@dataclass(frozen=True)
class LawOfS:
    """What :func:`law_of_s` estimates. Tables have the columns low, high, n, value, lower, upper."""

    responses: int  # that have moved
    sigma: Estimate  # sqrt(mean Q/L): spread of a token's log-ratio
    sigma_by_length: pd.DataFrame
    drift_by_length: pd.DataFrame  # mean S/L, nats per token
    std_by_length: pd.DataFrame  # standard deviation of S around the bin's drift per token
    variation_by_length: pd.DataFrame  # sqrt(mean Q), that is sigma·sqrt(L) at these lengths
    ratio_by_length: pd.DataFrame  # mean e^S
    last_share_by_length: pd.DataFrame  # part of Q in the last tokens of the responses
    top_share_by_length: pd.DataFrame  # part of Q in the largest 1% of their tokens
    last_share: Estimate  # the same over all lengths
    top_share: Estimate
    kappa: Estimate  # mean S / mean(−Q/2): 1 if S drifts by −Q/2, 0 if not at all
    std_slope: Estimate  # of log std(S) against log L; FSPO assumes 0.5
    variance_law: VarianceLaw


_CURVES = ("sigma", "drift", "std", "variation", "ratio", "last_share", "top_share")
_OVERALL = ("sigma", "last_share", "top_share", "kappa", "std_slope")


def law_of_s(
    records: pd.DataFrame, edges, rng: np.random.Generator, draws: int = 400, min_count: int = MIN_COUNT
) -> LawOfS:
    """Estimate the law of S over the responses that have moved (Q > 0), with intervals clustered by prompt.

    Per bin, the standard deviation of S is taken around d·L, d = ΣS/ΣL of the bin, so that the drift within a bin does
    not count as spread. ``std_slope`` is the least-squares slope of its logarithm against the logarithm of the bin's
    mean length, each bin weighted with its responses. ``variance_law`` is the least-squares fit of its square on 1,
    mean L and mean L², each bin weighted with responses / (mean L)², which is the inverse variance of the left side
    up to a constant if Var(S) ∝ L; signs are left free. (Derived here; the quantities are those of
    :class:`fspo_verl.loss.Band`.)

    Bins with fewer than ``min_count`` responses or 10 prompts keep their value in the tables, with no interval, and
    take no part in slope and variance law. These need two and three bins, and are NaN otherwise. Without a response
    that has moved everything is NaN.
    """
    moved = records[records["quadratic_variation"] > 0]
    cell, cells = length_cells(moved["length"], edges)
    columns, cluster = _columns(moved), clusters(moved)
    n, usable = np.bincount(cell, minlength=cells), enough(cluster, cell, cells, min_count)

    def statistic(totals):
        with np.errstate(invalid="ignore", divide="ignore"):
            return _statistic(dict(zip(columns, np.moveaxis(totals, -1, 0), strict=True)), usable)

    totals = sum_by(pool(cluster, rng), columns.values(), cell, cells)
    estimate = np.stack(bootstrap_totals(totals, statistic, rng, draws))
    curves, numbers = np.split(estimate, [cells * len(_CURVES)], axis=1)
    curves = curves.reshape(3, len(_CURVES), cells)
    curves[1:, :, ~usable] = np.nan
    tables = {
        f"{name}_by_length": length_table(edges, n=n, value=value, lower=lower, upper=upper)
        for name, (value, lower, upper) in zip(_CURVES, curves.swapaxes(0, 1), strict=True)
    }
    *overall, constant, linear, quadratic = (Estimate(*row) for row in numbers.T.tolist())
    variance = VarianceLaw(constant, linear, quadratic)
    return LawOfS(len(moved), variance_law=variance, **dict(zip(_OVERALL, overall, strict=True)), **tables)


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
        "S_per_L": s / length,
        "ratio": np.exp(np.minimum(s, 20)),
        "last": moved["quadratic_variation_last"],
        "top": moved["quadratic_variation_top"],
    }


def _statistic(by_bin: Mapping[str, np.ndarray], usable: np.ndarray) -> np.ndarray:
    """Estimates ``[..., M]`` from totals ``[..., bins]``: curves, numbers over all lengths, coefficients of Var(S)."""
    everything = {name: column.sum(-1) for name, column in by_bin.items()}
    curves, means = _curves(by_bin), _curves(everything)
    means["kappa"] = -2 * everything["S"] / everything["Q"]
    means["std_slope"] = _std_slope(by_bin, curves, usable)
    overall = np.stack([means[name] for name in _OVERALL], -1)
    return np.concatenate([*(curves[name] for name in _CURVES), overall, _variance_law(by_bin, curves, usable)], -1)


def _curves(totals: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    n, drift = totals["n"], totals["S"] / totals["L"]
    squares = totals["S2"] - 2 * drift * totals["SL"] + drift**2 * totals["L2"]
    return {
        "sigma": np.sqrt(totals["Q_per_L"] / n),
        "drift": totals["S_per_L"] / n,
        "std": np.sqrt(np.maximum(squares, 0.0) / np.where(n > 1, n - 1, np.nan)),
        "variation": np.sqrt(totals["Q"] / n),
        "ratio": totals["ratio"] / n,
        "last_share": totals["last"] / totals["Q"],
        "top_share": totals["top"] / totals["Q"],
    }


def _std_slope(by_bin, curves, usable: np.ndarray) -> np.ndarray:
    if usable.sum() < 2:
        return np.full(by_bin["n"].shape[:-1], np.nan)
    weight = by_bin["n"][..., usable]
    x = np.log(by_bin["L"] / by_bin["n"])[..., usable]
    y = np.log(curves["std"])[..., usable]
    x = x - (weight * x).sum(-1, keepdims=True) / weight.sum(-1, keepdims=True)
    return (weight * x * y).sum(-1) / (weight * x * x).sum(-1)


def _variance_law(by_bin, curves, usable: np.ndarray) -> np.ndarray:
    """Coefficients ``[..., 3]``."""
    n = by_bin["n"][..., usable]
    if usable.sum() < 3:
        return np.full((*n.shape[:-1], 3), np.nan)
    length, length2 = by_bin["L"][..., usable] / n, by_bin["L2"][..., usable] / n
    unit = np.nanmax(length)  # so that the three columns are of one size; NaN where a draw leaves a bin empty
    weight = n * (unit / length) ** 2
    x = np.stack([np.ones_like(length), length / unit, length2 / unit**2], -1)
    transposed = np.swapaxes(x * weight[..., None], -1, -2)
    y = curves["std"][..., usable, None] ** 2
    broken = ~np.isfinite(transposed @ y).all((-1, -2))
    normal = np.where(broken[..., None, None], 0.0, transposed @ x)
    fit = (np.linalg.pinv(normal, hermitian=True) @ (transposed @ y))[..., 0]
    return fit / np.array([1.0, unit, unit**2])
