# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Thresholds that tell a regression of the method in a small comparison: checked against, and derived from, trials.

A threshold file is JSON::

    {"setup": {...},         how the small comparison is run, see scripts/compare/comparison.py --check
     "measured": {...},      the trials the intervals come from: seeds, and every value
     "expected": {name: {"low": number or null, "high": number or null, "direction": text, "why": text}}}

Both ends are inclusive; null is open. A name is one of :data:`RULES`, its number a mean over the seeds.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from fspo_verl.clips import LOSSES
from fspo_verl.compare.measures import MEASURES, clip_rate, length_exponent, nonfinite_steps
from fspo_verl.compare.trials import Trial

CONFIDENCE = 0.99  # of an interval for the small comparison's mean, if nothing has changed
MIN_SEEDS = 3  # to derive intervals from


class Rule(NamedTuple):
    """A quantity, and why a value outside its interval is a regression."""

    direction: str  # more is better: no upper end; neither: both ends; less is better: at most 0, whatever was measured
    why: str
    of: Callable[[dict[str, Trial]], float]  # given the trial of each loss, all of one seed
    positive: bool = True  # a quantity above 0, of a log-normal law

    def interval(self, values: np.ndarray, seeds: int) -> tuple[float | None, float | None]:
        """For the mean of ``seeds`` further values, by :func:`prediction`; None where it is open.

        Raises:
            ValueError: a value that has to be above 0 is not.
        """
        if self.direction == "less is better":
            return None, 0.0
        if self.positive and not values.min() > 0:
            raise ValueError(f"expected above 0, but measured as {values.tolist()}")
        low, high = map(math.exp, prediction(np.log(values), seeds)) if self.positive else prediction(values, seeds)
        return low, high if self.direction == "neither" else None


def prediction(values: np.ndarray, seeds: int) -> tuple[float, float]:
    """Interval for the mean of ``seeds`` further values of the same normal law (Student's prediction interval)."""
    count = len(values)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * values.std(ddof=1) * math.sqrt(1 / count + 1 / seeds)
    return values.mean() - half, values.mean() + half


def _gap(upper: str | None, lower: str | None) -> Callable[[dict[str, Trial]], float]:
    """Difference in k of two bands on fspo's responses; None stands for fspo's as it trained."""
    return lambda of: length_exponent(of["fspo"], upper) - length_exponent(of["fspo"], lower)


def _gain(of: dict[str, Trial]) -> float:
    validation = of["fspo"].validation
    return validation[max(validation)] - validation.get(0, math.nan)


def _flatter(of: dict[str, Trial]) -> float:
    bias = MEASURES["length_bias_matched"].of
    return bias(of["gspo"], 0) - bias(of["fspo"], 0)


def _nonfinite(loss: str) -> Callable[[dict[str, Trial]], float]:
    return lambda of: nonfinite_steps(of[loss])


_MORE = "more is better"
_GAP = "k of clip rate ∝ length^k tells the shapes of the bands apart on the same responses"
_TRAINS = "the loss trains: a wrong sign or a lost gradient shows here first"
_IN_EFFECT = (
    "the band in effect is the one configured: below it the band is too wide (an eps taken from clip_ratio_low, a "
    "scale of L), above it too narrow (a scale without the square root of L)"
)
_FLATTER = "fspo's clip rate is flatter over length than gspo's, each on its own responses"
RULES = {
    "fspo accuracy gain": Rule(_MORE, _TRAINS, _gain, positive=False),
    "fspo clip rate": Rule("neither", _IN_EFFECT, lambda of: clip_rate(of["fspo"])),
    "k, fspo as trained - gspo's band": Rule(
        _MORE, f"{_GAP}: fspo, as it clipped, favours short responses less than gspo's band", _gap(None, "gspo")
    ),
    "k, the fixed band - fspo as trained": Rule(
        _MORE,
        f"{_GAP}: fspo, as it clipped, favours long responses less than the fixed band",
        _gap("fixed_band", None),
    ),
    "k, fspo's band - gspo's band": Rule(_MORE, f"{_GAP}, all at one clip rate", _gap("fspo", "gspo")),
    "k, the fixed band - fspo's band": Rule(_MORE, f"{_GAP}, all at one clip rate", _gap("fixed_band", "fspo")),
    "|k| at one clip rate, gspo - fspo": Rule(_MORE, _FLATTER, _flatter),
    **{
        f"{loss} non-finite steps": Rule("less is better", "no loss or gradient is NaN or inf", _nonfinite(loss))
        for loss in LOSSES
    },
}


def quantities(trials: Sequence[Trial]) -> pd.DataFrame:
    """What is checked: index seed, a column per name of :data:`RULES`.

    Raises:
        ValueError: a loss, or one of its seeds, is missing.
    """
    by_seed: dict[int, dict[str, Trial]] = {}
    for trial in trials:
        by_seed.setdefault(trial.seed, {})[trial.loss] = trial
    if not all(of.keys() >= set(LOSSES) for of in by_seed.values()):
        raise ValueError(f"thresholds need runs of {', '.join(LOSSES)} with the same seeds")
    rows = [{name: rule.of(of) for name, rule in RULES.items()} for _, of in sorted(by_seed.items())]
    return pd.DataFrame(rows, index=sorted(by_seed), dtype=float)


def check(file: Path, trials: Sequence[Trial]) -> tuple[str, bool]:
    """Hold the means over the seeds against a threshold file; a report of a line per name, and whether all are kept.

    A quantity that is not known (NaN), as clip rates are without records, is not within its interval.

    Raises:
        ValueError: the file expects something that is not in :data:`RULES`, or leaves something out.
    """
    expected = json.loads(file.read_text())["expected"]
    if differing := sorted(expected.keys() ^ RULES.keys()):
        raise ValueError(f"{file} does not fit this version; names that differ: {differing}")
    means = quantities(trials).mean(skipna=False)
    lines, all_kept = [], True
    for name, limits in expected.items():
        low, high = limits["low"], limits["high"]
        kept = (low is None or low <= means[name]) and (high is None or means[name] <= high)
        all_kept &= kept
        ends = {"at least": low, "at most": high}
        interval = " and ".join(f"{side} {end:g}" for side, end in ends.items() if end is not None)
        line = f"{'ok  ' if kept else 'FAIL'} {name}: {means[name]:.4g}, expected {interval}"
        lines.append(line if kept else f"{line} ({limits['why']})")
    return "\n".join(lines), bool(all_kept)


def update(file: Path, trials: Sequence[Trial]) -> None:
    """Derive the intervals from trials and write them to a threshold file, for as many seeds as its ``setup`` names.

    Raises:
        ValueError: the trials have fewer than 3 seeds, or the file has no setup.
    """
    setup = json.loads(file.read_text()).get("setup") if file.exists() else None
    if setup is None:
        raise ValueError(f'{file} needs an entry "setup": how the small comparison is run; see the one in tests/')
    measured = quantities(trials)
    if len(measured) < MIN_SEEDS:
        raise ValueError(f"thresholds come from {MIN_SEEDS} seeds or more, these are {list(measured.index)}")
    rounded = {name: [_round(value) for value in column] for name, column in measured.items()}
    expected = {}
    for name, rule in RULES.items():
        low, high = map(_round, rule.interval(np.array(rounded[name]), len(setup["seeds"])))
        expected[name] = {"low": low, "high": high, "direction": rule.direction, "why": rule.why}
    data = {"setup": setup, "measured": {"seeds": measured.index.tolist(), **rounded}, "expected": expected}
    file.write_text(json.dumps(data, indent=1) + "\n")


def _round(value: float | None) -> float | None:
    """4 significant digits."""
    return None if value is None else float(f"{value:.4g}")
