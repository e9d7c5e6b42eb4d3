# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What one trial has reached: a number per measure."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import integrate, optimize

from fspo_verl.clips import MATCHED_RATE
from fspo_verl.compare.trials import Trial

LATE = 5  # steps whose mean is the value at the end of a run


class Measure(NamedTuple):
    """A number per trial."""

    label: str
    better: int  # 1: more is better, -1: less is, 0: neither
    form: str  # of a value in a table
    of: Callable[[Trial, float], float]  # given the stated accuracy


def accuracy_area(trial: Trial) -> float:
    """Mean height of the curve of validation accuracy over the steps, straight lines between validations."""
    steps, values = list(trial.validation), list(trial.validation.values())
    return float(integrate.trapezoid(values, steps) / (steps[-1] - steps[0])) if len(steps) > 1 else values[0]


def steps_to(trial: Trial, target: float) -> float:
    """The step at which the straight lines between validations first reach an accuracy; NaN if they never do."""
    steps, values = np.array(list(trial.validation.items())).T
    reached = np.flatnonzero(values >= target)
    if not len(reached):
        return math.nan
    around = slice(max(reached[0] - 1, 0), reached[0] + 1)
    return float(np.interp(target, values[around], steps[around]))


def nonfinite_steps(trial: Trial) -> int:
    """Steps whose loss or gradient norm is not finite, or in which some response held NaN or inf."""
    logged = [~np.isfinite(trial.series(name)) for name in ("loss", "grad_norm") if name in trial.training]
    responses = trial.series("nonfinite_responses") > 0
    return int(np.logical_or.reduce([responses, *logged]).sum())


def clip_table(trial: Trial, band: str | None = None) -> pd.DataFrame | None:
    """Low, high, n, mean_log and rate of each length bin over all steps, as it was or had ``band`` clipped."""
    if trial.clips is None or band not in (None, *trial.clips.matched):
        return None
    counts = trial.clips.clipped if band is None else trial.clips.matched[band]
    n, clipped = np.sum(trial.clips.responses, axis=0), np.sum(counts, axis=0)
    low, high = trial.clips.edges[:-1], np.array(trial.clips.edges[1:]) - 1
    rate = np.where(n > 0, clipped / np.maximum(n, 1), np.nan)
    return pd.DataFrame({"low": low, "high": high, "n": n, "rate": rate, "mean_log": trial.clips.mean_log})


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
    "accuracy": Measure("accuracy at the end", 1, ".3f", lambda t, _: t.validation[max(t.validation)]),
    "accuracy_area": Measure("accuracy, mean over the run", 1, ".3f", lambda t, _: accuracy_area(t)),
    "reward": Measure("training reward, mean over the run", 1, ".3f", lambda t, _: np.mean(t.series("reward"))),
    "steps_to_target": Measure("steps to accuracy {target:g}", -1, ".1f", steps_to),
    "response_length": Measure(
        f"response length, last {LATE} steps", 0, ".1f", lambda t, _: np.mean(t.series("response_length")[-LATE:])
    ),
    "clip_rate": Measure("clip rate", 0, ".2%", lambda t, _: clip_rate(t)),
    "length_bias_matched": Measure(
        f"size of k at clip rate {MATCHED_RATE:.0%}", -1, ".2f", lambda t, _: abs(length_exponent(t, t.loss))
    ),
    "nonfinite_steps": Measure("non-finite steps", -1, ".1f", lambda t, _: nonfinite_steps(t)),
}


def measure(trials: Sequence[Trial], target: float) -> pd.DataFrame:
    """A row per trial: columns loss, seed, accuracy_before, and all :data:`MEASURES`."""
    return pd.DataFrame(
        {"loss": trial.loss, "seed": trial.seed, "accuracy_before": trial.validation.get(0, math.nan)}
        | {name: of_trial.of(trial, target) for name, of_trial in MEASURES.items()}
        for trial in trials
    )
