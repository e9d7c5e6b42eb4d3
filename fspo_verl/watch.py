# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Follow a run: a line every few steps, and one when something changes, with what is wrong and what to do.

  fspo-verl watch RUN             a folder with records or metrics, of a run that goes on or has ended
  fspo-verl watch train.log       any log that `fspo-verl report` reads

A line is about the last ten steps. With records it says why the clip acts: which share of the clips is
numerical noise, mismatch of trainer and rollout engine, age of the responses, or movement of the policy.
Of a log it says what verl's metrics say, which is not why.

It ends with the run: when the run has marked its end, or has written nothing for five times its longest
step, and for five minutes at least.
"""

import argparse
import contextlib
import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from fspo_verl.alerts import STEPS, alarming
from fspo_verl.analysis import conclusion, verdict
from fspo_verl.analysis.attribution import attribution
from fspo_verl.analysis.conclusion import Conclusion, Evidence
from fspo_verl.analysis.logs import NOT_FINITE
from fspo_verl.analysis.metric_facts import LEARN_MORE, facts
from fspo_verl.analysis.runs import Run, read_run, written
from fspo_verl.observe.attempts import FINISHED
from fspo_verl.observe.metrics import NAMES
from fspo_verl.output import plain, say

_POLL = 5.0  # seconds between two looks; ranks that write one step are not as far apart
_QUIET = 300.0  # seconds, at least, after which a run that writes nothing has ended
_LONG = 5  # times its longest step


def main(args: argparse.Namespace) -> int:
    """Print the lines of ``args.run``; 0, or ValueError or FileNotFoundError with what to mend."""
    if args.every < 1:
        raise ValueError(f"--every={args.every} must be at least 1")
    if not args.run.exists():
        raise FileNotFoundError(f"{args.run}: no such folder or file")
    with contextlib.suppress(KeyboardInterrupt):
        for line in follow(args.run, args.every, args.once):
            say(plain(line))
    return 0


def follow(path: Path, every: int, once: bool) -> Iterator[str]:
    """The lines of a run until it ends; of what is there, if ``once``.

    Raises:
        FileNotFoundError, ValueError: there is nothing of a run, or several; the former only if ``once``.
    """
    watcher, seen, waits, run = Watcher(every), None, False, None
    while True:
        now = written(path)
        changed, seen = now != seen, now
        if changed:
            try:
                run = read_run(path, path.name, since=watcher.last - STEPS)
            except FileNotFoundError:
                if once:
                    raise
        ended = once or (run is not None and has_ended(run, seen))
        if run is not None and (changed or ended):
            yield from watcher.lines(run, ended or not changed)
        if ended and run is not None:
            yield f"next: {LEARN_MORE if watcher.of_log else f'fspo-verl report {shlex.quote(str(path))}'}"
            return
        if not waits:
            waits = True
            print(plain(f"waiting for what {path} writes; Ctrl-C ends it"), file=sys.stderr, flush=True)
        time.sleep(_POLL)


def has_ended(run: Run, files: set[tuple[Path, int, int]]) -> bool:
    """Whether a run has marked its end, or has written nothing for long."""
    if not files:
        return False
    newest = max(files, key=lambda file: file[1])
    if newest[0].with_name(FINISHED).exists():
        return True
    seconds = run.metrics[NAMES["seconds"]].max() if NAMES["seconds"] in run.metrics else math.nan
    if math.isnan(seconds):  # from one step's records to the next's
        times = sorted(file[1] / 1e9 for file in files if file[0].suffix == ".parquet")
        seconds = max((later - earlier for earlier, later in zip(times, times[1:], strict=False)), default=0.0)
    return time.time() - newest[1] / 1e9 > max(_QUIET, _LONG * seconds)


class Watcher:
    """What has been said of a run."""

    def __init__(self, every: int):
        self.every = every
        self.last = -1  # the step up to which all is said
        self.of_log = False
        self._count = 0  # of the steps
        self._holds: dict[str, int] = {}  # by cause, at which of the steps it held last
        self._due = ""  # the line of the last step, where it has not been said

    def lines(self, run: Run, whole: bool) -> Iterator[str]:
        """The lines of steps that are new; the newest one may be about to be written if not ``whole``."""
        steps = sorted(set(run.records["step"]) or {step for step in run.metrics.index if step > 0})
        for step in steps if whole else steps[:-1]:
            if step > self.last:
                yield from self._of_step(run, [one for one in steps if one <= step][-STEPS:])
                self.last = step
        if whole and self._due:
            yield self._due
            self._due = ""

    def _of_step(self, run: Run, window: list[int]) -> Iterator[str]:
        numbers, found = self._observed(run, window)
        self._count += 1
        new = [one for one in found if one.cause not in self._holds]
        self._holds |= {one.cause: self._count for one in found}
        muted = any(one.cause in conclusion.HEALTH for one in found)
        over = [
            cause
            for cause, held in self._holds.items()
            if self._count - held >= STEPS and not (muted and cause not in conclusion.HEALTH)
        ]
        for cause in over:
            del self._holds[cause]
        said = [f"{one.sentence} {one.advice}" for one in new] + [f"Over: {cause}." for cause in over]
        self._due = f"step {window[-1]}: {numbers or 'nothing to say'}."
        if said or self._count % self.every == 0:
            yield " ".join([self._due, *said])
            self._due = ""

    def _observed(self, run: Run, window: list[int]) -> tuple[str, list[Conclusion]]:
        """Numbers in a line, and what holds."""
        metrics = _of_steps(run.metrics, window)
        broken = tuple(name for name in _broken(metrics) if window[-1] in metrics.attrs[NOT_FINITE][name])
        if len(run.records):
            records = run.records[run.records["step"].isin(window)]
            evidence = verdict.of_records(records, tested=False)
            rejected = int(run.rejected["step"].isin(window).sum()) if len(run.rejected) else 0
            if rejected:
                evidence = dataclasses.replace(evidence, rejected=rejected / (rejected + len(records)))
            parts = attribution(records)
            newest = records[records["step"] == window[-1]]
            idle = "" if (newest["advantage"] != 0).any() else "no response of this step has an advantage"
        else:
            evidence, parts, idle = verdict.of_metrics(metrics, run.settings), None, ""
        evidence = dataclasses.replace(evidence, broken=broken)
        if evidence.clip_rate is not None or len(run.records):
            numbers = "; ".join(filter(None, [conclusion.brief(evidence, parts), idle]))
            return numbers, alarming(evidence, len(window))
        self.of_log = True
        return _logged(dataclasses.replace(run, metrics=metrics), broken)


def _logged(run: Run, broken: tuple[str, ...]) -> tuple[str, list[Conclusion]]:
    """What a log without our series says of its last steps: never why the clip acts."""
    found = {fact.about: fact for fact in facts(run)}
    values = {about: fact.values for about, fact in found.items()}
    rate, cut_off = (values.get(about, {}).get("last") for about in ("clipped", "cut off"))
    numbers = conclusion.brief(Evidence(clip_rate=rate or None, by_token=True, cut_off=cut_off, broken=broken))
    said = [found["clipped"].sentence.rstrip(".") if rate == 0 else "", numbers]  # 0 may be a rounded number
    if "lengths" in values:
        said.append(f"{values['lengths']['last']:,.0f} tokens on average")
    if "mismatch" in values:
        said.append(f"mismatch {values['mismatch']['sigma']:.2g} nats per token")
    of_run = verdict.verdict_of(run)
    holds = of_run.cause in conclusion.CAUSES and (of_run.cause != conclusion.NOT_FINITE or bool(broken))
    one = Conclusion(of_run.cause, of_run.sentence, of_run.advice, of_run.action)
    return "; ".join(filter(None, said)), [one] if holds else []


def _broken(metrics: pd.DataFrame) -> list[str]:
    return [name for name in metrics.attrs.get(NOT_FINITE, {}) if name.startswith(conclusion.TRAINED)]


def _of_steps(metrics: pd.DataFrame, window: list[int]) -> pd.DataFrame:
    """The rows of these steps, and what is broken in them."""
    rows = metrics[(metrics.index >= window[0]) & (metrics.index <= window[-1])].dropna(axis=1, how="all")
    known = metrics.attrs.get(NOT_FINITE, {})
    here = {name: [step for step in steps if window[0] <= step <= window[-1]] for name, steps in known.items()}
    rows.attrs = {NOT_FINITE: {name: steps for name, steps in here.items() if steps}}
    return rows
