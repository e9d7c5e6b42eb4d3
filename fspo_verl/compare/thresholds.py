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
from collections.abc import Callable
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
    """A quantity, how its interval is derived, and why a value outside it is a regression."""

    direction: str  # more is better: no upper end; neither: both ends; less is better: at most 0, whatever was measured
    why: str
    of: Callable[[dict[str, pd.DataFrame]], pd.Series]  # by seed, given the rows of each loss
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


_MORE = "more is better"
_GAP = "k of clip rate ∝ length^k tells the shapes of the bands apart on the same responses"
RULES = {
    "fspo accuracy gain": Rule(
        _MORE,
        "the loss trains: a wrong sign or a lost gradient shows here first",
        lambda of: of["fspo"].accuracy - of["fspo"].accuracy_before,
        positive=False,
    ),
    "fspo clip rate": Rule(
        "neither",
        "the band in effect is the one configured: below it the band is too wide (an eps taken from clip_ratio_low, a "
        "scale of L), above it too narrow (a scale without the square root of L)",
        lambda of: of["fspo"].clip_rate,
    ),
    "k, fspo as trained - gspo's band": Rule(
        _MORE,
        f"{_GAP}: fspo, as it clipped, favours short responses less than gspo's band",
        lambda of: of["fspo"].length_exponent - of["fspo"].k_gspo,
    ),
    "k, the fixed band - fspo as trained": Rule(
        _MORE,
        f"{_GAP}: fspo, as it clipped, favours long responses less than the fixed band",
        lambda of: of["fspo"].k_fixed_band - of["fspo"].length_exponent,
    ),
    "k, fspo's band - gspo's band": Rule(
        _MORE, f"{_GAP}, all at one clip rate", lambda of: of["fspo"].k_fspo - of["fspo"].k_gspo
    ),
    "k, the fixed band - fspo's band": Rule(
        _MORE, f"{_GAP}, all at one clip rate", lambda of: of["fspo"].k_fixed_band - of["fspo"].k_fspo
    ),
    "|k| at one clip rate, gspo - fspo": Rule(
        _MORE,
        "fspo's clip rate is flatter over length than gspo's, each on its own responses",
        lambda of: of["gspo"].length_bias_matched - of["fspo"].length_bias_matched,
    ),
    **{
        f"{loss} non-finite steps": Rule(
            "less is better", "no loss or gradient is NaN or inf", lambda of, loss=loss: of[loss].nonfinite_steps
        )
        for loss in LOSSES
    },
}


def quantities(values: pd.DataFrame) -> pd.DataFrame:
    """What is checked, from :func:`fspo_verl.compare.measures.measure`: index seed, a column per name of :data:`RULES`.

    Raises:
        ValueError: a loss, one of its seeds, or the records of the runs are missing.
    """
    by_loss = {loss: rows.set_index("seed").sort_index() for loss, rows in values.groupby("loss")}
    missing = [loss for loss in LOSSES if loss not in by_loss]
    if missing or len({tuple(rows.index) for rows in by_loss.values()}) > 1:
        raise ValueError(
            f"thresholds need runs of {', '.join(LOSSES)} with the same seeds; missing: {missing or 'seeds'}"
        )
    if values.clip_rate.isna().all():
        raise ValueError("thresholds need the records of the runs (policy_loss.records_dir)")
    return pd.DataFrame({name: rule.of(by_loss) for name, rule in RULES.items()}).astype(float)


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
    lines, all_kept = [], True
    for name, limits in expected.items():
        low, high = _ends(limits)
        kept = low <= means[name] <= high  # False for NaN
        all_kept &= kept
        line = f"{'ok  ' if kept else 'FAIL'} {name}: {means[name]:.4g}, expected {_text(limits)}"
        lines.append(line if kept else f"{line} ({limits['why']})")
    return "\n".join(lines), bool(all_kept)


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
    measured = quantities(values).map(_round)
    if len(measured) < MIN_SEEDS:
        raise ValueError(f"thresholds come from {MIN_SEEDS} seeds or more, these are {list(measured.index)}")
    old, lines = data.get("expected", {}), [f"written: {file}"]
    data |= {"measured": {"seeds": measured.index.tolist(), **measured.to_dict("list")}, "expected": {}}
    for name, rule in RULES.items():
        low, high = map(_round, rule.interval(measured[name].to_numpy(), len(data["setup"]["seeds"])))
        data["expected"][name] = {"low": low, "high": high, "direction": rule.direction, "why": rule.why}
        before, after = (_text(limits[name]) if name in limits else "nothing" for limits in (old, data["expected"]))
        lines.append(f"{name}: {after}" + ("" if before == after else f", was {before}"))
    file.write_text(json.dumps(data, indent=1) + "\n")
    return "\n".join(lines)


def _ends(limits: dict) -> tuple[float, float]:
    """Both ends as numbers: an open one is infinite."""
    low, high = limits["low"], limits["high"]
    return -math.inf if low is None else low, math.inf if high is None else high


def _text(limits: dict) -> str:
    low, high = _ends(limits)
    if low == -math.inf:
        return f"at most {high:g}"
    return f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"


def _round(value: float | None) -> float | None:
    """4 significant digits."""
    return None if value is None else float(f"{value:.4g}")
