# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Length fairness of a clip, and the law of the sequence log-ratio S, from the records of a run.

``records`` is everywhere a DataFrame of :mod:`fspo_verl.records`: one row per response and optimiser step. A clip rate
is Σ clipped over the responses that have a gradient to lose (advantage != 0). The law of S is that of the responses
that have moved (Q > 0). Lengths are response tokens, log-ratios nats.

Intervals resample whole prompts, as the responses to one prompt resemble each other: the cluster is (step, prompt).
They hold for the updates that were recorded, with other prompts; another run takes other updates.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from fspo_verl.loss import Band

# Clusters are pooled at random into at most this many blocks before they are resampled. Sums of independent clusters
# are independent, so the interval stays valid; its width is then known to 1/sqrt(2000), and the cost is bounded.
_BLOCKS = 1000
_LEVELS = 256  # of a share, in draws by chance

# What a length bin needs to take part in an LRE, or in a regression over bins. Prompts count as well, as the responses
# to a few of them tell little, however many they are.
MIN_COUNT = 50  # responses
MIN_PROMPTS = 10


class Estimate(NamedTuple):
    """A number (or an array of them) with its confidence interval; NaN where it cannot be estimated."""

    value: float
    lower: float
    upper: float


class LRE(NamedTuple):
    """Length reweighting error of a table of rates; see :func:`length_reweighting_error`."""

    worst: float  # max over bins of |a_b / a − 1|
    weighted: float  # the same, averaged over bins with their shares of the responses
    excluded_bins: int  # bins left out because they hold too few responses or prompts; empty bins are not counted
    excluded_responses: int  # responses in them


class Floor(NamedTuple):
    """LRE if the clips had fallen at random: mean over draws, and the draws' central range."""

    worst: Estimate
    weighted: Estimate


# --- clip rates by length --------------------------------------------------------------------------------------------


def clip_rate(records: pd.DataFrame) -> float:
    """Σ clipped over the number of responses with advantage != 0; NaN where there is none."""
    clipped = records["clipped"].to_numpy()[sides(records)["all"]]
    return float(clipped.mean(dtype=np.float64)) if len(clipped) else math.nan


def clusters(records: pd.DataFrame) -> np.ndarray:
    """Integer code ``[rows]`` of the cluster (step, prompt) of each row, from 0 without gaps."""
    (step, _), (prompt, prompts) = (pd.factorize(records[name], use_na_sentinel=False) for name in ("step", "prompt"))
    return pd.factorize(step * np.int64(len(prompts)) + prompt)[0]


def sides(records: pd.DataFrame) -> dict[str, np.ndarray]:
    """bool masks ``[rows]``: ``all`` (A != 0), ``upper`` (A > 0, clipped above), ``lower`` (A < 0, below or dual)."""
    advantage = records["advantage"].to_numpy()
    return {"all": advantage != 0, "upper": advantage > 0, "lower": advantage < 0}


def length_edges(length, bins: int = 8) -> np.ndarray:
    """Rising integer edges of up to ``bins`` log-spaced bins [edges[i], edges[i+1]) that cover all lengths.

    There are fewer bins where the lengths span few integers: one for a single length, none (one edge) without lengths.

    Raises:
        ValueError: a length is below 1.
    """
    length = np.asarray(length)
    if not len(length):
        return np.array([1])
    if length.min() < 1:
        raise ValueError(f"lengths are response tokens and at least 1, got {length.min()}")
    return np.unique(np.rint(np.geomspace(length.min(), length.max() + 1, bins + 1)).astype(np.int64))


def rate_by_length(
    length, clipped, edges, confidence: float = 0.95, clusters=None, rerun: bool = False
) -> pd.DataFrame:
    """Rate in each length bin with its Wilson interval: columns low, high, n, rate, lower, upper, clusters if given.

    ``high`` is the last length in the bin; an empty bin has NaN for its rate and interval. Without ``clusters`` the
    interval takes responses for independent (and is then wider than necessary for shares between 0 and 1). With them
    it is Wilson's interval at n over the design effect, the ratio of the variance of the rate between clusters to the
    binomial one, at least 1, and with Student's t for the normal quantile; where every response of a bin has the same
    outcome, each cluster counts as one response. One cluster alone has no interval.

    Args:
        length: ``[rows]`` tokens.
        clipped: ``[rows]`` bool, or shares between 0 and 1.
        edges: of :func:`length_edges`.
        confidence: of the interval.
        clusters: ``[rows]`` codes of :func:`clusters`, or of whatever else varies as a whole.
        rerun: the interval is to hold the rate of other data of the same size, and not that of endless data: its
            variance is then twice as large, once for either.

    Raises:
        ValueError: a length is outside the edges.
    """
    clipped = np.asarray(clipped, dtype=np.float64)
    cell, cells = _cells(length, edges)
    n = np.bincount(cell, minlength=cells)
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = np.bincount(cell, clipped, cells) / n
        quantile = np.full(cells, _quantile(confidence))
        effective, counts = n.astype(np.float64), {}
        if clusters is not None:
            groups, variance = _cluster_variance(np.asarray(clusters), cell, cells, clipped - rate[cell])
            counts = {"clusters": groups}
            quantile = _quantile(confidence, groups - 1)
            binomial = rate * (1 - rate) / n
            effective = np.where(binomial > 0, n / np.maximum(variance / binomial, 1), groups)
        lower, upper = _wilson(rate, effective / 2 if rerun else effective, quantile)
    return _table(edges, n=n, rate=rate, lower=lower, upper=upper, **counts)


def takes_part(table: pd.DataFrame, min_count: int = MIN_COUNT) -> pd.Series:
    """bool per bin of a table: ``min_count`` responses or more, and 10 prompts (``clusters``) where the table tells."""
    enough = table["n"] >= min_count
    return enough & (table["clusters"] >= MIN_PROMPTS) if "clusters" in table else enough


def length_reweighting_error(table: pd.DataFrame, min_count: int = MIN_COUNT) -> LRE:
    """Length reweighting error: how far acceptance in a length bin departs from overall acceptance.

    a_b = 1 − rate of bin b, a = acceptance of all responses; LRE = max_b |a_b / a − 1| over the bins that have enough
    responses and prompts (:func:`takes_part`), and the mean of |a_b / a − 1| with the shares of these bins beside it.
    The paper's formula (arXiv 2509.09177) is not known; this one is derived here.

    NaN with fewer than two bins to compare, and where everything is clipped (a = 0). Where nothing is clipped it is 0.

    Args:
        table: of :func:`rate_by_length`.
        min_count: responses that a bin needs to take part.
    """
    n, keep = table["n"].to_numpy(), takes_part(table, min_count).to_numpy()
    worst, weighted = _lre(n, n * np.nan_to_num(table["rate"].to_numpy()), keep)
    excluded = ~keep & (n > 0)
    return LRE(float(worst), float(weighted), int(excluded.sum()), int(n[excluded].sum()))


def chance_floor(
    length,
    clipped,
    clusters,
    edges,
    rng: np.random.Generator,
    draws: int = 400,
    min_count: int = MIN_COUNT,
    confidence: float = 0.95,
) -> Floor:
    """The LRE that comes out if clips fall on prompts at random, whatever their lengths.

    Every bin draws its rate as a mean of independent responses, taken from all of them, but of fewer than it has:
    responses over the design effect. What the responses to a prompt have in common then counts once (Rao and Scott,
    doi:10.1214/aos/1176346391). With e = clipped − rate, v its variance over all responses, ρ its correlation between
    two responses to one prompt (at least 0), n_cb the responses of prompt c in bin b, and p_b the bin's share of all,

        design effect = 1 − ρ + ρ·Σ_c (n_cb − p_b n_c)² / (n_b (1 − p_b)), at least 1,

    which is the variance of the bin's excess of clips over that without correlation. Prompts may have any number of
    responses each; where all have the same, this agrees with a permutation of whole prompts. How often it is exceeded
    where all lengths are clipped alike is in ``docs/coverage.md``. NaN where :func:`length_reweighting_error` is.

    Args:
        length, clipped, clusters, edges: as in :func:`rate_by_length`. Shares that take more than 256 values are
            replaced by the means of 256 groups of equal size, which bounds the cost.
        rng: source of the draws.
        draws, min_count, confidence: how many draws, responses that a bin needs, and the central range of the draws.
    """
    clipped = np.asarray(clipped, dtype=np.float64)
    cell, cells = _cells(length, edges)
    totals = _totals(np.asarray(clusters), [np.ones(len(clipped)), clipped], cell, cells)
    n, keep = totals[..., 0].sum(0), _enough(totals[..., 0], min_count)
    if keep.sum() < 2:
        nothing = Estimate(math.nan, math.nan, math.nan)
        return Floor(nothing, nothing)
    levels, counts = np.unique(clipped, return_counts=True)
    if len(levels) > _LEVELS:
        groups = np.array_split(np.sort(clipped), _LEVELS)
        levels, counts = np.array([(group.mean(), len(group)) for group in groups]).T
    independent = np.maximum(n / _design_effect(totals, clipped), 1).astype(np.int64)
    rates = [rng.multinomial(size, counts / counts.sum(), draws) @ levels / size for size in independent]
    tail = (1 - confidence) / 2
    return Floor(
        *(
            Estimate(float(value.mean()), *np.quantile(value, [tail, 1 - tail]).tolist())
            for value in _lre(n, n * np.stack(rates, -1), keep)
        )
    )


def _design_effect(totals: np.ndarray, clipped: np.ndarray) -> np.ndarray:
    """Design effect of each bin, see :func:`chance_floor`; from responses and clips ``[clusters, bins, 2]``."""
    count, size = totals[..., 0], totals[..., 0].sum(-1)
    squares = np.square(clipped - clipped.mean()).sum()
    pairs = (size * (size - 1)).sum()
    excess = totals[..., 1].sum(-1) - clipped.mean() * size
    alike = 0.0
    if squares > 0 and pairs > 0:
        alike = max((np.square(excess).sum() - squares) / pairs / (squares / len(clipped)), 0.0)
    n = count.sum(0)
    share = n / n.sum()
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.square(count - share * size[:, None]).sum(0) / (n * (1 - share))
    return np.maximum(1 - alike + alike * np.nan_to_num(spread), 1)


def lre_against_chance(
    records: pd.DataFrame,
    clipped,
    edges,
    rng: np.random.Generator,
    draws: int = 400,
    min_count: int = MIN_COUNT,
    confidence: float = 0.95,
) -> tuple[Estimate, Floor]:
    """Worst-bin LRE of ``clipped`` ``[rows]`` over the given records with its interval, and :func:`chance_floor`.

    The interval is clustered by prompt. The LRE is a maximum of absolute values, which noise can only raise: where it
    is not above what chance gives, the interval reaches down to 0.
    """
    cluster = clusters(records)
    cell, cells = _cells(records["length"], edges)
    totals = _totals(_pool(cluster, rng), [np.ones(len(records)), clipped], cell, cells)
    keep = _enough(_totals(cluster, [np.ones(len(records))], cell, cells)[..., 0], min_count)

    def worst(totals):
        return _lre(totals[..., 0], totals[..., 1], keep)[0][..., None]

    value, lower, upper = (number.item() for number in _bootstrap(totals, worst, rng, draws, confidence))
    floor = chance_floor(records["length"], clipped, cluster, edges, rng, draws, min_count, confidence)
    return Estimate(value, max(lower, 0.0) if value > floor.worst.upper else 0.0, upper), floor


def cosine_bound(lre, kappa):
    """sqrt(1 − (kappa·LRE)²), a lower bound on the cosine between clipped and true update; NaN for kappa·LRE >= 1.

    Derived here. Let g_b be the mean gradient in bin b, p_b the bin's share, g = Σ p_b g_b, and let accepted gradients
    be unbiased within a bin. The clipped update is Σ p_b a_b g_b = a·(g + Σ p_b (a_b/a − 1) g_b), whose last sum is no
    longer than LRE·Σ p_b |g_b| = kappa·LRE·|g| with kappa = Σ p_b |g_b| / |g| >= 1. That kappa is one of gradients,
    not :attr:`LawOfS.kappa`, and it is not in the records. LRE is the worst one over all bins.
    """
    product = np.asarray(lre, dtype=np.float64) * kappa
    return np.sqrt(np.where(product < 1, 1 - product**2, np.nan))[()]


def _lre(n: np.ndarray, clipped: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Worst and weighted LRE ``[...]`` of responses and clips per bin ``[..., bins]``, over the bins to keep."""
    shape = np.shape(clipped)[:-1]
    if keep.sum() < 2:
        return np.full(shape, np.nan), np.full(shape, np.nan)
    accepted = n - clipped
    with np.errstate(invalid="ignore", divide="ignore"):
        overall = accepted.sum(-1, keepdims=True) / n.sum(-1, keepdims=True)
        error = np.abs(accepted / n / overall - 1)[..., keep]
        weight = np.broadcast_to(n, accepted.shape)[..., keep]
        return error.max(-1), (weight * error).sum(-1) / weight.sum(-1)


def _enough(count: np.ndarray, min_count: int) -> np.ndarray:
    """Which bins take part, from the responses ``[clusters, bins]``."""
    return (count.sum(0) >= min_count) & (np.count_nonzero(count, axis=0) >= MIN_PROMPTS)


def _cells(length, edges) -> tuple[np.ndarray, int]:
    """Number of the length bin of each row, and how many bins there are."""
    length, edges = np.asarray(length), np.asarray(edges)
    if len(length) and not (edges[0] <= length.min() and length.max() < edges[-1]):
        raise ValueError(f"lengths {length.min()} to {length.max()} are not covered by the edges {edges.tolist()}")
    return np.searchsorted(edges, length, side="right") - 1, len(edges) - 1


def _table(edges, **columns) -> pd.DataFrame:
    edges = np.asarray(edges)
    return pd.DataFrame({"low": edges[:-1], "high": edges[1:] - 1, **columns})


def _quantile(confidence: float, freedom=None):
    """Of Student's t, or of the normal law without ``freedom``: ``confidence`` lies between its negative and itself."""
    from scipy import stats  # here: a run that trains takes its LRE from this module, and scipy comes with an extra

    law = stats.norm() if freedom is None else stats.t(freedom)
    return law.ppf((1 + confidence) / 2)


def _wilson(rate, n, quantile) -> tuple[np.ndarray, np.ndarray]:
    spread = quantile**2 / n
    center = (rate + spread / 2) / (1 + spread)
    half = np.sqrt(rate * (1 - rate) * spread + spread**2 / 4) / (1 + spread)
    # The rate belongs to its interval; at 0 and 1 rounding would put it outside.
    return np.minimum(np.maximum(center - half, 0.0), rate), np.maximum(np.minimum(center + half, 1.0), rate)


def _cluster_variance(cluster, cell, cells, residual) -> tuple[np.ndarray, np.ndarray]:
    """Number of clusters in each bin, and the variance of the bin's mean if clusters are independent draws."""
    totals = _totals(cluster, [np.ones(len(cell)), residual], cell, cells)
    groups = np.count_nonzero(totals[..., 0], axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return groups, groups / (groups - 1) * np.square(totals[..., 1]).sum(0) / totals[..., 0].sum(0) ** 2


# --- resampling ------------------------------------------------------------------------------------------------------


def clustered_bootstrap(
    cluster,
    columns,
    statistic: Callable[[np.ndarray], np.ndarray],
    rng: np.random.Generator,
    draws: int = 400,
    confidence: float = 0.95,
) -> Estimate:
    """A function of column totals, with an interval from resampling whole clusters.

    The interval is value ± t · (standard deviation over the draws), with Student's t. Its degrees of freedom are those
    of the variance Σψ², ψ the change of the value when one cluster is left out: 2 (Σψ²)² / (Σψ⁴ − (Σψ²)²/clusters),
    which is the number of clusters where the ψ are Gaussian, and less where few clusters decide. This covers better
    than percentiles. NaN for a single cluster; a draw without a value (NaN) is left out.

    Args:
        cluster: ``[rows]`` codes from 0, see :func:`clusters`.
        columns: ``[rows, K]`` numbers.
        statistic: maps totals ``[..., K]`` to ``[..., M]``; the dots run over the draws.
        rng: source of the draws.
        draws: how many.
        confidence: of the interval.

    Returns:
        An :class:`Estimate` of arrays ``[M]``.
    """
    columns = np.asarray(columns).T
    return _bootstrap(_totals(_pool(cluster, rng), columns)[:, 0], statistic, rng, draws, confidence)


def _bootstrap(totals: np.ndarray, statistic: Callable, rng, draws: int, confidence: float) -> Estimate:
    """:func:`clustered_bootstrap` from totals ``[clusters, ...]`` of any shape, which ``statistic`` gets summed."""
    count, whole = len(totals), totals.sum(0)
    value = statistic(whole)
    if count < 2:
        nothing = np.full_like(value, np.nan)
        return Estimate(value, nothing, nothing)
    weights = rng.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)
    drawn = statistic((weights @ totals.reshape(count, -1)).reshape(draws, *totals.shape[1:]))
    influence = statistic(whole - totals) - value
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.filterwarnings("ignore", "Degrees of freedom <= 0", RuntimeWarning)  # no draw has a value: NaN
        deviation = np.nanstd(np.where(np.isfinite(drawn), drawn, np.nan), axis=0, ddof=1)
        influence -= influence.mean(0)
        squares = np.square(influence).sum(0)
        freedom = 2 / (np.power(influence, 4).sum(0) / squares**2 - 1 / count)
    freedom = np.where(squares > 0, np.clip(freedom, 1, count - 1), count - 1)
    half = _quantile(confidence, freedom) * deviation * np.sqrt(count / (count - 1))
    return Estimate(value, value - half, value + half)


def _pool(cluster, rng: np.random.Generator) -> np.ndarray:
    """Codes ``[rows]`` of at most 1,000 blocks of clusters, each cluster whole in one block drawn at random."""
    cluster = np.asarray(cluster)
    count = int(cluster.max()) + 1 if len(cluster) else 0
    return cluster if count <= _BLOCKS else (rng.permutation(count) % _BLOCKS)[cluster]


def _totals(code: np.ndarray, columns, cell=0, cells: int = 1) -> np.ndarray:
    """Totals ``[codes, cells, K]`` of K columns ``[rows]``, by a code and a cell of each row."""
    codes = int(code.max()) + 1 if len(code) else 0
    place = code * np.int64(cells) + cell
    totals = [np.bincount(place, np.asarray(column), codes * cells) for column in columns]
    return np.stack(totals, -1).reshape(codes, cells, len(totals))


# --- the law of S ----------------------------------------------------------------------------------------------------


class VarianceLaw(NamedTuple):
    """Var(S | L) = constant + linear·L + quadratic·L², nats².

    Independent tokens of one variance have only the linear term. A constant comes from tokens that every response has
    (its last ones), a quadratic term from moves that all tokens of a response share.
    """

    constant: Estimate
    linear: Estimate
    quadratic: Estimate


@dataclass(frozen=True)
class LawOfS:
    """What :func:`law_of_s` estimates. Tables have the columns low, high, n, value, lower, upper."""

    responses: int  # that have moved
    sigma: Estimate  # sqrt(mean Q/L): spread of a token's log-ratio
    sigma_by_length: pd.DataFrame
    drift_by_length: pd.DataFrame  # mean S/L, nats per token
    std_by_length: pd.DataFrame  # standard deviation of S around the bin's drift per token
    variation_by_length: pd.DataFrame  # sqrt(mean Q), that is sigma·sqrt(L) at these lengths
    ratio_by_length: pd.DataFrame  # mean e^S
    last_share_by_length: pd.DataFrame  # part of Q in the last tokens of the responses
    top_share_by_length: pd.DataFrame  # part of Q in the largest 1% of their tokens
    last_share: Estimate  # the same over all lengths
    top_share: Estimate
    kappa: Estimate  # mean S / mean(−Q/2): 1 if S drifts by −Q/2, 0 if not at all
    std_slope: Estimate  # of log std(S) against log L; FSPO assumes 0.5
    variance_law: VarianceLaw


_LAW_COLUMNS = ("n", "L", "L2", "S", "S2", "SL", "Q", "Q_per_L", "S_per_L", "ratio", "last", "top")
_CURVES = ("sigma", "drift", "std", "variation", "ratio", "last_share", "top_share")


def law_of_s(
    records: pd.DataFrame,
    edges,
    rng: np.random.Generator,
    draws: int = 400,
    min_count: int = MIN_COUNT,
    confidence: float = 0.95,
) -> LawOfS:
    """Estimate the law of S over the responses that have moved (Q > 0), with intervals clustered by prompt.

    Per bin, the standard deviation of S is taken around d·L, d = ΣS/ΣL of the bin, so that the drift within a bin does
    not count as spread. ``std_slope`` is the least-squares slope of its logarithm against the logarithm of the bin's
    mean length, each bin weighted with its responses. ``variance_law`` is the least-squares fit of its square on 1,
    mean L and mean L², each bin weighted with responses / (mean L)², which is the inverse variance of the left side
    up to a constant if Var(S) ∝ L; signs are left free. (Derived here; the quantities are those of
    :class:`fspo_verl.loss.Band`.)

    Bins with fewer than ``min_count`` responses or 10 prompts keep their value in the tables, with no interval, and
    take no part in slope and variance law. These need two and three bins, and are NaN otherwise. Without a response
    that has moved everything is NaN.
    """
    moved = records[records["quadratic_variation"] > 0]
    cell, cells = _cells(moved["length"], edges)
    length, s, q, last, top, ratio = (
        moved[name].to_numpy(np.float64)
        for name in (
            "length",
            "log_ratio",
            "quadratic_variation",
            "quadratic_variation_last",
            "quadratic_variation_top",
            "ratio",
        )
    )
    columns = [np.ones(len(moved)), length, length**2, s, s**2, s * length, q, q / length, s / length, ratio, last, top]
    cluster = clusters(moved)
    n = np.bincount(cell, minlength=cells)
    prompts = _cluster_variance(cluster, cell, cells, np.zeros(len(cell)))[0]
    usable = (n >= min_count) & (prompts >= MIN_PROMPTS)

    def statistic(totals):
        with np.errstate(invalid="ignore", divide="ignore"):
            by_bin = dict(zip(_LAW_COLUMNS, np.moveaxis(totals, -1, 0), strict=True))
            everything = {name: column.sum(-1) for name, column in by_bin.items()}
            curves, means = _curves(by_bin), _curves(everything)
            overall = [means["sigma"], means["last_share"], means["top_share"], -2 * everything["S"] / everything["Q"]]
            slope, fit = _std_slope(by_bin, curves, usable), _variance_law(by_bin, curves, usable)
            return np.concatenate([*(curves[name] for name in _CURVES), np.stack([*overall, slope], -1), fit], -1)

    estimate = _bootstrap(_totals(_pool(cluster, rng), columns, cell, cells), statistic, rng, draws, confidence)
    curves = np.stack(estimate)[:, : cells * len(_CURVES)].reshape(3, len(_CURVES), cells)
    curves[1:, :, ~usable] = np.nan
    tables = {
        f"{name}_by_length": _table(edges, n=n, value=value, lower=lower, upper=upper)
        for name, (value, lower, upper) in zip(_CURVES, curves.swapaxes(0, 1), strict=True)
    }
    sigma, last_share, top_share, kappa, std_slope, *variance = (
        Estimate(*numbers) for numbers in np.stack(estimate)[:, cells * len(_CURVES) :].T.tolist()
    )
    return LawOfS(
        responses=len(moved),
        sigma=sigma,
        last_share=last_share,
        top_share=top_share,
        kappa=kappa,
        std_slope=std_slope,
        variance_law=VarianceLaw(*variance),
        **tables,
    )


def _curves(totals: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    n, drift = totals["n"], totals["S"] / totals["L"]
    squares = totals["S2"] - 2 * drift * totals["SL"] + drift**2 * totals["L2"]
    return {
        "sigma": np.sqrt(totals["Q_per_L"] / n),
        "drift": totals["S_per_L"] / n,
        "std": np.sqrt(np.maximum(squares, 0.0) / np.where(n > 1, n - 1, np.nan)),
        "variation": np.sqrt(totals["Q"] / n),
        "ratio": totals["ratio"] / n,
        "last_share": totals["last"] / totals["Q"],
        "top_share": totals["top"] / totals["Q"],
    }


def _std_slope(by_bin, curves, usable: np.ndarray) -> np.ndarray:
    if usable.sum() < 2:
        return np.full(by_bin["n"].shape[:-1], np.nan)
    weight = by_bin["n"][..., usable]
    x = np.log(by_bin["L"] / by_bin["n"])[..., usable]
    y = np.log(curves["std"])[..., usable]
    x = x - (weight * x).sum(-1, keepdims=True) / weight.sum(-1, keepdims=True)
    return (weight * x * y).sum(-1) / (weight * x * x).sum(-1)


def _variance_law(by_bin, curves, usable: np.ndarray) -> np.ndarray:
    """Coefficients ``[..., 3]``."""
    n = by_bin["n"][..., usable]
    if usable.sum() < 3:
        return np.full((*n.shape[:-1], 3), np.nan)
    length, length2 = by_bin["L"][..., usable] / n, by_bin["L2"][..., usable] / n
    unit = np.nanmax(length)  # so that the three columns are of one size; NaN where a draw leaves a bin empty
    weight = n * (unit / length) ** 2
    x = np.stack([np.ones_like(length), length / unit, length2 / unit**2], -1)
    transposed = np.swapaxes(x * weight[..., None], -1, -2)
    y = curves["std"][..., usable, None] ** 2
    broken = ~np.isfinite(transposed @ y).all((-1, -2))
    normal = np.where(broken[..., None, None], 0.0, transposed @ x)
    fit = (np.linalg.pinv(normal, hermitian=True) @ (transposed @ y))[..., 0]
    return fit / np.array([1.0, unit, unit**2])


def fair_length(eps, sigma, kappa=1.0):
    """(2 eps / (kappa·sigma²))², tokens: from here on the drift is larger than the half-width of a zero-centred band.

    S drifts by −kappa·sigma²·L/2, the band reaches eps·sqrt(L) below 0: the band treats lengths alike far below this
    length only. Derived here; infinite where there is no drift.
    """
    drift = np.asarray(kappa, dtype=np.float64) * np.square(sigma)
    with np.errstate(divide="ignore"):
        return np.where(drift > 0, np.square(2 * np.asarray(eps) / np.abs(drift)), np.inf)[()]


def effective_sample_size(ratio) -> float:
    """(Σw)² / Σw² of importance-sampling ratios w ``[rows]``: 1 to the number of rows, NaN without a ratio."""
    ratio = np.asarray(ratio, dtype=np.float64)
    return float(ratio.sum() ** 2 / np.square(ratio).sum()) if len(ratio) else math.nan


# --- what other clips would have done --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A clip that can be applied to records after the fact."""

    name: str
    label: str  # for tables and legends
    band: Band | None  # None: token by token, as recorded in tokens_clipped
    note: str = ""  # what a reader should know before choosing it

    def clipped(self, records: pd.DataFrame) -> np.ndarray:
        """Share ``[rows]`` of each response that loses its gradient, given the sign of its advantage.

        0 or 1 for a band: with A > 0 above it, with A < 0 below it or above the dual clip. Edges are computed and
        compared in float32, as by the loss that trains. An advantage that varies along a response counts with its mean.
        """
        side = sides(records)
        if self.band is None:
            return np.where(side["all"], records["tokens_clipped"] / records["length"], 0.0)
        s = records["log_ratio"].to_numpy()
        low, high, dual = _edges(self.band, records, np.float32)
        return np.where(side["lower"], (s < low) | (s > dual), side["upper"] & (s > high)).astype(np.float64)

    def outside(self, records: pd.DataFrame) -> np.ndarray:
        """bool ``[rows]``: S outside the band, whatever the advantage; an edge is inside.

        Raises:
            ValueError: the method works token by token, and the records hold its clips by sign only.
        """
        if self.band is None:
            raise ValueError(f"{self.name} clips token by token: the records do not tell what is outside its range")
        s = records["log_ratio"].to_numpy()
        low, high, _ = _edges(self.band, records, np.float32)
        return (s < low) | (s > high)

    def matched(self, records: pd.DataFrame, rate: float) -> "Method":
        """The method with all its eps multiplied by the one number at which :meth:`clipped` has this overall rate.

        The number is exact on these records: one response less would be clipped with any larger one. (Responses whose
        S ties with the edge in float32 may fall on either side.)

        Raises:
            ValueError: the method works token by token, or too few responses are on the clipped side of the centre.
        """
        if self.band is None:
            raise ValueError(f"{self.name} clips token by token: the records hold its clips at one range only")
        side = sides(records)
        score = standardized(records, self.band)
        dual = math.inf if self.band.eps_dual is None else self.band.eps_dual
        below = np.maximum(-score / self.band.eps_low, score / dual)
        multiple = np.where(side["lower"], below, score / self.band.eps_high)[side["all"]]
        if not len(multiple):
            raise ValueError(f"no clip rate of {rate:g} can be matched: no response has an advantage")
        factor = upper_quantile(multiple, rate)
        if factor <= 0:
            raise ValueError(
                f"{self.name} cannot clip {rate:g} of these responses, as only {np.mean(multiple > 0):.3g} of them "
                "have moved to the side on which they can be clipped"
            )
        eps = {"eps_low": self.band.eps_low * factor, "eps_high": self.band.eps_high * factor}
        eps["eps_dual"] = None if self.band.eps_dual is None else self.band.eps_dual * factor
        return dataclasses.replace(self, band=dataclasses.replace(self.band, **eps))


def standardized(records: pd.DataFrame, band: Band) -> np.ndarray:
    """(S − c) / s ``[rows]`` with the band's centre c and scale s; 0 where s is 0, as S is then too."""
    unit = dataclasses.replace(band, eps_low=1.0, eps_high=1.0, eps_dual=None)
    low, high, _ = _edges(unit, records, np.float64)
    center, scale = (high + low) / 2, (high - low) / 2
    return np.where(scale > 0, records["log_ratio"].to_numpy(np.float64) - center, 0.0) / np.where(scale > 0, scale, 1)


def upper_quantile(values, share: float) -> float:
    """The smallest of the ``values`` beyond which at most ``share`` of them lie (0 <= share < 1)."""
    beyond = math.floor(share * len(values) + 1e-9)  # the product of a decimal fraction may fall short of an integer
    place = len(values) - 1 - beyond
    return float(np.partition(values, place)[place])


def _edges(band: Band, records: pd.DataFrame, dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    columns = (torch.tensor(records[name].to_numpy(dtype)) for name in ("length", "quadratic_variation"))
    return tuple(edge.numpy() for edge in band.edges(*columns))


_GSPO = {"eps_low": -math.log1p(-3e-4), "eps_high": math.log1p(4e-4)}
_RLOO = {"eps_low": -math.log1p(-0.2), "eps_high": math.log1p(0.2)}
_STUDENTIZED = {"eps_low": 1.5, "eps_high": 1.5, "eps_dual": 4.5, "band_width": "realized"}

METHODS = {
    method.name: method
    for method in (
        Method("fspo", "FSPO", Band()),
        Method("fspo_centered", "FSPO, centre -Q/2", Band(band_center="realized")),
        Method(
            "fspo_studentized",
            "FSPO, centre -Q/2, width sqrt(Q)",
            Band(band_center="realized", **_STUDENTIZED),
            "the width grows with the policy's move: no trust region",
        ),
        Method(
            "fspo_width",
            "FSPO, width sqrt(Q)",
            Band(**_STUDENTIZED),
            "one-sided where S drifts: a drift of -Q/2 outgrows a width of sqrt(Q)",
        ),
        Method("gspo", "GSPO", Band(**_GSPO, eps_dual=None, length_power=1.0)),
        Method("rloo", "RLOO, ratio 1 ± 0.2", Band(**_RLOO, eps_dual=None, length_power=0.0)),
        Method("grpo", "GRPO, token ratio 1 ± 0.2", None, "clips tokens: its rate is the mean share of a response"),
    )
}
"""The clips of :func:`counterfactuals` at their usual constants: FSPO's defaults, 1.5 standard deviations where eps
counts those, GSPO's 3e-4 and 4e-4 (arXiv 2507.18071), and verl's default ratio range 1 ± 0.2 for RLOO and GRPO."""


class Counterfactuals(NamedTuple):
    """What :func:`counterfactuals` returns. ``side`` is all, upper, lower (see :func:`sides`) or outside.

    The rates of ``outside`` are those of all responses, whatever their advantage.
    """

    by_length: pd.DataFrame  # method, side, low, high, n, rate, lower, upper
    summary: pd.DataFrame  # method, side, eps_low, eps_high, eps_dual, n, rate, lower, upper and those of _LRE_COLUMNS


_LRE_COLUMNS = (
    "lre",
    "lre_lower",
    "lre_upper",
    "lre_weighted",
    "floor",
    "floor_upper",
    "excluded_bins",
    "excluded_responses",
)


def counterfactuals(
    records: pd.DataFrame,
    edges,
    rng: np.random.Generator,
    match_rate: float | None = None,
    methods: Mapping[str, Method] | None = None,
    draws: int = 400,
    min_count: int = MIN_COUNT,
    confidence: float = 0.95,
) -> Counterfactuals:
    """What each method would have clipped on these records, per length bin and side, with intervals and LRE.

    It is the answer for the recorded updates: trained with another clip, the policy would have moved otherwise.

    Args:
        records: the run; all responses, moved or not.
        edges: of :func:`length_edges`.
        rng: source of all draws.
        match_rate: None for the methods' own constants. A number scales each method to clip this share of the
            responses with advantage != 0, so that shapes are compared and not constants; methods that clip token by
            token are then left out.
        methods: default :data:`METHODS`.
        draws, min_count, confidence: as in :func:`lre_against_chance`.

    Raises:
        ValueError: a method cannot reach ``match_rate`` on these records.
    """
    methods = METHODS if methods is None else methods
    if match_rate is not None:
        methods = {name: method.matched(records, match_rate) for name, method in methods.items() if method.band}
    cluster = clusters(records)
    tables, rows = [], []
    for name, method in methods.items():
        clipped = method.clipped(records)
        cases = {side: (mask, clipped) for side, mask in sides(records).items()}
        if method.band:
            cases["outside"] = np.ones(len(records), bool), method.outside(records)
        eps = {field: method.band and getattr(method.band, field) for field in ("eps_low", "eps_high", "eps_dual")}
        for side, (mask, values) in cases.items():
            part, values = records[mask], values[mask]
            table = rate_by_length(part["length"], values, edges, confidence, cluster[mask])
            overall = rate_by_length(part["length"], values, edges[[0, -1]], confidence, cluster[mask])
            lre = length_reweighting_error(table, min_count)
            error, (floor, _) = lre_against_chance(part, values, edges, rng, draws, min_count, confidence)
            numbers = (*error, lre.weighted, floor.value, floor.upper, *lre[2:])
            tables.append(table.assign(method=name, side=side))
            rows.append(
                {"method": name, "side": side, **eps}
                | overall.drop(columns=["low", "high", "clusters"]).to_dict("records")[0]
                | dict(zip(_LRE_COLUMNS, numbers, strict=True))
            )
    first = ["method", "side"]
    by_length = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=first)
    return Counterfactuals(by_length[first + [c for c in by_length if c not in first]], pd.DataFrame(rows))
