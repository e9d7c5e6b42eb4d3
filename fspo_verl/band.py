# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The clip range of FSPO in log space: an interval of sequence log-ratios S, per response.

Source: FSPO, arXiv 2509.09177 (v2/v3: centre 0, width √L). The drift-corrected range is derived here; see
:class:`Band`. Log-ratios are in nats. This module knows nothing of verl.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

NORMALIZATIONS = ("plain", "drift_corrected")


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_positive(value) -> bool:
    """Return whether this is a number above 0, inf included; True is none."""
    return _is_number(value) and value > 0


class BadField(ValueError):
    """A field of a config has a value that is not allowed."""

    field = ""
    """Its name."""

    @staticmethod
    def of(field: str, text: str) -> "BadField":
        """The error of a field; with this constructor, Ray can hand it from process to process."""
        error = BadField(text)
        error.field = field
        return error


def require(holds: bool, config, field: str, allowed: str) -> None:
    """Refuse the value of a field of a config.

    Raises:
        BadField: the condition does not hold; says what is allowed.
    """
    if not holds:
        raise BadField.of(field, f"{config.key_prefix}{field}={getattr(config, field)!r} is not allowed: {allowed}")


@dataclass
class Band:
    """The interval of sequence log-ratios S that FSPO leaves unclipped: ``[c − low·s, c + high·s]``.

    Centre c and scale s are constants to the optimiser: no gradient flows through them. The fields hold what was set;
    :attr:`low`, :attr:`high` and :attr:`dual` are the values in effect. A side of ``inf`` clips nothing.
    """

    eps: float | None = 0.03
    """Half-width of the range in units of s, for every side that is not set by itself; ``inf`` clips nothing. It
    may be null where both sides are set.

    Source: a third party's reading of the paper; the authors' values are not known. CTPO (arXiv 2605.07331) publishes
    −0.025·√t to +0.05·√t, on prefixes of t tokens."""

    eps_low: float | None = None
    """Half-width below the centre; null takes eps.

    Source: two sides that differ, public reviews of the paper."""

    eps_high: float | None = None
    """Half-width above the centre; null takes eps.

    Source: as eps_low."""

    eps_dual: float | None = None
    """Dual clip: a sequence with A < 0 and S > c + eps_dual·s contributes no gradient. Null takes the upper
    half-width (three times the wider one under target_clip_rate); ``inf`` turns it off.

    It is an edge in log space like the other two, because a fixed ratio bound such as verl's ``clip_ratio_c`` falls
    inside the range at long lengths.

    Source: listed in the paper's configuration table (public reviews); its form and value are not known, ours are
    derived here. On the upper edge: CTPO, as for eps; see scripts/studies/ten_percent."""

    length_power: float = 0.5
    """p in s = L^p: 0.5 is FSPO, 0 a fixed range of S, 1 a range of the per-token mean S/L (GSPO's shape).

    Source: abstract, "with a band that scales as √L"."""

    normalization: str = "plain"
    """The centre c of the range. ``plain``: c = 0. ``drift_corrected``: c = −Q/2, Q = Σ_t (log-ratio of token t)², the
    drift that E_old[w] = 1 implies.

    Source: plain, versions 2 and 3 of the paper; version 1 has "a KL-corrected drift term", whose estimate is not
    known; drift_corrected is derived here."""

    key_prefix = ""  # a class attribute, not a field: where these keys live in a config, for the error messages

    def __post_init__(self):
        sides = {"eps_low": self.eps_low, "eps_high": self.eps_high}
        can_be_null = self.eps is None and None not in sides.values()
        allowed = "a positive number, inf (clips nothing), or null where eps_low and eps_high are set"
        require(can_be_null or is_positive(self.eps), self, "eps", allowed)
        for name, eps in sides.items():
            require(eps is None or is_positive(eps), self, name, "null (takes eps) or a positive number")
        allowed = (
            "null (the upper half-width), inf (no dual clip) or a number of at least the upper half-width "
            f"{self.high:g}, as a dual clip inside the range would undo it"
        )
        dual = self.eps_dual
        require(dual is None or (is_positive(dual) and dual >= self.high), self, "eps_dual", allowed)
        power, allowed = self.length_power, "a number from 0 (fixed range) over 0.5 (FSPO) to 1 (per-token mean)"
        require(_is_number(power) and 0 <= power <= 1, self, "length_power", allowed)
        allowed = f"one of {', '.join(NORMALIZATIONS)}"
        require(self.normalization in NORMALIZATIONS, self, "normalization", allowed)

    @property
    def low(self) -> float:
        """Half-width below the centre that is in effect, in units of s; inf where nothing is clipped below."""
        return self._half_width(self.eps_low)

    @property
    def high(self) -> float:
        """Half-width above the centre that is in effect, in units of s; inf where nothing is clipped above."""
        return self._half_width(self.eps_high)

    @property
    def dual(self) -> float:
        """Distance of the dual clip from the centre that is in effect, in units of s; inf where it is off."""
        return self.high if self.eps_dual is None else self.eps_dual

    def _half_width(self, side: float | None) -> float:
        width = self.eps if side is None else side
        assert width is not None, "without eps both sides are set"
        return width

    @property
    def half_widths(self) -> dict[str, float]:
        """:attr:`low`, :attr:`high` and :attr:`dual`, by the fields that set them."""
        return {"eps_low": self.low, "eps_high": self.high, "eps_dual": self.dual}

    @property
    def form(self) -> tuple:
        """Normalization and power: the shape, whatever eps is."""
        return self.normalization, self.length_power

    def scale(self, length: Tensor) -> Tensor:
        """Return s ``[B]``, the unit of eps, for sequences of ``length`` tokens ``[B]``."""
        return length.pow(self.length_power)

    def scale_at(self, length: int) -> float:
        """Return s of a response of ``length`` tokens."""
        return self.scale(torch.tensor([length], dtype=torch.float64)).item()

    def edges(self, length: Tensor, quadratic_variation: Tensor) -> "Edges":
        """Return the edges in log space for sequences of ``length`` tokens ``[B]`` and realised variation Q ``[B]``.

        A sequence whose tokens all have log-ratio 0 (the on-policy case) has drifted nowhere: its centre is 0 under
        every normalisation, so that the first update is the plain policy gradient.
        """
        scale = self.scale(length)
        edges = Edges(-self.low * scale, self.high * scale, self.dual * scale)
        if self.normalization == "plain":
            return edges
        center = quadratic_variation / -2
        return Edges(*(center + edge for edge in edges))

    def to_json(self) -> dict:
        """Return the values in effect by field, without ``eps``; null where there is no edge."""
        values = {name: value if math.isfinite(value) else None for name, value in self.half_widths.items()}
        return values | {"length_power": self.length_power, "normalization": self.normalization}

    @staticmethod
    def from_json(values: Mapping) -> "Band":
        """Return the band of :meth:`to_json`; a missing field has its default.

        Raises:
            TypeError, ValueError: there are fields or values that a band cannot have.
        """
        infinite = {name: math.inf for name in ("eps_low", "eps_high", "eps_dual") if values.get(name, 0) is None}
        return Band(**{**values, **infinite})

    @staticmethod
    def fields_in(settings: Mapping) -> dict:
        """Return the entries of a mapping that are fields of a band."""
        names = {field.name for field in fields(Band)}
        return {name: settings[name] for name in settings if name in names}

    def ratios_at(self, length: int) -> str | None:
        """The edges for ``length`` tokens as ratios e^S; None where each response has a centre of its own."""
        if self.normalization != "plain":
            return None
        low, high, dual = (_short(_exp(side * self.scale_at(length))) for side in (-self.low, self.high, self.dual))
        return f"{low} to {high}" + ("" if math.isinf(self.dual) else f", dual clip {dual}")

    def describe(self) -> str:
        """Return the range in one line, for logs."""
        scale = f"L^{self.length_power:g}"
        center = "0" if self.normalization == "plain" else "-Q/2"
        dual = "no dual clip" if math.isinf(self.dual) else f"dual clip +{self.dual:g}*{scale}"
        return f"log-ratio range {center} [-{self.low:g}, +{self.high:g}]*{scale}, {dual}"


def _exp(log_ratio: float) -> float:
    return math.exp(log_ratio) if log_ratio < 700 else math.inf  # the largest of a double is e^709


def _short(ratio: float) -> str:
    """Three digits, without an exponent below a million."""
    return f"{float(f'{ratio:.3g}'):,.6g}" if 1 <= ratio < 1e6 else f"{ratio:.3g}"


class Edges(NamedTuple):
    """Edges of the range of each sequence in log space, all ``[B]``; infinite where there is no edge."""

    low: Tensor
    high: Tensor
    dual: Tensor
