# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A number per measure and trial, the paired differences between losses, and what can be told from them.

A handful of seeds does not show how differences are distributed, so neither intervals nor verdicts take them for
normal, only for as likely to lie some way above their mean as below it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import integrate, optimize
from trials import Trial, losses

from fspo_verl.analysis.clip_rates import CONFIDENCE, length_table
from fspo_verl.clips import MATCHED_RATE

LATE = 5  # steps whose mean is the value at the end of a run
MIN_SEEDS = 6
"""The fewest seeds of an interval: flipping the signs of 5 differences gives 32 outcomes, too few for 2.5%."""
SAME = "the same in every seed"  # verdicts, here and below
TOO_FEW = f"fewer than {MIN_SEEDS} seeds"
NOT_SHOWN = "no difference shown"
UNSURE = (TOO_FEW, NOT_SHOWN)
_POWER = 0.8
_SUBSETS = 2**16  # of more than 16 seeds, so many are drawn


class Measure(NamedTuple):
    """A number per trial."""

    label: str
    better: int  # 1: more is better, -1: less is, 0: neither
    form: str  # of a value in a table
    of: Callable[[Trial], float]


def accuracy_area(trial: Trial) -> float:
    """Mean height of the curve of validation accuracy over the steps, straight lines between validations."""
    steps, values = list(trial.validation), list(trial.validation.values())
    return float(integrate.trapezoid(values, steps) / (steps[-1] - steps[0])) if len(steps) > 1 else values[0]


def nonfinite_steps(trial: Trial) -> float:
    """Steps whose loss or gradient norm is not finite, or in which some response held NaN or inf.

    NaN where one of the three is not logged: a zero would pass for a sound run.
    """
    needed = ("loss", "grad_norm", "nonfinite_responses")
    if not trial.training.keys() >= set(needed):
        return math.nan
    loss, grad_norm, responses = map(trial.series, needed)
    return int(np.sum(~np.isfinite(loss + grad_norm) | (responses > 0)))


def clip_table(trial: Trial, band: str | None = None) -> pd.DataFrame | None:
    """Low, high, n, mean_log and rate of each length bin over all steps, as it was or had ``band`` clipped."""
    if trial.clips is None or band not in (None, *trial.clips.matched):
        return None
    counts = trial.clips.clipped if band is None else trial.clips.matched[band]
    n, clipped = np.sum(trial.clips.responses, axis=0), np.sum(counts, axis=0)
    rate = np.where(n > 0, clipped / np.maximum(n, 1), np.nan)
    return length_table(trial.clips.edges, n=n, rate=rate, mean_log=trial.clips.mean_log)


def clip_rate(trial: Trial) -> float:
    """Σ clipped over the responses with advantage != 0."""
    table = clip_table(trial)
    return math.nan if table is None else float((table.n * table.rate.fillna(0)).sum() / table.n.sum())


def length_exponent(trial: Trial, band: str | None = None) -> float:
    """k in clip rate ∝ length^k, by maximum likelihood (Poisson): 0 is flat, above 0 clips long responses more.

    With ``band``: had that band clipped at the common rate, the only k in which losses are compared. The likelihood is
    largest where the mean log length of the clipped responses equals that of all responses weighted with length^k.
    Derived here. NaN where nothing is clipped, or only the shortest or the longest bin is.
    """
    table = clip_table(trial, band)
    if table is None:
        return math.nan
    n, x, rate = table.loc[table.n > 0, ["n", "mean_log", "rate"]].to_numpy(np.float64).T
    clipped = n * rate
    if not clipped.sum() or not x.min() < (mean := clipped @ x / clipped.sum()) < x.max():
        return math.nan

    def excess(k: float) -> float:
        weight = n * np.exp(k * (x - x.mean()))
        return weight @ x / weight.sum() - mean

    return float(optimize.brentq(excess, -50, 50))


MEASURES = {
    "accuracy": Measure("accuracy at the end", 1, ".3f", lambda t: t.validation[max(t.validation)]),
    "accuracy_area": Measure("accuracy, mean over the run", 1, ".3f", accuracy_area),
    "reward": Measure("training reward, mean over the run", 1, ".3f", lambda t: np.mean(t.series("reward"))),
    "response_length": Measure(
        f"response length, last {LATE} steps", 0, ".1f", lambda t: np.mean(t.series("response_length")[-LATE:])
    ),
    "clip_rate": Measure("clip rate", 0, ".2%", clip_rate),
    "length_bias_matched": Measure(
        f"size of k at clip rate {MATCHED_RATE:.0%}", -1, ".2f", lambda t: abs(length_exponent(t, t.loss))
    ),
    "nonfinite_steps": Measure("non-finite steps", -1, ".1f", nonfinite_steps),
}


def measure(trials: Sequence[Trial]) -> pd.DataFrame:
    """A row per trial: columns loss, seed, accuracy_before, and all :data:`MEASURES`."""
    return pd.DataFrame(
        {"loss": trial.loss, "seed": trial.seed, "accuracy_before": trial.validation.get(0, math.nan)}
        | {name: of_trial.of(trial) for name, of_trial in MEASURES.items()}
        for trial in trials
    )


def _subsets(count: int) -> np.ndarray:
    """0 or 1 ``[subsets, seeds]``: every subset of the seeds but the empty one, or a random choice of them."""
    if 2**count <= _SUBSETS:
        return np.arange(1, 2**count)[:, None] >> np.arange(count) & 1
    chosen = np.random.default_rng(0).integers(0, 2, (_SUBSETS - 1, count))
    return chosen[chosen.any(1)]


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
    chosen = _subsets(count)
    means = np.sort(chosen @ values / chosen.sum(1))
    outside = int((1 - CONFIDENCE) / 2 * (len(means) + 1))
    return float(means[outside - 1]), float(means[-outside])


def adjusted_p(differences: np.ndarray) -> np.ndarray:
    """p-value ``[losses]`` that a mean difference is 0, adjusted for the number of losses.

    Step-down maxT (Westfall and Young 1993): signs flip in all losses at once, seed by seed, and a loss is held against
    the largest statistic of those not yet told apart. The chance that any of several equal losses gets p <= 0.05 is at
    most about 5%. Unlike Holm's correction it can tell several losses apart with six seeds: the smallest p of a sign
    flip test is then 2/64, however many losses there are.

    Args:
        differences: ``[seeds, losses]`` paired differences, 0 where a seed lacks one. A column of zeros gets 1.
    """
    flips = 1 - 2 * _subsets(len(differences))
    signs = np.vstack([np.ones(len(differences)), flips])
    size = np.sqrt(np.square(differences).sum(0))
    statistic = np.abs(signs @ (differences / np.where(size > 0, size, 1.0)))
    order, found, largest = np.argsort(-statistic[0]), np.empty(differences.shape[1]), 0.0
    for place, loss in enumerate(order):
        rivals = statistic[:, order[place:]].max(1)
        largest = max(largest, float(np.mean(rivals >= statistic[0, loss] - 1e-9)))
        found[loss] = largest
    return found


def contrasts(pairs: pd.DataFrame) -> pd.DataFrame:
    """A row per column of paired differences ``[seeds, contrasts]``: mean, interval, p adjusted for their number."""
    rows = [(pair.mean(), *sign_flip_interval(pair.to_numpy())) for _, pair in pairs.items()]
    table = pd.DataFrame(rows, pairs.columns, ["mean", "lower", "upper"])
    return table.assign(p=adjusted_p(pairs.to_numpy()))


def seeds_to_show(size: float, spread: float, losses: int) -> int:
    """Seeds that show a mean difference of this size in 4 of 5 comparisons, 6 or more.

    By the normal law, with Bonferroni's correction, and so a rough number.

    Args:
        size: of the difference.
        spread: standard deviation of the differences between seeds.
        losses: that are compared with the baseline.
    """
    normal = NormalDist()
    quantiles = normal.inv_cdf(1 - (1 - CONFIDENCE) / 2 / losses) + normal.inv_cdf(_POWER)
    return max(MIN_SEEDS, math.ceil((quantiles * spread / size) ** 2))


def differences(values: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Paired differences of the baseline to every other loss: a row per measure and loss.

    Columns: metric, loss, seeds (pairs), difference (baseline − loss), spread (standard deviation over the pairs),
    lower, upper, improvement (share of pairs in which the baseline is better, ties count half; NaN for a measure of
    which neither more nor less is better), p (adjusted for the losses of the measure), verdict. A seed in which one of
    the two losses has no value is no pair.
    """
    found = []
    for name, of_trial in MEASURES.items():
        table = values.pivot(index="seed", columns="loss", values=name)
        pairs = table.rsub(table[baseline], axis=0).drop(columns=baseline).dropna(axis=1, how="all")
        gain = pairs * of_trial.better
        rows = pd.DataFrame({"metric": name, "seeds": pairs.count(), "difference": pairs.mean(), "spread": pairs.std()})
        ends = [sign_flip_interval(pairs[loss].dropna().to_numpy()) for loss in pairs]
        rows["lower"], rows["upper"] = np.reshape(ends, (len(pairs.columns), 2)).T
        rows["improvement"] = ((gain > 0).sum() + (gain == 0).sum() / 2) / rows.seeds if of_trial.better else math.nan
        differs = (pairs.fillna(0) != 0).any()
        tested = differs & (rows.seeds >= MIN_SEEDS)
        rows["p"] = math.nan
        if tested.any():
            rows.loc[tested, "p"] = adjusted_p(pairs.loc[:, tested].dropna(how="all").fillna(0).to_numpy())
        told = np.where(rows.difference > 0, f"{baseline} higher", f"{baseline} lower")
        which = [~differs, ~tested, rows.p > 1 - CONFIDENCE]
        rows["verdict"] = np.select(which, [SAME, TOO_FEW, NOT_SHOWN], told)
        found.append(rows.rename_axis("loss").reset_index())
    columns = "metric loss seeds difference spread lower upper improvement p verdict".split()
    return pd.concat(found, ignore_index=True)[columns]


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
