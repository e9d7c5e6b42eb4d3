# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Estimates with 95% intervals that take whole prompts as clusters, for the law of S.

Lengths are response tokens, log-ratios nats. ``cluster`` is everywhere ``[rows]`` integer codes from 0, without gaps.
"""

import math

import numpy as np
from scipy.optimize import brentq

from fspo_verl.analysis.clip_rates import MIN_BIN_PROMPTS, Estimate, t_quantile

UNKNOWN = Estimate(math.nan, math.nan, math.nan)
_LARGEST = 4.0  # of the exponent


def interval(value: float, influence, cluster) -> Estimate:
    """An estimate with its interval, from the influence ``[rows]`` of each row: what the row adds to the error.

    The variance is Σψ², ψ the sums over clusters, times G / (G − 1) for G clusters. Student's t has the degrees of
    freedom of this variance, 2 (Σψ²)² / (Σψ⁴ − (Σψ²)²/G): about G where the ψ are Gaussian, and fewer where few
    clusters decide. No ends with a single cluster.
    """
    total = np.bincount(cluster, influence)
    count, squares = len(total), np.square(total).sum()
    if count < 2 or not squares > 0:
        return UNKNOWN._replace(value=value)
    freedom = 2 / max(np.power(total, 4).sum() / squares**2 - 1 / count, 1 / count**2)
    half = t_quantile(np.clip(freedom, 1, count - 1)) * math.sqrt(squares * count / (count - 1))
    return Estimate(value, float(value - half), float(value + half))


def exponent(s, length, cluster) -> Estimate:
    """p in std(S | L) ~ L^p: the maximum of the Gaussian likelihood, without bins of length.

    S is taken about the drift per token, ΣS / ΣL. Unknown with fewer than 10 clusters, without two lengths, where
    nothing moved, and beyond ±4.
    """
    s, length = np.asarray(s, np.float64), np.asarray(length, np.float64)
    if not s.any() or np.ptp(length) == 0 or np.max(cluster) + 1 < MIN_BIN_PROMPTS:
        return UNKNOWN
    squares, x = np.square(s - length * s.sum() / length.sum()), np.log(length)
    x = x - x.mean()

    def relative(power: float) -> np.ndarray:
        """S² over its expectation, mean 1."""
        weight = squares * np.exp(-2 * power * x)
        return weight / weight.mean()

    def moment(power: float) -> float:
        """Falls with the power; 0 at the estimate."""
        return float(relative(power) @ x)

    if not moment(-_LARGEST) > 0 > moment(_LARGEST):
        return UNKNOWN
    power = brentq(moment, -_LARGEST, _LARGEST)
    found = relative(power)
    return interval(power, (found - 1) * x / (2 * (found * x) @ x), cluster)


def root_mean(squares, count, cluster) -> Estimate:
    """sqrt(Σ squares / Σ count), as the spread of a token from sums over its squares."""
    squares, count = np.asarray(squares, np.float64), np.asarray(count, np.float64)
    if not count.sum() > 0 or not squares.sum() > 0:
        return UNKNOWN
    value = math.sqrt(squares.sum() / count.sum())
    return interval(value, (squares - value**2 * count) / (2 * value * count.sum()), cluster)
