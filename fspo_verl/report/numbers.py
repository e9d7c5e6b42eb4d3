# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers of a report: clip rates of a run by length, and those of other clips on the same records."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from fspo_verl.analysis.clip_rates import length_reweighting_error, prompts_of, rate_by_length, sides
from fspo_verl.analysis.judgement import Judgement, comparison_rows, judge
from fspo_verl.analysis.length_effect import LengthEffect, length_effect
from fspo_verl.analysis.live import bins_of_log, of_log, over_steps
from fspo_verl.analysis.mismatch import Mismatch, mismatch
from fspo_verl.analysis.runs import Run
from fspo_verl.analysis.widths import unevenness
from fspo_verl.clips import CLIPS, MATCHED_RATE, Clip, TokenClip
from fspo_verl.observe.metrics import NAMES


class Measured(NamedTuple):
    """The effect of a clip on the responses with an advantage."""

    by_length: pd.DataFrame  # of rate_by_length
    overall: dict[str, float]  # n, rate, lower, upper, lre, p; exponent and its interval, NaN where k is no line
    effect: LengthEffect | None  # of the length; None where the records cannot tell
    uneven: float  # see :func:`fspo_verl.analysis.widths.unevenness`
    smallest: float


@dataclass
class Analysis:
    """The numbers of one run; clip rates are of responses with an advantage."""

    run: Run
    judgement: Judgement
    rates: pd.DataFrame  # by length; without records from live metrics, without n and with unknown intervals
    own: Measured | None = None  # None without records, as the next two
    others: Sequence[tuple[Clip, Measured]] = ()  # on the recorded updates: with another clip there had been others
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
        found: dict = {
            "run": self.run.name,
            "loss": self.loss,
            "steps": self.steps,
            "records": len(self.run.records),
            "findings": [one.to_json() for one in self.judgement.findings],
            "verdict": self.judgement.verdict.name.lower() if self.judgement.verdict else None,
            "ranges": comparison_rows(self.judgement.compared),
            "clip": plain((self.own.overall if self.own else {}) | {"rate": self.judgement.evidence.clip_rate}),
            "lengths": rows(self.rates),
            "clips": [
                {"method": clip.name}
                | plain(clip.eps | found.overall | {"uneven": found.uneven, "smallest": found.smallest})
                for clip, found in self.others
            ],
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
    own = measured(records, records.clipped.to_numpy(), edges, judgement.evidence.lengths.effect)
    others = [(clip, measured(records, clip.clipped(records), edges)) for clip in at_one_rate(records)]
    return Analysis(run, judgement, own.by_length, own, others, mismatch(run.rollouts, run.settings))


def live_rates(metrics: pd.DataFrame) -> pd.DataFrame:
    """Clip rate by length bin over all steps, from metrics: columns low, high, rate, lower and upper (not known)."""
    bins = bins_of_log(of_log(over_steps(metrics.to_dict("records"))))
    longest = metrics[NAMES["longest"]].max() if NAMES["longest"] in metrics else math.nan
    ends = [np.fmax(longest, one.shortest) if math.isnan(one.longest) else one.longest for one in bins]
    low, rate = [int(one.shortest) for one in bins], [one.rate for one in bins]
    return pd.DataFrame({"low": low, "high": ends, "rate": rate, "lower": math.nan, "upper": math.nan})


def measured(
    records: pd.DataFrame, clipped: np.ndarray, edges: np.ndarray, effect: LengthEffect | None = None
) -> Measured:
    """Measure what a clip does, by length bin and in all.

    Args:
        clipped: 0 or 1, or shares of tokens ``[rows]``.
        effect: of the length, if the test has been made.
    """
    counted = sides(records)["all"]
    length, shares, cluster = records["length"][counted], np.asarray(clipped)[counted], prompts_of(records[counted])
    by_length, whole = (rate_by_length(length, shares, bins, clusters=cluster) for bins in (edges, edges[[0, -1]]))
    overall = whole.iloc[0][["n", "rate", "lower", "upper"]].to_dict() | {"lre": length_reweighting_error(by_length)}
    unknown = LengthEffect(math.nan, math.nan, math.nan, math.nan)
    effect = effect or length_effect(records, clipped)
    line = effect if effect and (effect.is_line or not effect.depends) else unknown
    overall |= {"exponent": line.exponent, "exponent_lower": line.lower, "exponent_upper": line.upper}
    overall |= {"p": (effect or unknown).p}
    return Measured(by_length, overall, effect, *unevenness(records, clipped))


def at_one_rate(records: pd.DataFrame, clips: Mapping[str, Clip] = CLIPS) -> list[Clip]:
    """The clips, each scaled to take :data:`MATCHED_RATE` of the responses with an advantage: shapes, not constants.

    Those that work token by token stay as they are; those that cannot reach the rate on these records are left out.
    """
    scaled = []
    for clip in clips.values():
        with contextlib.suppress(ValueError):
            scaled.append(clip if isinstance(clip, TokenClip) else clip.matched(records, MATCHED_RATE))
    return scaled


def plain(numbers: Mapping) -> dict:
    """Numbers for JSON; None for what is not known, or has no bound."""
    return {name: None if value is None or not math.isfinite(value) else value for name, value in numbers.items()}


def rows(table: pd.DataFrame) -> list[dict]:
    """The rows of a table for JSON; None for what is not known, or has no bound."""
    table = table.replace([np.inf, -np.inf], np.nan).astype(object)
    return table.where(table.notna(), None).to_dict("records")
