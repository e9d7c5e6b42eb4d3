# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What other clips would have done on the records of a run, at their own constants or at one common clip rate."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from fspo_verl.analysis.clip_rates import (
    clusters,
    length_reweighting_error,
    lre_of_an_unclipped_bin,
    rate_by_length,
    sides,
)
from fspo_verl.analysis.length_effect import length_effect
from fspo_verl.clips import CLIPS, Clip, TokenClip


class Counterfactuals(NamedTuple):
    """What :func:`counterfactuals` returns: tables whose index is the clip's name, ``method``."""

    by_length: pd.DataFrame  # low, high, n, rate, lower, upper, clusters
    summary: pd.DataFrame  # eps_low, eps_high, eps_dual, and the numbers of measures


def measures(records: pd.DataFrame, clipped: np.ndarray, edges) -> tuple[pd.DataFrame, dict[str, float]]:
    """What a clip does to the responses with an advantage, by length bin and in all.

    Returns:
        The table of :func:`rate_by_length`; and n, rate, lower, upper, lre, lre_unclipped (its value where a length
        loses nothing), and the length effect: exponent, exponent_lower, exponent_upper, p; NaN without one.
    """
    counted = sides(records)["all"]
    length, shares, cluster = records["length"][counted], np.asarray(clipped)[counted], clusters(records[counted])
    table, whole = (rate_by_length(length, shares, bins, clusters=cluster) for bins in (edges, edges[[0, -1]]))
    overall = whole.iloc[0][["n", "rate", "lower", "upper"]].to_dict()
    effect = length_effect(records, clipped)
    numbers = [math.nan] * 4 if effect is None else effect[:4]
    lre = {"lre": length_reweighting_error(table), "lre_unclipped": lre_of_an_unclipped_bin(overall["rate"])}
    return table, overall | lre | dict(zip(("exponent", "exponent_lower", "exponent_upper", "p"), numbers, strict=True))


def counterfactuals(
    records: pd.DataFrame, edges, match_rate: float | None = None, clips: Mapping[str, Clip] = CLIPS
) -> Counterfactuals:
    """What each clip would have taken on these records.

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
    tables, rows = {}, {}
    for name, clip in clips.items():
        if match_rate is not None and isinstance(clip, TokenClip):
            continue
        if match_rate is not None:
            clip = clip.matched(records, match_rate)
        tables[name], found = measures(records, clip.clipped(records), edges)
        rows[name] = {**clip.eps, **found}
    by_length = pd.concat(tables).droplevel(1) if tables else pd.DataFrame()
    return Counterfactuals(by_length.rename_axis("method"), pd.DataFrame.from_dict(rows, "index").rename_axis("method"))
