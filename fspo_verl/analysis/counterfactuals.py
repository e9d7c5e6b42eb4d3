# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What other clips would have done on the records of a run, at their own constants or at one common clip rate."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from fspo_verl.analysis.clip_rates import MIN_COUNT, length_reweighting_error, lre_against_chance, rate_by_length, sides
from fspo_verl.analysis.resampling import clusters
from fspo_verl.band import Band


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

        The edge comes to lie half way between the last response inside and the first outside, so that no rounding
        decides which of them is clipped.

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
        if len(clipped := multiple[multiple > factor]):
            factor = (factor + clipped.min()) / 2
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
