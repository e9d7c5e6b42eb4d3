# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The catalogue of clips, and which recorded responses each of them clips.

A clip works on whole responses (:class:`BandClip`) or token by token (:class:`TokenClip`).
``records`` is a DataFrame of :mod:`fspo_verl.observe.records`. The tokens that a :class:`TokenClip` drops are counted
where records are written, and only there. Log-ratios are in nats. This module knows nothing of verl.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fspo_verl.band import Band

MATCHED_RATE = 0.10
"""Share of the responses with an advantage that each clip is scaled to clip, where clips are compared at one rate."""


class Tokens(NamedTuple):
    """The tokens of a micro-batch, all ``[B, T]``."""

    log_ratio: Tensor  # float32; 0 at padding
    advantages: Tensor  # as they come
    mask: Tensor  # bool


@dataclass(frozen=True)
class Clip:
    """A clip that can be applied to records after the fact."""

    name: str  # its key, the option of the group where it has one
    label: str  # its name for readers, the same everywhere
    _: KW_ONLY
    range: str = ""  # its constants, for tables
    note: str = ""  # what a reader should know before choosing it

    @property
    def eps(self) -> dict[str, float | None]:
        """Its range as eps_low, eps_high and eps_dual; None for what it has not."""
        return dict.fromkeys(("eps_low", "eps_high", "eps_dual"))

    def clipped(self, records: pd.DataFrame) -> np.ndarray:
        """Return the share ``[rows]`` of each response that loses its gradient by the sign of its advantage.

        It is 0 where A = 0. An advantage that varies along a response counts with its mean.
        """
        raise NotImplementedError

    def matched(self, records: pd.DataFrame, rate: float) -> "Clip":
        """Scale the range so that the clip rate equals ``rate``.

        Raises:
            ValueError: the clip works token by token, or too few responses are on the clipped side of the centre.
        """
        raise ValueError(f"{self.name} clips token by token: the records hold its clips at one range only")


@dataclass(frozen=True)
class BandClip(Clip):
    """A range of S. A response beyond an edge is clipped if its advantage points further out, as in PPO's minimum."""

    band: Band
    _: KW_ONLY
    rejects: bool = False  # what is outside is dropped, whatever the sign of its advantage; there is no dual clip

    @property
    def eps(self):
        return {name: eps if math.isfinite(eps) else None for name, eps in self.band.half_widths.items()}

    def clipped(self, records):
        """0 or 1. Edges are computed and compared in float32, as by the loss that trains."""
        advantage, s = records["advantage"].to_numpy(), records["log_ratio"].to_numpy()
        if self.rejects:
            return (self.outside(records) & (advantage != 0)).astype(np.float64)
        low, high, dual = _edges(self.band, records, np.float32)
        return np.where(advantage < 0, (s < low) | (s > dual), (advantage > 0) & (s > high)).astype(np.float64)

    def outside(self, records: pd.DataFrame) -> np.ndarray:
        """bool ``[rows]``: outside the range, whatever the advantage; an edge is inside."""
        s = records["log_ratio"].to_numpy()
        low, high, _ = _edges(self.band, records, np.float32)
        return (s < low) | (s > high)

    def matched(self, records, rate):
        """Scale the range; an edge lies half way between the last response inside and the first outside.

        So no rounding decides which of them is clipped.
        """
        advantage, score = records["advantage"].to_numpy(), standardized(records, self.band)
        # For each response: by how much the range must be scaled for the response to lie on its edge.
        above, below = score / self.band.high, -score / self.band.low
        worse = np.maximum(below, above if self.rejects else score / self.band.dual)
        better = worse if self.rejects else above
        factors = np.where(advantage < 0, worse, better)[advantage != 0]
        if not len(factors):
            raise ValueError(f"no clip rate of {rate:g} can be matched: no response has an advantage")
        factor = upper_quantile(factors, rate)
        if factor <= 0:
            raise ValueError(
                f"{self.name} cannot clip {rate:g} of these responses, as only {np.mean(factors > 0):.3g} of them "
                "have moved to the side on which they can be clipped"
            )
        if len(clipped := factors[factors > factor]):
            factor = (factor + clipped.min()) / 2
        scaled: dict[str, Any] = {name: float(factor) * eps for name, eps in self.band.half_widths.items()}
        return dataclasses.replace(self, band=dataclasses.replace(self.band, eps=None, **scaled))


@dataclass(frozen=True)
class TokenClip(Clip):
    """Drops single tokens."""

    drops: Callable[[Tokens], Tensor]  # bool ``[B, T]``; whatever at padding
    _: KW_ONLY
    column: str  # of the records: the number of tokens of a response that it drops
    loss_mode: str | None = None  # verl's name of its loss that clips so

    def clipped(self, records):
        return np.where(records["advantage"] != 0, records[self.column] / records["length"], 0.0)


def standardized(records: pd.DataFrame, band: Band) -> np.ndarray:
    """Return (S − c) / s ``[rows]`` with the centre c and scale s of the range."""
    unit = dataclasses.replace(band, eps=1.0, eps_low=None, eps_high=None, eps_dual=None)
    low, high, _ = _edges(unit, records, np.float64)
    center, scale = (high + low) / 2, (high - low) / 2
    return (records["log_ratio"].to_numpy(np.float64) - center) / scale


def upper_quantile(values, share: float) -> float:
    """Return the smallest of the ``values`` beyond which at most ``share`` of them lie (0 <= share < 1)."""
    beyond = math.floor(share * len(values) + 1e-9)  # the product of a decimal fraction may fall short of an integer
    place = len(values) - 1 - beyond
    return float(np.partition(values, place)[place])


def _edges(band: Band, records: pd.DataFrame, dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    columns = (torch.tensor(records[name].to_numpy(dtype)) for name in ("length", "quadratic_variation"))
    low, high, dual = band.edges(*columns)
    return low.numpy(), high.numpy(), dual.numpy()


# --- the tokens that single clips drop --------------------------------------------------------------------------------


def _ppo(tokens: Tokens) -> Tensor:
    """verl's ``vanilla`` at its defaults: ratio 1 ± 0.2, dual clip 3."""
    ratio = tokens.log_ratio.clamp(-20, 20).exp()  # the range to which verl clamps it
    return torch.where(tokens.advantages > 0, ratio > 1.2, (tokens.advantages < 0) & ((ratio < 0.8) | (ratio > 3)))


# --- the catalogue ----------------------------------------------------------------------------------------------------


def ratio_band(low: float, high: float, length_power: float) -> Band:
    """Return the range of S in which exp(S/L^length_power) lies between ``low`` and ``high``, without a dual clip."""
    return Band(eps=None, eps_low=-math.log(low), eps_high=math.log(high), eps_dual=math.inf, length_power=length_power)


_CATALOGUE = (  # a new clip is an entry here, with the source of its range
    BandClip("fspo", "FSPO", Band()),  # 2509.09177
    BandClip("fspo_drift_corrected", "FSPO, drift-corrected", Band(normalization="drift_corrected")),  # derived here
    BandClip("gspo", "GSPO", ratio_band(1 - 3e-4, 1 + 4e-4, 1.0)),  # 2507.18071
    TokenClip(  # 1707.06347, 2402.03300
        *("grpo", "GRPO", _ppo),
        column="tokens_clipped",
        range="token ratio 1 ± 0.2",
        loss_mode="vanilla",
        note="clips tokens: its rate is the mean share of a response",
    ),
    # The baseline of 2509.09177.
    BandClip("fixed_band", "fixed range", ratio_band(0.8, 1.2, 0.0), range="ratio 1 ± 0.2"),
    BandClip(  # verl's RolloutCorrectionConfig.decoupled_seq_is_rs
        *("seq_is", "rejection by S", ratio_band(0.5, 2.0, 0.0)),
        range="ratio 0.5 to 2",
        rejects=True,
        note="drops what is outside on either side, whatever its advantage",
    ),
    BandClip(  # verl's RolloutCorrectionConfig.decoupled_geo_rs; it bounds the ratio of the old policy to the new
        *("geo_rs", "rejection by S/L", ratio_band(1 / 1.001, 1 / 0.999, 1.0)),
        range="ratio 0.999 to 1.001",
        rejects=True,
        note="verl's remedy for the rejection of long responses: a range of the mean log-ratio",
    ),
)
CLIPS: dict[str, Clip] = {clip.name: clip for clip in _CATALOGUE}
"""Every clip at its usual range: FSPO's defaults, verl's defaults for GRPO and the fixed range, and the range that a
paper or verl publishes for the others."""

COLUMNS = {clip.column: clip.drops for clip in CLIPS.values() if isinstance(clip, TokenClip)}
"""Columns of records that hold how many tokens of a response a clip of tokens drops."""


LOSSES = ("fspo", "gspo", "grpo", "fixed_band")
"""The clips that this package trains with from a config of their own."""


def of_run(loss_mode: str, band: Band | None) -> str | None:
    """Return the name of the clip with the shape of what a run trained with, if the catalogue has it.

    Args:
        loss_mode: verl's name of its loss.
        band: its range of S; None for a loss without one.
    """
    for name, clip in CLIPS.items():
        if isinstance(clip, TokenClip) and band is None and clip.loss_mode == loss_mode:
            return name
        if isinstance(clip, BandClip) and band is not None and not clip.rejects and clip.band.form == band.form:
            return name
    return None
