# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What other clips would have done on the records of a run, at their own constants or at one common clip rate."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from fspo_verl.analysis.clip_rates import lre_against_chance, lre_columns, rate_by_length, sides
from fspo_verl.analysis.resampling import clusters
from fspo_verl.clips import CLIPS, Clip, TokenClip


class Counterfactuals(NamedTuple):
    """What :func:`counterfactuals` returns. ``side`` is all, upper, lower (see :func:`sides`) or outside.

    The rates of ``outside`` are those of all responses, whatever their advantage.
    """

    by_length: pd.DataFrame  # method, side, low, high, n, rate, lower, upper
    summary: pd.DataFrame  # method, side, eps_low, eps_high, eps_dual, n, rate, lower, upper and those of lre_columns

    @property
    def overall(self) -> "Counterfactuals":
        """The rows of side all, indexed by method."""
        return Counterfactuals(*(table[table["side"] == "all"].set_index("method") for table in self))


def counterfactuals(
    records: pd.DataFrame,
    edges,
    rng: np.random.Generator,
    match_rate: float | None = None,
    clips: Mapping[str, Clip] = CLIPS,
    draws: int = 400,
) -> Counterfactuals:
    """What each clip would have taken on these records, per length bin and side, with intervals and LRE.

    It is the answer for the recorded updates: trained with another clip, the policy would have moved otherwise.

    Args:
        records: the run; all responses, moved or not.
        edges: of :func:`length_edges`.
        rng, draws: source of all draws, and how many.
        match_rate: None for the clips' own constants. A number scales each clip to take this share of the
            responses with advantage != 0, so that shapes are compared and not constants; those that work token by token
            are then left out.
        clips: one whose column the records lack is left out.

    Raises:
        ValueError: a clip cannot reach ``match_rate`` on these records.
    """
    cluster = clusters(records)
    tables, rows = [], []
    for name, clip in clips.items():
        if clip.lacks(records) or (match_rate is not None and isinstance(clip, TokenClip)):
            continue
        if match_rate is not None:
            clip = clip.matched(records, match_rate)
        clipped = clip.clipped(records)
        cases = {side: (mask, clipped) for side, mask in sides(records).items()}
        if not isinstance(clip, TokenClip):
            cases["outside"] = np.ones(len(records), bool), clip.outside(records)
        for side, (mask, values) in cases.items():
            part, values = records[mask], values[mask]
            table = rate_by_length(part["length"], values, edges, clusters=cluster[mask])
            overall = rate_by_length(part["length"], values, edges[[0, -1]], clusters=cluster[mask])
            lre = lre_columns(*lre_against_chance(part, values, edges, rng, draws))
            tables.append(pd.DataFrame({"method": name, "side": side}, table.index).join(table))
            rows.append(
                {"method": name, "side": side, **clip.eps}
                | overall.drop(columns=["low", "high", "clusters"]).to_dict("records")[0]
                | lre
            )
    by_length = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["method", "side"])
    return Counterfactuals(by_length, pd.DataFrame(rows))
