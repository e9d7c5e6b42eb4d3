# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Fits a clip band to the records of a run: its shape, eps for a wished clip rate, and what it does elsewhere.

``records`` is a DataFrame of :mod:`fspo_verl.observe.records`. All responses with an advantage count, on-policy ones
included.

An interval of eps is the quantiles at the two ends of the interval of the rate beyond it, which is Wilson's with
clusters and Student's t (:func:`fspo_verl.analysis.clip_rates.rate_by_length`). A cluster is a training step, whose
responses share an update, or, with records of one step, a prompt: the intervals then hold for this update alone. The
interval of the rate is for a re-run of the same size at the fitted eps, with other steps: its variance counts twice,
once for these records, which fixed the eps, and once for the re-run. What another seed does to the course of a whole
run is in neither.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import bisect

from fspo_verl.analysis import clip_rates, resampling
from fspo_verl.analysis.length_effect import LengthEffect, length_effect, length_score, prompts_of
from fspo_verl.analysis.resampling import CONFIDENCE, Estimate
from fspo_verl.band import DUAL, Band
from fspo_verl.clips import BandClip, standardized, upper_quantile
from fspo_verl.observe.settings import RunSettings

ACTOR = "actor_rollout_ref.actor."
KEY = f"{ACTOR}policy_loss."
SIDES = ("upper", "lower")
_DUAL_SHARE = 0.1  # of the target: what the dual clip may take of the responses with A < 0 before it is widened
_KNOTS = 6
_TURNS = 5  # of strata and curve; the last one moves no width by 1%
_BEYOND_LIMIT = 0.05  # share of the moved responses on which the limit of a realised width acts


class Unreachable(ValueError):
    """No band of this shape has the wished clip rate on these records; the text says why."""


# --- eps for a clip rate ---------------------------------------------------------------------------------------------


def beyond(records: pd.DataFrame, band: Band, side: str) -> np.ndarray:
    """(S − c)/s of the responses on one side ``[rows of the side]``, its sign such that large ones are clipped."""
    sign = 1 if side == "upper" else -1
    return sign * standardized(records, band)[clip_rates.sides(records)[side]]


def with_eps(records: pd.DataFrame, band: Band, target: float) -> Band:
    """The band with the smallest eps that clip at most the share ``target`` on each side, of all responses there.

    Its dual clip is three times as wide as the upper side, or wider: beyond it lies at most a tenth of the target.

    Raises:
        Unreachable: fewer than that lie on one side of the centre, or there are none with one sign of the advantage.
    """
    scores = {side: beyond(records, band, side) for side in SIDES}
    if not all(map(len, scores.values())):
        raise Unreachable(f"no response has an advantage {'<' if len(scores['upper']) else '>'} 0")
    eps = {side: upper_quantile(score, target) for side, score in scores.items()}
    refused = [_unreachable(side, records, scores[side], target) for side in SIDES if eps[side] <= 0]
    if refused:
        raise Unreachable("; ".join(refused))
    dual = upper_quantile(-scores["lower"], _DUAL_SHARE * target)
    eps_dual = dual if dual > DUAL * eps["upper"] else None
    return dataclasses.replace(band, eps=None, eps_low=eps["lower"], eps_high=eps["upper"], eps_dual=eps_dual)


def _unreachable(side: str, records: pd.DataFrame, score: np.ndarray, target: float) -> str:
    part = records[clip_rates.sides(records)[side]]
    moved = (part["quadratic_variation"] > 0).mean()
    where = "with A > 0 lie above" if side == "upper" else "with A < 0 lie below"
    text = f"only {np.mean(score > 0):.1%} of the responses {where} the centre, and eps must be positive"
    if moved < target:
        count = int(part["mini_batch"].max()) + 1
        text += (
            f"; {1 - moved:.1%} have not moved, as those of the first of {count} mini-batches of each rollout, "
            "which no clip can reach: lower the target, or actor_rollout_ref.actor.ppo_mini_batch_size"
        )
    return text


def resampled(records: pd.DataFrame) -> tuple[str, np.ndarray]:
    """What varies as a whole from one run to the next, and its code ``[rows]``: steps, or prompts of the only step."""
    if records["step"].nunique() > 1:
        return "steps", pd.factorize(records["step"])[0]
    return "prompts", resampling.clusters(records)


def eps_interval(score: np.ndarray, eps: float, cluster: np.ndarray, confidence=CONFIDENCE) -> tuple[float, float]:
    """The quantiles of the score at the two ends of the interval of the rate beyond eps, which is clustered."""
    rate = _rate(score > eps, cluster, confidence)
    if math.isnan(rate["lower"]):
        return math.nan, math.nan
    lowest = upper_quantile(score, min(rate["upper"], 1 - 1 / len(score)))
    return max(lowest, 0.0), upper_quantile(score, rate["lower"])


def rerun_rate(clipped: np.ndarray, cluster: np.ndarray, confidence=CONFIDENCE) -> Estimate:
    """The rate, and the interval in which that of a re-run of the same size lands."""
    return Estimate(*_rate(clipped, cluster, confidence, rerun=True)[["rate", "lower", "upper"]])


def _rate(clipped: np.ndarray, cluster: np.ndarray, confidence: float, rerun: bool = False) -> pd.Series:
    cluster = pd.factorize(cluster)[0]  # a side may lack some of them
    return clip_rates.rate_by_length(np.ones(len(clipped)), clipped, [1, 2], confidence, cluster, rerun).iloc[0]


# --- shapes ----------------------------------------------------------------------------------------------------------


def _power(records: pd.DataFrame, target: float) -> Band:
    """The width L^p with the p, 0 to 1, at which long and short responses are clipped alike at the target rate."""

    def score(power: float) -> float:
        band = with_eps(records, Band(length_power=power), target)
        return length_score(records, clipped_by(band, records))

    ends = score(0.0), score(1.0)
    if math.isnan(ends[0] + ends[1]):
        raise Unreachable("too few prompts with a clip to fit a power of the length")
    if ends[0] <= 0 or ends[1] >= 0:  # shorter ones are clipped more by any power, or longer ones are
        return Band(length_power=0.0 if ends[0] <= 0 else 1.0)
    return Band(length_power=round(bisect(score, 0.0, 1.0, xtol=5e-3), 2))


def _limited(records: pd.DataFrame, target: float) -> Band:
    """The width sqrt(Q), up to the 95% quantile of sqrt(Q/L) of the responses that have moved."""
    moved = records[records["quadratic_variation"] > 0]
    if moved.empty:
        raise Unreachable("no response has moved")
    root = np.sqrt((moved["quadratic_variation"] / moved["length"]).to_numpy(np.float64))
    return Band(eps=1.0, normalization="studentized", realized_limit=digits(upper_quantile(root, _BEYOND_LIMIT)))


def measured_shape(records: pd.DataFrame, target: float = 0.1) -> list[list[float]]:
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

    That a clip sees one side, and the two steps of shrinkage, were chosen on the records of
    ``scripts/studies/measured_shape``, which has the comparison.

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
    if len(clusters) < 3 or min(cluster.max() + 1 for cluster in clusters) < clip_rates.MIN_PROMPTS:
        raise Unreachable("too few lengths and prompts to measure a width")
    stratum = used.groupby(["step", "mini_batch", used["advantage"] > 0], observed=True).ngroup().to_numpy()
    log_length = np.log(length)
    place = np.bincount(knot, log_length) / np.bincount(knot)
    bend = np.zeros(len(clusters))  # log(g/√L) at the knots
    for _ in range(_TURNS):
        unit = np.exp(np.interp(log_length, place, bend))
        spread = np.sqrt(np.bincount(stratum, np.square(score / unit)) / np.bincount(stratum))
        relative, found = score / spread[stratum], []
        for number, cluster in enumerate(clusters):
            part = relative[knot == number]
            quantile = upper_quantile(part, target)
            low, high = eps_interval(part, quantile, cluster)
            if not low > 0:
                raise Unreachable("too few responses have moved at some lengths to measure a width")
            found.append((math.log(quantile), math.log(high / low) / (2 * clip_rates.t_quantile())))
        bend = _shrunk(place, *np.array(found).T)
    bend -= np.interp(np.log(np.median(length)), place, bend)
    tokens = np.rint(np.exp(place)).astype(int)
    widths = np.exp(bend) * np.sqrt(tokens)
    return [[int(at), digits(width)] for at, width in zip(tokens, widths, strict=True)]


def _shrunk(x: np.ndarray, y: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Values ``[knots]`` with these standard errors, drawn to their line in x, and that to slope 0."""
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


FITTED_POWER = "a fitted power of the length"
SHAPES: dict[str, Callable[[pd.DataFrame, float], Band]] = {
    "sqrt(length)": lambda records, target: Band(),
    FITTED_POWER: _power,
    "each response's own spread, limited": _limited,
}
"""What the width of a band follows, and the band of this shape for records and a target rate; eps is not fitted."""


# --- fitted bands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The band of one shape that has the target rate on both sides of these records, or why there is none."""

    shape: str
    refused: str = ""
    band: Band | None = None  # eps in four digits
    eps_low: Estimate | None = None
    eps_high: Estimate | None = None
    rates: dict[str, Estimate] | None = None
    """By side (all, upper, lower): the rate on these records, and the interval in which that of a re-run lands."""
    effect: LengthEffect | None = None
    """Whether the clip of this band depends on length here."""
    held_out: LengthEffect | None = None
    """The same on the later half of the steps, of the band whose shape was fitted on the earlier half."""

    @property
    def width(self) -> str:
        """What the width of the band follows, with the power that was fitted."""
        if self.band is None or self.shape != FITTED_POWER:
            return self.shape
        return f"length^{self.band.length_power:g} (fitted)"

    @property
    def is_fair(self) -> bool:
        """Whether there is such a band, and no dependence on length is shown."""
        return self.band is not None and not (self.effect is not None and self.effect.depends)


def fit(records: pd.DataFrame, shape: str, target: float) -> Fit:
    """The band of a shape that clips the target share on each side, with intervals; or why there is none."""
    try:
        band = with_eps(records, SHAPES[shape](records, target), target)
    except Unreachable as error:
        return Fit(shape, str(error))
    sides, (_, cluster) = clip_rates.sides(records), resampled(records)
    eps_low, eps_high = (
        Estimate(eps, *eps_interval(beyond(records, band, side), eps, cluster[sides[side]]))
        for side, eps in (("lower", band.low), ("upper", band.high))
    )
    band = rounded(band)
    clipped = clipped_by(band, records)
    rates = {side: rerun_rate(clipped[mask], cluster[mask]) for side, mask in sides.items()}
    return Fit(
        shape, "", band, eps_low, eps_high, rates, length_effect(records, clipped), held_out(records, shape, target)
    )


def fits(records: pd.DataFrame, target: float) -> tuple[Fit, ...]:
    """:func:`fit` of every shape, that to take first; it has a band.

    That is sqrt(length) unless the test says that it is not fair. Then it is the shape whose clip depends least on
    length on the held-out half of the steps: the smallest abs(k) of clip rate ~ length^k, all at the target rate.

    Raises:
        Unreachable: no shape reaches the target.
    """
    found = [fit(records, shape, target) for shape in SHAPES]
    if not any(one.band for one in found):
        reasons = "; ".join(dict.fromkeys(one.refused for one in found))
        raise Unreachable(f"no band clips {target:g} of the responses on each side: {reasons}")
    if not found[0].is_fair:
        found.sort(key=lambda one: (one.band is None, abs(one.held_out.exponent) if one.held_out else math.inf))
    return tuple(found)


def held_out(records: pd.DataFrame, shape: str, target: float) -> LengthEffect | None:
    """The length effect in the later half of a band whose shape is fitted on the earlier one, at the target rate."""
    earlier, later = halves(records)
    try:
        band = with_eps(later, SHAPES[shape](earlier, target), target)
    except Unreachable:
        return None
    return length_effect(later, clipped_by(band, later))


def halves(records: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The earlier and the later half of the steps; of one step every other prompt."""
    if records["step"].nunique() > 1:
        steps = np.unique(records["step"])
        later = (records["step"] > steps[(len(steps) - 1) // 2]).to_numpy()
    else:
        later = resampling.clusters(records) % 2 == 1
    return records[~later], records[later]


def clipped_by(band: Band, records: pd.DataFrame) -> np.ndarray:
    """What a band clips, 0 or 1 ``[rows]``."""
    return BandClip("", "", band).clipped(records)


def overrides(band: Band, settings: RunSettings | None = None) -> dict[str, float | str | None]:
    """Hydra overrides that give this band in a launch like that of the run; None stands for null.

    Args:
        settings: of the run, whose loss and band have to be undone; a launch of the loss fspo at its defaults if None.
    """
    trained = settings.band if settings and settings.band else Band()
    values = {"eps": None, "eps_low": band.low, "eps_high": band.high, "eps_dual": band.eps_dual}
    for name in ("normalization", "length_power", "realized_limit"):
        if {getattr(band, name)} != {getattr(trained, name), getattr(Band, name)}:
            values[name] = getattr(band, name)
    loss = {"+algorithm.policy_loss": "fspo"} if settings and settings.loss != "fspo" else {}
    return loss | {KEY + name: value for name, value in values.items()}


def rounded(band: Band) -> Band:
    """The band of :func:`with_eps` with its eps in four digits."""
    values = {name: getattr(band, name) for name in ("eps_low", "eps_high", "eps_dual")}
    in_digits: dict[str, Any] = {name: value and digits(value) for name, value in values.items()}
    return dataclasses.replace(band, **in_digits)


def digits(value: float, count: int = 4) -> float:
    """The number in so many digits."""
    return float(f"{value:.{count}g}")
