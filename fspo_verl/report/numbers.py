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
    prompts_of,
    rate_by_length,
    sides,
    third_of,
)
from fspo_verl.analysis.judgement import Judgement, judge
from fspo_verl.analysis.length_effect import length_effect
from fspo_verl.analysis.mismatch import Mismatch, mismatch
from fspo_verl.analysis.runs import Run
from fspo_verl.clips import CLIPS, MATCHED_RATE, Clip, TokenClip
from fspo_verl.observe.metrics import NAMES
from fspo_verl.observe.quotients import length_bins, sums_of


class Counterfactuals(NamedTuple):
    """What :func:`counterfactuals` returns: tables whose index is the clip's name, ``method``."""

    by_length: pd.DataFrame  # low, high, n, rate, lower, upper, clusters
    summary: pd.DataFrame  # eps_low, eps_high, eps_dual, and the numbers of measures


@dataclass
class Analysis:
    """The numbers of one run; clip rates are of responses with an advantage."""

    run: Run
    judgement: Judgement
    rates: pd.DataFrame  # by length; without records from live metrics, without n and with unknown intervals
    overall: pd.Series | None = None  # over all lengths, named as in Counterfactuals.summary; None without records
    others: Counterfactuals | None = None  # of the clips of at_one_rate; None without records
    mismatch: Mismatch | None = None  # of trainer and rollout engine; None where records do not hold it

    @property
    def loss(self) -> str | None:
        """verl's name of the loss that trained."""
        return self.run.settings.loss if self.run.settings else None

    @property
    def steps(self) -> int:
        """Number of training steps that left metrics or records."""
        return len(set(self.run.metrics.index[self.run.metrics.index > 0]) | set(self.run.records.step.unique()))

    def to_json(self) -> dict:
        """The run in report.json: findings first, then what tables and figures show."""
        overall = {} if self.overall is None else self.overall.to_dict()
        found: dict = {
            "run": self.run.name,
            "loss": self.loss,
            "steps": self.steps,
            "records": len(self.run.records),
            "findings": [one.to_json() for one in self.judgement.findings],
            "clip": plain(overall | {"rate": self.judgement.evidence.clip_rate}),
            "lengths": rows(self.rates),
            "clips": [] if self.others is None else rows(self.others.summary.reset_index()),
            "mismatch": None,
        }
        if self.mismatch is not None:
            numbers = self.mismatch._asdict()
            dropped = numbers.pop("dropped")
            found["mismatch"] = plain(numbers) | {"dropped": rows(dropped.reset_index())}
        return found


def analyse(run: Run, edges: np.ndarray) -> Analysis:
    """All numbers of one run; ``edges`` are of length bins that cover all its lengths."""
    records, judgement = run.records, judge(run)
    if not (records.advantage != 0).any():
        return Analysis(run, judgement, live_rates(run.metrics))
    rates, overall = measures(records, records.clipped.to_numpy(), edges)
    others = counterfactuals(records, edges, at_one_rate(records))
    return Analysis(run, judgement, rates, pd.Series(overall), others, mismatch(run.rollouts, run.settings))


def live_rates(metrics: pd.DataFrame) -> pd.DataFrame:
    """Clip rate by length bin over all steps, from metrics: columns low, high, rate, lower and upper (not known)."""
    bins = length_bins(sums_of({str(name): value for name, value in metrics.mean().items()}))
    longest = metrics[NAMES["longest"]].max() if NAMES["longest"] in metrics else math.nan
    ends = [np.fmax(longest, one.shortest) if math.isnan(one.longest) else one.longest for one in bins]
    low, rate = [int(one.shortest) for one in bins], [one.rate for one in bins]
    return pd.DataFrame({"low": low, "high": ends, "rate": rate, "lower": math.nan, "upper": math.nan})


def measures(records: pd.DataFrame, clipped: np.ndarray, edges) -> tuple[pd.DataFrame, dict[str, float]]:
    """What a clip does to the responses with an advantage, by length bin and in all.

    Returns:
        The table of :func:`rate_by_length`; and n, rate, lower, upper, lre, p of no dependence on length, and exponent,
        exponent_lower and exponent_upper of a line; NaN without.
    """
    counted = sides(records)["all"]
    length, shares, cluster = records["length"][counted], np.asarray(clipped)[counted], prompts_of(records[counted])
    table, whole = (rate_by_length(length, shares, bins, clusters=cluster) for bins in (edges, edges[[0, -1]]))
    overall = whole.iloc[0][["n", "rate", "lower", "upper"]].to_dict()
    overall["lre"] = length_reweighting_error(table)
    effect = length_effect(records, clipped)
    is_line = effect is not None and (effect.is_line or not effect.depends)
    line = (effect.exponent, effect.lower, effect.upper) if effect is not None and is_line else [math.nan] * 3
    overall |= dict(zip(("exponent", "exponent_lower", "exponent_upper"), line, strict=True))
    return table, overall | {"p": math.nan if effect is None else effect.p}


def counterfactuals(records: pd.DataFrame, edges, clips: Mapping[str, Clip]) -> Counterfactuals:
    """What each clip would have taken on these records.

    It is the answer for the recorded updates: trained with another clip, the policy would have moved otherwise.

    Args:
        records: the run; all responses, moved or not.
        edges: of :func:`fspo_verl.analysis.clip_rates.length_edges`.
        clips: at least one, by name.
    """
    tables, rows_of = {}, {}
    for name, clip in clips.items():
        tables[name], numbers = measures(records, clip.clipped(records), edges)
        rows_of[name] = {**clip.eps, **numbers}
    by_length = pd.concat(tables).droplevel(1).rename_axis("method")
    return Counterfactuals(by_length, pd.DataFrame.from_dict(rows_of, "index").rename_axis("method"))


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


def by_side(run: Run) -> pd.DataFrame:
    """Clip rate ``all``, and of the ``shortest``, ``middle`` and ``longest`` third, of better and worse responses."""
    counted = run.records[run.records["advantage"] != 0]
    side = np.where(counted["advantage"] > 0, "better", "worse")
    third = np.array(["shortest", "middle", "longest"])[third_of(counted["length"].to_numpy())]
    rates = counted.groupby([side, third])["clipped"].mean().unstack()
    every = counted.groupby(side)["clipped"].mean().rename("all")
    return pd.concat([every, rates.reindex(columns=["shortest", "middle", "longest"])], axis=1)


def plain(numbers: Mapping) -> dict:
    """Numbers for JSON; None for what is not known, or has no bound."""
    return {name: None if value is None or not math.isfinite(value) else value for name, value in numbers.items()}


def rows(table: pd.DataFrame) -> list[dict]:
    """The rows of a table for JSON; None for what is not known, or has no bound."""
    table = table.replace([np.inf, -np.inf], np.nan).astype(object)
    return table.where(table.notna(), None).to_dict("records")
