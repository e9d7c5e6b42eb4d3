# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the logs that people have: each becomes a table of metrics by step, under verl's names.

verl's console output and file logger, TensorBoard's events, W&B's exports and run folders. NaN and inf that were logged
stay apart from what was not logged. A log of another trainer is refused by name.
"""

import contextlib
import json
import logging
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fspo_verl.observe.attempts import files_below
from fspo_verl.output import plain

logger = logging.getLogger("fspo_verl")

Row = tuple[int, dict[str, float]]
"""Step and metrics; a step may come in several rows, of which the latest value counts."""

FILE_LOGGER = "verl's file logger"
CLIPPED = "actor/pg_clipfrac"
NAMES = {
    # verl up to 0.4, and 0.6
    "actor/entropy_loss": "actor/entropy",
    "mismatch/mismatch_kl": "rollout_corr/kl",
    "mismatch/mismatch_k3_kl": "rollout_corr/k3_kl",
}
"""verl's name (0.9) of what an earlier version called otherwise."""

_TRL = re.compile(r"\b(completions?/\w+|completion_length|clip_ratio/region_mean|log_history)\b")
_LAST_STEP = 2**53  # what is beyond is no number of a step
_STEPS = ("training/global_step", "global_step", "step", "Step", "_step")
READS = (
    "verl's console output (step:1 - actor/pg_clipfrac:0.1 - ...) and file logger, TensorBoard's events, W&B's CSV, "
    "history and run folders"
)


class Log(NamedTuple):
    """The metrics of a run by step."""

    metrics: pd.DataFrame
    """Index ``step``, one float column per metric, NaN where a step has not logged it."""

    source: str
    """The kind of log that they are from."""

    not_finite: dict[str, list[int]]
    """By metric, the steps that logged NaN or inf."""

    @staticmethod
    def of(rows: Iterable[Row], source: str = FILE_LOGGER) -> "Log":
        """Make the log of rows; a clip fraction that is no share is not taken for logged."""
        steps: dict[int, dict[str, float]] = {}
        for step, metrics in rows:
            if not 0 <= step < _LAST_STEP:
                continue
            named = {_verl_name(name, metrics): value for name, value in metrics.items()}
            if math.isfinite(share := named.get(CLIPPED, math.nan)) and not 0 <= share <= 1:
                del named[CLIPPED]
            steps.setdefault(step, {}).update(named)
        frame = pd.DataFrame.from_dict(steps, orient="index", dtype=float).sort_index()
        frame.index = frame.index.astype(int).rename("step")
        not_finite: dict[str, list[int]] = {}
        for step in sorted(steps):
            for name, value in steps[step].items():
                if not math.isfinite(value):
                    not_finite.setdefault(name, []).append(step)
        return Log(frame, source, not_finite)


def read(path: Path) -> Log | None:
    """The metrics of a log file, or of the logs in a folder and all folders below; None where there is no step.

    Raises:
        ValueError: it holds several runs, is of another trainer, or needs a package that is not there.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    log = _read_file(path)
    if log is None or not any(name.startswith("actor/") for name in log.metrics):
        _refuse_trl(path, log)
    return log


def _read_file(path: Path) -> Log | None:
    if "tfevents" in path.name:
        return _log("TensorBoard", tensorboard(path))
    if path.suffix == ".wandb":
        raise ValueError(f"{path}: only W&B reads this file. Name its folder, or export the run's history as CSV")
    if path.suffix == ".csv":
        return _log("a CSV of W&B", wandb_csv(path))
    if is_file_logger(path):
        return _log(FILE_LOGGER, newest(file_logger(path), path))
    if found := _read_json(path):
        return found
    with path.open(encoding="utf-8", errors="replace") as lines:
        return _log("console output", newest(console(lines), path))


def _refuse_trl(path: Path, log: Log | None) -> None:
    """Raise a ValueError if the names of a log are those of TRL, which ms-swift has as well."""
    text = "\n".join(map(str, log.metrics)) if log else path.read_text(encoding="utf-8", errors="replace")
    if name := _TRL.search(text):
        raise ValueError(f"{path}: this is no log of verl: TRL's names, such as {name[1]}")


def _log(source: str, rows: Iterable[Row]) -> Log | None:
    log = Log.of(rows, source)
    return log if log.metrics.size else None


def _verl_name(name: str, beside: Container[str]) -> str:
    """verl's name of a metric; its own where another one has that name in the same row."""
    known = NAMES.get(name, name)
    return plain(name if known in beside else known)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics among values: numbers, NaN and inf included, and their texts."""
    found = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, bool):
                found[name] = float(value)
    return found


# --- files ------------------------------------------------------------------------------------------------------------


_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STEP = re.compile(r"(?<![\w/])step:\d+( - |\s*$)")  # alone, one metric a line follows
_PREFIX = re.compile(r"\([^()]*pid=\d+[^()]*\)\s*")  # Ray's
_PAIR = re.compile(r"([^:]+):(?:np\.\w+\()?([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))\)?(?![\w.])", re.IGNORECASE)


def newest(rows: Iterable[Row], log: Path | str) -> list[Row]:
    """The rows that count of a log to which trainings were appended, as they were written.

    Where the training goes back to an earlier step, it does the steps from there on again: what was logged of them
    before is left out. That is said of another run, which goes back to its first step.
    """
    kept: list[Row] = []
    reached, left = -1, -1
    for step, metrics in rows:
        trains = any(name.startswith("actor/") for name in metrics)  # and is no late validation
        if trains and step < reached:
            left = reached if step <= 1 else left
            while kept and kept[-1][0] >= step:
                kept.pop()
        reached = step if trains else reached
        kept.append((step, metrics))
    if left >= 0:
        logger.warning("%s: another run begins after step %d; what comes before is left out", log, left)
    return kept


def console(lines: Iterable[str]) -> Iterator[Row]:
    """Read verl's console output, whatever stands around it: Ray's prefix, colours, a line that the terminal wrapped.

    A step is one line, or a line for itself with one metric a line below.
    """
    for step in _printed_steps(lines):
        start, *parts = step.whole_text.split(" - ")
        if not start:  # the number of the step itself may be cut off
            continue
        pairs = [_PAIR.fullmatch(part.strip()) or _PAIR.match(part.strip()) for part in parts]
        metrics = {pair[1]: float(pair[2]) for pair in pairs if pair}
        if metrics or not step.is_listed:  # else the line only speaks of a step
            yield int(start.removeprefix("step:")), metrics


@dataclass(frozen=True)
class _PrintedStep:
    """A step as the console shows it, from one or several lines."""

    text: str  # "step:1 - name:value - name:value"
    is_listed: bool  # one metric a line follows
    is_cut: bool  # its last line has no end

    @property
    def whole_text(self) -> str:
        """The text; without its last pair if that may be cut off within a number."""
        return self.text.rpartition(" - ")[0] if self.is_cut else self.text

    def joined(self, line: str, is_cut: bool) -> "_PrintedStep | None":
        """Return the step with the next line, if that belongs to it; else None."""
        alone = _PREFIX.sub("", line).strip()
        if self.is_listed and "/" in alone and _PAIR.fullmatch(alone):
            return replace(self, text=f"{self.text} - {alone}", is_cut=is_cut)
        for text in (self.text + line, f"{self.text} {line}"):
            pairs = [_PAIR.fullmatch(part.strip()) for part in text.split(" - ")[1:]]
            if pairs and line.strip() and all(pairs[:-1]) and (pairs[-1] or " - " in line):
                return replace(self, text=text, is_cut=is_cut)
        return None


def _printed_steps(lines: Iterable[str]) -> Iterator[_PrintedStep]:
    """Join the lines of each step; other lines are left out."""
    step: _PrintedStep | None = None
    for printed in lines:
        is_cut = not printed.endswith("\n")
        line = _COLOUR.sub("", printed).rstrip("\n")
        start = _STEP.search(line)
        if start is None and step is not None and (more := step.joined(line, is_cut)) is not None:
            step = more
            continue
        if step is not None:
            yield step
        step = None
        if start is not None:
            is_listed = start[1] != " - "
            text = line[start.start() :]
            step = _PrintedStep(text.rstrip() if is_listed else text, is_listed, is_cut)
    if step is not None:
        yield step


def _file_logger_entry(line: bytes) -> Row | None:
    """One line of verl's file logger; None for any other line, or a part of one. Its null is a NaN or inf."""
    match _json(line):
        case {"step": int(step), "data": dict(data)}:
            return step, numbers({name: math.nan if value is None else value for name, value in data.items()})
    return None


def is_file_logger(file: Path) -> bool:
    """Whether a file is one of verl's file logger, by its first line."""
    with file.open("rb") as lines:
        return _file_logger_entry(lines.readline()) is not None


def file_logger(file: Path) -> Iterator[Row]:
    """verl's file logger. A last line that is cut off, as in a run that was killed or goes on, is left out."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if (entry := _file_logger_entry(line)) is not None:
                yield entry
            elif line.endswith(b"\n"):
                logger.warning("%s: line %d is left out, as it is no metrics of verl", file, number)


def tensorboard(path: Path) -> Iterator[Row]:
    """The scalars of an event file, or of all event files of a folder."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError as error:
        raise ValueError(f"{path}: TensorBoard's events need the package tensorboard") from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield event.step, {name: event.value}


def wandb_csv(file: Path) -> Iterator[Row]:
    """W&B's export of a panel (columns ``RUN - METRIC``) or of a run's history.

    Raises:
        ValueError: it holds several runs.
    """
    frame = pd.read_csv(file, dtype=str, keep_default_na=False, on_bad_lines="skip", encoding_errors="replace")
    frame = frame[[name for name in frame if not str(name).endswith(("__MIN", "__MAX"))]]
    runs = {name.rpartition(" - ")[0] for name in frame} - {""}
    if len(runs) > 1:
        raise ValueError(f"{file} holds {len(runs)} runs ({', '.join(sorted(runs))}): export one of them")
    yield from _history(frame.rename(columns=lambda name: name.rpartition(" - ")[2]).to_dict("records"))


def _read_json(file: Path) -> Log | None:
    """The history or the summary of W&B: JSON, or a JSON object per line."""
    with file.open("rb") as lines:
        if not lines.readline().lstrip().startswith((b"{", b"[")):
            return None
    text = file.read_bytes()
    whole = _json(text)
    entries = whole if isinstance(whole, list) else [whole] if whole else [_json(line) for line in text.splitlines()]
    entries = [entry for entry in entries if isinstance(entry, dict)]
    return _log("a history of W&B", _history(entries))


def _json(text: bytes) -> Any:
    """The value of a JSON text; None if it is not JSON, or cut off."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also of a write that was cut within a character
        return None


def _history(entries: Iterable[dict]) -> Iterator[Row]:
    """Objects with a step among their metrics."""
    for entry in entries:
        metrics = numbers(entry)
        steps = [metrics.pop(name) for name in _STEPS if name in metrics]
        if (step := next(filter(math.isfinite, steps), None)) is not None:
            yield int(step), metrics


# --- folders ----------------------------------------------------------------------------------------------------------

PATTERNS = ("*tfevents*", "output.log", "*.log", "wandb-summary.json")
"""Logs of a folder, in the order in which they are looked for: the first kind that holds a step counts."""


def _read_folder(folder: Path) -> Log | None:
    below = files_below(folder)
    for pattern in PATTERNS:
        files = list(dict.fromkeys(file.resolve() for file in below if file.match(pattern)))
        if pattern == "*tfevents*":  # a resumed run adds a file to its folder
            files = list(dict.fromkeys(file.parent for file in files))
        each = ((place, _log("TensorBoard", tensorboard(place)) if place.is_dir() else read(place)) for place in files)
        found = {place: log for place, log in each if log}
        if len(found) > 1:
            raise ValueError(f"{folder} holds logs of several runs; name one: {', '.join(map(str, found))}")
        if found:
            return next(iter(found.values()))
    return None
