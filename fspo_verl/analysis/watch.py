# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Follow a run: a line every few steps, and one when something changes, with what is wrong and what to do.

  fspo-verl watch RUN             a folder with records or metrics, of a run that goes on or has ended
  fspo-verl watch train.log       any log that `fspo-verl report` reads

A line is about the last ten steps. Of a run that is observed it says how much of the variance of the
log-ratios is numerical noise, or in bypass mode mismatch of trainer and rollout engine. The rest is movement
of the policy. Of any other log it says what verl's metrics say, which is not why the clip acts.

It ends where the records mark the end of the run, with --once, or with Ctrl-C.
"""

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fspo_verl.analysis.alerts import alarming
from fspo_verl.analysis.causes import HEALTH, NOTABLE_PART, STEPS, conclude
from fspo_verl.analysis.evidence import TRAINED, Evidence
from fspo_verl.analysis.judgement import evidence_of_metrics, evidence_of_records
from fspo_verl.analysis.logs import NOT_FINITE
from fspo_verl.analysis.metric_facts import facts, learn_more
from fspo_verl.analysis.runs import RECORDS, Run, read_run, written
from fspo_verl.findings import Finding
from fspo_verl.observe.attempts import is_finished
from fspo_verl.output import percent, plain, say

_POLL = 5.0  # seconds between two looks; ranks that write one step are not as far apart


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
    watcher, run, seen, waits = Watcher(every), None, None, False
    while True:
        now = written(path)
        changed, seen = now != seen, now
        if changed:
            try:
                run = read_run(path, path.name, since=watcher.last - STEPS)
                if -1 < (newest := max(_steps(run), default=-1)) < watcher.newest:
                    before = f"step {watcher.newest} was there before"
                    yield f"The run goes on from step {newest}, or another has begun: {before}."
                    run = read_run(path, path.name)
                    watcher = Watcher(every, last=newest - STEPS)  # the last ten steps are spoken of again
            except (FileNotFoundError, ValueError) as error:
                begins_anew = run is not None and path.is_file()  # a log in which another run has no step yet
                if once or not (begins_anew or isinstance(error, FileNotFoundError)):
                    raise
        ended = once or has_ended(now)
        if run is not None and (changed or ended):
            yield from watcher.lines(run, ended or not changed)
        if ended and run is not None:
            yield f"next: {watcher.more or f'fspo-verl report {shlex.quote(str(path))}'}"
            return
        if not waits:
            waits = True
            print(plain(f"waiting for what {path} writes; Ctrl-C ends it"), file=sys.stderr, flush=True)
        time.sleep(_POLL)


def has_ended(files: set[tuple[Path, int, int]]) -> bool:
    """Whether the newest records of a run mark its end; ``files`` of :func:`fspo_verl.analysis.runs.written`."""
    records = [(changed, file) for file, changed, _ in files if file.match(RECORDS)]
    return bool(records) and is_finished(max(records)[1].parent)


class Watcher:
    """What has been said of a run.

    Args:
        every: steps from one line to the next.
        last: the step up to which all is said.
    """

    def __init__(self, every: int, last: int = -1):
        self.every, self.last = every, last
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
        for place, step in enumerate(steps if whole else steps[:-1], start=1):
            if step > self.last:
                yield from self._of_step(run, steps[max(place - STEPS, 0) : place])
                self.last = step
        if whole and self._due:
            yield self._due
            self._due = ""

    def _of_step(self, run: Run, window: list[int]) -> Iterator[str]:
        numbers, found = self.observe(run, window)
        self._count += 1
        new = [str(one) for one in found if one.id not in self._holds]
        self._holds |= {one.id: self._count for one in found}
        muted = any(one.id in HEALTH for one in found)
        long_ago = [cause for cause, held in self._holds.items() if self._count - held >= STEPS]
        over = [cause for cause in long_ago if cause in HEALTH or not muted]
        for cause in over:
            del self._holds[cause]
        said = [*new, *(f"Over: {cause}." for cause in over)]
        self._due = f"step {window[-1]}: {numbers or 'nothing to say'}."
        if said or self._count % self.every == 0:
            yield " ".join([self._due, *said])
            self._due = ""

    def observe(self, run: Run, window: list[int]) -> tuple[str, list[Finding]]:
        """Numbers of these steps in a line, and what holds in them. What is broken is broken in the newest."""
        newest = window[-1]
        metrics = run.metrics.loc[window[0] : newest].dropna(axis=1, how="all")
        part = replace(run, metrics=metrics, rollouts=run.rollouts[run.rollouts["step"].isin(window)])
        records, has_records = part.records, len(part.records) > 0
        evidence = evidence_of_records(part.rollouts, run.settings) if has_records else evidence_of_metrics(part)
        if self._cut_off is None:
            self._cut_off = evidence.cut_off
        steps_of = run.metrics.attrs[NOT_FINITE]
        broken = tuple(name for name in steps_of if name.startswith(TRAINED) and newest in steps_of[name])
        evidence = replace(evidence, broken=broken, cut_off_before=self._cut_off, cut_off_since=None)
        if has_records:
            is_idle = not (records["advantage"][records["step"] == newest] != 0).any()
            idle = "no response of this step has an advantage" if is_idle else ""
            numbers = "; ".join(filter(None, [brief(evidence), idle]))
        elif evidence.clip_rate is not None:
            numbers = brief(evidence)
        else:
            numbers, self.more = _logged(part, evidence), learn_more(run)
        return numbers, alarming(conclude(evidence), evidence)


def brief(evidence: Evidence) -> str:
    """The numbers in one line; empty where none is known."""
    said = []
    if evidence.clip_rate is not None:
        said.append(f"{percent(evidence.clip_rate)}{' of the tokens' if evidence.by_token else ''} clipped")
    if evidence.clip_rate:
        parts = {"noise": evidence.noise_share, "mismatch": evidence.mismatch_share if evidence.bypass else None}
        named = {part: min(share, 1.0) for part, share in parts.items() if share and share >= NOTABLE_PART}
        said += [f"{part} is {percent(share)} of the variance" for part, share in named.items()]
        if evidence.thirds:
            shortest, longest = evidence.thirds[0].rate, evidence.thirds[-1].rate
            said.append(f"shortest third {percent(shortest)}, longest {percent(longest)}")
        if evidence.sides:
            said.append("better than their group {}, worse {}".format(*map(percent, evidence.sides)))
    shares = {"cut off": evidence.cut_off, "rejected": evidence.rejected, "not finite": evidence.not_finite}
    said += [f"{what} {percent(share)}" for what, share in shares.items() if share]
    if evidence.broken:
        said.append(f"NaN or inf in {', '.join(evidence.broken)}")
    return "; ".join(said)


def _logged(run: Run, evidence: Evidence) -> str:
    """What a log without our series says of its last steps: never why the clip acts."""
    values = {one.id: one for one in facts(run)}
    rate = values["clipped"].value if "clipped" in values else None
    said = [values["clipped"].sentence.rstrip(".")] if rate == 0 else []  # 0 may be a rounded number
    said.append(brief(replace(evidence, clip_rate=rate or None, by_token=True)))
    if "lengths" in values:
        said.append(f"{values['lengths'].value:,.0f} tokens on average")
    return "; ".join(filter(None, said))


def _steps(run: Run) -> list[int]:
    """Those that left records, or else metrics."""
    return sorted(set(run.records["step"]) or {step for step in run.metrics.index if step > 0})
