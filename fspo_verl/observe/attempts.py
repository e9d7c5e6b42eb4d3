# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's records: its attempts, names of its files, and what is missing.

Each launch of a run is an attempt with a folder of its own, ``attempt-0001-RUN``, so that it overwrites nothing: not
where it goes on from a checkpoint, and not where two launches train at once. The newest attempt counts from
its first step on. ``run.json`` says whose records they are; a launch with other checkpoints is refused.
"""

import contextlib
import hashlib
import itertools
import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

RECORD = "step-{step:06d}-rank-{rank:04d}.parquet"
FINISHED = "finished"  # beside the records of an attempt that has come to the last step of the run
_ATTEMPT = re.compile(r"attempt-(\d+)-([0-9a-f]+)")
_RECORD = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")
_OWNER = "run.json"


class Part(NamedTuple):
    """A file of records, with what its metadata says of the attempt; an older file, or a damaged one, says nothing."""

    folder: Path  # of the run's records
    number: int  # of the attempt; 0 for an older file, which is in no folder of one
    run: str  # whose attempt it is; "" for an older file
    step: int
    rank: int
    file: Path
    rows: int = 0
    ranks: int = 0  # that train; 0 where it is not known
    started: int = 0  # first step that the attempt was to record
    taken: int = 0  # how many it was to record up to this one
    freq: int = 1
    last_step: int | None = None  # the last one that the run was to record
    limit_bytes: float = math.inf  # of the files of one rank


class Missing(NamedTuple):
    """Records that a run should have written and that are not there."""

    steps: int  # of which some are missing
    files: int
    responses: int  # about: as many to a file as in those that are there
    limited_after: int | None  # the step after which a rank records nothing, as it has reached its limit_bytes


def parts(folder: str | Path) -> list[Part]:
    """The record files below a folder, by attempt, step and rank; copies and other files are skipped."""
    files = []
    for file in Path(folder).rglob("step-*.parquet"):
        if name := _RECORD.fullmatch(file.name):
            attempt = _ATTEMPT.fullmatch(file.parent.name)
            of = (file.parents[1], int(attempt[1]), attempt[2]) if attempt else (file.parent, 0, "")
            files.append(Part(*of, int(name[1]), int(name[2]), file))
    return sorted(files)


def record_files(folder: str | Path) -> list[Path]:
    """As :func:`parts`."""
    return [part.file for part in parts(folder)]


def attempt(folder: Path, run: str) -> Path:
    """The folder of what a launch records below the folder of its run; made by the first of its processes that asks.

    Args:
        run: an identity that all processes of the launch share, and no other has.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.blake2b(run.encode(), digest_size=4).hexdigest()
    matches = filter(None, (_ATTEMPT.fullmatch(made.name) for made in folder.iterdir()))
    made = sorted((int(match[1]), match[2]) for match in matches)
    number = next((number for number, of in made if of == name), made[-1][0] + 1 if made else 1)
    own = folder / f"attempt-{number:04d}-{name}"
    own.mkdir(exist_ok=True)
    return own


def newest(files: Sequence[Part]) -> list[Part]:
    """The parts that no later attempt in the same folder has done again, from its first step on."""
    ends = _ends(files)
    return [part for part in files if part.step < ends[part.folder, part.run]]


def missing(files: Sequence[Part]) -> Missing:
    """The records that are missing from the attempts of :func:`newest`.

    An attempt ends where a later one starts, or at the last step of the run where it has marked that it got there. Of
    one that may still go on, the last step that is there does not count: ranks do not write at the same time.
    """
    attempts: dict[str, list[Part]] = {}
    for part in files:  # the files of one attempt may lie on the disks of several nodes
        attempts.setdefault(part.run, []).append(part)
    ends, each = _ends(files), []
    for of in attempts.values():
        if told := [part for part in of if part.ranks]:
            end = min(ends[part.folder, part.run] for part in of)
            if end == math.inf and any(part.file.with_name(FINISHED).exists() for part in of):
                end = told[0].last_step + 1 if told[0].last_step else end
            each.append(_missing(of, max(told, key=lambda part: part.taken), end))
    return Missing(
        sum(one.steps for one in each),
        sum(one.files for one in each),
        sum(one.responses for one in each),
        min((one.limited_after for one in each if one.limited_after is not None), default=None),
    )


def _missing(of: list[Part], latest: Part, end: float) -> Missing:
    """Those of one attempt. ``latest`` is its last part with metadata, ``end`` the first step that it did not take."""
    ranks: dict[int, set[int]] = {}  # by step
    size: dict[int, int] = {}  # by rank
    for part in of:
        ranks.setdefault(part.step, set()).add(part.rank)
        size[part.rank] = size.get(part.rank, 0) + part.file.stat().st_size
    last = {rank: max(part.step for part in of if part.rank == rank) for rank in size}
    full = {rank: last[rank] for rank in size if size[rank] > latest.limit_bytes}
    counted = [step for step in ranks if end < math.inf or step < latest.step]
    expected = {step: [rank for rank in range(latest.ranks) if step <= full.get(rank, step)] for step in counted}
    gaps = [gap for step in counted if (gap := len(set(expected[step]) - ranks[step]))]
    nowhere = latest.taken - sum(step <= latest.step for step in ranks)  # steps of which no rank has a file
    if end < math.inf:
        nowhere += max((int(end) - 1) // latest.freq - max(ranks) // latest.freq, 0)
    nowhere *= latest.ranks > len(full)
    files = sum(gaps) + nowhere * (latest.ranks - len(full))
    rows = [part.rows for part in of if part.ranks]
    stopped = min(full.values(), default=None)
    if stopped == latest.last_step:
        stopped = None
    return Missing(len(gaps) + nowhere, files, round(files * sum(rows) / len(rows)), stopped)


def _ends(files: Sequence[Part]) -> dict[tuple[Path, str], float]:
    """By folder and run: the first step that a later attempt in the folder has done again; inf where none has."""
    firsts: dict[tuple[Path, str], tuple[int, int]] = {}  # number and first step
    for part in files:
        number, first = firsts.get((part.folder, part.run), (part.number, part.started or part.step))
        firsts[part.folder, part.run] = min(number, part.number), min(first, part.started or part.step)

    def end(folder: Path, run: str) -> float:
        own = firsts[folder, run][0], run
        later = [first for (other, of), (number, first) in firsts.items() if other == folder and (number, of) > own]
        return min(later, default=math.inf)

    return {key: end(*key) for key in firsts}


def claim(folder: Path, checkpoints: Path) -> None:
    """Give the folder to the run with these checkpoints; of two that start at once one gets it.

    Raises:
        ValueError: it is that of another run; names a free one.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (reason := why_taken(folder, checkpoints)):
        with contextlib.suppress(FileExistsError), (folder / _OWNER).open("x") as file:
            json.dump({"checkpoints": str(checkpoints.resolve())}, file)
        reason = why_taken(folder, checkpoints)  # another may have been faster
    if reason:
        one = "one folder is for the records of one run"
        raise ValueError(f"records_dir={folder} is taken: {reason}; {one}; records_dir={free(folder)}")


def why_taken(folder: Path, checkpoints: Path) -> str | None:
    """Why a run with these checkpoints must not write to a folder; None if it may."""
    if owner := _owner(folder):
        other = owner != str(checkpoints.resolve())
        return f"it is that of another run, with checkpoints in {owner}" if other else None
    return "it holds records that no run has claimed" if record_files(folder) else None


def _owner(folder: Path) -> str | None:
    """The folder of checkpoints of the run that owns the folder; None where nobody owns it."""
    for _ in range(50):  # another may be about to write it; cut off, it is nobody's
        with contextlib.suppress(ValueError):
            try:
                return json.loads((folder / _OWNER).read_text())["checkpoints"]
            except FileNotFoundError:
                return None
        time.sleep(0.1)
    return None


def free(folder: str | Path) -> str:
    """A folder beside this one that is not there."""
    names = (f"{str(folder).rstrip('/')}-{number}" for number in itertools.count(2))
    return next(name for name in names if not Path(name).exists())
