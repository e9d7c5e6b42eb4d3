# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Ranges that clip lengths more alike than that of a run: all that can be tried, judged where they were not fitted.

The run's own range and those whose widths follow :data:`fspo_verl.analysis.fit.WIDTHS` are compared at one clip rate on
each side, that of the range to take. A width is fitted to one half of the steps and judged on the other, both ways
round. A clip of tokens stays as it was recorded: it is compared only where it has that rate already.

The measure is the unevenness of the clip rate over fifths of the length of the better and of the worse responses, in
units of the mean rate: the root of the mean of (observed / expected − 1)² less the part of it that sampling explains,
with what is expected from the stratum (:mod:`fspo_verl.analysis.length_effect`). It sees every curve, and sides that
differ. Whether one range is more even than another is Student's t of the difference of both over its jackknife variance
(Tukey 1958), with steps as clusters, or prompts below ten steps; and it has to be so in each third of the run. The
measure is derived here; ``tests/truth_table.py`` has how often its advice is right.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy.special import chdtri, stdtr

from fspo_verl.analysis import clip_rates, fit
from fspo_verl.analysis.clip_rates import prompts_of, strata_of
from fspo_verl.analysis.length_effect import MIN_STEPS, RARE
from fspo_verl.band import Band
from fspo_verl.observe.settings import RunSettings
from fspo_verl.output import percent

OWN = "the clip as it was recorded"

_PARTS = 5  # of the length, on each side
_THIRDS = 3  # of the run
_NEAR = 0.2  # by so much of the rate that is asked a clip of tokens may miss it, on each side
_COLUMNS = ["step", "mini_batch", "prompt", "prompt_text_hash", "length", "log_ratio", "quadratic_variation"]
_COLUMNS += ["advantage", "clipped"]
_ANYWAY = 0.001  # p-value, over all ranges, below which one stands out though no dependence on length is shown


@dataclass(frozen=True)
class Width:
    """A range that was tried.

    Attributes:
        band: at the common rate, fitted to all records; None of the run's own clip where that is no range of S.
        uneven: variation of its clip rate over lengths, as a share of the mean rate, where it was not fitted; 0 if
            sampling explains all of it.
        smallest: the unevenness from which it is told from none: below lies what sampling makes in 95 of 100 even runs.
        course: the same in each third of the steps.
        sums: of the measure.
    """

    name: str
    band: Band | None
    uneven: float
    smallest: float
    course: tuple[float, ...]
    sums: np.ndarray = field(repr=False)

    @property
    def shows(self) -> bool:
        """Whether it is uneven by more than sampling makes."""
        return self.uneven > self.smallest


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        rate: on each side, at which the ranges are compared.
        own: the range of the run; None where it could not be put to this rate.
        best: the most even of those that are more even than the range of the run by more than noise.
        is_tie: another range is as even as the best within noise; sqrt(length) is taken then.
        untried: why not, by name.
    """

    rate: float
    own: Width | None
    others: tuple[Width, ...]
    best: Width | None
    is_tie: bool
    untried: dict[str, str]


def compare(records: pd.DataFrame, settings: RunSettings | None, depends: bool, rate: float) -> Comparison:
    """Try every range on the records of a run.

    Args:
        records: of :mod:`fspo_verl.observe.records`, all responses, some of them clipped.
        settings: of the run, with its own range.
        depends: whether the clip of the run is known to depend on length.
        rate: clip rate on each side.
    """
    records = records[[name for name in _COLUMNS if name in records]]
    own, measure = settings.trained_band if settings else None, _Measure(records)
    tried: dict[str, Width] = {}
    untried: dict[str, str] = {}
    if own is None and (why := _misses(records, rate)):
        untried[OWN] = why
    elif own is None:
        tried[OWN] = measure.of(OWN, None, records["clipped"].to_numpy(np.float64))
    for name, shape in _shapes(own, rate).items():
        try:
            band, clipped = _cross_fitted(records, shape, rate)
        except fit.Unreachable as error:
            untried[name] = str(error)
            continue
        if name != fit.POWER or all(band.form != one.band.form for one in tried.values() if one.band):
            tried[name] = measure.of(fit.name_of(band), band, clipped)
    of_run = tried.pop(OWN, None)
    best, is_tie = None, False
    if of_run:
        best, is_tie = _best(of_run, tried, measure, RARE if depends else _ANYWAY / max(len(tried), 1))
    return Comparison(rate, of_run, tuple(tried.values()), best, is_tie, untried)


_Shape = Callable[[pd.DataFrame], Band]
"""Makes a range, whatever its eps, with a width that is fitted to records."""


def _shapes(own: Band | None, rate: float) -> dict[str, _Shape]:
    """The shapes to try: that of the run, and those that it does not have."""
    # Where the run has no dual clip, none gets one.
    plain = Band() if own is None or math.isfinite(own.dual) else Band(eps_dual=math.inf)

    def of_power(power: float) -> Band:
        return dataclasses.replace(plain, length_power=power)

    shapes: dict[str, _Shape] = {
        fit.ROOT: lambda _: of_power(0.5),
        fit.FIXED: lambda _: of_power(0.0),
        fit.POWER: lambda records: of_power(fit.fitted_power(records, rate)),
    }
    if own is None:
        return shapes
    return {OWN: lambda _: own} | {name: shape for name, shape in shapes.items() if name != fit.name_of(own)}


def _cross_fitted(records: pd.DataFrame, shape: _Shape, rate: float) -> tuple[Band, np.ndarray]:
    """A range of this shape at the rate, and what it clips ``[rows]`` in each half with the shape of the other half."""
    band, later, clipped = (
        fit.with_eps(records, shape(records), rate),
        fit.is_later_half(records),
        np.zeros(len(records)),
    )
    for half in (~later, later):
        judged = records[half]
        clipped[half] = fit.clipped_by(fit.with_eps(judged, shape(records[~half]), rate), judged)
    return band, clipped


def _misses(records: pd.DataFrame, rate: float) -> str | None:
    """Why a clip that stays as it was recorded cannot be compared at a rate; None where it has that rate."""
    sides, clipped = clip_rates.sides(records), records["clipped"].to_numpy(np.float64)
    rates = [float(clipped[sides[side]].mean()) for side in ("upper", "lower") if sides[side].any()]
    if all(abs(one - rate) <= _NEAR * rate for one in rates):
        return None
    return f"it clips {' and '.join(map(percent, rates))} of the better and the worse, and has no eps to change that"


def _best(own: Width, others: Mapping[str, Width], measure: "_Measure", rare: float) -> tuple[Width | None, bool]:
    """The most even of those that are more even than the own range by more than noise, and in each third of the run.

    sqrt(length) where it ties, and whether it does.
    """
    agree = {
        name: one for name, one in others.items() if all(a < b for a, b in zip(one.course, own.course, strict=True))
    }
    even = {name: one for name, one in agree.items() if measure.p_value(own, one) < rare}
    if not even:
        return None, False
    least = min(even.values(), key=lambda one: one.uneven)
    root = even.get(fit.ROOT, least)
    ties = root is not least and measure.p_value(root, least) >= RARE
    return (root, True) if ties else (least, False)


def unevenness(records: pd.DataFrame, clipped: np.ndarray) -> tuple[float, float]:
    """How much a clip rate varies over lengths, and the smallest such variation that would show; as in :class:`Width`.

    Args:
        clipped: 0 or 1, or a share of tokens ``[rows]``.
    """
    found = _Measure(records).of("", None, np.asarray(clipped, np.float64))
    return found.uneven, found.smallest


class _Measure:
    """The unevenness of a clip rate over fifths of the length on each side, and the difference of two."""

    def __init__(self, records: pd.DataFrame):
        self._counted = clip_rates.sides(records)["all"] & (records["length"] > 0).to_numpy()
        rows = records[self._counted]
        self._stratum = strata_of(rows)
        self._size = np.bincount(self._stratum)
        length, by_step = rows["length"].to_numpy(), rows["step"].nunique() >= MIN_STEPS
        better = (rows["advantage"] > 0).to_numpy()
        part, self._parts = np.zeros(len(rows), np.int64), 0
        for side in (better, ~better):
            if side.any():
                cuts = np.unique(np.quantile(length[side], np.arange(1, _PARTS) / _PARTS))
                part[side] = self._parts + np.digitize(length[side], cuts)
                self._parts += len(cuts) + 1
        self._freedom = self._parts - (1 + (better.any() and not better.all()))  # a side's excess sums to 0
        cluster = pd.factorize(rows["step"], sort=True)[0] if by_step else prompts_of(rows)
        self._clusters = int(cluster.max()) + 1
        self._third = cluster * _THIRDS // self._clusters
        self._cell = cluster * self._parts + part
        self._weight = np.bincount(part, minlength=self._parts) / len(rows)

    def of(self, name: str, band: Band | None, clipped: np.ndarray) -> Width:
        """A range with its unevenness; ``clipped`` is 0 or 1, or a share of tokens ``[rows]``."""
        clipped = clipped[self._counted]
        expected = (np.bincount(self._stratum, clipped) / self._size)[self._stratum]
        sums = self._sums(clipped - expected, expected)
        square, sampling = (values[0] for values in self._squares(sums))
        smallest = math.nan
        if self._freedom:  # of even rates, square / sampling is about chi² / freedom
            smallest = math.sqrt(max(sampling * (chdtri(self._freedom, RARE) / self._freedom - 1), 0.0))
        course = []
        for third in range(_THIRDS):
            part = self._third == third
            square_of_part, sampling_of_part = self._squares(self._sums((clipped - expected) * part, expected * part))
            course.append(math.sqrt(max(square_of_part[0] - sampling_of_part[0], 0.0)))
        uneven = math.sqrt(max(square - sampling, 0.0))
        return Width(name, band, uneven, smallest, tuple(course), sums)

    def _sums(self, *values: np.ndarray) -> np.ndarray:
        """Sums by cluster and part, ``[values, clusters, parts]``."""
        shape = (self._clusters, self._parts)
        return np.stack([np.bincount(self._cell, one, math.prod(shape)).reshape(shape) for one in values])

    def _squares(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean over the parts of the squared relative excess, and what of it is sampling.

        Args:
            sums: observed less expected clips, and expected ones, ``[2, clusters, parts]``.

        Returns:
            Of all clusters, then without each of them: ``[1 + clusters]``.
        """
        excess, expected = sums
        each = np.stack([excess, np.square(excess), expected])
        total = each.sum(1, keepdims=True)
        excess, squares, expected = np.concatenate([total, total - each], axis=1)
        clusters = np.full((len(excess), 1), self._clusters - 1)
        clusters[0] += 1
        with np.errstate(divide="ignore", invalid="ignore"):
            unit = np.where(expected > 0, np.square(expected), math.inf)
            sampling = squares * clusters / (clusters - 1)
            return (np.square(excess) / unit) @ self._weight, (sampling / unit) @ self._weight

    def p_value(self, one: Width, other: Width) -> float:
        """p of the first being no more uneven than the other.

        Both are compared with the same mean sampling in them: a root is no sum over clusters where it comes near 0.
        """
        if self._clusters < 3:
            return 1.0
        (square, sampling), (other_square, other_sampling) = self._squares(one.sums), self._squares(other.sums)
        shift = (other_sampling - sampling) / 2
        difference = np.sqrt(np.maximum(square + shift, 0)) - np.sqrt(np.maximum(other_square - shift, 0))
        whole, parts = difference[0], difference[1:]
        variance = (self._clusters - 1) / self._clusters * np.square(parts - parts.mean()).sum()
        return float(stdtr(self._clusters - 1, -whole / math.sqrt(variance))) if variance > 0 else 1.0
