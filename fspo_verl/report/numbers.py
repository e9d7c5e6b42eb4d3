# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers of a report: what is computed from the records and the metrics of each run, with intervals."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fspo_verl.analysis import clip_rates, verdict
from fspo_verl.analysis.counterfactuals import Counterfactuals, counterfactuals, measures
from fspo_verl.analysis.runs import RECORDS_DIR, Run, config_differences, live_clip_rates
from fspo_verl.analysis.verdict import Verdict
from fspo_verl.clips import CLIPS, MATCHED_RATE
from fspo_verl.observe import noise
from fspo_verl.observe.metrics import NAMES


@dataclass
class Analysis:
    """What is known of one run; clip rates are of responses with an advantage."""

    run: Run
    verdict: Verdict
    rates: pd.DataFrame  # by length; from live metrics with steps in place of n where nothing is recorded
    overall: pd.Series | None = None  # over all lengths, named as in Counterfactuals.summary; None without records
    stock: Counterfactuals | None = None
    matched: Counterfactuals | None = None  # None where no clip can take MATCHED_RATE of these responses, too


def analyse(run: Run, edges: np.ndarray) -> Analysis:
    """All numbers of one run; ``edges`` are of length bins that cover all its lengths."""
    records, found = run.records, verdict_of(run)
    counted = records[records.advantage != 0]
    if counted.empty:
        return Analysis(run, found, live_rates(run))
    rates, overall = measures(records, records.clipped.to_numpy(), edges)
    clips = {name: clip for name, clip in CLIPS.items() if _reaches(clip, records)}
    matched = counterfactuals(records, edges, MATCHED_RATE, clips) if clips else None
    return Analysis(run, found, rates, pd.Series(overall), counterfactuals(records, edges), matched)


def _reaches(clip, records: pd.DataFrame) -> bool:
    """Whether a clip can be scaled to take MATCHED_RATE of these responses."""
    with contextlib.suppress(ValueError):
        clip.matched(records, MATCHED_RATE)
        return True
    return False


def verdict_of(run: Run) -> Verdict:
    """:func:`fspo_verl.analysis.verdict.verdict` of a run's records; from its metrics rates only, without a test."""
    if len(run.records):
        return verdict.verdict(run.records)
    live = live_clip_rates(run.metrics).query("responses > 0")
    sentence, rate = "Nothing to say: there are no records, and the metrics hold no clip rates.", math.nan
    if len(live):
        rate = live.clipped.sum() / live.responses.sum()
        share = f"{verdict.percent(rate)} of the responses with an advantage"
        sentence = f"Clips {share}. These are rates only, no test: there are no records."
    settings, notes = run.settings, []
    how = f"Record more: train with {RECORDS_DIR}=DIR"
    if settings is None or settings.loss != "fspo":
        how += " and +algorithm.policy_loss=observed (algorithm.policy_loss=gspo and grpo include it)"
    if (found := noise.of_metrics(run.metrics)) is not None:
        notes.append(
            f"{found.responses:,} responses of first mini-batches, which no update has moved, show numerical noise: a "
            f"token's log-ratio spreads by {found.sigma:.2g} nats."
        )
        band = settings.trained_band if settings else None
        if band is not None and (warned := noise.warning(found, band)):
            notes.append(f"{warned[0].upper()}{warned[1:]}.")
    return Verdict(sentence, f"{how}.", rate, 0, notes=tuple(notes))


def live_rates(run: Run) -> pd.DataFrame:
    """Clip rate by length from a run's metrics: columns low, high, steps, rate, lower, upper.

    ``steps`` have a response in the bin, and the interval takes them for independent: how many responses stand behind a
    step's rate is not logged.
    """
    rows = []
    longest = run.metrics.reindex(columns=NAMES["longest"]).max().item()
    for low, part in live_clip_rates(run.metrics).query("responses > 0").groupby("low"):
        rate = clip_rates.ratio_of_sums(part.clipped, part.responses)
        high = np.fmax(longest, low) if part.high.isna().any() else part.high.max()
        rows.append((low, high, len(part), *rate))
    return pd.DataFrame(rows, columns=["low", "high", "steps", "rate", "lower", "upper"])


def tables(analyses: Sequence[Analysis]) -> dict[str, pd.DataFrame]:
    """Every number of a report, by the name of its file."""
    methods = {
        (a.run.name, constants): found
        for a in analyses
        for constants, found in (("stock", a.stock), ("matched", a.matched))
        if found is not None
    }
    by_method, runs = ("run", "constants"), [a.run for a in analyses]
    return {
        "summary": pd.DataFrame([_summary(a) for a in analyses]),
        "clip_rate_by_length": _stacked({a.run.name: a.rates for a in analyses if a.overall is not None}),
        "live_clip_rate_by_length": _stacked({a.run.name: a.rates for a in analyses if a.overall is None}),
        "counterfactuals_by_length": _stacked(
            {k: found.by_length.reset_index() for k, found in methods.items()}, by_method
        ),
        "counterfactuals_summary": _stacked(
            {k: found.summary.reset_index() for k, found in methods.items()}, by_method
        ),
        "metrics": _stacked({run.name: run.metrics.reset_index() for run in runs}),
        "config_differences": config_differences(runs).reset_index(),
    }


def _stacked(frames: dict, keys: Sequence[str] = ("run",)) -> pd.DataFrame:
    """One table of all; its first columns, ``keys``, say which."""
    # Copied into one block: pandas warns of new columns in a table of a hundred blocks, as those of metrics are.
    return pd.concat(frames, names=keys).copy().reset_index(keys) if frames else pd.DataFrame()


def steps(run: Run) -> int:
    """Number of training steps that left metrics or records."""
    return len(set(run.metrics.index[run.metrics.index > 0]) | set(run.records.step.unique()))


def _summary(a: Analysis) -> dict:
    run = a.run
    row: dict[str, object] = {"run": run.name, "loss": run.settings.loss if run.settings else None}
    row |= {"steps": steps(run), "records": len(run.records)}
    if a.overall is None:
        return row | {"clip_rate": a.verdict.rate}
    length = run.records.length
    row |= {"length_shortest": length.min(), "length_median": length.median(), "length_longest": length.max()}
    row |= {"moved": int((run.records.quadratic_variation > 0).sum())}
    return row | a.overall.rename({name: f"clip_{name}" for name in ("rate", "lower", "upper")}).to_dict()
