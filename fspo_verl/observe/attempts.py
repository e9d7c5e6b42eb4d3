# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's records: its attempts, names of its files, and which steps are incomplete.

Each training that writes there is an attempt with a folder of its own, ``attempt-0001-RUN``, so that it overwrites
nothing: not where it goes on from a checkpoint, and not where two train at once. The newest attempt counts from the
step on at which it began. ``run.json`` says whose records they are; a launch with other checkpoints is refused.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

RECORD = "step-{step:06d}-rank-{rank:04d}.parquet"
FINISHED = "finished"  # beside the records of an attempt that has come to the last step of the run
BEGAN = "from-{step:06d}"  # beside them as well: the step at which the attempt began, recorded or not
MOST_BEHIND_LINKS = 1000
"""Folders behind links that are searched for files of a run."""
_ATTEMPT = re.compile(r"attempt-(\d+)-([0-9a-f]+)")
_RECORD = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")
_BEGAN = re.compile(r"from-(\d+)")
_OWNER = "run.json"


class Part(NamedTuple):
    """A file of records, with what its metadata says of the attempt; an older file, or a damaged one, says nothing."""

    folder: Path  # of the run's records
    number: int  # of the attempt; 0 for an older file, which is in no folder of one
    run: str  # whose attempt it is; "" for an older file
    step: int
    rank: int
    file: Path
    end: float = math.inf  # the step at which a later attempt in the folder began
    damaged: bool = False
    ranks: int = 0  # that train; 0 where it is not known
    taken: int = 0  # how many steps it was to record up to this one
    freq: int = 1
    last_step: int | None = None  # the last one that the run was to record
    limit_bytes: float = math.inf  # of the files of one rank


class Incomplete(NamedTuple):
    """What a run should have recorded and has not."""

    steps: int  # of which a file is missing or damaged
    limited_after: int | None  # the step after which a rank records nothing, as it has reached its limit_bytes


def parts(folder: str | Path) -> list[Part]:
    """The record files below a folder, by attempt, step and rank; copies and other files are skipped."""
    files: list[Part] = []
    begins: dict[tuple[Path, int, str], list[int]] = {}
    for place, names in walk(Path(folder)):
        attempt = _ATTEMPT.fullmatch(place.name)
        of = (place.parent, int(attempt[1]), attempt[2]) if attempt else (place, 0, "")
        records = [(int(name[1]), int(name[2]), place / name[0]) for name in map(_RECORD.fullmatch, names) if name]
        files += [Part(*of, *record) for record in records]
        began = [int(name[1]) for name in map(_BEGAN.fullmatch, names) if name]
        if steps := began or [step for step, _, _ in records]:  # an older version did not say when it began
            begins.setdefault(of, []).extend(steps)

    def end(folder: Path, number: int, run: str) -> float:
        later = (min(steps) for (other, *of), steps in begins.items() if other == folder and of > [number, run])
        return min(later, default=math.inf)

    ends = {of: end(*of) for of in begins}
    return sorted(part._replace(end=ends[part[:3]]) for part in files)


def walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder from this one down, once, with the names of all in it but folders; none where nothing can be read.

    Links to folders are followed, after what lies below the folder itself: there a name says more. A link upwards, to
    a folder that holds this one, is not.
    """
    top = Path(os.path.realpath(folder))
    below: list[Path] = [folder]
    behind: list[Path] = []
    seen, most = set(map(str, top.parents)), math.inf
    while below or behind:
        if not below:
            below.append(behind.pop())
            most = min(most, len(seen) + MOST_BEHIND_LINKS)
        place = below.pop()
        if (real := os.path.realpath(place)) in seen:
            continue
        if len(seen) >= most:
            text = f"more than {MOST_BEHIND_LINKS} folders lie behind links below {folder}: not all were searched"
            warnings.warn(f"{text}; name the folder itself", stacklevel=3)
            return
        seen.add(real)
        names = []
        with contextlib.suppress(OSError):  # that nobody may read, or that is gone
            for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
                if not Path(entry.path).is_dir():  # which says no of a link that leads around in a circle
                    names.append(entry.name)
                else:
                    (behind if entry.is_symlink() else below).append(place / entry.name)
        yield place, names


def files_below(folder: Path) -> list[Path]:
    """All files of :func:`walk`, in the order of their names."""
    return sorted(place / name for place, names in walk(folder) for name in names if (place / name).is_file())


def record_files(folder: str | Path) -> list[Path]:
    """As :func:`parts`."""
    return [part.file for part in parts(folder)]


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


def incomplete(files: Sequence[Part]) -> Incomplete:
    """The steps of the attempts of :func:`newest` of which a file is missing or damaged.

    An attempt ends where a later one begins, or at the last step of the run where it has marked that it got there. Of
    one that may still go on, the last step counts once all ranks have written it.
    """
    attempts: dict[str, list[Part]] = {}
    for part in files:  # the files of one attempt may lie on the disks of several nodes
        attempts.setdefault(part.run, []).append(part)
    each = [_incomplete(of) for of in attempts.values()]
    limited = (one.limited_after for one in each if one.limited_after is not None)
    return Incomplete(sum(one.steps for one in each), min(limited, default=None))


def _incomplete(of: list[Part]) -> Incomplete:
    """Those of one attempt."""
    limited, damaged = _limited_after(of), {part.step for part in of if part.damaged}
    until = math.inf if limited is None else limited
    told = [part for part in of if part.ranks and part.step <= until]
    if not told:
        return Incomplete(len(damaged), limited)
    latest = max(told, key=lambda part: (part.step, part.taken))
    files = Counter(part.step for part in told)
    whole = {step for step in files if files[step] >= latest.ranks}
    due, end = latest.taken, _end(of)
    if end < until:
        due += max((int(end) - 1) // latest.freq - latest.step // latest.freq, 0)
    else:
        due += sum(latest.step < step <= until for step in damaged)
        if limited is None and latest.step not in whole | damaged:
            due -= 1  # it may still be written
    return Incomplete(max(due - len(whole), 0), limited)


def _end(of: list[Part]) -> float:
    """The first step that an attempt has not trained; inf where it may still go on."""
    end, last = min(part.end for part in of), max((part.last_step or 0 for part in of), default=0)
    if end == math.inf and last and any(part.file.with_name(FINISHED).exists() for part in of):
        return last + 1
    return end


def _limited_after(of: list[Part]) -> int | None:
    """The step after which a rank of an attempt has reached its limit; None where none has, or only at its last."""
    size: Counter[int] = Counter()
    last: dict[int, int] = {}
    for part in of:
        size[part.rank] += part.file.stat().st_size
        last[part.rank] = max(part.step, last.get(part.rank, part.step))
    limit = min(part.limit_bytes for part in of)
    stopped = min((last[rank] for rank in size if size[rank] > limit), default=None)
    return None if stopped in [part.last_step for part in of] else stopped


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
        try:
            content = json.loads((folder / _OWNER).read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            time.sleep(0.1)
        else:
            owner = content.get("checkpoints") if isinstance(content, dict) else None
            return owner if isinstance(owner, str) else None
    return None


def free(folder: str | Path) -> str:
    """A folder beside this one that is not there."""
    names = (f"{str(folder).rstrip('/')}-{number}" for number in itertools.count(2))
    return next(name for name in names if not Path(name).exists())
