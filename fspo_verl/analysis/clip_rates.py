# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Clip rates by length, the length reweighting error (LRE) of a clip, and what chance alone would give.

``records`` is everywhere a DataFrame of :mod:`fspo_verl.observe.records`: one row per response and optimiser step. A
clip rate is Σ clipped over the responses that have a gradient to lose (advantage != 0). Lengths are response tokens.
"""

import math

import numpy as np
import pandas as pd

from fspo_verl.analysis import resampling
from fspo_verl.analysis.resampling import CONFIDENCE, UNKNOWN, Estimate, sum_by, t_quantile

_LEVELS = 256  # of a share, in draws by chance
# What a length bin needs to take part in an LRE, or in a regression over bins. Prompts count as well, as the responses
# to a few of them tell little, however many they are.
MIN_COUNT = 50  # responses
MIN_PROMPTS = 10


def clip_rate(records: pd.DataFrame) -> float:
    """Σ clipped over the number of responses with advantage != 0; NaN where there is none."""
    clipped = records["clipped"].to_numpy()[sides(records)["all"]]
    return float(clipped.mean(dtype=np.float64)) if len(clipped) else math.nan


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
    length, clipped, edges, confidence: float = CONFIDENCE, clusters=None, rerun: bool = False
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
        clusters: ``[rows]`` codes of :func:`fspo_verl.analysis.resampling.clusters`, or of what else varies as a whole.
        rerun: the interval is to hold the rate of other data of the same size, and not that of endless data: its
            variance is then twice as large, once for either.

    Raises:
        ValueError: a length is outside the edges.
    """
    clipped = np.asarray(clipped, dtype=np.float64)
    cell, cells = length_cells(length, edges)
    n = np.bincount(cell, minlength=cells)
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = np.bincount(cell, clipped, cells) / n
        quantile, effective, counts = t_quantile(confidence=confidence), n, {}
        if clusters is not None:
            groups, variance = resampling.cluster_variance(np.asarray(clusters), cell, cells, clipped - rate[cell])
            counts, quantile = {"clusters": groups}, t_quantile(groups - 1, confidence)
            binomial = rate * (1 - rate) / n
            effective = np.where(binomial > 0, n / np.maximum(variance / binomial, 1), groups)
        lower, upper = _wilson(rate, effective / 2 if rerun else effective, quantile)
    return length_table(edges, n=n, rate=rate, lower=lower, upper=upper, **counts)


def takes_part(table: pd.DataFrame, min_count: int = MIN_COUNT) -> pd.Series:
    """bool per bin of a table: ``min_count`` responses or more, and 10 prompts (``clusters``) where the table tells."""
    enough = table["n"] >= min_count
    return enough & (table["clusters"] >= MIN_PROMPTS) if "clusters" in table else enough


def length_reweighting_error(table: pd.DataFrame, min_count: int = MIN_COUNT) -> float:
    """Length reweighting error: how far acceptance in a length bin departs from overall acceptance.

    a_b = 1 − rate of bin b, a = acceptance of all responses; LRE = max_b |a_b / a − 1| over the bins that have enough
    responses and prompts (:func:`takes_part`). The paper's formula (arXiv 2509.09177) is not known; this one is derived
    here.

    NaN with fewer than two bins to compare, and where everything is clipped (a = 0). Where nothing is clipped it is 0.

    Args:
        table: of :func:`rate_by_length`.
        min_count: responses that a bin needs to take part.
    """
    n, keep = table["n"].to_numpy(), takes_part(table, min_count).to_numpy()
    return float(_lre(n, n * np.nan_to_num(table["rate"].to_numpy()), keep))


def chance_floor(
    length, clipped, clusters, edges, rng: np.random.Generator, draws: int = 400, min_count: int = MIN_COUNT
) -> Estimate:
    """The LRE that comes out if clips fall on prompts at random: mean over the draws, and their central range.

    Every bin draws its rate as a mean of independent responses, taken from all of them, but of fewer than it has:
    responses over the design effect. What the responses to a prompt have in common then counts once (Rao and Scott,
    doi:10.1214/aos/1176346391). With e = clipped − rate, v its variance over all responses, ρ its correlation between
    two responses to one prompt (at least 0), n_cb the responses of prompt c in bin b, and p_b the bin's share of all,

        design effect = 1 − ρ + ρ·Σ_c (n_cb − p_b n_c)² / (n_b (1 − p_b)), at least 1,

    which is the variance of the bin's excess of clips over that without correlation. Prompts may have any number of
    responses each; where all have the same, this agrees with a permutation of whole prompts. How often it is exceeded
    where all lengths are clipped alike: ``scripts/studies/coverage``. NaN where :func:`length_reweighting_error` is.

    Args:
        length, clipped, clusters, edges: as in :func:`rate_by_length`. Shares that take more than 256 values are
            replaced by the means of 256 groups of equal size, which bounds the cost.
        rng, draws, min_count: source of the draws, how many, and responses that a bin needs.
    """
    clipped = np.asarray(clipped, dtype=np.float64)
    cell, cells = length_cells(length, edges)
    totals = sum_by(np.asarray(clusters), [np.ones(len(clipped)), clipped], cell, cells)
    n, keep = totals[..., 0].sum(0), enough(np.asarray(clusters), cell, cells, min_count)
    if keep.sum() < 2:
        return UNKNOWN
    levels, counts = np.unique(clipped, return_counts=True)
    if len(levels) > _LEVELS:
        groups = np.array_split(np.sort(clipped), _LEVELS)
        levels, counts = np.array([(group.mean(), len(group)) for group in groups]).T
    independent = np.maximum(n / _design_effect(totals, clipped), 1).astype(np.int64)
    rates = [rng.multinomial(size, counts / counts.sum(), draws) @ levels / size for size in independent]
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    drawn = _lre(n, n * np.stack(rates, -1), keep)
    return Estimate(float(drawn.mean()), *np.quantile(drawn, tails).tolist())


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
    records: pd.DataFrame, clipped, edges, rng: np.random.Generator, draws: int = 400, min_count: int = MIN_COUNT
) -> tuple[Estimate, Estimate]:
    """LRE of ``clipped`` ``[rows]`` over the given records with its interval, and :func:`chance_floor`.

    The interval is clustered by prompt. The LRE is a maximum of absolute values, which noise can only raise: where it
    is not above what chance gives, the interval reaches down to 0.
    """
    cluster = resampling.clusters(records)
    cell, cells = length_cells(records["length"], edges)
    totals = sum_by(resampling.pool(cluster, rng), [np.ones(len(records)), clipped], cell, cells)
    keep = enough(cluster, cell, cells, min_count)

    def statistic(totals):
        return _lre(totals[..., 0], totals[..., 1], keep)[..., None]

    value, lower, upper = (part.item() for part in resampling.bootstrap_totals(totals, statistic, rng, draws))
    floor = chance_floor(records["length"], clipped, cluster, edges, rng, draws, min_count)
    return Estimate(value, max(lower, 0.0) if value > floor.upper else 0.0, upper), floor


def lre_columns(lre: Estimate, floor: Estimate) -> dict[str, float]:
    """What :func:`lre_against_chance` returns, as columns of a table."""
    return {
        "lre": lre.value,
        "lre_lower": lre.lower,
        "lre_upper": lre.upper,
        "floor": floor.value,
        "floor_upper": floor.upper,
    }


def _lre(n: np.ndarray, clipped: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """LRE ``[...]`` of responses and clips per bin ``[..., bins]``, over the bins to keep."""
    if keep.sum() < 2:
        return np.full(np.shape(clipped)[:-1], np.nan)
    accepted = n - clipped
    with np.errstate(invalid="ignore", divide="ignore"):
        overall = accepted.sum(-1, keepdims=True) / n.sum(-1, keepdims=True)
        return np.abs(accepted / n / overall - 1)[..., keep].max(-1)


def enough(cluster: np.ndarray, cell: np.ndarray, cells: int, min_count: int) -> np.ndarray:
    """Which bins ``[cells]`` take part, from the cluster and the bin of each response."""
    count = sum_by(cluster, [np.ones(len(cell))], cell, cells)[..., 0]
    return (count.sum(0) >= min_count) & (np.count_nonzero(count, axis=0) >= MIN_PROMPTS)


def length_cells(length, edges) -> tuple[np.ndarray, int]:
    """Number of the length bin of each row, and how many bins there are."""
    length, edges = np.asarray(length), np.asarray(edges)
    if len(length) and not (edges[0] <= length.min() and length.max() < edges[-1]):
        raise ValueError(f"lengths {length.min()} to {length.max()} are not covered by the edges {edges.tolist()}")
    return np.searchsorted(edges, length, side="right") - 1, len(edges) - 1


def length_table(edges, **columns) -> pd.DataFrame:
    """Columns low and high (both lengths in the bin), and those given, a row per bin."""
    edges = np.asarray(edges)
    return pd.DataFrame({"low": edges[:-1], "high": edges[1:] - 1, **columns})


def _wilson(rate, n, quantile) -> tuple[np.ndarray, np.ndarray]:
    spread = quantile**2 / n
    center = (rate + spread / 2) / (1 + spread)
    half = np.sqrt(rate * (1 - rate) * spread + spread**2 / 4) / (1 + spread)
    # The rate belongs to its interval; at 0 and 1 rounding would put it outside.
    return np.minimum(np.maximum(center - half, 0.0), rate), np.maximum(np.minimum(center + half, 1.0), rate)
