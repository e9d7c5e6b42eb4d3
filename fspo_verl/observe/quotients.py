# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The one table of numerators and denominators.

Live series, the evidence of a conclusion and reports read it. Sums are means over rows, by the names of
:func:`fspo_verl.observe.metrics.sums`: those that verl hands on, or those of records. Light to import.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fspo_verl.observe.metrics import PREFIX

_LENGTH_BIN = re.compile(r"length_(\d+)_(?:to_(\d+)|up)/responses")
MIN_COUNT = 50
"""Responses that a length bin needs to take part in a length reweighting error, or a regression over bins."""


class Quotient(NamedTuple):
    """Two sums, each a name or several with signs between them."""

    numerator: str
    denominator: str
    is_square: bool = False  # the rate is its root


QUOTIENTS = {
    "clip_rate/all": Quotient("clipped", "responses"),
    "clip_rate/better": Quotient("better/clipped", "better/responses"),
    "clip_rate/worse": Quotient("clipped - better/clipped", "responses - better/responses"),
    "not_finite": Quotient("nonfinite_fraction", "sequence_fraction"),
    "truncated": Quotient("truncated_fraction", "sequence_fraction"),
    "rejected": Quotient("rollout_rejected_fraction", "sequence_fraction + rollout_rejected_fraction"),
    "moved_sigma": Quotient("moved_sigma_squared", "moved_fraction", True),
    "noise_sigma": Quotient("on_policy_sigma_squared", "on_policy_fraction", True),
    "noise_outside": Quotient("on_policy_outside_fraction", "on_policy_fraction"),
    "mismatch_sigma": Quotient("rollout_quadratic_variation", "rollout_length", True),
}
"""Rates by name. ``clipped`` and ``responses`` are of all responses with an advantage."""


def sums_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The sums among the metrics that a logger has, by their names without :data:`PREFIX`; finite ones only."""
    known = {name.removeprefix(PREFIX): float(value) for name, value in metrics.items() if name.startswith(PREFIX)}
    return {name: value for name, value in known.items() if math.isfinite(value)}


def quotients(sums: Mapping[str, float]) -> dict[str, float]:
    """Every rate of :data:`QUOTIENTS` that these sums give."""
    bins = length_bins(sums)
    if bins:
        totals = {"responses": sum(part.responses for part in bins), "clipped": sum(part.clipped for part in bins)}
        sums = {**sums, **totals}
    rates = {}
    for name, (numerator, denominator, is_square) in QUOTIENTS.items():
        above, below = _sum(numerator, sums), _sum(denominator, sums)
        if above is not None and below is not None and below > 1e-12:  # what differences of floats leave is 0
            quotient = max(above, 0.0) / below
            rates[name] = math.sqrt(quotient) if is_square else quotient
    return rates


def effective_sample_size(sums: Mapping[str, float]) -> float | None:
    """(Σw)² / (n Σw²), a share between 0 and 1; w = e^S of the n responses with an advantage that the clip leaves.

    With equal weights it is 1. It is Kish's effective sample size, divided by n. None where it is not known.
    """
    bins = length_bins(sums)
    kept = sum(part.responses - part.clipped for part in bins)
    if not (kept > 1e-12 and sums.get("ratio_squared") and "ratio" in sums):
        return None
    return sums["ratio"] ** 2 / (sums["ratio_squared"] * kept)


def _sum(names: str, sums: Mapping[str, float]) -> float | None:
    """The value of such as ``a - b``; None where a sum is not known."""
    terms = re.findall(r"([+-]?) ?([\w/]+)", names)
    if not all(name in sums for _, name in terms):
        return None
    return sum(-sums[name] if sign == "-" else sums[name] for sign, name in terms)


# --- by length -------------------------------------------------------------------------------------------------------


class Counted(NamedTuple):
    """Responses of some lengths with an advantage, and how many of them are clipped."""

    shortest: float  # tokens
    longest: float  # NaN where it is not known
    responses: float  # of sums: shares of the rows
    clipped: float

    @property
    def rate(self) -> float:
        return self.clipped / self.responses

    @property
    def name(self) -> str:
        """Return the name with leading zeros, so that loggers sort bins by length."""
        end = "up" if math.isnan(self.longest) else f"{self.longest:05.0f}"
        return f"len_{self.shortest:05.0f}_{end}"


def length_bins(sums: Mapping[str, float]) -> list[Counted]:
    """The length bins that have responses, from the shortest."""
    bins = []
    for name, share in sums.items():
        if (match := _LENGTH_BIN.fullmatch(name)) and share > 0:
            clipped = sums.get(f"{name.removesuffix('responses')}clipped", 0.0)
            bins.append(Counted(float(match[1]), float(match[2] or "nan"), share, clipped))
    return sorted(bins)


def parts(groups: Iterable[Counted], share: float = 1 / 3) -> tuple[Counted, ...]:
    """The short, those in between, and the long: groups joined from either end until they hold a share of all.

    Args:
        groups: responses by length, from the shortest.

    Returns:
        Two or three parts; none where one group has all.
    """
    groups = list(groups)
    enough = share * sum(group.responses for group in groups) - 1e-9
    below = above = 0.0
    first, last = 0, len(groups)
    while first < last and below < enough:
        below, first = below + groups[first].responses, first + 1
    while last > first and above < enough:
        above, last = above + groups[last - 1].responses, last - 1
    joined = [_joined(part) for part in (groups[:first], groups[first:last], groups[last:]) if part]
    return tuple(joined) if len(joined) > 1 else ()


def _joined(part: Sequence[Counted]) -> Counted:
    responses, clipped = (sum(getattr(group, name) for group in part) for name in ("responses", "clipped"))
    return Counted(part[0].shortest, part[-1].longest, responses, clipped)


def length_reweighting_error(n: np.ndarray, rate: np.ndarray, keep: np.ndarray) -> float:
    """max over the bins ``keep`` of |acceptance of the bin / acceptance of all − 1|; NaN with fewer than two of them.

    Args:
        n: responses ``[bins]``.
        rate: clip rate ``[bins]``; NaN where there is no response.
        keep: bool ``[bins]``: which have enough responses to be compared.
    """
    accepted = n * (1 - np.nan_to_num(rate))
    if keep.sum() < 2 or not accepted.sum() > 0:
        return math.nan
    return float(np.abs(accepted[keep] / n[keep] / (accepted.sum() / n.sum()) - 1).max())
