# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Clip rates by length, and the length reweighting error (LRE) of a clip.

``records`` is everywhere a DataFrame of :mod:`fspo_verl.observe.records`: one row per response and optimiser step. A
clip rate is Σ clipped over the responses that have a gradient to lose (advantage != 0). Lengths are response tokens.
"""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from fspo_verl.observe import quotients
from fspo_verl.observe.quotients import MIN_COUNT, Counted, parts

CONFIDENCE = 0.95
"""The level of all intervals."""

MIN_BIN_PROMPTS = 10
"""Prompts that a length bin needs besides :data:`MIN_COUNT` responses: a few tell little, however many responses."""


class Estimate(NamedTuple):
    """A number (or an array of them) with its confidence interval; NaN where it cannot be estimated."""

    value: float
    lower: float
    upper: float

    def __format__(self, form: str) -> str:
        value, lower, upper = (number(part, form) for part in self)
        return value if math.isnan(self.lower) and math.isnan(self.upper) else f"{value} [{lower}, {upper}]"


def number(value: float, form: str) -> str:
    """A number in this format; a dash for NaN."""
    return "-" if math.isnan(value) else format(value, form)


def prompts_of(records: pd.DataFrame) -> np.ndarray:
    """Number ``[rows]`` of the prompt, from 0 without gaps; the same in every epoch if the records have its hash."""
    name = "prompt_text_hash" if "prompt_text_hash" in records else "prompt"
    return pd.factorize(records[name], use_na_sentinel=False)[0]


def strata_of(records: pd.DataFrame) -> np.ndarray:
    """Integer code ``[rows]`` of step, mini-batch and sign of the advantage; from 0 without gaps."""
    step, mini_batch = (records[name].to_numpy(np.int64) for name in ("step", "mini_batch"))
    code = step * (mini_batch.max(initial=0) + 1) + mini_batch
    return pd.factorize(2 * code + (records["advantage"].to_numpy() > 0))[0]


def third_of(length: np.ndarray) -> np.ndarray:
    """0, 1 or 2 ``[rows]``: of the short, the middle or the long responses; all middle where they have one length."""
    lengths, counts = np.unique(length, return_counts=True)
    thirds = parts(Counted(one, one, count, 0) for one, count in zip(lengths, counts, strict=True))
    if not thirds:
        return np.ones(len(length), np.int64)
    return (length > thirds[0].longest).astype(np.int64) + (length >= thirds[-1].shortest)


def t_quantile(freedom):
    """The quantile of Student's t between whose negative and itself the share :data:`CONFIDENCE` lies."""
    return stdtrit(freedom, (1 + CONFIDENCE) / 2)


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


def rate_by_length(length, clipped, edges, clusters) -> pd.DataFrame:
    """Rate in each length bin with its interval: columns low, high, n, rate, lower, upper, clusters.

    ``high`` is the last length in the bin; an empty bin has NaN for its rate and interval. The interval is Wilson's at
    n over the design effect, the ratio of the variance of the rate between clusters to the binomial one, at least 1,
    and with Student's t for the normal quantile; where every response of a bin has the same outcome, each cluster
    counts as one response. One cluster alone has no interval.

    Args:
        length: ``[rows]`` tokens.
        clipped: ``[rows]`` bool, or shares between 0 and 1.
        edges: of :func:`length_edges`.
        clusters: ``[rows]`` codes of :func:`prompts_of`, or of what else varies as a whole.

    Raises:
        ValueError: a length is outside the edges.
    """
    cell, cells = length_cells(length, edges)
    clipped = np.asarray(clipped, dtype=np.float64)
    n = np.bincount(cell, minlength=cells)
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = np.bincount(cell, clipped, cells) / n
        groups, variance = _between_clusters(np.asarray(clusters), cell, cells, clipped - rate[cell])
        binomial = rate * (1 - rate) / n
        effective = np.where(binomial > 0, n / np.maximum(variance / binomial, 1), groups)
        lower, upper = _wilson(rate, effective, t_quantile(groups - 1))
    return length_table(edges, n=n, rate=rate, lower=lower, upper=upper, clusters=groups)


def has_enough_data(table: pd.DataFrame, min_count: int = MIN_COUNT) -> pd.Series:
    """bool per bin: it has ``min_count`` responses or more, and 10 prompts if the table has ``clusters``."""
    enough = table["n"] >= min_count
    return enough & (table["clusters"] >= MIN_BIN_PROMPTS) if "clusters" in table else enough


def length_reweighting_error(table: pd.DataFrame, min_count: int = MIN_COUNT) -> float:
    """Length reweighting error: how far acceptance in a length bin departs from overall acceptance.

    a_b = 1 − rate of bin b, a = acceptance of all responses; LRE = max_b |a_b / a − 1| over the bins that have enough
    responses and prompts (:func:`has_enough_data`). The paper's formula (arXiv 2509.09177) is not known; this one
    is derived here. Noise can only raise it: :func:`fspo_verl.analysis.length_effect.length_effect` is the test.

    NaN with fewer than two bins to compare, and where everything is clipped (a = 0). Where nothing is clipped it is 0.

    Args:
        table: of :func:`rate_by_length`.
        min_count: responses that a bin needs to take part.
    """
    keep = has_enough_data(table, min_count).to_numpy()
    return quotients.length_reweighting_error(table["n"].to_numpy(), table["rate"].to_numpy(), keep)


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


def _between_clusters(cluster, cell, cells, residual) -> tuple[np.ndarray, np.ndarray]:
    """Number of clusters in each bin, and the variance of the bin's mean if clusters are independent draws."""
    codes = int(cluster.max()) + 1 if len(cluster) else 0
    place = cluster * np.int64(cells) + cell
    count, total = (np.bincount(place, of, codes * cells).reshape(codes, cells) for of in (None, residual))
    groups = np.count_nonzero(count, axis=0)
    return groups, groups / (groups - 1) * np.square(total).sum(0) / count.sum(0) ** 2


def _wilson(rate, n, quantile) -> tuple[np.ndarray, np.ndarray]:
    spread = quantile**2 / n
    center = (rate + spread / 2) / (1 + spread)
    half = np.sqrt(rate * (1 - rate) * spread + spread**2 / 4) / (1 + spread)
    # The rate belongs to its interval; at 0 and 1 rounding would put it outside.
    return np.minimum(np.maximum(center - half, 0.0), rate), np.maximum(np.minimum(center + half, 1.0), rate)
