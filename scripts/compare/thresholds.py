# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Thresholds that tell a regression of the method in a small comparison: checked against, and derived from, trials.

  bash scripts/compare_baselines.sh --check JSON      runs the small comparison and checks it
  python scripts/compare/thresholds.py JSON RUNS ...  derives the thresholds anew from folders of runs

A threshold file is JSON::

    {"setup": {...},         how the small comparison is run
     "measured": {...},      the trials the intervals come from: seeds, and every value
     "expected": {name: {"low": number or null, "high": number or null, "direction": text, "why": text}}}

Both ends are inclusive; null is open. A name is one of :data:`QUANTITIES`, its number a mean over the seeds. The
direction says which ends an interval has: both ("neither"), no upper one ("more is better"), or 0 as the upper one,
whatever was measured ("less is better").
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from compare import load
from measures import MEASURES, clip_rate, length_exponent, nonfinite_steps
from scipy import stats
from trials import Trial

from fspo_verl.analysis.fit import digits
from fspo_verl.clips import LOSSES

CONFIDENCE = 0.99  # of an interval for the small comparison's mean, if nothing has changed
MIN_SEEDS = 3  # to derive intervals from
GAIN = "fspo accuracy gain"

OfSeed = Callable[[dict[str, Trial]], float]  # given the trial of each loss, all of one seed


def _gap(upper: str | None, lower: str | None) -> OfSeed:
    """Difference in k of two bands on fspo's responses; None stands for fspo's as it trained."""
    return lambda of: length_exponent(of["fspo"], upper) - length_exponent(of["fspo"], lower)


def _gain(of: dict[str, Trial]) -> float:
    validation = of["fspo"].validation
    return validation[max(validation)] - validation.get(0, math.nan)


def _flatter(of: dict[str, Trial]) -> float:
    bias = MEASURES["length_bias_matched"].of
    return bias(of["gspo"]) - bias(of["fspo"])


QUANTITIES: dict[str, OfSeed] = {
    GAIN: _gain,
    "fspo clip rate": lambda of: clip_rate(of["fspo"]),
    "k, fspo as trained - gspo's band": _gap(None, "gspo"),
    "k, the fixed band - fspo as trained": _gap("fixed_band", None),
    "k, fspo's band - gspo's band": _gap("fspo", "gspo"),
    "k, the fixed band - fspo's band": _gap("fixed_band", "fspo"),
    "|k| at one clip rate, gspo - fspo": _flatter,
    **{f"{loss} non-finite steps": lambda of, loss=loss: nonfinite_steps(of[loss]) for loss in LOSSES},
}


def interval(name: str, direction: str, values: np.ndarray, seeds: int) -> tuple[float | None, float | None]:
    """For the mean of ``seeds`` further values, by :func:`prediction`; None where it is open.

    The gain may be negative; all else is above 0 and taken to be log-normal.

    Raises:
        ValueError: a value that has to be above 0 is not.
    """
    if direction == "less is better":
        return None, 0.0
    if name != GAIN and not values.min() > 0:
        raise ValueError(f"{name} is expected above 0, but measured as {values.tolist()}")
    low, high = prediction(values, seeds) if name == GAIN else map(math.exp, prediction(np.log(values), seeds))
    return low, high if direction == "neither" else None


def prediction(values: np.ndarray, seeds: int) -> tuple[float, float]:
    """Interval for the mean of ``seeds`` further values of the same normal law (Student's prediction interval)."""
    count = len(values)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * values.std(ddof=1) * math.sqrt(1 / count + 1 / seeds)
    return values.mean() - half, values.mean() + half


def quantities(trials: Sequence[Trial]) -> pd.DataFrame:
    """What is checked: index seed, a column per name of :data:`QUANTITIES`.

    Raises:
        ValueError: a loss, or one of its seeds, is missing.
    """
    by_seed: dict[int, dict[str, Trial]] = {}
    for trial in trials:
        by_seed.setdefault(trial.seed, {})[trial.loss] = trial
    if not all(of.keys() >= set(LOSSES) for of in by_seed.values()):
        raise ValueError(f"thresholds need runs of {', '.join(LOSSES)} with the same seeds")
    rows = {seed: {name: quantity(of) for name, quantity in QUANTITIES.items()} for seed, of in by_seed.items()}
    return pd.DataFrame.from_dict(rows, orient="index", dtype=float).sort_index()


def check(file: Path, trials: Sequence[Trial]) -> tuple[str, bool]:
    """Hold the means over the seeds against a threshold file; a report of a line per name, and whether all are kept.

    A quantity that is not known (NaN), as clip rates are without records, is not within its interval.
    """
    means, lines, all_kept = quantities(trials).mean(skipna=False), [], True
    for name, limits in _read(file)["expected"].items():
        low, high = limits["low"], limits["high"]
        kept = (low is None or low <= means[name]) and (high is None or means[name] <= high)
        all_kept &= kept
        ends = {"at least": low, "at most": high}
        expected = " and ".join(f"{side} {end:g}" for side, end in ends.items() if end is not None)
        line = f"{'ok  ' if kept else 'FAIL'} {name}: {means[name]:.4g}, expected {expected}"
        lines.append(line if kept else f"{line} ({limits['why']})")
    return "\n".join(lines), bool(all_kept)


def update(file: Path, trials: Sequence[Trial]) -> None:
    """Derive the intervals of a threshold file anew from trials, for as many seeds as its ``setup`` names."""
    data, measured = _read(file), quantities(trials)
    if len(measured) < MIN_SEEDS:
        raise ValueError(f"thresholds come from {MIN_SEEDS} seeds or more, these are {list(measured.index)}")
    rounded = {name: [digits(value) for value in column] for name, column in measured.items()}
    for name, limits in data["expected"].items():
        ends = interval(name, limits["direction"], np.array(rounded[name]), len(data["setup"]["seeds"]))
        limits["low"], limits["high"] = (end if end is None else digits(end) for end in ends)
    data["measured"] = {"seeds": measured.index.tolist(), **rounded}
    file.write_text(json.dumps(data, indent=1) + "\n")


def _read(file: Path) -> dict:
    data = json.loads(file.read_text())
    if differing := sorted(data["expected"].keys() ^ QUANTITIES.keys()):
        raise ValueError(f"{file} does not fit this version; names that differ: {differing}")
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="JSON", help="the thresholds, written anew")
    parser.add_argument("paths", type=Path, metavar="RUNS", nargs="+", help="what compare.py takes")
    args = parser.parse_args()
    update(args.file, load(*args.paths))


if __name__ == "__main__":
    main()
