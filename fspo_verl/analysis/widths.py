# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which width clips lengths more alike than that of a run: all that can be tried, judged where they were not fitted.

The run's own clip and the widths of :data:`fspo_verl.analysis.fit.WIDTHS` are compared at one clip rate on each side,
that of the band to take. A width is fitted to one half of the steps and judged on the other, both ways round. A clip
that works token by token stays as it was recorded.

The measure is the spread of the clip rate over tenths of the length, in units of the mean rate: the root of the mean of
(observed / expected − 1)² less the part of it that sampling explains, with what is expected from the stratum
(:mod:`fspo_verl.analysis.length_effect`). It sees every curve. Whether one clip is more even than another is Student's
t of the difference of both over its jackknife variance (Tukey 1958), with steps as clusters, or prompts below ten
steps. The measure is derived here; ``tests/truth_table.py`` has how often its advice is right.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import chdtri, stdtr

from fspo_verl.analysis import clip_rates, fit
from fspo_verl.analysis.clip_rates import prompts_of, strata_of
from fspo_verl.analysis.length_effect import MIN_STEPS, RARE
from fspo_verl.band import Band
from fspo_verl.observe.settings import RunSettings

OWN = "the clip as it was recorded"

_PARTS = 10  # of the length
_COLUMNS = ["step", "mini_batch", "prompt", "prompt_text_hash", "length", "log_ratio", "quadratic_variation"]
_COLUMNS += ["advantage", "clipped"]
_ANYWAY = 0.001  # p-value, over all widths, below which one stands out though no dependence on length is shown


@dataclass(frozen=True)
class Width:
    """A clip that was tried."""

    name: str
    band: Band | None
    """At the common rate, fitted to all records; None of the run's own clip where that is no band on S."""

    spread: float = math.nan
    """Of its clip rate over tenths of the length, as a share of the mean rate, where it was not fitted; 0 if sampling
    explains all of it."""

    seen: float = math.nan
    """The spread from which it is told from none: below lies what sampling makes in 95 of 100 even runs."""


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`."""

    rate: float
    """On each side, at which the widths are compared."""

    own: Width | None
    """The clip of the run; None where it could not be put to this rate."""

    others: tuple[Width, ...]
    best: Width | None
    """Of those that are more even than the clip of the run by more than noise."""

    untried: dict[str, str]
    """Why, by width."""


def compare(records: pd.DataFrame, settings: RunSettings | None, depends: bool, rate: float) -> Comparison:
    """Try every width on the records of a run.

    Args:
        records: of :mod:`fspo_verl.observe.records`, all responses, some of them clipped.
        settings: of the run, which tell its own width.
        depends: whether the clip of the run is known to depend on length.
        rate: clip rate on each side.
    """
    records = records[[name for name in _COLUMNS if name in records]]
    band, halves, measure = settings.trained_band if settings else None, _Halves(records), _Measure(records)
    tried: dict[str, _Tried] = {}
    untried: dict[str, str] = {}
    if band is None:
        tried[OWN] = measure.of(Width(OWN, None), records["clipped"].to_numpy(np.float64))
    for name, shapes in _shapes(halves, band, rate, untried).items():
        try:
            whole, clipped = halves.applied(shapes, rate)
        except fit.Unreachable as error:
            untried[name] = str(error)
            continue
        if name != fit.POWER or all(whole.form != one.width.band.form for one in tried.values() if one.width.band):
            tried[name] = measure.of(Width(fit.name_of(whole), whole), clipped)
    own = tried.pop(OWN, None)
    best = _best(own, tried, measure, RARE if depends else _ANYWAY / max(len(tried), 1)) if own else None
    return Comparison(rate, own and own.width, tuple(one.width for one in tried.values()), best, untried)


class _Tried(NamedTuple):
    width: Width
    sums: np.ndarray  # of the measure


class _Halves:
    """The records and their halves: what is fitted to one is applied to the other."""

    def __init__(self, records: pd.DataFrame):
        self._later = fit.is_later_half(records)
        self.parts = records, records[~self._later], records[self._later]

    def applied(self, shapes: Sequence[Band], rate: float) -> tuple[Band, np.ndarray]:
        """The band at the rate on all records, and what those of the halves clip ``[rows]``.

        Raises:
            Unreachable: one of the three does not reach the rate.
        """
        whole, *bands = (fit.with_eps(part, shape, rate) for part, shape in zip(self.parts, shapes, strict=True))
        clipped = np.zeros(len(self._later))
        for rows, part, band in zip((~self._later, self._later), self.parts[1:], bands, strict=True):
            clipped[rows] = fit.clipped_by(band, part)
        return whole, clipped


def _shapes(halves: _Halves, own: Band | None, rate: float, untried: dict[str, str]) -> dict[str, Sequence[Band]]:
    """For each width, the run's own first: its shape on all records, and on either half as fitted to the other.

    Where the run has no dual clip, none gets one.
    """
    plain = Band() if own is None or math.isfinite(own.dual) else Band(eps_dual=math.inf)
    found: dict[str, Sequence[Band]] = {} if own is None else {OWN: [own] * 3}
    for name, power in ((fit.ROOT, 0.5), (fit.FIXED, 0.0)):
        if own is None or fit.name_of(own) != name:
            found[name] = [dataclasses.replace(plain, length_power=power)] * 3
    whole, earlier, later = halves.parts
    try:
        powers = [fit.fitted_power(part, rate) for part in (whole, later, earlier)]
        found[fit.POWER] = [dataclasses.replace(plain, length_power=power) for power in powers]
    except fit.Unreachable as error:
        untried[fit.POWER] = str(error)
    return found


def _best(own: _Tried, others: Mapping[str, _Tried], measure: "_Measure", rare: float) -> Width | None:
    """The most even of those that are more even than the own clip by more than noise; sqrt(length) where it ties."""
    even = {name: one for name, one in others.items() if measure.p_value(own.sums, one.sums) < rare}
    if not even:
        return None
    least = min(even.values(), key=lambda one: one.width.spread)
    root = even.get(fit.ROOT, least)
    return least.width if measure.p_value(root.sums, least.sums) < RARE else root.width


class _Measure:
    """The spread of a clip rate over tenths of the length, and the difference of two."""

    def __init__(self, records: pd.DataFrame):
        self._counted = clip_rates.sides(records)["all"] & (records["length"] > 0).to_numpy()
        rows = records[self._counted]
        self._stratum = strata_of(rows)
        self._size = np.bincount(self._stratum)
        length, by_step = rows["length"].to_numpy(), rows["step"].nunique() >= MIN_STEPS
        cuts = np.unique(np.quantile(length, np.arange(1, _PARTS) / _PARTS))
        part, cluster = np.digitize(length, cuts), pd.factorize(rows["step"])[0] if by_step else prompts_of(rows)
        self._parts, self._clusters = len(cuts) + 1, int(cluster.max()) + 1
        self._cell = cluster * self._parts + part
        self._weight = np.bincount(part, minlength=self._parts) / len(rows)

    def of(self, width: Width, clipped: np.ndarray) -> _Tried:
        """The width with its spread."""
        clipped = clipped[self._counted]
        expected = (np.bincount(self._stratum, clipped) / self._size)[self._stratum]
        shape = self._clusters, self._parts
        sums = np.stack(
            [
                np.bincount(self._cell, values, math.prod(shape)).reshape(shape)
                for values in (clipped - expected, expected)
            ]
        )
        (square, sampling), _ = self._squares(sums)
        spread = math.sqrt(max(square - sampling, 0.0))
        freedom = self._parts - 1  # of even rates, square / sampling is about chi² / freedom
        seen = math.sqrt(max(sampling * (chdtri(freedom, RARE) / freedom - 1), 0.0)) if freedom else math.nan
        return _Tried(dataclasses.replace(width, spread=spread, seen=seen), sums)

    def _squares(self, sums: np.ndarray) -> tuple[tuple, tuple]:
        """Mean over the parts of the squared relative excess, and what of it is sampling; of all clusters, and without
        each ``[clusters]``.

        Args:
            sums: observed less expected clips, and expected ones, ``[2, clusters, parts]``.
        """

        def of(parts, clusters):
            excess, squares, expected = parts
            with np.errstate(divide="ignore", invalid="ignore"):
                unit = np.where(expected > 0, np.square(expected), math.inf)
                sampling = squares * clusters / (clusters - 1)
                return (np.square(excess) / unit) @ self._weight, (sampling / unit) @ self._weight

        excess, expected = sums
        each = excess, np.square(excess), expected
        total = [one.sum(0) for one in each]
        without = [whole - part for whole, part in zip(total, each, strict=True)]
        return of(total, self._clusters), of(without, self._clusters - 1)

    def p_value(self, sums: np.ndarray, other: np.ndarray) -> float:
        """p of the first spread being no larger than the other.

        Both are compared with the same mean sampling in them: a root is no sum over clusters where it comes near 0.
        """
        if self._clusters < 3:
            return 1.0

        def difference(mine, theirs):
            shift = (theirs[1] - mine[1]) / 2
            return np.sqrt(np.maximum(mine[0] + shift, 0)) - np.sqrt(np.maximum(theirs[0] - shift, 0))

        whole, parts = (difference(*both) for both in zip(self._squares(sums), self._squares(other), strict=True))
        variance = (self._clusters - 1) / self._clusters * np.square(parts - parts.mean()).sum()
        return float(stdtr(self._clusters - 1, -whole / math.sqrt(variance))) if variance > 0 else 1.0
