# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's records: its attempts, names of its files, and which steps are incomplete.

Each launch that records there is an attempt with a folder of its own, ``run-CHECKPOINTS/attempt-START-TOKEN``, which
the driver names before Ray starts. It overwrites nothing: not where it resumes, and not where two train at once.
Attempts with one folder of checkpoints are one run, of which the newest counts from the step on at which it began.
Empty hidden files beside its records mark where an attempt began and ended.
"""

import hashlib
import math
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

RECORD = "step-{step:06d}-rank-{rank:04d}.parquet"
MARK = ".{what}-{step:06d}"
BEGAN, FINISHED = "from", "finished"
"""Names of marks, before a step: the first one of an attempt, recorded or not; the last one of the run."""
MOST_STEPS, MOST_ROWS = 30, 4096
"""A file is full with so many steps, or rows: then the next step begins another one."""
BYTES_A_ROW = 70
"""The bytes that a response takes on the disk in a full file, by ``scripts/bench/records.py``."""
_ATTEMPT = re.compile(r"attempt-\d[\w-]*")
_RECORD = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")
_MARK = re.compile(rf"\.({BEGAN}|{FINISHED})-(\d+)")


@dataclass(order=True)
class RecordFile:
    """A file of records of one rank, which is named by its first step."""

    rank: int
    step: int
    path: Path
    end: float = math.inf  # the first step that does not count: the next file of the rank, or a later attempt, has it


@dataclass
class Attempt:
    """One launch of a run: what it has recorded, and which of its steps count."""

    folder: Path
    run: Path
    began: float = math.inf  # the first training step, recorded or not
    end: float = math.inf  # the first step that a later attempt of the run trained again
    last: float = math.inf  # the last step of the run, where the attempt has come to it
    files: list[RecordFile] = field(default_factory=list)

    @property
    def counted(self) -> list[RecordFile]:
        """The files with steps that count, by rank and step."""
        return [file for file in self.files if file.step < file.end]


def attempts_below(folder: str | Path) -> list[Attempt]:
    """The attempts below a folder, by run and start; copies of files and other files are skipped."""
    found = [attempt for place, names in walk(Path(folder)) if (attempt := _attempt(place, names))]
    found.sort(key=lambda attempt: (attempt.run, attempt.folder.name))
    by_run: defaultdict[Path, list[Attempt]] = defaultdict(list)
    for attempt in found:
        by_run[attempt.run].append(attempt)
    for attempts in by_run.values():
        began = math.inf
        for attempt in reversed(attempts):
            attempt.end, began = began, min(began, attempt.began)
            _set_ends(attempt)
    return found


def _attempt(place: Path, names: Sequence[str]) -> Attempt | None:
    """The attempt whose folder this is; None for another folder."""
    attempt = Attempt(place, place.parent if is_attempt(place) else place)
    for name in names:
        if match := _RECORD.fullmatch(name):
            attempt.files.append(RecordFile(int(match[2]), int(match[1]), place / name))
        elif (match := _MARK.fullmatch(name)) and match[1] == BEGAN:
            attempt.began = min(attempt.began, int(match[2]))
        elif match:
            attempt.last = int(match[2])
    if not attempt.files and attempt.began == math.inf:
        return None
    attempt.began = min([attempt.began, *(file.step for file in attempt.files)])
    return attempt


def _set_ends(attempt: Attempt) -> None:
    attempt.files.sort()
    for file in attempt.files:
        file.end = attempt.end
    for file, following in pairwise(attempt.files):
        if file.rank == following.rank:
            file.end = min(file.end, following.step)


def walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder from this one down, once, with the names of the files in it; links to folders are followed.

    Of several names of a folder that of an attempt is taken, then one that is no link. A link upwards, to a folder that
    holds this one, is not followed.
    """
    seen = set(map(str, Path(os.path.realpath(folder)).parents))
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort(key=lambda name: (not is_attempt(name), os.path.islink(os.path.join(place, name)), name))
        yield Path(place), sorted(names)


def files_below(folder: Path) -> list[Path]:
    """All files of :func:`walk`, in the order of their names."""
    return sorted(place / name for place, names in walk(folder) for name in names if (place / name).is_file())


def new(folder: str | Path, checkpoints: Path | None) -> Path:
    """The folder of another attempt of the run with these checkpoints, not made yet; a later one sorts after it.

    Args:
        folder: of records. A folder of an attempt is kept while nothing is in it; else another one beside it is named.
    """
    folder = Path(folder)
    if is_attempt(folder):
        if not folder.exists():
            return folder
        run = folder.parent
    else:
        name = hashlib.blake2b(str(checkpoints and checkpoints.resolve()).encode(), digest_size=4).hexdigest()
        run = folder / f"run-{name}"
    start = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
    return run / f"attempt-{start}-{secrets.token_hex(2)}"


def is_attempt(folder: str | Path) -> bool:
    """Tell whether a folder has the name of an attempt."""
    return _ATTEMPT.fullmatch(Path(folder).name) is not None


# --- what is missing -------------------------------------------------------------------------------------------------


@dataclass
class Footer:
    """The metadata of a file about its attempt."""

    steps: list[int]  # that the rank has recorded in it, with or without a response; empty where it does not say
    ranks: int  # that train
    freq: int  # of so many training steps one is recorded


def missing_steps(attempt: Attempt, footers: Mapping[Path, Footer]) -> int:
    """How many steps of an attempt, as far as they count, lack the records of a rank.

    Args:
        footers: those of the files that could be read; other files are damaged.

    The last step of an attempt that may go on is no loss: other ranks may still write it.
    """
    damaged_from = {file.step for file in attempt.counted if file.path not in footers}
    readable = [(file, footers[file.path]) for file in attempt.counted if file.path in footers]
    readable = [(file, footer) for file, footer in readable if footer.steps]
    if not readable:
        return len(damaged_from)
    ranks_with: defaultdict[int, set[int]] = defaultdict(set)
    for file, footer in readable:
        for step in footer.steps:
            if step < file.end:
                ranks_with[step].add(file.rank)
    ranks, freq = (max(values) for values in zip(*((footer.ranks, footer.freq) for _, footer in readable), strict=True))
    whole = {step for step, found in ranks_with.items() if len(found) >= ranks}
    end = min(attempt.end, attempt.last + 1)
    if end == math.inf:
        latest = max([*ranks_with, *damaged_from])
        end = latest + 1 if latest in whole | damaged_from else latest
    due = range(math.ceil(attempt.began / freq) * freq, int(end), freq)
    return sum(step not in whole for step in due)
