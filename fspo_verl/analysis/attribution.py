# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Why a clip acts: the shares of its clips that are numerical noise, mismatch, age and movement of the policy.

The first mini-batch of a step has not moved: its log-ratios are numerical noise, or in bypass mode the mismatch of
trainer and rollout engine and, where ``staleness`` is above 0, the age of the responses. Later ones hold the movement
as well. The variances of independent parts add up, so that the first mini-batch gives the share of each part.

How often a clip would act without a part follows from the clip rate by a normal law: the edge lies at the quantile
that the rate has, and moves outwards as the spread shrinks. What the first mini-batch shows alone is counted, not
computed. Clips of several parts together are split by Shapley's value (1953), the mean over all orders in which the
parts could have come. All of this is done within strata (thirds of the length, sign of the advantage, mini-batches).
How far it is off: ``tests/simulated_parts.py``.
"""

import math
from collections.abc import Callable, Mapping
from itertools import combinations

import numpy as np
import pandas as pd
from scipy.special import ndtr, ndtri

from fspo_verl.analysis.clip_rates import third_of
from fspo_verl.observe.settings import RunSettings

PARTS = NOISE, MISMATCH, AGE, MISMATCH_OR_AGE, MOVEMENT = ("noise", "mismatch", "age", "mismatch or age", "movement")
MIN_CLIPS = 50
"""Clips below which nothing is said of their parts."""
_MIN_FRESH = 100  # responses sampled from the newest weights, from which mismatch and age are told apart
_GROUPS = 4  # of later mini-batches


def attribution(records: pd.DataFrame, settings: RunSettings | None) -> dict[str, float] | None:
    """Shares of the clips, which add up to 1, by part; of a loss that clips tokens, shares of what they take.

    Args:
        records: of :mod:`fspo_verl.observe.records`, of steps in which the run does not change much.

    Returns:
        None with fewer than :data:`MIN_CLIPS` clips, or where no first mini-batch was recorded.
    """
    counted = records[(records["advantage"] != 0) & (records["length"] > 0)]
    clipped = counted["clipped"].to_numpy(np.float64)
    first = (counted["mini_batch"] == 0).to_numpy()
    if clipped.sum() < MIN_CLIPS or not first.any():
        return None
    bypass = settings is not None and settings.old_log_probs_from_rollout
    stale = np.zeros(len(counted), bool)
    base = [NOISE]
    if bypass:
        age = counted["staleness"].to_numpy(np.float64) if "staleness" in counted else np.full(len(counted), np.nan)
        can_split = (first & (age <= 0)).sum() >= _MIN_FRESH
        stale = (age > 0) & can_split
        base = [MISMATCH, AGE] if stale.any() else [MISMATCH] if (age <= 0).all() else [MISMATCH_OR_AGE]
    by_token = bool(((clipped > 0) & (clipped < 1)).any())
    # What is split up is the variance per root token of S, or for tokens that of the root of Q.
    spread = np.sqrt(counted["quadratic_variation"].astype(np.float64)) if by_token else counted["log_ratio"]
    mini_batch = counted["mini_batch"].to_numpy()
    later = np.unique(mini_batch[~first])
    group = 1 + np.searchsorted(later, mini_batch) * _GROUPS // max(len(later), _GROUPS)
    table = pd.DataFrame(
        {
            "clipped": clipped,
            "spread": spread.to_numpy(np.float64) / np.sqrt(counted["length"].to_numpy(np.float64)),
            "third": third_of(counted["length"].to_numpy()),
            "side": counted["advantage"].to_numpy() > 0,
            "stale": stale,
            "group": np.where(first, 0, group),
        }
    )
    totals = dict.fromkeys([*base, MOVEMENT], 0.0)
    for _, of_third in table.groupby("third"):
        for part, clips in _of_third(of_third, base, by_token).items():
            totals[part] += clips
    totals = {part: max(clips, 0.0) for part, clips in totals.items()}
    every = sum(totals.values())
    return {part: clips / every for part, clips in totals.items()} if every > 0 else None


def _of_third(rows: pd.DataFrame, base: list[str], by_token: bool) -> dict[str, float]:
    """Clips by part among responses of like length."""
    unmoved = rows[rows["group"] == 0]
    if unmoved.empty:
        return {MOVEMENT: float(rows["clipped"].sum())}
    still = {stale: _variance(part["spread"], about_zero=True) for stale, part in unmoved.groupby("stale")}
    found = dict.fromkeys([*base, MOVEMENT], 0.0)
    for (group, side, stale), stratum in rows.groupby(["group", "side", "stale"]):
        alone = unmoved[(unmoved["side"] == side) & (unmoved["stale"] == stale)]["clipped"].mean()
        variance = _variance(stratum["spread"], about_zero=by_token or group == 0)
        of_base = 1.0 if group == 0 else min(still.get(stale, math.nan) / variance, 1.0) if variance > 0 else 1.0
        if math.isnan(of_base) or math.isnan(alone):
            continue
        fresh = min(still[False] / still[True], 1.0) if stale and still.get(True) and False in still else 1.0
        shares = {base[0]: of_base * fresh, MOVEMENT: 1 - of_base}
        if len(base) > 1:
            shares[AGE] = of_base * (1 - fresh)
        rates = _rates(float(stratum["clipped"].mean()), float(alone), shares)
        for part, rate in shapley(list(shares), rates).items():
            found[part] += rate * len(stratum)
    return found


def _variance(spread: pd.Series, about_zero: bool) -> float:
    return float((spread**2).mean()) if about_zero else float(spread.var(ddof=0))


def _rates(rate: float, alone: float, shares: Mapping[str, float]) -> Callable[[frozenset[str]], float]:
    """The clip rate that a stratum would have with some of its parts only.

    Args:
        rate: with all of them.
        alone: as measured without movement.
        shares: of the variance, by part.
    """
    of_base = sum(share for part, share in shares.items() if part != MOVEMENT)

    def with_parts(parts: frozenset[str]) -> float:
        left = sum(shares[part] for part in parts)
        if MOVEMENT in parts:
            return _rate_at(rate, left)
        return _rate_at(alone, left / of_base) if of_base else 0.0

    return with_parts


def _rate_at(rate: float, left: float) -> float:
    """The clip rate when the share ``left`` of the variance remains; the law is normal, and the edge stays."""
    if left >= 1 - 1e-12 or rate in (0.0, 1.0):
        return rate
    return float(ndtr(ndtri(rate) / math.sqrt(left))) if left > 0 else float(rate > 0.5)


def shapley(parts: list[str], value: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """Shapley's value of each part (1953, doi:10.1515/9781400881970-018): its mean contribution over all orders.

    Args:
        value: of a set of parts; of none it is 0.
    """
    found = dict.fromkeys(parts, 0.0)
    for part in parts:
        others = [other for other in parts if other != part]
        for size in range(len(parts)):
            weight = 1 / (len(parts) * math.comb(len(others), size))
            for before in map(frozenset, combinations(others, size)):
                found[part] += weight * (value(before | {part}) - (value(before) if before else 0.0))
    return found
