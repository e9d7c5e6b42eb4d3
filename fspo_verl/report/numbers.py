# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers of a report: clip rates of a run by length, and those of other clips on the same records."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from fspo_verl.analysis.clip_rates import (
    length_reweighting_error,
    lre_of_an_unclipped_bin,
    prompts_of,
    rate_by_length,
    sides,
)
from fspo_verl.analysis.length_effect import length_effect
from fspo_verl.analysis.mismatch import Mismatch, mismatch
from fspo_verl.analysis.runs import Run, live_clip_rates
from fspo_verl.analysis.verdict import Verdict, verdict_of
from fspo_verl.clips import CLIPS, MATCHED_RATE, Clip, TokenClip
from fspo_verl.observe.metrics import NAMES


class Counterfactuals(NamedTuple):
    """What :func:`counterfactuals` returns: tables whose index is the clip's name, ``method``."""

    by_length: pd.DataFrame  # low, high, n, rate, lower, upper, clusters
    summary: pd.DataFrame  # eps_low, eps_high, eps_dual, and the numbers of measures


@dataclass
class Analysis:
    """The numbers of one run; clip rates are of responses with an advantage."""

    run: Run
    verdict: Verdict
    rates: pd.DataFrame  # by length; without records from live metrics, without n and with unknown intervals
    overall: pd.Series | None = None  # over all lengths, named as in Counterfactuals.summary; None without records
    others: Counterfactuals | None = None  # of the clips of at_one_rate; None without records
    mismatch: Mismatch | None = None  # of trainer and rollout engine; None where records do not hold it


def analyse(run: Run, edges: np.ndarray) -> Analysis:
    """All numbers of one run; ``edges`` are of length bins that cover all its lengths."""
    records, verdict = run.records, verdict_of(run)
    if not (records.advantage != 0).any():
        live = live_clip_rates(run.metrics)
        longest = np.fmax(run.metrics.reindex(columns=[NAMES["longest"]]).max().item(), live.low)
        return Analysis(run, verdict, live.assign(high=live.high.fillna(longest), lower=math.nan, upper=math.nan))
    rates, overall = measures(records, records.clipped.to_numpy(), edges)
    others = counterfactuals(records, edges, at_one_rate(records))
    return Analysis(run, verdict, rates, pd.Series(overall), others, mismatch(run.rollouts))


def measures(records: pd.DataFrame, clipped: np.ndarray, edges) -> tuple[pd.DataFrame, dict[str, float]]:
    """What a clip does to the responses with an advantage, by length bin and in all.

    Returns:
        The table of :func:`rate_by_length`; and n, rate, lower, upper, lre, lre_unclipped (its value where a length
        loses nothing), and the length effect: p, and where a line is not rejected exponent, exponent_lower and
        exponent_upper; NaN without.
    """
    counted = sides(records)["all"]
    length, shares, cluster = records["length"][counted], np.asarray(clipped)[counted], prompts_of(records[counted])
    table, whole = (rate_by_length(length, shares, bins, clusters=cluster) for bins in (edges, edges[[0, -1]]))
    overall = whole.iloc[0][["n", "rate", "lower", "upper"]].to_dict()
    effect = length_effect(records, clipped)
    numbers = [math.nan] * 4 if effect is None else list(effect[:4])
    if effect is not None and effect.depends and not effect.is_line:
        numbers[:3] = [math.nan] * 3
    lre = {"lre": length_reweighting_error(table), "lre_unclipped": lre_of_an_unclipped_bin(overall["rate"])}
    return table, overall | lre | dict(zip(("exponent", "exponent_lower", "exponent_upper", "p"), numbers, strict=True))


def counterfactuals(records: pd.DataFrame, edges, clips: Mapping[str, Clip]) -> Counterfactuals:
    """What each clip would have taken on these records.

    It is the answer for the recorded updates: trained with another clip, the policy would have moved otherwise.

    Args:
        records: the run; all responses, moved or not.
        edges: of :func:`fspo_verl.analysis.clip_rates.length_edges`.
        clips: at least one, by name.
    """
    tables, rows = {}, {}
    for name, clip in clips.items():
        tables[name], numbers = measures(records, clip.clipped(records), edges)
        rows[name] = {**clip.eps, **numbers}
    by_length = pd.concat(tables).droplevel(1).rename_axis("method")
    return Counterfactuals(by_length, pd.DataFrame.from_dict(rows, "index").rename_axis("method"))


def at_one_rate(records: pd.DataFrame, clips: Mapping[str, Clip] = CLIPS) -> dict[str, Clip]:
    """The clips, each scaled to take :data:`MATCHED_RATE` of the responses with an advantage: shapes, not constants.

    Those that work token by token stay as they are; those that cannot reach the rate on these records, and those that
    these records cannot judge, are left out.
    """
    scaled = {}
    for name, clip in clips.items():
        if not clip.judges(records):
            continue
        with contextlib.suppress(ValueError):
            scaled[name] = clip if isinstance(clip, TokenClip) else clip.matched(records, MATCHED_RATE)
    return scaled


def steps(run: Run) -> int:
    """Number of training steps that left metrics or records."""
    return len(set(run.metrics.index[run.metrics.index > 0]) | set(run.records.step.unique()))


def summary(a: Analysis) -> dict:
    """A run in one row of report.json."""
    run = a.run
    row: dict[str, object] = {"run": run.name, "loss": run.settings.loss if run.settings else None}
    row |= {"steps": steps(run), "records": len(run.records)}
    if a.overall is None:
        return row | {"clip_rate": a.verdict.rate}
    return row | a.overall.rename({name: f"clip_{name}" for name in ("rate", "lower", "upper")}).to_dict()
