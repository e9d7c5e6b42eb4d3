# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Follow a run: a line every few steps, and one when something changes, with what is wrong and what to do.

  fspo-verl watch RUN             a folder with records or metrics, of a run that goes on or has ended
  fspo-verl watch train.log       any log that `fspo-verl report` reads

A line is about the last ten steps. With records it says why the clip acts: which share of the clips is
numerical noise, mismatch of trainer and rollout engine, age of the responses, or movement of the policy.
Of a log it says what verl's metrics say, which is not why.

It ends with the run: when the run has marked its end, or has written nothing for five times its longest
step, and for five minutes at least. Before the length of a step is known that is a day.
"""

import argparse
import contextlib
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pandas as pd

from fspo_verl.analysis.alerts import alarming
from fspo_verl.analysis.attribution import attribution
from fspo_verl.analysis.causes import HEALTH, STEPS, conclude
from fspo_verl.analysis.evidence import TRAINED, Evidence
from fspo_verl.analysis.judgement import evidence_of_metrics, evidence_of_records
from fspo_verl.analysis.logs import NOT_FINITE
from fspo_verl.analysis.metric_facts import facts, learn_more
from fspo_verl.analysis.runs import RECORDS, Run, read_run, written
from fspo_verl.findings import NOTE, Finding
from fspo_verl.observe.attempts import FINISHED
from fspo_verl.observe.metrics import NAMES
from fspo_verl.output import percent, plain, say

_SMALL_PART = 0.05  # of the clips, below which it is not named
_POLL = 5.0  # seconds between two looks; ranks that write one step are not as far apart
_QUIET = 300.0  # seconds, at least, after which a run that writes nothing has ended
_LONG = 5  # times its longest step
_UNKNOWN = 86400 / _LONG  # seconds that a step may take where that is not known


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
    watcher, seen, heard, waits, run = Watcher(every), None, 0.0, False, None
    while True:
        now = written(path)
        changed, heard, seen = now != seen, heard if seen in (None, now) else time.time(), now
        if changed:
            try:
                run = read_run(path, path.name, since=watcher.last - STEPS)
                if -1 < _newest(run) < watcher.newest:  # another run, or a resumed one
                    run = read_run(path, path.name)
                    yield watcher.goes_back(run)
            except (FileNotFoundError, ValueError) as error:
                begins_anew = run is not None and path.is_file()  # a log in which another run has no step yet
                if once or not (begins_anew or isinstance(error, FileNotFoundError)):
                    raise
        ended = once or (run is not None and has_ended(run, seen, heard))
        if run is not None and (changed or ended):
            yield from watcher.lines(run, ended or not changed)
        if ended and run is not None:
            yield f"next: {watcher.more or f'fspo-verl report {shlex.quote(str(path))}'}"
            return
        if not waits:
            waits = True
            print(plain(f"waiting for what {path} writes; Ctrl-C ends it"), file=sys.stderr, flush=True)
        time.sleep(_POLL)


def has_ended(run: Run, files: set[tuple[Path, int, int]], heard: float = 0.0) -> bool:
    """Whether a run has marked its end, or has written nothing for long.

    Args:
        files: of :func:`fspo_verl.analysis.runs.written`.
        heard: when a change of them was seen, by the clock of this machine; that of their disk may be another.
    """
    if not files:
        return False
    newest = max(files, key=lambda file: file[1])
    if any(newest[0].parent.glob(f"{FINISHED}*")):
        return True
    seconds = run.metrics[NAMES["seconds"]].max() if NAMES["seconds"] in run.metrics else math.nan
    if math.isnan(seconds):  # from one step's records to the next's
        steps: dict[str, float] = {}
        for file, changed, _ in files:
            if file.match(RECORDS):
                step = file.name.partition("-rank")[0]
                steps[step] = max(changed / 1e9, steps.get(step, 0.0))
        times = sorted(steps.values())
        seconds = max((later - earlier for earlier, later in pairwise(times)), default=_UNKNOWN)
    return time.time() - max(newest[1] / 1e9, heard) > max(_QUIET, _LONG * seconds)


def _steps(run: Run) -> list[int]:
    """Those that left records, or else metrics."""
    return sorted(set(run.records["step"]) or {step for step in run.metrics.index if step > 0})


def _newest(run: Run) -> int:
    return max(_steps(run), default=-1)


class Watcher:
    """What has been said of a run."""

    def __init__(self, every: int):
        self.every = every
        self.last = -1  # the step up to which all is said
        self.newest = -1  # the newest step that was there
        self.more = ""  # of a log: what would tell more
        self._cut_off: float | None = None  # share at the start
        self._count = 0  # of the steps
        self._holds: dict[str, int] = {}  # by cause, at which of the steps it held last
        self._due = ""  # the line of the last step, where it has not been said

    def lines(self, run: Run, whole: bool) -> Iterator[str]:
        """The lines of steps that are new; the newest one may be about to be written if not ``whole``."""
        steps = _steps(run)
        self.newest = max(steps, default=self.newest)
        for step in steps if whole else steps[:-1]:
            if step > self.last:
                yield from self._of_step(run, [one for one in steps if one <= step][-STEPS:])
                self.last = step
        if whole and self._due:
            yield self._due
            self._due = ""

    def goes_back(self, run: Run) -> str:
        """The line for a run that is behind what was seen of it. Its last ten steps are spoken of again."""
        said = f"The run goes on from step {_newest(run)}, or another has begun: step {self.newest} was there before."
        self.last, self.newest = _newest(run) - STEPS, -1
        self._cut_off, self._count, self._holds, self._due = None, 0, {}, ""
        return said

    def _of_step(self, run: Run, window: list[int]) -> Iterator[str]:
        numbers, found = self._observed(_of_steps(run, window), window)
        self._count += 1
        new = [one for one in found if one.id not in self._holds]
        self._holds |= {one.id: self._count for one in found}
        muted = any(one.id in HEALTH for one in found)
        over = [
            cause
            for cause, held in self._holds.items()
            if self._count - held >= STEPS and not (muted and cause not in HEALTH)
        ]
        for cause in over:
            del self._holds[cause]
        said = [*map(str, new), *(f"Over: {cause}." for cause in over)]
        self._due = f"step {window[-1]}: {numbers or 'nothing to say'}."
        if said or self._count % self.every == 0:
            yield " ".join([self._due, *said])
            self._due = ""

    def _observed(self, run: Run, window: list[int]) -> tuple[str, list[Finding]]:
        """Numbers in a line, and what holds."""
        if len(run.records):
            evidence = self._in_window(run, evidence_of_records(run.rollouts, run.settings))
            newest = run.records[run.records["step"] == window[-1]]
            idle = "" if (newest["advantage"] != 0).any() else "no response of this step has an advantage"
            numbers = "; ".join(filter(None, [brief(evidence, attribution(run.records, run.settings)), idle]))
            return numbers, alarming(conclude(evidence), evidence)
        evidence = self._in_window(run, evidence_of_metrics(run))
        if evidence.clip_rate is not None:
            return brief(evidence), alarming(conclude(evidence), evidence)
        self.more = learn_more(run)
        return _logged(run, evidence)

    def _in_window(self, run: Run, evidence: Evidence) -> Evidence:
        """The evidence of a window, with what is broken in it, and what was cut off when the run began."""
        if self._cut_off is None:
            self._cut_off = evidence.cut_off
        broken = tuple(name for name in run.metrics.attrs[NOT_FINITE] if name.startswith(TRAINED))
        return replace(evidence, broken=broken, cut_off_before=self._cut_off, cut_off_since=None)


def brief(evidence: Evidence, parts: Mapping[str, float] | None = None) -> str:
    """The numbers in one line; empty where none is known.

    Args:
        parts: shares of the clips, of :func:`fspo_verl.analysis.attribution.attribution`.
    """
    said = []
    if evidence.clip_rate is not None:
        of = " of the tokens" if evidence.by_token else ""
        named = [f"{percent(share)} of it {part}" for part, share in (parts or {}).items() if share >= _SMALL_PART]
        said.append(", ".join([f"{percent(evidence.clip_rate)}{of} clipped", *(named if evidence.clip_rate else ())]))
    if evidence.thirds and evidence.clip_rate:
        shortest, longest = evidence.thirds[0].rate, evidence.thirds[-1].rate
        said.append(f"shortest third {percent(shortest)}, longest {percent(longest)}")
    if evidence.sides and evidence.clip_rate:
        said.append("better than their group {}, worse {}".format(*map(percent, evidence.sides)))
    shares = {"cut off": evidence.cut_off, "rejected": evidence.rejected, "not finite": evidence.not_finite}
    said += [f"{what} {percent(share)}" for what, share in shares.items() if share]
    if evidence.broken:
        said.append(f"NaN or inf in {', '.join(evidence.broken)}")
    return "; ".join(said)


def _logged(run: Run, evidence: Evidence) -> tuple[str, list[Finding]]:
    """What a log without our series says of its last steps: never why the clip acts."""
    values = {one.id: one for one in facts(run)}
    rate = values["clipped"].value if "clipped" in values else None
    said = [values["clipped"].sentence.rstrip(".")] if rate == 0 else []  # 0 may be a rounded number
    said.append(brief(replace(evidence, clip_rate=rate or None, by_token=True)))
    if "lengths" in values:
        said.append(f"{values['lengths'].value:,.0f} tokens on average")
    found = [one for one in conclude(evidence) if one.id in HEALTH and one.severity != NOTE]
    return "; ".join(filter(None, said)), found


def _of_steps(run: Run, window: list[int]) -> Run:
    """The run of these steps alone; what is broken is broken in the newest of them."""
    first, last = window[0], window[-1]
    rows = run.metrics[(run.metrics.index >= first) & (run.metrics.index <= last)].dropna(axis=1, how="all")
    known = run.metrics.attrs.get(NOT_FINITE, {})
    rows.attrs = {NOT_FINITE: {name: [last] for name, steps in known.items() if last in steps}}
    return replace(run, metrics=rows, records=_within(run.records, window), rejected=_within(run.rejected, window))


def _within(records: pd.DataFrame, window: list[int]) -> pd.DataFrame:
    return records[records["step"].isin(window)] if len(records) else records
