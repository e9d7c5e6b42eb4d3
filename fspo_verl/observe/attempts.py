# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's records: its attempts, names of its files, and which steps are incomplete.

Each launch that records there is an attempt with a folder of its own, ``run-CHECKPOINTS/attempt-START-TOKEN``, which
the driver names before Ray starts. It overwrites nothing: not where it resumes, and not where two train at once.
Attempts with one folder of checkpoints are one run, of which the newest counts from the step on at which it began.
Empty files beside its records mark where an attempt began and ended.
"""

import contextlib
import hashlib
import math
import os
import re
import secrets
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

RECORD = "step-{step:06d}-rank-{rank:04d}.parquet"
MARK = "{what}-{step:06d}"
MARKS = BEGAN, FINISHED, LIMITED = ("from", "finished", "limited")
"""Names of marks, before a step: the first one of an attempt, recorded or not; the last one of the run, which it has
come to; and the last one that a rank has recorded, where ``records_limit_mb`` stopped it."""
MOST_BEHIND_LINKS = 1000
"""Folders behind links that are searched for files of a run."""
_ATTEMPT = re.compile(r"attempt-\d[\w-]*")
_RECORD = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")
_MARK = re.compile(rf"({'|'.join(MARKS)})-(\d+)")


class Part(NamedTuple):
    """A file of records, with what its metadata says of the attempt; an older file, or a damaged one, says nothing."""

    folder: Path  # of the run's records
    attempt: str  # the name of its folder, later ones sort later; "" for a file that is in none
    step: int
    rank: int
    file: Path
    end: float = math.inf  # the first step that the attempt has not trained, or that a later one trained again
    limit: float = math.inf  # the last step that every rank of the attempt was to record
    damaged: bool = False
    ranks: int = 0  # that train; 0 where it is not known
    taken: int = 0  # how many steps it was to record up to this one
    freq: int = 1


def parts(folder: str | Path) -> list[Part]:
    """The record files below a folder, by attempt, step and rank; copies and other files are skipped."""
    files: list[Part] = []
    steps: defaultdict[tuple, list[int]] = defaultdict(list)  # by attempt, and what names them
    for place, names in walk(Path(folder)):
        attempt = (place.parent, place.name) if _ATTEMPT.fullmatch(place.name) else (place, "")
        for match in filter(None, map(_MARK.fullmatch, names)):
            steps[attempt, match[1]].append(int(match[2]))
        for match in filter(None, map(_RECORD.fullmatch, names)):
            files.append(Part(*attempt, int(match[1]), int(match[2]), place / match[0]))
            steps[attempt, RECORD].append(int(match[1]))
    attempts = {attempt for attempt, _ in steps}
    # An older version did not say when an attempt began.
    began = {one: min(steps[one, BEGAN] or steps[one, RECORD], default=math.inf) for one in attempts}
    ends, limits = {}, {}
    for attempt in attempts:
        folder, name = attempt
        later = [first for (other, of), first in began.items() if other == folder and of > name]
        ends[attempt] = min([*later, *(last + 1 for last in steps[attempt, FINISHED])], default=math.inf)
        limits[attempt] = min((step for step in steps[attempt, LIMITED] if step < ends[attempt] - 1), default=math.inf)
    return sorted(part._replace(end=ends[part[:2]], limit=limits[part[:2]]) for part in files)


def walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder from this one down, once, with the names of all in it but folders; none where nothing can be read.

    Links to folders are followed, after what lies below the folder itself: there a name says more. A link upwards, to
    a folder that holds this one, is not.
    """
    queue = deque([(folder, False)])  # a place, and whether it lies behind a link
    seen, behind_links = set(map(str, Path(os.path.realpath(folder)).parents)), 0
    while queue:
        place, is_behind = queue.popleft()
        if (real := os.path.realpath(place)) in seen:
            continue
        seen.add(real)
        behind_links += is_behind
        if behind_links > MOST_BEHIND_LINKS:
            text = f"more than {MOST_BEHIND_LINKS} folders lie behind links below {folder}: not all were searched"
            warnings.warn(f"{text}; name the folder itself", stacklevel=3)
            return
        names = []
        with contextlib.suppress(OSError):  # that nobody may read, or that is gone
            for entry in sorted(os.scandir(place), key=lambda entry: entry.name, reverse=True):
                if not Path(entry.path).is_dir():  # which says no of a link that leads around in a circle
                    names.append(entry.name)
                elif entry.is_symlink():
                    queue.append((place / entry.name, True))
                else:
                    queue.appendleft((place / entry.name, is_behind))
        yield place, names


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
    """Whether a folder has the name of an attempt."""
    return _ATTEMPT.fullmatch(Path(folder).name) is not None


def newest(files: Sequence[Part]) -> list[Part]:
    """The parts that no later attempt in the same folder has done again."""
    return [part for part in files if part.step < part.end]


def limited_after(files: Sequence[Part]) -> int | None:
    """The step after which a rank records nothing, as it has reached ``records_limit_mb``; None where none has."""
    first = min((part.limit for part in files), default=math.inf)
    return None if first == math.inf else int(first)


def missing_steps(files: Sequence[Part]) -> int:
    """Of how many steps of the attempts of :func:`newest` a file is missing or damaged."""
    of_attempt: defaultdict[str, list[Part]] = defaultdict(list)
    for part in files:  # the files of one attempt may lie on the disks of several nodes
        of_attempt[part.attempt].append(part)
    return sum(map(_missing_steps, of_attempt.values()))


def _missing_steps(attempt: list[Part]) -> int:
    """Those that one attempt was to record, less those of which all ranks have a whole file."""
    end, limit = min(part.end for part in attempt), min(part.limit for part in attempt)
    damaged = {part.step for part in attempt if part.damaged and part.step <= limit}
    files = [part for part in attempt if part.ranks and part.step <= limit]
    if not files:
        return len(damaged)
    latest = max(files, key=lambda part: (part.step, part.taken))
    ranks = Counter(part.step for part in files)
    whole = {step for step in ranks if ranks[step] >= latest.ranks}
    due = latest.taken
    if end < limit:  # it has ended: all steps count
        due += max((int(end) - 1) // latest.freq - latest.step // latest.freq, 0)
    else:
        due += sum(step > latest.step for step in damaged)
        if limit == math.inf and latest.step not in whole | damaged:
            due -= 1  # it may still be written
    return max(due - len(whole), 0)
