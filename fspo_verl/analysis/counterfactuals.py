# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What other clips would have done on the records of a run, at their own constants or at one common clip rate."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from fspo_verl.analysis.clip_rates import (
    length_reweighting_error,
    lre_of_an_unclipped_bin,
    rate_by_length,
    sides,
)
from fspo_verl.analysis.length_effect import length_effect
from fspo_verl.analysis.resampling import clusters
from fspo_verl.clips import CLIPS, Clip, TokenClip


class Counterfactuals(NamedTuple):
    """What :func:`counterfactuals` returns. ``side`` is all, upper or lower (see :func:`sides`)."""

    by_length: pd.DataFrame  # method, side, low, high, n, rate, lower, upper
    summary: pd.DataFrame
    """method, side, eps_low, eps_high, eps_dual, n, rate, lower, upper, lre, lre_unclipped (its value where a length
    loses nothing), and for side all the length effect: exponent, exponent_lower, exponent_upper, p; NaN without one."""

    @property
    def overall(self) -> "Counterfactuals":
        """The rows of side all, indexed by method."""
        return Counterfactuals(*(table[table["side"] == "all"].set_index("method") for table in self))


def counterfactuals(
    records: pd.DataFrame, edges, match_rate: float | None = None, clips: Mapping[str, Clip] = CLIPS
) -> Counterfactuals:
    """What each clip would have taken on these records, per length bin and side.

    It is the answer for the recorded updates: trained with another clip, the policy would have moved otherwise.

    Args:
        records: the run; all responses, moved or not.
        edges: of :func:`length_edges`.
        match_rate: None for the clips' own constants. A number scales each clip to take this share of the
            responses with advantage != 0, so that shapes are compared and not constants; those that work token by token
            are then left out.
        clips: of the catalogue, by name.

    Raises:
        ValueError: a clip cannot reach ``match_rate`` on these records.
    """
    cluster = clusters(records)
    tables, rows = [], []
    for name, clip in clips.items():
        if match_rate is not None and isinstance(clip, TokenClip):
            continue
        if match_rate is not None:
            clip = clip.matched(records, match_rate)
        clipped = clip.clipped(records)
        for side, mask in sides(records).items():
            part, values = records[mask], clipped[mask]
            table = rate_by_length(part["length"], values, edges, clusters=cluster[mask])
            overall = rate_by_length(part["length"], values, edges[[0, -1]], clusters=cluster[mask]).iloc[0]
            effect = length_effect(records, clipped) if side == "all" else None
            numbers = [math.nan] * 4 if effect is None else [effect.exponent, effect.lower, effect.upper, effect.p]
            tables.append(pd.DataFrame({"method": name, "side": side}, table.index).join(table))
            rows.append(
                {"method": name, "side": side, **clip.eps}
                | overall[["n", "rate", "lower", "upper"]].to_dict()
                | {"lre": length_reweighting_error(table), "lre_unclipped": lre_of_an_unclipped_bin(overall["rate"])}
                | dict(zip(("exponent", "exponent_lower", "exponent_upper", "p"), numbers, strict=True))
            )
    by_length = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["method", "side"])
    return Counterfactuals(by_length, pd.DataFrame(rows))
