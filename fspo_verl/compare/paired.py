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

from fspo_verl.analysis.resampling import CONFIDENCE, UNKNOWN, Estimate, t_quantile
from fspo_verl.compare.measures import METRICS, area_weights, clip_table
from fspo_verl.compare.trials import Trial, losses

MIN_SEEDS = 6
"""Of an interval: all signs of 5 differences flipped give 32 outcomes, too few for 2.5% on either side."""
SAME = "the same in every seed"  # verdicts, here and below
TOO_FEW = f"no interval with fewer than {MIN_SEEDS} seeds"
NOT_TOLD = "no difference can be told"
_SUBSETS = 2**16  # of more than 16 seeds, so many are drawn


def sign_flip_interval(values: np.ndarray) -> Estimate:
    """Mean of some seeds' values ``[seeds]``, with the 95% interval of the test that flips all their signs.

    It holds the means that this test does not reject. Its ends are order statistics of the means of all subsets of the
    seeds, which part the line into 2^seeds pieces that hold the true mean with one probability each, whatever the
    distribution, if it is symmetric (Hartigan 1969, "Using subsample values as typical values"). So 6 seeds give
    96.9%, from the smallest to the largest value; NaN for fewer.
    """
    count = len(values)
    if count < MIN_SEEDS:
        return Estimate(float(values.mean()), *UNKNOWN[1:])
    if 2**count <= _SUBSETS:
        chosen = np.arange(1, 2**count)[:, None] >> np.arange(count) & 1
    else:
        chosen = np.random.default_rng(0).integers(0, 2, (_SUBSETS - 1, count))
        chosen = chosen[chosen.any(1)]
    means = np.sort(chosen @ values / chosen.sum(1))
    outside = int((1 - CONFIDENCE) / 2 * (len(means) + 1))
    return Estimate(float(values.mean()), float(means[outside - 1]), float(means[-outside]))


def over_questions(differences: np.ndarray) -> Estimate:
    """Mean of differences ``[seeds, questions]``: :func:`sign_flip_interval` over seeds, widened for other questions.

    What the questions add is the variance of their own effects, the noise of single answers taken off, as the seeds
    bear that already. Derived here.
    """
    seeds, questions = differences.shape
    value, lower, upper = sign_flip_interval(differences.mean(1))
    if math.isnan(lower):
        return Estimate(value, lower, upper)
    by_seed, by_question = differences.mean(1, keepdims=True), differences.mean(0)
    noise = np.square(differences - by_seed - by_question + value).sum() / ((seeds - 1) * (questions - 1))
    variance = max(by_question.var(ddof=1) - noise / seeds, 0) / questions
    more = t_quantile(questions - 1) * math.sqrt(variance)
    return Estimate(value, value - math.hypot(value - lower, more), value + math.hypot(upper - value, more))


def answer_differences(first: Sequence[Trial], second: Sequence[Trial], metric: str) -> np.ndarray | None:
    """Differences ``[seeds, questions]`` between paired trials, whose means are those of the metric.

    None where the metric is not made of answers, or answers to the same questions at the same steps are not at hand.
    """
    trials, steps = [*first, *second], sorted(first[0].validation)
    paired = len({trial.questions for trial in trials}) == 1 and all(sorted(t.answers) == steps for t in trials)
    if metric not in ("accuracy", "accuracy_area") or not paired:
        return None
    weights = area_weights(steps) if metric == "accuracy_area" else np.arange(len(steps)) == len(steps) - 1

    def right(trial: Trial) -> np.ndarray:
        return weights @ np.array([list(trial.answers[step]) for step in steps], dtype=np.float64)

    return np.array([right(a) - right(b) for a, b in zip(first, second, strict=True)])


def differences(trials: Sequence[Trial], values: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Paired differences of the baseline to every other loss: a row per metric and loss.

    Columns: metric, loss, seeds (pairs), difference (baseline − loss), lower, upper (over seeds), lower_questions,
    upper_questions (over seeds and validation questions), improvement (share of pairs in which the baseline is better,
    ties count half; NaN for a metric of which neither more nor less is better), verdict. A seed in which one of the two
    losses has no value is no pair.
    """
    by_key = {(trial.loss, trial.seed): trial for trial in trials}
    rows = []
    for name, metric in METRICS.items():
        table = values.pivot(index="seed", columns="loss", values=name)
        for loss in table.columns.drop(baseline):
            pair = table[[baseline, loss]].dropna()
            difference = (pair[baseline] - pair[loss]).to_numpy()
            if not len(difference):
                continue
            interval = sign_flip_interval(difference)
            answers = answer_differences(*([by_key[of, seed] for seed in pair.index] for of in (baseline, loss)), name)
            both = UNKNOWN if answers is None else over_questions(answers)
            gain = difference * metric.better
            better = np.where(gain == 0, 0.5, gain > 0).mean() if metric.better else math.nan
            said = verdict(difference, [interval, both], baseline)
            rows.append((name, loss, len(difference), *interval, *both[1:], better, said))
    columns = ["metric", "loss", "seeds", "difference", "lower", "upper", "lower_questions", "upper_questions"]
    columns += ["improvement", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def verdict(difference: np.ndarray, intervals: Sequence[Estimate], baseline: str) -> str:
    """What can be said of paired differences, in words: a difference counts where no interval holds 0."""
    if not difference.any():
        return SAME
    if len(difference) < MIN_SEEDS:
        return TOO_FEW
    known = [interval for interval in intervals if not math.isnan(interval.lower)]
    if any(interval.lower <= 0 <= interval.upper for interval in known):
        return NOT_TOLD
    return f"{baseline} {'higher' if intervals[0].value > 0 else 'lower'}"


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
