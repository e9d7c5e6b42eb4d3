# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Paired differences between losses over seeds, and what can be told from them.

A handful of seeds does not show how differences are distributed, so the intervals do not take them for normal, only for
as likely to lie some way above their mean as below it.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from fspo_verl.compare.measures import METRICS, clip_table
from fspo_verl.compare.trials import Trial, losses

CONFIDENCE = 0.95
MIN_SEEDS = 6
"""Of an interval: all signs of 5 differences flipped give 32 outcomes, too few for 2.5% on either side."""
SAME = "the same in every seed"  # verdicts, here and below
TOO_FEW = f"no interval with fewer than {MIN_SEEDS} seeds"
NOT_TOLD = "no difference can be told"
_SUBSETS = 2**16  # of more than 16 seeds, so many are drawn


def sign_flip_interval(values: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean of some seeds' values ``[seeds]``, by the test that flips all their signs.

    It holds the means that this test does not reject. Its ends are order statistics of the means of all subsets of the
    seeds, which part the line into 2^seeds pieces that hold the true mean with one probability each, whatever the
    distribution, if it is symmetric (Hartigan 1969, "Using subsample values as typical values"). So 6 seeds give
    96.9%, from the smallest to the largest value; NaN for fewer.
    """
    count = len(values)
    if count < MIN_SEEDS:
        return math.nan, math.nan
    if 2**count <= _SUBSETS:
        chosen = np.arange(1, 2**count)[:, None] >> np.arange(count) & 1
    else:
        chosen = np.random.default_rng(0).integers(0, 2, (_SUBSETS - 1, count))
        chosen = chosen[chosen.any(1)]
    means = np.sort(chosen @ values / chosen.sum(1))
    outside = int((1 - CONFIDENCE) / 2 * (len(means) + 1))
    return float(means[outside - 1]), float(means[-outside])


def differences(values: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Paired differences of the baseline to every other loss: a row per metric and loss.

    Columns: metric, loss, seeds (pairs), difference (baseline − loss), lower, upper, improvement (share of pairs in
    which the baseline is better, ties count half; NaN for a metric of which neither more nor less is better), verdict.
    A seed in which one of the two losses has no value is no pair.
    """
    rows = []
    for name, metric in METRICS.items():
        table = values.pivot(index="seed", columns="loss", values=name)
        for loss in table.columns.drop(baseline):
            pair = table[[baseline, loss]].dropna()
            difference = (pair[baseline] - pair[loss]).to_numpy()
            if not len(difference):
                continue
            interval = sign_flip_interval(difference)
            gain = difference * metric.better
            better = np.where(gain == 0, 0.5, gain > 0).mean() if metric.better else math.nan
            said = verdict(difference, interval, baseline)
            rows.append((name, loss, len(difference), difference.mean(), *interval, better, said))
    columns = ["metric", "loss", "seeds", "difference", "lower", "upper", "improvement", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def verdict(difference: np.ndarray, interval: tuple[float, float], baseline: str) -> str:
    """What can be said of paired differences, in words: a difference counts where its interval does not hold 0."""
    if not difference.any():
        return SAME
    if len(difference) < MIN_SEEDS:
        return TOO_FEW
    if interval[0] <= 0 <= interval[1]:
        return NOT_TOLD
    return f"{baseline} {'higher' if interval[0] > 0 else 'lower'}"


def clip_rates(trials: Sequence[Trial]) -> pd.DataFrame:
    """Clip rate by loss and length bin: mean, smallest and largest of the rates of the seeds that have one.

    Columns: loss, kind (``clipped``, or ``matched`` for the loss's band scaled to one rate), seeds (that have one),
    low, high, length (geometric mean of the lengths in the bin; NaN if it is empty), n (responses with advantage != 0),
    rate, smallest, largest.
    """
    rows = []
    for loss, kind in itertools.product(losses(trials), ("clipped", "matched")):
        tables = [clip_table(trial, None if kind == "clipped" else loss) for trial in trials if trial.loss == loss]
        known = [table for table in tables if table is not None]
        for (low, high), seeds in pd.concat(known).groupby(["low", "high"]) if known else ():
            length, rate = np.exp(seeds.mean_log[seeds.n > 0].mean()), seeds.rate
            rows.append((loss, kind, len(known), low, high, length, seeds.n.sum(), rate.mean(), rate.min(), rate.max()))
    columns = ["loss", "kind", "seeds", "low", "high", "length", "n", "rate", "smallest", "largest"]
    return pd.DataFrame(rows, columns=columns)
