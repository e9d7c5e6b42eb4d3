# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Estimates with confidence intervals that resample whole prompts, for the law of S."""

import math
import warnings
from collections.abc import Callable

import numpy as np

from fspo_verl.analysis.clip_rates import Estimate, t_quantile

# Clusters are pooled at random into at most this many blocks before they are resampled. Sums of independent clusters
# are independent, so the interval stays valid; its width is then known to 1/sqrt(2000), and the cost is bounded.
_BLOCKS = 1000
UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def clustered_bootstrap(cluster, columns, statistic: Callable, rng: np.random.Generator, draws: int = 400) -> Estimate:
    """A function of column totals, with an interval from resampling whole clusters.

    The interval is value ± t · (standard deviation over the draws), with Student's t. Its degrees of freedom are those
    of the variance Σψ², ψ the change of the value when one cluster is left out: 2 (Σψ²)² / (Σψ⁴ − (Σψ²)²/clusters),
    which is the number of clusters where the ψ are Gaussian, and less where few clusters decide. This covers better
    than percentiles. NaN for a single cluster; a draw without a value (NaN) is left out.

    Args:
        cluster: ``[rows]`` codes from 0, of the cluster.
        columns: ``[rows, K]`` numbers.
        statistic: maps totals ``[..., K]`` to ``[..., M]``, of which the estimates are; the dots run over the draws.
        rng, draws: source of the draws, and how many.
    """
    return bootstrap_totals(sum_by(pool(cluster, rng), np.asarray(columns).T)[:, 0], statistic, rng, draws)


def bootstrap_totals(totals: np.ndarray, statistic: Callable, rng: np.random.Generator, draws: int) -> Estimate:
    """:func:`clustered_bootstrap` from totals ``[clusters, ...]`` of any shape, which ``statistic`` gets summed."""
    count, whole = len(totals), totals.sum(0)
    value = statistic(whole)
    if count < 2:
        nothing = np.full_like(value, np.nan)
        return Estimate(value, nothing, nothing)
    weights = rng.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)
    drawn = statistic((weights @ totals.reshape(count, -1)).reshape(draws, *totals.shape[1:]))
    influence = statistic(whole - totals) - value
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.filterwarnings("ignore", "Degrees of freedom <= 0", RuntimeWarning)  # no draw has a value: NaN
        deviation = np.nanstd(np.where(np.isfinite(drawn), drawn, np.nan), axis=0, ddof=1)
        influence -= influence.mean(0)
        squares = np.square(influence).sum(0)
        freedom = 2 / (np.power(influence, 4).sum(0) / squares**2 - 1 / count)
    freedom = np.where(squares > 0, np.clip(freedom, 1, count - 1), count - 1)
    half = t_quantile(freedom) * deviation * np.sqrt(count / (count - 1))
    return Estimate(value, value - half, value + half)


def pool(cluster, rng: np.random.Generator) -> np.ndarray:
    """Codes ``[rows]`` of at most 1,000 blocks of clusters, each cluster whole in one block drawn at random."""
    cluster = np.asarray(cluster)
    count = int(cluster.max()) + 1 if len(cluster) else 0
    return cluster if count <= _BLOCKS else (rng.permutation(count) % _BLOCKS)[cluster]


def sum_by(code: np.ndarray, columns, cell=0, cells: int = 1) -> np.ndarray:
    """Totals ``[codes, cells, K]`` of K columns ``[rows]``, by a code and a cell of each row."""
    codes = int(code.max()) + 1 if len(code) else 0
    place = code * np.int64(cells) + cell
    totals = [np.bincount(place, np.asarray(column), codes * cells) for column in columns]
    return np.stack(totals, -1).reshape(codes, cells, len(totals))
