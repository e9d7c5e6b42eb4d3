# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Fits a clip band to the records of a run: its shape, eps for a wished clip rate, and what it does elsewhere.

``records`` is a DataFrame of :mod:`fspo_verl.observe.records`. All responses with an advantage count, on-policy ones
included.

The interval of a clip rate is a prediction interval, for a re-run of the same size at the fitted eps with other steps:
its variance counts twice, once for these records, which fixed the eps, and once for the re-run. A cluster is a training
step, whose responses share an update, or, with records of one step, a prompt: the interval then holds for this update
alone. What another seed does to the course of a whole run is not in it.

Without records :func:`from_metrics` takes eps from the live metrics of a run, by a Gaussian law.
"""

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import ndtr

from fspo_verl.analysis import clip_rates, numerical_noise
from fspo_verl.analysis.clip_rates import Estimate, prompts_of, strata_of
from fspo_verl.analysis.conclusion import NOTHING_MOVED
from fspo_verl.analysis.length_effect import LengthEffect, length_effect
from fspo_verl.band import DUAL, Band
from fspo_verl.clips import BandClip, standardized, upper_quantile
from fspo_verl.keys import ACTOR, GROUP, RECORDS_DIR
from fspo_verl.observe.metrics import PREFIX
from fspo_verl.observe.noise import Noise

WIDTHS = ROOT, FIXED, POWER, MEASURED = ("sqrt(length)", "a fixed width", "a fitted power", "a measured curve")
"""What the width of a band may follow, those with fewer numbers to fit first."""
_DUAL_SHARE = 0.1  # of the target: what the dual clip may take of the responses with A < 0 before it is widened
_KNOTS = 6
_ONE_SIGMA = 0.6827  # of the normal law: the confidence of plus and minus one standard error
_ROUNDING = 1e-6  # of log-ratios in float32, relative
_TURNS = 5  # of strata and curve; the last one moves no width by 1%
_MEAN, _SQUARE = (f"{PREFIX}log_ratio_per_sqrt_length{which}" for which in ("", "_squared"))
_SEQUENCES, _ON_POLICY = (f"{PREFIX}{which}_fraction" for which in ("sequence", "on_policy"))


class Unreachable(ValueError):
    """No band of this shape has the wished clip rate on these records; the text says why."""


# --- eps for a clip rate ---------------------------------------------------------------------------------------------


def with_eps(records: pd.DataFrame, band: Band, target: float) -> Band:
    """The band with the smallest eps, in four digits, that clip the share ``target`` of the responses of each side.

    Its dual clip is three times as wide as the upper side, or wider: beyond it lies at most a tenth of the target.

    Raises:
        Unreachable: fewer than that lie on one side of the centre, or there are none with one sign of the advantage.
    """
    score, sides = standardized(records, band), clip_rates.sides(records)
    upper, lower = score[sides["upper"]], -score[sides["lower"]]
    if not (len(upper) and len(lower)):
        raise Unreachable(f"no response has an advantage {'<' if len(upper) else '>'} 0")
    high, low = upper_quantile(upper, target), upper_quantile(lower, target)
    for name, where, values, end in (("upper", "> 0 lie above", upper, high), ("lower", "< 0 lie below", lower, low)):
        if end <= 0:
            why = _unreachable(records[sides[name]], where, float(np.mean(values > 0)), target)
            raise Unreachable(f"no band clips {target:g} of the responses on each side of a width of this shape: {why}")
    dual = upper_quantile(-lower, _DUAL_SHARE * target)
    eps: dict[str, Any] = {"eps_low": digits(low), "eps_high": digits(high)}
    eps["eps_dual"] = digits(dual) if dual > DUAL * high else None
    return dataclasses.replace(band, eps=None, **eps)


def _unreachable(side: pd.DataFrame, where: str, share: float, target: float) -> str:
    moved = (side["quadratic_variation"] > 0).mean()
    text = f"only {share:.1%} of the responses with A {where} the centre, and eps must be positive"
    if moved < target:
        text += (
            f"; {1 - moved:.1%} have not moved, as those of the first of {side['mini_batch'].max() + 1} mini-batches "
            f"of each rollout, which no clip can reach: lower the target, or {ACTOR}.ppo_mini_batch_size"
        )
    return text


def clipped_by(band: Band, records: pd.DataFrame) -> np.ndarray:
    """Whether a band clips each response, 0 or 1 ``[rows]``."""
    return BandClip("", "", band).clipped(records)


def resampled(records: pd.DataFrame) -> tuple[str, np.ndarray]:
    """The name of the clusters and their code ``[rows]``: steps, or the prompts of the only step."""
    if records["step"].nunique() > 1:
        return "steps", pd.factorize(records["step"])[0]
    return "prompts", prompts_of(records)


# --- the measured shape ----------------------------------------------------------------------------------------------


def measured_shape(records: pd.DataFrame, target: float) -> list[list[float]]:
    """Knots [tokens, width] of the width that clips the target share of the responses at every length.

    A response counts with sign(A)·S/√L, each side in units of its upper quantile at the target, so that one curve
    serves both. At each of six ranges of length that hold equally many responses that have moved:

    1. The curve is this upper quantile given the length. Responses enter over the root mean square of their stratum
       (step, mini-batch, sign of A) about the curve, in turns of curve and strata: lengths and moves that rise over
       training together are then no effect of length. The standard error of a quantile is that of Woodruff (1952,
       doi:10.1080/01621459.1952.10483443), with prompts as clusters.
    2. It is shrunk towards √L, twice: its slope in log L by the positive-part rule of James and Stein, and then every
       knot towards the line of this slope as in the model of Fay and Herriot (1979,
       doi:10.1080/01621459.1979.10482505),
       with the moment estimate of the variance about the line. Where knots scatter no more than their standard errors
       say, the curve is the line; where the slope does not either, it is √L.
    3. At the median length of these responses it is √L, so that eps means there what it means for FSPO.

    That a clip sees one side, and the two steps of shrinkage, were chosen on records of updates of a small
    language model.

    Raises:
        Unreachable: there are too few lengths, prompts or moved responses.
    """
    return knots_of(records, target).shape()


class Knots(NamedTuple):
    """log(g/√L) at six ranges of length, before it is shrunk; see :func:`measured_shape`."""

    median: float  # log length
    place: np.ndarray  # mean log length ``[knots]``
    bend: np.ndarray
    error: np.ndarray  # standard errors

    def shape(self) -> list[list[float]]:
        """The measured width, [tokens, width] at each knot."""
        bend = _shrunk(self.place, self.bend, self.error)
        bend -= np.interp(self.median, self.place, bend)
        tokens = np.rint(np.exp(self.place)).astype(int)
        widths = np.exp(bend) * np.sqrt(tokens)
        return [[int(at), digits(width, 3)] for at, width in zip(tokens, widths, strict=True)]

    def power(self) -> float:
        """p of the width L^p, from 0 to 1 in two digits: that of the line through the knots."""
        slope = np.polyfit(self.place, self.bend, 1, w=1 / self.error)[0]
        return round(float(np.clip(0.5 + slope, 0, 1)), 2)


def knots_of(records: pd.DataFrame, target: float) -> Knots:
    """The spread of S at six ranges of length.

    Raises:
        Unreachable: there are too few lengths, prompts or moved responses.
    """
    used = records[(records["advantage"] != 0) & (records["quadratic_variation"] > 0) & (records["length"] > 0)]
    length, sign = used["length"].to_numpy(np.float64), np.sign(used["advantage"].to_numpy())
    score = sign * used["log_ratio"].to_numpy(np.float64) / np.sqrt(length)
    for side in (sign > 0, sign < 0):
        if not side.any() or (unit := upper_quantile(score[side], target)) <= 0:
            raise Unreachable("too few responses have moved to where they can be clipped to measure a width")
        score[side] /= unit
    knot = np.searchsorted(np.quantile(length, np.arange(1, _KNOTS) / _KNOTS), length, "right")
    knot, prompt = pd.factorize(knot, sort=True)[0], prompts_of(used)
    clusters = [pd.factorize(prompt[knot == number])[0] for number in range(knot.max() + 1)]
    if len(clusters) < 3 or min(cluster.max() + 1 for cluster in clusters) < clip_rates.MIN_BIN_PROMPTS:
        raise Unreachable("too few lengths and prompts to measure a width")
    stratum = strata_of(used)
    log_length = np.log(length)
    place = np.bincount(knot, log_length) / np.bincount(knot)
    bend = np.zeros(len(clusters))  # log(g/√L) at the knots
    for _ in range(_TURNS):
        unit = np.exp(np.interp(log_length, place, bend))
        spread = np.sqrt(np.bincount(stratum, np.square(score / unit)) / np.bincount(stratum))
        relative = score / spread[stratum]
        found = [_log_quantile(relative[knot == number], target, of) for number, of in enumerate(clusters)]
        bend = _shrunk(place, *np.array(found).T)
    value, error = np.array(found).T
    if not (error > _ROUNDING).all():  # ties, which give no standard error
        raise Unreachable("too few responses have moved at some lengths to measure a width")
    return Knots(float(np.log(np.median(length))), place, value, error)


def _log_quantile(score: np.ndarray, target: float, cluster: np.ndarray) -> tuple[float, float]:
    """Log of the upper quantile of scores ``[rows]``, and its standard error: half the distance between the quantiles
    at the rate plus and minus the rate's standard error.

    Raises:
        Unreachable: the quantile, or the lower one, is not above 0.
    """
    quantile = upper_quantile(score, target)
    rate = clip_rates.rate_of_all(score > quantile, cluster, _ONE_SIGMA)
    low = upper_quantile(score, min(rate.upper, 1 - 1 / len(score)))
    if not min(low, quantile) > 0:
        raise Unreachable("too few responses have moved at some lengths to measure a width")
    return math.log(quantile), math.log(upper_quantile(score, rate.lower) / low) / 2


def _shrunk(x: np.ndarray, y: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Values ``[knots]``, shrunk by their standard errors towards their line in x, and the line towards slope 0."""
    weight = 1 / np.square(error)
    x_mean, y_mean = np.average(x, weights=weight), np.average(y, weights=weight)
    spread = np.sum(weight * np.square(x - x_mean))
    slope = np.sum(weight * (x - x_mean) * (y - y_mean)) / spread
    slope *= max(0.0, 1 - 1 / (slope**2 * spread)) if slope else 0.0
    line = y_mean + slope * (x - x_mean)
    # The trace of weight · (1 − hat matrix): what a unit variance about the line adds to the sum of squares.
    trace = weight.sum() - np.sum(np.square(weight)) / weight.sum() - np.sum(np.square(weight * (x - x_mean))) / spread
    variance = max(0.0, (np.sum(weight * np.square(y - line)) - (len(x) - 2)) / trace)
    return line + variance / (variance + np.square(error)) * (y - line)


# --- fitted bands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The band of one shape that has the target rate on both sides of these records."""

    width: str
    """The law of its width, one of :data:`WIDTHS`."""

    band: Band
    rate: Estimate
    """The clip rate on these records, and its prediction interval for a re-run."""

    effect: LengthEffect | None
    """Whether the clip of this band depends on length here; None where that was not tested."""

    held_out: LengthEffect | None = None
    """The same on the later half of the steps, of the band whose shape was fitted on the earlier half."""


def fits(records: pd.DataFrame, target: float) -> list[Fit]:
    """A fit for every width that reaches the target, with its held-out test."""
    found = []
    for width in WIDTHS:
        with contextlib.suppress(Unreachable):
            one = fitted(records, width, target)
            found.append(dataclasses.replace(one, width=width, held_out=held_out(records, width, target)))
    return found


def fitted(records: pd.DataFrame, width: str, target: float) -> Fit:
    """The band of one width, without a held-out test.

    Raises:
        Unreachable: this width does not reach the target, or cannot be measured.
    """
    return of_band(records, with_eps(records, shaped(records, width, target), target))


def of_band(records: pd.DataFrame, band: Band, tested: bool = True) -> Fit:
    """What a band does to these records; with ``tested`` also whether it depends on length, which takes longest."""
    clipped, counted = clipped_by(band, records), clip_rates.sides(records)["all"]
    rate = predicted_rate(records[counted], clipped[counted])
    return Fit(name_of(band), band, rate, length_effect(records, clipped) if tested else None)


def shaped(records: pd.DataFrame, width: str, target: float) -> Band:
    """The band of a width, its shape fitted to the records and its eps at the default.

    Raises:
        Unreachable: a shape cannot be fitted.
    """
    if width in (ROOT, FIXED):
        return Band(length_power=0.5 if width == ROOT else 0.0)
    knots = knots_of(records, target)
    return Band(shape=knots.shape()) if width == MEASURED else Band(length_power=knots.power())


def name_of(band: Band) -> str:
    """The law of a band's width in words."""
    if band.shape is not None:
        name = MEASURED
    else:
        name = {0.5: ROOT, 0.0: FIXED, 1.0: "length"}.get(band.length_power, f"length^{band.length_power:g}")
    return name if band.normalization == "plain" else f"{name}, drift-corrected"


def predicted_rate(records: pd.DataFrame, clipped: np.ndarray) -> Estimate:
    """The rate, and its prediction interval for a re-run of the same size."""
    return clip_rates.rate_of_all(clipped, pd.factorize(resampled(records)[1])[0], prediction=True)


def held_out(records: pd.DataFrame, width: str, target: float) -> LengthEffect | None:
    """The length effect in the later half of a band whose shape is fitted on the earlier one, at the target rate."""
    earlier, later = halves(records)
    try:
        band = with_eps(later, shaped(earlier, width, target), target)
    except Unreachable:
        return None
    return length_effect(later, clipped_by(band, later))


def halves(records: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The earlier and the later half of the steps; of one step every other prompt."""
    later = is_later_half(records)
    return records[~later], records[later]


def is_later_half(records: pd.DataFrame) -> np.ndarray:
    """bool ``[rows]``, see :func:`halves`."""
    if records["step"].nunique() > 1:
        steps = np.unique(records["step"])
        return (records["step"] > steps[(len(steps) - 1) // 2]).to_numpy()
    return prompts_of(records) % 2 == 1


# --- eps from metrics alone -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FromMetrics:
    """What :func:`from_metrics` finds."""

    target: float
    steps: int
    moved: float  # share of the responses that move at all, mean over steps
    band: Band  # with eps in three digits
    noise: Noise | None


def from_metrics(metrics: pd.DataFrame, target: float) -> FromMetrics:
    """Band with centre 0 and width sqrt(L) from live metrics alone.

    Each step contributes the Gaussian that has the mean and the mean square of S/sqrt(L) of its responses; the band is
    the one beyond which the steps have the target share on average. The first mini-batch of a rollout has not moved:
    its rows are taken out of the means. In bypass mode, and where a step has one mini-batch only, all have moved.

    Args:
        metrics: of :class:`fspo_verl.analysis.runs.Run`.
        target: share between 0 and 1.

    Raises:
        ValueError: the metrics lack what is needed here, nothing moved, or too little moved for the target.
    """
    needed = [_MEAN, _SQUARE, _SEQUENCES, _ON_POLICY]
    if missing := [name for name in needed if name not in metrics]:
        raise ValueError(
            f"there are no records, and the metrics lack {', '.join(missing)}: train with "
            f"{GROUP}=fspo, and with {RECORDS_DIR}=DIR for the full answer"
        )
    mean, square, sequences, on_policy = metrics[needed].dropna().to_numpy().T
    if not (square > 0).any():
        raise ValueError(NOTHING_MOVED)
    share = sequences - np.where(on_policy < 0.999 * sequences, on_policy, 0.0)  # of the rows: those that have moved
    mean = mean / share
    spread = np.sqrt(np.maximum(square / share - mean**2, 0))
    moved = np.where(spread > 0, share / sequences, 0.0)
    eps_low, eps_high = (
        digits(_gaussian_eps(sign * mean, spread, moved, target, where), 3)
        for sign, where in ((-1, "below"), (1, "above"))
    )
    return FromMetrics(
        target=target,
        steps=len(mean),
        moved=float(moved.mean()),
        band=Band(eps=None, eps_low=eps_low, eps_high=eps_high),
        noise=numerical_noise.of_metrics(metrics),
    )


def _gaussian_eps(mean: np.ndarray, spread: np.ndarray, moved: np.ndarray, target: float, where: str) -> float:
    """The number beyond which the target share lies; each step is Gaussian for a share ``moved``, else 0."""

    def excess(eps: float) -> float:
        return np.mean(moved * ndtr((mean - eps) / np.where(spread > 0, spread, 1.0))) - target

    if excess(0.0) <= 0:
        raise ValueError(
            f"no band with centre 0 clips {target:g} of the responses {where} it: only {excess(0.0) + target:.1%} lie "
            f"there; lower the target, or {ACTOR}.ppo_mini_batch_size"
        )
    return brentq(excess, 0.0, np.max(np.abs(mean) + 40 * spread))


def digits(value: float, count: int = 4) -> float:
    """The number rounded to ``count`` significant digits."""
    return float(f"{value:.{count}g}")
