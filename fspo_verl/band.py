# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The clip band of FSPO in log space: an interval of sequence log-ratios S, per response.

Source: FSPO, arXiv 2509.09177 (v2/v3: centre 0, width √L). The realised centre and width are derived here; see
:class:`Band`. Log-ratios are in nats. This module knows nothing of verl.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

BAND_WIDTHS = ("length", "realized")
BAND_CENTERS = ("zero", "constant", "realized")


@dataclass
class Band:
    """The interval of sequence log-ratios S that FSPO leaves unclipped: ``[c − eps_low·s, c + eps_high·s]``.

    Centre c and scale s are constants to the optimiser: no gradient flows through them.
    """

    eps_low: float = 0.03
    """Half-width below the centre, in units of s. The authors' value is not known; 0.03 is a third party's reading."""

    eps_high: float = 0.03
    """Half-width above the centre, in units of s."""

    eps_dual: float | None = 0.09
    """Dual clip: a sequence with A < 0 and S > c + eps_dual·s contributes no gradient; null turns it off.

    The paper lists a dual clip without giving its form. This one is a log-space band like the other two, because a
    fixed ratio bound such as verl's ``clip_ratio_c`` falls inside the band at long lengths and is unfair to them. The
    default is 3 half-widths: where eps is one to two standard deviations of S/√L it acts on outliers only (beyond 3
    standard deviations), at the same rate at every length.
    """

    length_power: float = 0.5
    """p in s = L^p: 0.5 is FSPO, 0 a fixed band on S, 1 a band on the per-token mean S/L (GSPO's shape). With
    ``realized_limit`` it is the p of that limit."""

    band_width: str = "length"
    """``length``: s = L^length_power. ``realized``: s = √Q, Q = Σ_t (log-ratio of token t)², so that eps counts
    standard deviations of S (derived here). A realised width grows with the policy's move: without ``realized_limit``
    it is no trust region."""

    realized_limit: float | None = None
    """For ``band_width: realized``: √Q counts as at most realized_limit·L^length_power, in width and centre; null sets
    no limit. Up to it the band follows the move, beyond it it is as a band of fixed eps: no response keeps its
    gradient beyond eps·realized_limit·L^length_power from the centre (derived here). At length_power 0.5 it is the
    largest root mean square of a response's token log-ratios that the band follows."""

    band_center: str = "zero"
    """``zero``: c = 0 (paper v2/v3). ``constant``: c = −drift_per_token·L (the drift of paper v1, whose estimate is not
    known). ``realized``: c = −Q/2, the drift that E_old[w] = 1 implies, per sequence (derived here)."""

    drift_per_token: float = 0.0
    """Nats per token by which S drifts down, for ``band_center: constant`` only; σ²/2 for per-token spread σ."""

    key_prefix = ""  # a class attribute, not a field: where these keys live in a config, for the error messages

    def __post_init__(self):
        def require(condition: bool, field: str, allowed: str):
            if not condition:
                raise ValueError(f"{self.key_prefix}{field}={getattr(self, field)!r} is not allowed: {allowed}")

        for field in ("eps_low", "eps_high"):
            require(_is_number(getattr(self, field)) and getattr(self, field) > 0, field, "a positive finite number")
        require(
            self.eps_dual is None or (_is_number(self.eps_dual) and self.eps_dual >= self.eps_high),
            "eps_dual",
            f"null (no dual clip) or a finite number >= eps_high={self.eps_high} "
            f"(a dual clip inside the band would undo it; 3 * eps_high is {3 * self.eps_high:g})",
        )
        require(
            _is_number(self.length_power) and 0 <= self.length_power <= 1,
            "length_power",
            "a number from 0 (fixed band) over 0.5 (FSPO) to 1 (per-token mean)",
        )
        require(self.band_width in BAND_WIDTHS, "band_width", f"one of {', '.join(BAND_WIDTHS)}")
        require(self.band_center in BAND_CENTERS, "band_center", f"one of {', '.join(BAND_CENTERS)}")
        require(
            _is_number(self.drift_per_token) and self.drift_per_token >= 0,
            "drift_per_token",
            "a finite number >= 0 (nats per token; the band is centred on -drift_per_token * L)",
        )
        require(
            (self.band_center == "constant") == (self.drift_per_token > 0),
            "drift_per_token",
            f"it must be > 0 with band_center=constant and 0 otherwise, and band_center={self.band_center!r}",
        )
        limit = self.realized_limit
        require(limit is None or (_is_number(limit) and limit > 0), "realized_limit", "null or a positive number")
        require(
            limit is None or self.band_width == "realized",
            "realized_limit",
            f"it has no effect with band_width={self.band_width!r}; leave it at null or set band_width=realized",
        )
        require(
            self.band_width == "length" or limit is not None or self.length_power == 0.5,
            "length_power",
            "it has no effect with band_width='realized' and no realized_limit; leave it at 0.5, set band_width=length "
            "or a realized_limit",
        )

    def edges(self, length: Tensor, quadratic_variation: Tensor) -> "Edges":
        """Band edges in log space for sequences of ``length`` tokens ``[B]`` and realised variation Q ``[B]``.

        A sequence whose tokens all have log-ratio 0 (the on-policy case) has drifted nowhere: its centre is 0 in every
        mode, so that the first update is the plain policy gradient.
        """
        q = quadratic_variation
        if self.realized_limit is not None:
            q = q.minimum((self.realized_limit * length.pow(self.length_power)).square())
        if self.band_width == "realized":
            scale = q.sqrt()
        else:
            scale = length.pow(self.length_power)
        if self.band_center == "realized":
            center = -q / 2
        elif self.band_center == "constant":
            center = torch.where(q > 0, -self.drift_per_token * length, 0.0)
        else:
            center = torch.zeros_like(q)
        dual = torch.full_like(q, math.inf) if self.eps_dual is None else center + self.eps_dual * scale
        return Edges(center - self.eps_low * scale, center + self.eps_high * scale, dual)

    def values(self) -> dict:
        """The fields of a band by name, without those of a subclass."""
        return {field.name: getattr(self, field.name) for field in fields(Band)}

    @staticmethod
    def fields_in(settings: Mapping) -> dict:
        """The entries of a mapping that are fields of a band."""
        names = {field.name for field in fields(Band)}
        return {name: settings[name] for name in settings if name in names}

    def describe(self) -> str:
        """The band in one line, for logs."""
        scale = "sqrt(Q)" if self.band_width == "realized" else f"L^{self.length_power:g}"
        center = {"zero": "0", "constant": f"-{self.drift_per_token:g}*L", "realized": "-Q/2"}[self.band_center]
        limit = self.realized_limit
        within = "" if limit is None else f", sqrt(Q) at most {limit:g}*L^{self.length_power:g}"
        dual = "no dual clip" if self.eps_dual is None else f"dual clip +{self.eps_dual:g}*{scale}"
        return f"log-ratio band {center} [-{self.eps_low:g}, +{self.eps_high:g}]*{scale}, {dual}{within}"


class Edges(NamedTuple):
    """Band edges of each sequence in log space, all ``[B]``; ``dual`` is +inf where there is no dual clip."""

    low: Tensor
    high: Tensor
    dual: Tensor


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
