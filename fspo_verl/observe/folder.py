# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's records: names of its files, which run owns it, and what was lost.

A run claims its folder before it writes there, so that two runs never overwrite each other. A claim is a file
``claim-0001.json``, made in one step that fails where the file exists. The highest number is in force. A run with the
same checkpoints takes the folder over by the next number if it resumes, or if the run that owned it has not finished;
the earlier run then records nothing more.
"""

import contextlib
import csv
import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

RECORD = "step-{step:06d}-rank-{rank:04d}.parquet"
LOST, LOST_FILES = "lost-rank-{rank:04d}.csv", "lost-rank-*.csv"  # where the writers note lost records
_RECORD = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")
_CLAIM = "claim-{number:04d}.json"


def numbered(files: Iterable[Path]) -> Iterator[tuple[int, int, Path]]:
    """Step, rank and path of the record files among these; copies and other files are skipped."""
    for file in files:
        if match := _RECORD.fullmatch(file.name):
            yield int(match[1]), int(match[2]), file


def record_files(folder: str | Path) -> list[Path]:
    """The record files below a folder, in the order of steps and ranks."""
    return sorted(file for _, _, file in numbered(Path(folder).rglob("step-*.parquet")))


def losses(file: Path) -> list[tuple[int, int]]:
    """Step, and number of responses whose records were lost, in the order in which they were."""
    found = []
    with contextlib.suppress(ValueError):  # the last line may be cut off
        for step, count in csv.reader(file.read_text().splitlines()):
            found.append((int(step), int(count)))
    return found


def claim(folder: Path, run: str, checkpoints: Path | None, resumes: bool) -> Path:
    """Make the folder that of a run; its claim, though another may be in force by now. Every process may call this.

    Args:
        run: the identity of the run, the same in all its processes and in no other run.
        checkpoints: where the run saves its checkpoints; a run that goes on after a crash is known by them.
        resumes: whether the run goes on from one of these checkpoints.

    Raises:
        ValueError: the folder is taken; names a free one.
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        made = claims(folder)
        if own := [one for one in made if _values(one).get("run") == run]:
            return own[-1]
        if reason := why_taken(folder, checkpoints, resumes):
            if claims(folder) != made:  # a process of the same run may have made the new one
                continue
            one = "one folder is for the records of one run"
            raise ValueError(f"records_dir={folder} is taken: {reason}; {one}; records_dir={free(folder)}")
        new = successor(made[-1]) if made else folder / _CLAIM.format(number=1)
        # Another run may have been faster. It then owns the folder, and the next round looks at it.
        with contextlib.suppress(FileExistsError), new.open("x") as file:
            json.dump({"run": run, "checkpoints": _resolved(checkpoints)}, file)


def claims(folder: Path) -> list[Path]:
    """The claims to a folder, in the order in which they were made."""
    return sorted(folder.glob("claim-*.json"), key=_number)


def in_force(folder: Path) -> Path | None:
    """The claim of the run that owns a folder."""
    return next(reversed(claims(folder)), None)


def successor(claim: Path) -> Path:
    """The claim of the run that takes the folder over from the run of this claim."""
    return claim.with_name(_CLAIM.format(number=_number(claim) + 1))


def finished(claim: Path) -> Path:
    """The file that says that the run of this claim has recorded its last step."""
    return claim.with_suffix(".finished")


def why_taken(folder: Path, checkpoints: str | Path | None, resumes: bool) -> str | None:
    """Why a new run must not write to a folder; None if it may. Arguments as for :func:`claim`."""
    if (last := in_force(folder)) is None:
        return "it holds records that no run has claimed" if record_files(folder) else None
    owners = _values(last).get("checkpoints")
    if checkpoints is None or owners != _resolved(checkpoints):
        return f"it is that of another run, with checkpoints in {owners}"
    if not resumes and finished(last).exists():
        return "it holds the records of a run that has finished"
    return None


def free(folder: str | Path) -> str:
    """A folder beside this one that is not there."""
    names = (f"{str(folder).rstrip('/')}-{number}" for number in itertools.count(2))
    return next(name for name in names if not Path(name).exists())


def _number(claim: Path) -> int:
    return int(claim.stem.removeprefix("claim-"))


def _values(claim: Path) -> dict:
    """What a claim says, once it is written; nothing of one that was cut off."""
    for _ in range(50):
        with contextlib.suppress(ValueError):
            return json.loads(claim.read_text())
        time.sleep(0.1)
    return {}


def _resolved(checkpoints: str | Path | None) -> str | None:
    return None if checkpoints is None else str(Path(checkpoints).resolve())
