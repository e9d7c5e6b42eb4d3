# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Find the range that clips a target share of the responses and treats lengths alike, from what a run has recorded.

eps_high puts the target share of the responses with A > 0 above the range. eps_low puts the same
share of those with A < 0 below it. All recorded responses with an advantage count, as in
fspo/clip_rate/all, also those that no update has moved.

The width is the one that the report advises. It is the run's own, unless a range that was tried
is more even by more than noise. For a loss without a range it is sqrt(length).

With another range, learning rate or batch size the policy moves differently: calibrate again from
the records of that run.
"""

import argparse
import json
import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from fspo_verl import findings, output
from fspo_verl.analysis import causes, clip_rates, fit
from fspo_verl.analysis.clip_rates import prompts_of, t_quantile
from fspo_verl.analysis.judgement import (
    Judgement,
    comparison_rows,
    evidence_of_records,
    judge,
    show_comparison,
)
from fspo_verl.analysis.length_effect import MIN_STEPS
from fspo_verl.analysis.metric_facts import LEARN_MORE
from fspo_verl.analysis.overrides import band_overrides, to_know
from fspo_verl.analysis.runs import Run, read_run
from fspo_verl.band import Band
from fspo_verl.findings import FIX, NOTE, RECORD, TAKE, WARNING, Finding
from fspo_verl.observe.settings import RunSettings
from fspo_verl.output import percent

EPS = "eps"
"""The finding of this command: the range to take, with its overrides."""

OF_THE_BAND = ("few clipped", "one step", "last steps", "dual clip", EPS)
"""Findings on that range, in their order. ``fspo-verl report`` says more of the run."""
_FEW_CLIPPED = 50
_LAST = 5  # the end of a run is one of so many parts of its steps
_NOTABLE = 1.25  # by this factor the clip rate there has to differ


def main(args: argparse.Namespace) -> int:
    """Print the calibration of ``args.run``; 0, or ValueError or FileNotFoundError with what to fix."""
    if not 0 < args.target_clip_rate < 1:
        raise ValueError(f"--target-clip-rate={args.target_clip_rate:g} must lie between 0 and 1")
    if args.max_rows < 1:
        raise ValueError(f"--max-rows={args.max_rows} must be at least 1")
    run = read_run(args.run, args.run.name, args.max_rows)
    judged = judge(run, args.target_clip_rate)
    found = calibrate(run, args.target_clip_rate, judged)
    if args.json:
        answer = {"run": str(run.folder), "target": args.target_clip_rate}
        answer |= {"verdict": judged.verdict.name.lower() if judged.verdict else None}
        answer |= {"ranges": comparison_rows(judged.compared)}
        output.say(json.dumps(answer | {"findings": [one.to_json() for one in found]}, indent=1, allow_nan=False))
        return 0
    output.show([("run", run.name)], widths=(8,))
    shown = [one for place, one in enumerate(found) if place == 0 or one.id in OF_THE_BAND or one.severity != NOTE]
    # Advice to calibrate has been taken: the range answers it.
    shown = [one.without_advice() if one.command == "calibrate" else one for one in shown]
    findings.show(shown[:1])
    show_comparison(judged.compared)
    findings.show(shown[1:])  # the overrides to paste come last
    return 0


def calibrate(run: Run, target: float, judged: Judgement | None = None) -> list[Finding]:
    """Return the findings of a run, and last the range that clips a target share of each side.

    Args:
        target: share between 0 and 1.
        judged: the run, judged at the target, if that has been done.

    Raises:
        ValueError: there are no records, nothing has moved, a sign of the advantage is missing, or no range reaches the
            target.
    """
    judged = judged or judge(run, target)
    try:
        found = [*_of_records(run, judged, target)]
    except ValueError as error:
        first = judged.findings[0]
        if first.action != FIX:
            raise
        raise ValueError(f"{first} There is no eps to give: {error}") from error
    return [*judged.findings, *found]


def _of_records(run: Run, judged: Judgement, target: float) -> Iterator[Finding]:
    """Notes on the range, then the range with its overrides."""
    records, settings = run.records, run.settings
    if records.empty:
        raise ValueError(f"{run.folder} holds no records of responses, and an eps needs them: {LEARN_MORE}")
    if not (records["quadratic_variation"] > 0).any():
        raise ValueError("nothing moved")
    if records["step"].nunique() == 1 and prompts_of(records).max() == 0:
        raise ValueError("all records are of one prompt in one step, and no other says what holds beyond it")
    width = judged.width.band if judged.width else settings and settings.trained_band
    band = fit.with_eps(records, width or Band(), target)
    yield from _notes(records, band, target)
    bypass = bool(settings and settings.old_log_probs_from_rollout)
    of_band = evidence_of_records(records, RunSettings("fspo", band, old_log_probs_from_rollout=bypass), tested=False)
    if noise := causes.narrower(of_band):
        said = (
            f"There is nothing to paste: numerical noise alone puts {percent(noise.value or 0)} of the responses that "
            f"no update had moved outside the range that clips {percent(target)}."
        )
        yield Finding(EPS, WARNING, said, f"{noise.advice} Then train, and calibrate again.", noise.value, FIX)
        return
    clipped, sides = fit.clipped_by(band, records), clip_rates.sides(records)
    better, worse, rate = (float(clipped[sides[side]].mean()) for side in ("upper", "lower", "all"))
    own = ""
    if judged.evidence.sides and not judged.evidence.lengths.by_token:
        own = " (the run's own clip {} and {})".format(*map(percent, judged.evidence.sides))
    said = (
        f"{_eps(band, settings)} clip {percent(better)} of the better and {percent(worse)} of the worse responses "
        f"here{own}. That both sides give up the same share is an option: eps_low and eps_high are free."
    )
    action = judged.findings[0].action
    action = action if action in _NEXT else TAKE
    advice = f"{_NEXT[action]} {to_know(band, settings)}"
    yield Finding(EPS, NOTE, said, advice, rate, action, band_overrides(band, settings))


def _notes(records: pd.DataFrame, band: Band, target: float) -> Iterator[Finding]:
    for name, side in (("eps_high", "upper"), ("eps_low", "lower")):
        if (count := target * clip_rates.sides(records)[side].sum()) < _FEW_CLIPPED:
            said = f"{name} rests on {count:.0f} clipped responses: record more steps, or take a higher target."
            yield Finding("few clipped", NOTE, said, "", float(count))
    if records["step"].nunique() == 1:
        said = "All records are of one step: eps and clip rate hold for its update, and another may move otherwise."
        yield Finding("one step", NOTE, said, "", 1.0)
    yield from _last_steps(records, band, target)
    if band.high * 1.01 < band.dual < math.inf:
        said = (
            "Many responses with A < 0 move upwards here. eps_dual is wider than eps_high, so that beyond it lies at "
            "most a tenth of the target."
        )
        yield Finding("dual clip", NOTE, said, "", band.dual)


def _last_steps(records: pd.DataFrame, band: Band, target: float) -> Iterator[Finding]:
    """Describe what the range clips at the end of the run, if that is not what was asked, by more than noise.

    The noise of a step is what a line through the rates of all steps leaves.
    """
    counted = records[records["advantage"] != 0]
    rates = pd.Series(fit.clipped_by(band, counted)).groupby(counted["step"].to_numpy()).mean().to_numpy()
    if (steps := len(rates)) < MIN_STEPS:
        return
    rest = rates - np.polyval(np.polyfit(np.arange(steps), rates, 1), np.arange(steps))
    last = rates[-(steps // _LAST) :]
    rate, noise = float(last.mean()), math.sqrt(np.square(rest).sum() / (steps - 2) / len(last))
    if abs(rate - target) > t_quantile(steps - 2) * noise and not target / _NOTABLE < rate < target * _NOTABLE:
        moves = "less" if rate < target else "further"
        said = (
            f"In the last {len(last)} steps it clips {percent(rate)}, not {percent(target)}: responses move {moves} "
            "there than over the run. The run that goes on from here is like its end."
        )
        yield Finding("last steps", NOTE, said, "", rate)


_NEXT = {
    FIX: "First fix what the first line says, train, and calibrate from the records of that run.",
    RECORD: "Record more steps, and calibrate again.",
    TAKE: "Train with this, and calibrate again from the records of that run. With another eps the policy moves "
    "otherwise.",
}


def _eps(band: Band, settings: RunSettings | None) -> str:
    """The two numbers, after those of the run if its range has the same width."""
    own = settings and settings.trained_band
    before = own if own and own.form == band.form else None
    values = [
        f"{name} {f'{getattr(before, side):.4g} -> ' if before else ''}{getattr(band, side):.4g}"
        for name, side in (("eps_low", "low"), ("eps_high", "high"))
    ]
    name = fit.name_of(band)
    width = "a fixed width" if name == fit.FIXED else f"a width that follows {name}"
    return f"{' and '.join(values)} with {width}"
