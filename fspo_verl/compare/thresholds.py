# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Thresholds that tell a regression of the method in a small comparison: checked against, and derived from, trials.

A threshold file is JSON::

    {"setup": {...},         how the small comparison is run, see scripts/compare/comparison.py --check
     "measured": {...},      the trials the intervals come from: seeds, steps, and every value
     "expected": {name: {"low": number or null, "high": number or null, "direction": text, "why": text}}}

Both ends are inclusive; null is open. A name is a number of :func:`quantities`, a mean over the seeds.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from fspo_verl.clips import LOSSES

CONFIDENCE = 0.99  # of an interval for the small comparison's mean, if nothing has changed
MIN_SEEDS = 3  # to derive intervals from


def prediction(values: np.ndarray, seeds: int) -> tuple[float, float]:
    """Interval for the mean of ``seeds`` further values of the same normal law (Student's prediction interval)."""
    count = len(values)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * values.std(ddof=1) * math.sqrt(1 / count + 1 / seeds)
    return values.mean() - half, values.mean() + half


class Rule(NamedTuple):
    """How the interval of a quantity is derived, and why a value outside it is a regression."""

    direction: str  # more is better: no upper end; neither: both ends; less is better: at most 0, whatever was measured
    why: str
    positive: bool = True  # a quantity above 0, of a log-normal law

    def interval(self, values: np.ndarray, seeds: int) -> tuple[float | None, float | None]:
        """For the mean of ``seeds`` further values, by :func:`prediction`; None where it is open.

        Raises:
            ValueError: a value that has to be above 0 is not.
        """
        if self.direction == "less is better":
            return None, 0.0
        if self.positive and values.min() <= 0:
            raise ValueError(f"expected above 0, but measured as {values.tolist()}")
        low, high = map(math.exp, prediction(np.log(values), seeds)) if self.positive else prediction(values, seeds)
        return low, high if self.direction == "neither" else None


_GAP = "k of clip rate ∝ length^k tells the shapes of the bands apart on the same responses"
_FLATTER = "fspo's clip rate is flatter over length than"
RULES = {
    "fspo accuracy gain": Rule(
        "more is better", "the loss trains: a wrong sign or a lost gradient shows here first", positive=False
    ),
    "fspo clip rate": Rule(
        "neither",
        "the band in effect is the one configured: below it the band is too wide (an eps taken from clip_ratio_low, a "
        "scale of L), above it too narrow (a scale without the square root of L)",
    ),
    "k, fspo as trained - gspo's band": Rule(
        "more is better", f"{_GAP}: fspo, as it clipped, favours short responses less than gspo's band"
    ),
    "k, the fixed band - fspo as trained": Rule(
        "more is better", f"{_GAP}: fspo, as it clipped, favours long responses less than the fixed band"
    ),
    "k, fspo's band - gspo's band": Rule("more is better", f"{_GAP}, all at one clip rate"),
    "k, the fixed band - fspo's band": Rule("more is better", f"{_GAP}, all at one clip rate"),
    "|k| at one clip rate, gspo - fspo": Rule("more is better", f"{_FLATTER} gspo's, each on its own responses"),
    "|k|, fixed band - fspo, as trained": Rule("more is better", f"{_FLATTER} the fixed band's, as trained"),
    **{f"{loss} non-finite steps": Rule("less is better", "no loss or gradient is NaN or inf") for loss in LOSSES},
}


def quantities(values: pd.DataFrame) -> pd.DataFrame:
    """What is checked, from :func:`fspo_verl.compare.measures.measure`: index seed, a column per name of :data:`RULES`.

    Raises:
        ValueError: a loss or one of its seeds is missing.
    """
    by_loss = {loss: rows.set_index("seed").sort_index() for loss, rows in values.groupby("loss")}
    missing = [loss for loss in LOSSES if loss not in by_loss]
    if missing or len({tuple(rows.index) for rows in by_loss.values()}) > 1:
        raise ValueError(
            f"thresholds need runs of {', '.join(LOSSES)} with the same seeds; missing: {missing or 'seeds'}"
        )
    if "k_gspo" not in values:
        raise ValueError("thresholds need the records of the runs (policy_loss.records_dir)")
    fspo = by_loss["fspo"]
    result = {
        "fspo accuracy gain": fspo.accuracy - fspo.accuracy_before,
        "fspo clip rate": fspo.clip_rate,
        "k, fspo as trained - gspo's band": fspo.length_exponent - fspo.k_gspo,
        "k, the fixed band - fspo as trained": fspo.k_fixed_band - fspo.length_exponent,
        "k, fspo's band - gspo's band": fspo.k_fspo - fspo.k_gspo,
        "k, the fixed band - fspo's band": fspo.k_fixed_band - fspo.k_fspo,
        "|k| at one clip rate, gspo - fspo": by_loss["gspo"].length_bias_matched - fspo.length_bias_matched,
        "|k|, fixed band - fspo, as trained": by_loss["fixed_band"].length_bias - fspo.length_bias,
        **{f"{loss} non-finite steps": rows.nonfinite_steps for loss, rows in by_loss.items()},
    }
    return pd.DataFrame(result)[list(RULES)].astype(float)


def check(file: Path, values: pd.DataFrame) -> tuple[str, bool]:
    """Hold the means over the seeds against a threshold file; a report of a line per name, and whether all are kept.

    A quantity that is not known (NaN) is not within its interval.

    Raises:
        ValueError: the file expects something that is not in :data:`RULES`, or leaves something out.
    """
    expected = json.loads(file.read_text())["expected"]
    if expected.keys() != RULES.keys():
        raise ValueError(
            f"{file} does not fit this version; names that differ: {sorted(expected.keys() ^ RULES.keys())}"
        )
    means = quantities(values).mean(skipna=False)
    kept = {name: _within(means[name], limits) for name, limits in expected.items()}
    lines = [
        f"{'ok  ' if kept[name] else 'FAIL'} {name}: {means[name]:.4g}, expected {_text(limits)}"
        + ("" if kept[name] else f" ({limits['why']})")
        for name, limits in expected.items()
    ]
    return "\n".join(lines), all(kept.values())


def update(file: Path, values: pd.DataFrame) -> str:
    """Derive the intervals from trials and write them to a threshold file, whose ``setup`` stays; says what changes.

    The intervals are for as many seeds as the ``setup`` names.

    Raises:
        ValueError: the trials have fewer than 3 seeds, or the file has no setup.
    """
    data = json.loads(file.read_text()) if file.exists() else {}
    if "setup" not in data:
        raise ValueError(
            f'{file} needs an entry "setup" that says how the small comparison is run; see the one in tests/'
        )
    measured = quantities(values)
    if len(measured) < MIN_SEEDS:
        raise ValueError(f"thresholds come from {MIN_SEEDS} seeds or more, these are {list(measured.index)}")
    seeds, old, lines = len(data["setup"]["seeds"]), data.get("expected", {}), [f"written: {file}"]
    rounded = {name: [_round(value) for value in measured[name]] for name in RULES}
    data |= {"measured": {"seeds": measured.index.tolist(), **rounded}, "expected": {}}
    for name, rule in RULES.items():
        low, high = rule.interval(np.array(rounded[name]), seeds)
        limits = {"low": _round(low), "high": _round(high), "direction": rule.direction, "why": rule.why}
        data["expected"][name] = limits
        before = _text(old[name]) if name in old else "nothing"
        after = _text(limits)
        lines.append(f"{name}: {after}" + ("" if before == after else f", was {before}"))
    file.write_text(json.dumps(data, indent=1) + "\n")
    return "\n".join(lines)


def _within(value: float, limits: dict) -> bool:
    low, high = limits["low"], limits["high"]
    return not math.isnan(value) and (low is None or value >= low) and (high is None or value <= high)


def _text(limits: dict) -> str:
    low, high = limits["low"], limits["high"]
    if low is None:
        return f"at most {high:g}"
    return f"at least {low:g}" if high is None else f"{low:g} to {high:g}"


def _round(value: float | None) -> float | None:
    """4 significant digits."""
    return None if value is None else float(f"{value:.4g}")
