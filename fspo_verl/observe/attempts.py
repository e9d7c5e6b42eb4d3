# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's records: its attempts, names of its files, and which steps are incomplete.

Each training that writes there is an attempt with a folder of its own, ``attempt-0001-RUN``, so that it overwrites
nothing: not where it goes on from a checkpoint, and not where two train at once. The newest attempt counts from the
step on at which it began. Empty files beside its records mark where an attempt began and ended. ``run.json`` says
whose records they are; a launch with other checkpoints is refused.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

RECORD = "step-{step:06d}-rank-{rank:04d}.parquet"
MARK = "{what}-{step:06d}"
MARKS = BEGAN, FINISHED, LIMITED = ("from", "finished", "limited")
"""Names of marks, before a step: the first one of an attempt, recorded or not; the last one of the run, which it has
come to; and the last one that a rank has recorded, where ``records_limit_mb`` stopped it."""
MOST_BEHIND_LINKS = 1000
"""Folders behind links that are searched for files of a run."""
_ATTEMPT = re.compile(r"attempt-(\d+)-([0-9a-f]+)")
_RECORD = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")
_MARK = re.compile(rf"({'|'.join(MARKS)})-(\d+)")
_OWNER = "run.json"


class Part(NamedTuple):
    """A file of records, with what its metadata says of the attempt; an older file, or a damaged one, says nothing."""

    folder: Path  # of the run's records
    number: int  # of the attempt; 0 for an older file, which is in no folder of one
    run: str  # whose attempt it is; "" for an older file
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
        name = _ATTEMPT.fullmatch(place.name)
        attempt = (place.parent, int(name[1]), name[2]) if name else (place, 0, "")
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
        folder, *order = attempt
        later = [first for (other, *of), first in began.items() if other == folder and of > order]
        ends[attempt] = min([*later, *(last + 1 for last in steps[attempt, FINISHED])], default=math.inf)
        limits[attempt] = min((step for step in steps[attempt, LIMITED] if step < ends[attempt] - 1), default=math.inf)
    return sorted(part._replace(end=ends[part[:3]], limit=limits[part[:3]]) for part in files)


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


def attempt(folder: Path, run: str) -> Path:
    """The folder of what a training records below the folder of its run; made by the first of its processes that asks.

    Args:
        run: an identity that all processes of the training share, and no other has.

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
    """The parts that no later attempt in the same folder has done again."""
    return [part for part in files if part.step < part.end]


def limited_after(files: Sequence[Part]) -> int | None:
    """The step after which a rank records nothing, as it has reached ``records_limit_mb``; None where none has."""
    first = min((part.limit for part in files), default=math.inf)
    return None if first == math.inf else int(first)


def missing_steps(files: Sequence[Part]) -> int:
    """Of how many steps of the attempts of :func:`newest` a file is missing or damaged."""
    of_run: defaultdict[str, list[Part]] = defaultdict(list)
    for part in files:  # the files of one attempt may lie on the disks of several nodes
        of_run[part.run].append(part)
    return sum(map(_missing_steps, of_run.values()))


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
    return "it holds records that no run has claimed" if parts(folder) else None


def of_the_run(folder: Path, checkpoints: Path, step: int) -> Path | None:
    """The newest of the folders in this one whose run has these checkpoints and has recorded until a step, or beyond.

    One that began anew, and ended before it had a checkpoint of that step, is passed over. None where none is left.
    """
    for own in sorted(folder.glob("*"), reverse=True):
        is_far = max((part.step for part in parts(own)), default=-1) >= step
        if is_far and _owner(own) == str(checkpoints.resolve()):
            return own
    return None


def _owner(folder: Path) -> str | None:
    """The folder of checkpoints of the run that owns the folder; None where nobody owns it."""
    for _ in range(50):  # another may be about to write it; cut off, it is nobody's
        try:
            return json.loads((folder / _OWNER).read_text())["checkpoints"]
        except (FileNotFoundError, KeyError, TypeError):
            return None
        except ValueError:
            time.sleep(0.1)
    return None


def free(folder: str | Path) -> str:
    """A folder beside this one that is not there."""
    names = (f"{str(folder).rstrip('/')}-{number}" for number in itertools.count(2))
    return next(name for name in names if not Path(name).exists())
