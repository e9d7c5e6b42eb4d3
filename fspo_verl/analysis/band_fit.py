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
run is in neither. How often they hold is in ``scripts/studies/coverage``.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from fspo_verl.analysis import clip_rates, resampling
from fspo_verl.analysis.resampling import CONFIDENCE, UNKNOWN, Estimate
from fspo_verl.band import DUAL, Band
from fspo_verl.clips import CLIPS, BandClip, standardized, upper_quantile

SIDES = ("upper", "lower")
_DUAL_SHARE = 0.1  # of the target: what the dual clip may take of the responses with A < 0 before it is widened
_IN_BINS = 0.8  # share of the responses that has to lie in length bins which take part in an LRE
_BEYOND_LIMIT = 0.05  # share of the moved responses on which the limit of a realised width acts
_MINI_BATCHES = 8  # columns of a table; of more, neighbours are taken together


@dataclass(frozen=True)
class Shape:
    """A kind of band: what is left when eps, power and limit are fitted."""

    name: str  # p stands for the fitted power
    normalization: str
    power: bool = False  # p in L^p is fitted
    limit: bool = False  # and the limit of a studentised band

    @property
    def bounded(self) -> bool:
        """Whether the band limits how far a response may move; sqrt(Q) alone widens with the move."""
        return self.normalization != "studentized" or self.limit


SHAPES = (  # the simplest first
    Shape("sqrt(L)", "plain"),
    Shape("sqrt(L), -Q/2", "drift_corrected"),
    Shape("L^p", "plain", power=True),
    Shape("L^p, -Q/2", "drift_corrected", power=True),
    Shape("sqrt(Q) limited, -Q/2", "studentized", power=True, limit=True),
    Shape("sqrt(Q), -Q/2", "studentized"),
)


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
    dual = dual if dual > DUAL * eps["upper"] else None
    return dataclasses.replace(band, eps=None, eps_low=eps["lower"], eps_high=eps["upper"], eps_dual=dual)


def gspo_range(records: pd.DataFrame, target: float) -> dict[str, float]:
    """verl's ``clip_ratio_low`` and ``clip_ratio_high`` with which GSPO clips the share ``target`` on each side.

    GSPO clips exp(S/L) (2507.18071) and has no dual clip.

    Raises:
        Unreachable: as :func:`with_eps`.
    """
    band = with_eps(records, Band(length_power=1.0), target)
    low, high = -math.expm1(-band.eps_low), math.expm1(band.eps_high)
    return {"clip_ratio_low": _digits(low), "clip_ratio_high": _digits(high)}


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


# --- power of L ------------------------------------------------------------------------------------------------------


def power_of_length(parts, share: float) -> Estimate:
    """p such that eps·L^p is the (1 − share)-quantile of y at every length L, with its interval.

    It is the linear quantile regression of log y on log L (Koenker and Bassett, doi:10.2307/1913643): at its p, lying
    beyond eps·L^p is uncorrelated with log L. Several parts share one p, and each has its own eps. The interval holds
    every p whose correlation is within what clusters give by chance (Student's t); so it needs no density of y, and
    covers with few clusters, too. Both lie between 0 and 1, as :class:`fspo_verl.band.Band` asks; NaN where lengths or
    clusters are fewer than two, or fewer than the share of a part are above 0.

    Args:
        parts: of (y, length, cluster), each ``[rows]``; values of y below the quantile count as such only, so that
            zeros and negative ones may be among them.
        share: of each part beyond its quantile.
    """
    if any(not len(y) or upper_quantile(y, share) <= 0 for y, *_ in parts):
        return UNKNOWN
    parts = [(np.asarray(y), np.log(np.asarray(length)), np.asarray(cluster)) for y, length, cluster in parts]
    parts = [(y, x - x.mean(), cluster) for y, x, cluster in parts]
    clusters = 1 + max(int(cluster.max()) for *_, cluster in parts)
    if clusters < 2 or not any(np.ptp(x) > 0 for _, x, _ in parts):
        return UNKNOWN

    def excess(power: float) -> np.ndarray:
        scores = [(y * np.exp(-power * x), x, cluster) for y, x, cluster in parts]
        return sum(_excess(score > upper_quantile(score, share), x, c, clusters) for score, x, c in scores)

    quantile = resampling.t_quantile(clusters - 1)
    value = _falls_to(0.0, lambda power: excess(power).sum())
    lower, upper = (_falls_to(sign * quantile, lambda power: _t(excess(power))) for sign in (1, -1))
    return Estimate(value, min(lower, value), max(upper, value))


def length_trend(clipped: np.ndarray, length: np.ndarray, cluster: np.ndarray) -> float:
    """p-value of no correlation between being clipped and log L: the test that :func:`power_of_length` inverts.

    NaN where lengths or clusters are fewer than two.
    """
    x, cluster = np.log(length), pd.factorize(cluster)[0]
    clusters = 1 + cluster.max(initial=-1)
    if clusters < 2 or not np.ptp(x) > 0:
        return math.nan
    t = _t(_excess(clipped, x - x.mean(), cluster, clusters))
    return float(2 * stats.t.sf(abs(t), clusters - 1))


def _excess(clipped: np.ndarray, x: np.ndarray, cluster: np.ndarray, clusters: int) -> np.ndarray:
    """Sum of (clipped − its mean)·x in each cluster; x is log L, centred. Above 0 where long ones are clipped more."""
    return np.bincount(cluster, (clipped - clipped.mean()) * x, clusters)


def _t(totals: np.ndarray) -> float:
    error = math.sqrt(len(totals)) * totals.std(ddof=1)
    return float(totals.sum() / error) if error > 0 else 0.0


def _falls_to(level: float, function) -> float:
    """Where between 0 and 1 a function that falls in steps comes down to the level; the nearer end if it does not."""
    low, high = 0.0, 1.0
    if function(low) <= level:
        return low
    if function(high) > level:
        return high
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > level else (low, middle)
    return (low + high) / 2


def power_of_log_ratio(records: pd.DataFrame, normalization: str, target: float, sides=SIDES) -> Estimate:
    """:func:`power_of_length` for S − c at the edge of the band: above it with A > 0, below it with A < 0."""
    band = Band(normalization=normalization, length_power=0.0)  # a fixed one: its score is S − c itself
    masks, cluster = clip_rates.sides(records), resampled(records)[1]
    parts = [(beyond(records, band, side), records["length"][masks[side]], cluster[masks[side]]) for side in sides]
    return power_of_length(parts, target)


def shaped(records: pd.DataFrame, shape: Shape, target: float) -> Band:
    """The band of a shape with its power and limit fitted to the records, and eps = 1.

    The limit of a realised width is the 95% quantile of sqrt(Q) given L, over the responses that have moved: the band
    follows all moves but the largest of those recorded.

    Raises:
        Unreachable: there is no power, as too few responses have moved.
    """
    fields = {"normalization": shape.normalization}
    if shape.limit:
        moved = records[records["quadratic_variation"] > 0]
        root, length = np.sqrt(moved["quadratic_variation"].to_numpy(np.float64)), moved["length"].to_numpy()
        power = power_of_length([(root, length, resampled(moved)[1])], _BEYOND_LIMIT)
    elif shape.power:
        power = power_of_log_ratio(records, shape.normalization, target)
    if shape.power:
        if math.isnan(power.value):
            raise Unreachable("the power of L cannot be told from so few lengths, steps or responses that moved")
        fields["length_power"] = round(power.value, 2)
    if shape.limit:
        fields["realized_limit"] = _digits(upper_quantile(root / length ** fields["length_power"], _BEYOND_LIMIT))
    return Band(eps=1.0, **fields)


# --- fitted on some steps, judged on others --------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The band of one shape that has the target rate on both sides of these records, or why there is none."""

    shape: Shape
    refused: str = ""
    band: Band | None = None  # eps in four digits
    eps_low: Estimate | None = None
    eps_high: Estimate | None = None
    rates: dict[str, Estimate] | None = None
    """By side (all, upper, lower; dual: A < 0 beyond the dual clip): the rate on these records, and the interval in
    which the rate of a re-run of the same size lands."""
    trends: dict[str, float] | None = None
    """By side (upper, lower): p-value of no correlation between being clipped and log L, see :func:`length_trend`."""
    by_mini_batch: pd.DataFrame | None = None
    """Clip rate from the first to the last mini-batch of a rollout: columns first, last, n, rate."""

    @property
    def dual_widened(self) -> bool:
        """Whether the dual clip is wider than three times the upper side."""
        return self.band.dual > 1.01 * DUAL * self.band.high

    @property
    def trend(self) -> float:
        """p-value of the more conspicuous side, times two as there are two; 1 where neither can be tested."""
        return min([2 * p for p in self.trends.values() if not math.isnan(p)] + [1.0])

    @property
    def name(self) -> str:
        fitted = self.band is not None and self.shape.power and not self.shape.limit
        if not fitted:
            return self.shape.name
        power = self.band.length_power
        return self.shape.name.replace("L^p", f"L^{power:g}" if power else CLIPS["fixed_band"].label)


@dataclass(frozen=True)
class Judgement:
    """What a fit does on records that it has not seen."""

    rates: dict[str, float]  # by side, at the fitted eps: what :attr:`Fit.rates` predicts
    lre: dict[str, dict]
    """By side (upper, lower): lre, lre_lower, lre_upper, floor, floor_upper of the fitted shape, its eps scaled to the
    target on these records, so that shapes are compared and not rates."""
    by_length: pd.DataFrame  # clip rate at the fitted eps: see clip_rates.rate_by_length

    @property
    def excess(self) -> float:
        """LRE over what chance gives at most, on the worse side: up to 1 chance explains it.

        NaN where neither side can be judged.
        """
        ratios = [side["lre"] / side["floor_upper"] for side in self.lre.values() if side["floor_upper"] > 0]
        return max(ratios, default=math.nan)


def fit(records: pd.DataFrame, shape: Shape, target: float) -> Fit:
    """The band of a shape that clips the target share on each side, with intervals; or why there is none."""
    try:
        band = with_eps(records, shaped(records, shape, target), target)
    except Unreachable as error:
        return Fit(shape, str(error))
    sides, (_, cluster) = clip_rates.sides(records), resampled(records)
    eps_low, eps_high = (
        Estimate(eps, *eps_interval(beyond(records, band, side), eps, cluster[sides[side]]))
        for side, eps in (("lower", band.low), ("upper", band.high))
    )
    values = {"eps_low": band.low, "eps_high": band.high, "eps_dual": band.eps_dual}
    band = dataclasses.replace(band, **{name: value and _digits(value) for name, value in values.items()})
    clipped = BandClip("", "", band).clipped(records)
    beyond_dual = sides["lower"] & (clipped > 0) & (standardized(records, band) > 0)
    rates = {side: rerun_rate(clipped[mask], cluster[mask]) for side, mask in sides.items()}
    rates["dual"] = rerun_rate(beyond_dual[sides["lower"]], cluster[sides["lower"]])
    length = records["length"].to_numpy()
    trends = {side: length_trend(clipped[m], length[m], cluster[m]) for side, m in sides.items() if side in SIDES}
    return Fit(shape, "", band, eps_low, eps_high, rates, trends, _by_mini_batch(records, clipped))


def judging_edges(records: pd.DataFrame, bins: int, min_count: int) -> np.ndarray:
    """Length bins, as many up to ``bins`` as leave four fifths of either side's responses in bins that take part."""
    masks, cluster = [clip_rates.sides(records)[side] for side in SIDES], resampling.clusters(records)
    for count in range(max(bins, 2), 1, -1):
        edges = clip_rates.length_edges(records["length"], count)
        cell, cells = clip_rates.length_cells(records["length"], edges)
        taking_part = [clip_rates.enough(cluster[mask], cell[mask], cells, min_count)[cell[mask]] for mask in masks]
        if all(part.sum() >= _IN_BINS * len(part) for part in taking_part):
            break
    return edges


def judge(records: pd.DataFrame, found: Fit, target: float, edges, rng, draws: int, min_count: int) -> Judgement | None:
    """The fit on other records; None where it was refused, or cannot reach the target here."""
    if found.band is None:
        return None
    try:
        scaled = with_eps(records, found.band, target)
    except Unreachable:
        return None
    clipped, clipped_at_target = (BandClip("", "", band).clipped(records) for band in (found.band, scaled))
    sides, lre = clip_rates.sides(records), {}
    for side in SIDES:
        part, values = records[sides[side]], clipped_at_target[sides[side]]
        against = clip_rates.lre_against_chance(part, values, edges, rng, draws, min_count)
        lre[side] = clip_rates.lre_columns(*against)
    rates = {side: float(clipped[mask].mean()) for side, mask in sides.items()}
    part, values = records[sides["all"]], clipped[sides["all"]]
    by_length = clip_rates.rate_by_length(part["length"], values, edges, clusters=resampling.clusters(part))
    return Judgement(rates, lre, by_length)


def halves(records: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The earlier and the later half of the steps; of one step every other prompt."""
    if records["step"].nunique() > 1:
        steps = np.unique(records["step"])
        later = (records["step"] > steps[(len(steps) - 1) // 2]).to_numpy()
    else:
        later = resampling.clusters(records) % 2 == 1
    return records[~later], records[later]


def _by_mini_batch(records: pd.DataFrame, clipped: np.ndarray) -> pd.DataFrame:
    counted = (records["advantage"] != 0).to_numpy()
    numbers = np.unique(records["mini_batch"])
    rows = []
    for group in np.array_split(numbers, min(len(numbers), _MINI_BATCHES)):
        mask = counted & records["mini_batch"].between(group[0], group[-1]).to_numpy()
        rate = float(clipped[mask].mean()) if mask.any() else math.nan
        rows.append((int(group[0]), int(group[-1]), int(mask.sum()), rate))
    return pd.DataFrame(rows, columns=["first", "last", "n", "rate"])


def _digits(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")
