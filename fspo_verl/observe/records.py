# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Per-response records of a training run, and a reader: Parquet files of up to 30 steps of a rank.

A row is a response in one optimiser step; :data:`COLUMNS` says what it holds. At the end of each update the file of a
rank is written anew, whole, with the steps since the last full one: a crash takes the update that was trained, and
nothing before it. A disk that is full, slow or not there is a warning, and training goes on. Each file says which steps
it holds, and how many ranks there are: the reader finds those that are incomplete. Where a run goes on from a
checkpoint, its newest attempt counts (:mod:`fspo_verl.observe.attempts`).
"""

import atexit
import functools
import hashlib
import json
import math
import os
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fspo_verl import clips
from fspo_verl.observe import attempts
from fspo_verl.observe.attempts import MOST_ROWS, MOST_STEPS
from fspo_verl.observe.columns import OPTIONAL
from fspo_verl.observe.microbatch import MicroBatch
from fspo_verl.observe.settings import RunSettings
from fspo_verl.output import Once

COLUMNS = {
    "step": pa.int32(),  # training step
    "mini_batch": pa.int32(),  # optimiser step within the training step, from 0
    "prompt": pa.dictionary(pa.int32(), pa.string()),  # id; the responses to one prompt share it within a step
    "prompt_text_hash": pa.int64(),  # see text_hash; the same in every step that draws the prompt
    "length": pa.int32(),  # L, response tokens
    "log_ratio": pa.float32(),  # S, nats; 0 where not finite
    "quadratic_variation": pa.float32(),  # Q, nats²; 0 where not finite
    "advantage": pa.float32(),  # mean over the response tokens
    "clipped": pa.float32(),  # share of the response's tokens that lost their gradient to the clip
    # Which side of the clip took (part of) the gradient: kept (none), upper (A > 0), lower (A < 0, S low), dual (A < 0,
    # S high); nonfinite for a response that holds NaN or inf; rejected for one that a rollout correction left no token.
    "decision": pa.dictionary(pa.int32(), pa.string()),
}
CLIP_COLUMNS = dict.fromkeys(clips.COLUMNS, pa.int32())
"""Numbers of tokens that single clips drop; records that an older version wrote lack those of newer clips."""
EPS_COLUMNS = {name: pa.float64() for name in ("eps_low", "eps_high", "eps_dual")}
"""The range in force when a response was trained on, of runs with ``target_clip_rate`` only; see :class:`Band`."""
_OPTIONAL = CLIP_COLUMNS | EPS_COLUMNS | dict.fromkeys(OPTIONAL, pa.float32())

_TEXTS = [name for name, kind in COLUMNS.items() if pa.types.is_dictionary(kind)]  # numbers are smaller as they are

_SETTINGS = b"fspo_verl"  # key of the metadata entry of a file
_ATTEMPT = b"attempt"  # key of another one, with the fields of attempts.Footer

_MOST_WAITING = 4  # files that wait in memory for a disk
_PATIENCE = 5.0  # seconds that an update waits for the disk


def text_hash(prompt) -> int:
    """A number for what a prompt says, the same in every process and run: 64 bits of BLAKE2b of its JSON.

    Args:
        prompt: chat messages, or a text. What JSON cannot hold, such as an image, counts by its type alone. A key
            that is no text counts as what Python prints of it.
    """

    def plain(part):
        if isinstance(part, Mapping):
            return {str(key): plain(value) for key, value in part.items()}
        if isinstance(part, list | tuple | np.ndarray):
            return [plain(item) for item in (part.tolist() if isinstance(part, np.ndarray) else part)]
        return part if isinstance(part, str | int | float | None) else type(part).__name__

    text = json.dumps(plain(prompt), sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass
class _Filled:
    """A file that is being filled, of one rank."""

    path: Path
    ranks: int  # that train
    steps: list[int] = field(default_factory=list)
    tables: list[pa.Table] = field(default_factory=list)  # of micro-batches

    @property
    def is_full(self) -> bool:
        return len(self.steps) == MOST_STEPS or sum(map(len, self.tables)) >= MOST_ROWS


class RecordWriter:
    """Writes the records of one rank.

    Nothing here raises, and no disk is waited for longer than some seconds: what cannot be written waits in memory for
    the next update, and what is lost in the end is a warning.

    Args:
        folder: of this attempt; made with the first file.
        settings: stored with every file.
        began: the first training step, recorded or not.
        freq: of so many training steps one is handed in.
        last_step: the last training step that will be handed in, where it is known.
    """

    def __init__(
        self, folder: str | Path, settings: RunSettings, began: int, freq: int = 1, last_step: int | None = None
    ):
        self.folder, self._began, self._freq, self._last_step = Path(folder), began, freq, last_step
        self._settings = json.dumps(settings.to_json())
        self._filled: _Filled | None = None
        self._has_new = False  # rows that are not handed over
        self._waiting: dict[Path, pa.Table] = {}  # files that are not on the disk as they should be
        self._own: set[Path] = set()  # files that this writer has written
        self._is_marked, self._patience = False, _PATIENCE
        self._thread: threading.Thread | None = None
        self._process, self._once = os.getpid(), Once()
        atexit.register(self.close)

    def add(self, columns: dict[str, np.ndarray], micro_batch: MicroBatch) -> None:
        """Take the rows of one micro-batch, to be written at the end of the update.

        Args:
            columns: ``[B]`` arrays of :mod:`fspo_verl.observe.columns`, token columns included.
        """
        if self._is_a_copy:
            text = "process %d is a copy of the one that records, %d, and records nothing"
            self._warn("copy", text, os.getpid(), self._process)
            return
        step, file = micro_batch.step, self._filled
        if file is None or (step not in file.steps and file.is_full):
            if self._has_new:  # of a trainer that does not say when an update ends
                self.flush()
            name = attempts.RECORD.format(step=step, rank=micro_batch.rank)
            file = self._filled = _Filled(self.folder / name, micro_batch.ranks)
        if step not in file.steps:
            file.steps.append(step)
        self._has_new = True
        try:
            file.tables.append(_table(columns, micro_batch))
        except Exception as error:
            self._once.lost(error, f"records in {self.folder}: rows of step {step} are lost; training goes on")

    def flush(self, writes: bool = True) -> None:
        """Write what an update has added; drop it where another rank has the same responses, and ``writes`` them."""
        if self._is_a_copy or not (self._has_new or not self._is_marked):
            return
        file, self._has_new = self._filled, False
        if not writes:
            self._filled = None
            return
        if file is not None and file.tables:
            footer = attempts.Footer(file.steps, file.ranks, self._freq)
            metadata = {_SETTINGS: self._settings, _ATTEMPT: json.dumps(vars(footer))}
            table = pa.concat_tables(file.tables, promote_options="default")
            self._waiting[file.path] = table.replace_schema_metadata(metadata)
        while len(self._waiting) > _MOST_WAITING:
            lost = next(iter(self._waiting))
            del self._waiting[lost]
            self._warn("lost", "%s is lost, with up to %d steps: the disk is full or too slow", lost.name, MOST_STEPS)
        self._write_within(self._patience)

    def close(self) -> None:
        """Write what is left when the process ends."""
        if self._is_a_copy:
            return
        self.flush()
        if self._waiting:
            self._write_within(2 * _PATIENCE)
        if self._waiting:
            self._warn("end", "the process ends before %s could be written", ", ".join(x.name for x in self._waiting))

    def _write_within(self, seconds: float) -> None:
        """Write what waits, in a thread that is left alone after so many seconds: a disk that hangs stops nobody."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write_waiting, daemon=True)
            self._thread.start()
        self._thread.join(seconds)
        if self._thread.is_alive() and seconds:
            self._patience = 0.0
            self._warn("slow", "the disk takes more than %g s; if it stays so, what waits for it is lost", seconds)

    def _write_waiting(self) -> None:
        try:
            if not self._is_marked:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / attempts.MARK.format(what=attempts.BEGAN, step=self._began)).touch()
                self._is_marked = True
            for file, table in list(self._waiting.items()):
                self._write(file, table)
                if self._waiting.get(file) is table:
                    del self._waiting[file]
        except Exception as error:
            what = f"records in {self.folder} cannot be written now: those of more than {MOST_STEPS * _MOST_WAITING}"
            self._once.lost(error, f"{what} steps, and all that wait when the process ends, are lost; training goes on")

    def _write(self, file: Path, table: pa.Table) -> None:
        """Write a whole file.

        Raises:
            OSError: the disk is full.
        """
        if file not in self._own and file.exists():
            self._warn("there", "%s is there already, and is not overwritten", file.name)
            return
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            with unfinished.open("wb") as opened:
                pq.write_table(table, opened, compression="zstd", use_dictionary=_TEXTS, write_page_checksum=True)
                opened.flush()
                os.fsync(opened.fileno())
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
        self._own.add(file)
        last = json.loads(table.schema.metadata[_ATTEMPT])["steps"][-1]
        if self._last_step is not None and last >= self._last_step:
            (self.folder / attempts.MARK.format(what=attempts.FINISHED, step=last)).touch()

    @property
    def _is_a_copy(self) -> bool:
        """Tell whether this process was forked from the one that opened the writer, and holds a part of its step."""
        return os.getpid() != self._process

    def _warn(self, cause: str, text: str, *values) -> None:
        self._once.warn(cause, f"records in %s: {text}; training goes on.", self.folder, *values)


def _table(columns: dict[str, np.ndarray], micro_batch: MicroBatch) -> pa.Table:
    """The rows of one micro-batch."""
    length, rows = columns["length"], len(columns["length"])
    sides = {side: columns[f"clipped_{side}"] for side in ("upper", "lower", "dual")}
    is_so = [length == 0, columns["finite"] == 0, *(share > 0 for share in sides.values())]
    columns = columns | {
        "step": np.full(rows, micro_batch.step),
        "mini_batch": np.full(rows, micro_batch.mini_batch),
        "prompt": np.array(micro_batch.prompts, dtype=object),
        "prompt_text_hash": np.array([text_hash(text) for text in micro_batch.texts], dtype=np.int64),
        "clipped": sides["upper"] + sides["lower"] + sides["dual"],
        "decision": np.select(is_so, ["rejected", "nonfinite", *sides], "kept").astype(object),
    }
    if "rollout_length" in columns:
        columns["staleness"] = np.array(micro_batch.staleness)
    # Those that a rollout correction has rejected have tokens, though none in the loss. Padding has none.
    is_response = np.maximum(length, columns.get("rollout_length", 0)) > 0
    kinds = COLUMNS | {name: kind for name, kind in _OPTIONAL.items() if name in columns}
    arrays = [pa.array(columns[name][is_response], kind) for name, kind in kinds.items()]
    return pa.Table.from_arrays(arrays, schema=pa.schema(kinds))


@dataclass(frozen=True)
class Records:
    """The records of a run, and what there is to know of them beside the table."""

    table: pd.DataFrame
    """The result of :func:`read_records`."""

    settings: RunSettings | None
    """The last settings that the run trained with; None without any record."""

    rows: int
    """Rows of responses that trained, those included that a random choice has left out."""

    incomplete_steps: int = 0
    """Steps in which records are missing."""


def read_records(folder: str | Path, max_rows: int | None = None, rejected: bool = False) -> pd.DataFrame:
    """Read the records below a folder as one table, of a run that is going on, has ended or was killed.

    Args:
        folder: searched with all folders in it.
        max_rows: read about this many rows, a random choice (the same at every call) where there are more.
        rejected: also the responses that a rollout correction has taken out of the loss, whose length is 0.

    Returns:
        One row per response and optimiser step, of :data:`COLUMNS`, and where the run has them of :data:`CLIP_COLUMNS`,
        :data:`EPS_COLUMNS` and :data:`fspo_verl.observe.columns.OPTIONAL`; without any record an empty table.

    A file that is damaged, or that this package has not written, is left out with a warning, and its steps count as
    missing. Missing records, and different settings in one folder, are warnings.
    """
    return read(folder, max_rows, rejected).table


def read(folder: str | Path, max_rows: int | None = None, rejected: bool = False) -> Records:
    """Read the records below a folder as :func:`read_records` does, with their settings and what is missing."""
    launches = attempts.attempts_below(folder)
    files = [file for launch in launches for file in launch.counted]
    with ThreadPoolExecutor(_THREADS) as threads:
        rows = 0 if max_rows is None else sum(threads.map(_rows, files))
        share = min(max_rows / rows, 1.0) if max_rows is not None and rows else 1.0
        results = [*threads.map(functools.partial(_read_or_why, share=share, rejected=rejected), files)]
    parts = [part for part in results if isinstance(part, _Part)]
    table = _frame([part.rows for part in parts])
    settings = _in_force(parts[-1].settings, table) if parts else None
    footers = {part.path: part.footer for part in parts}
    incomplete = sum(attempts.missing_steps(launch, footers) for launch in launches)
    for file, why in zip(files, results, strict=True):
        if isinstance(why, str):
            warnings.warn(f"{file.path} is left out, it cannot be read: {why}", stacklevel=2)
    notes = [*_hidden(launches), *_differing([part.settings for part in parts])]
    if incomplete:
        notes.insert(0, f"steps with missing records: {incomplete:,}; files are damaged, gone or were not written")
    for text in notes:
        warnings.warn(f"{folder}: {text}", stacklevel=2)
    return Records(table, settings, sum(part.trained for part in parts), incomplete)


_THREADS = 2  # read at once: more do not read faster, as each holds Python's lock half of the time
_DAMAGED = (OSError, ValueError, pa.ArrowException)


class _Part(NamedTuple):
    """The content of a file, as far as it counts."""

    path: Path
    settings: RunSettings
    footer: attempts.Footer
    rows: pa.Table
    trained: int  # rows of responses that trained, before the choice


def _rows(file: attempts.RecordFile) -> int:
    """Return how many rows a file has; 0 where it is damaged."""
    try:
        return pq.read_metadata(file.path).num_rows
    except _DAMAGED:  # the reason is told where it is read
        return 0


def _read_or_why(file: attempts.RecordFile, share: float, rejected: bool) -> _Part | str:
    """Read a file; return the reason where it cannot be read."""
    try:
        return _read(file, share, rejected)
    except _DAMAGED as error:
        return str(error)


def _read(file: attempts.RecordFile, share: float, rejected: bool) -> _Part:
    """Read the rows of a file, or a random share of them.

    Raises:
        OSError, ValueError, pa.ArrowException: it is damaged, or this package has not written it.
    """
    with pq.ParquetFile(file.path, page_checksum_verification=True) as opened:
        settings, footer = _settings(opened.schema_arrow), _footer(opened.schema_arrow)
        rows = opened.read([*COLUMNS, *_OPTIONAL], use_threads=False).replace_schema_metadata(None)
    if math.isfinite(file.end):
        rows = rows.filter(pc.less(rows["step"], int(file.end)))
    is_trained = pc.greater(rows["length"], 0)
    trained = pc.sum(is_trained).as_py() or 0
    rows = rows if rejected else rows.filter(is_trained)
    if share < 1:
        chosen = np.random.default_rng(zlib.crc32(file.path.name.encode())).random(len(rows)) < share
        rows = rows.filter(pa.array(chosen))
    return _Part(file.path, settings, footer, rows, trained)


def _frame(tables: Sequence[pa.Table]) -> pd.DataFrame:
    whole = pa.concat_tables([pa.schema(COLUMNS).empty_table(), *tables], promote_options="default")
    return whole.unify_dictionaries().to_pandas(split_blocks=True, self_destruct=True)


def _hidden(launches: Sequence[attempts.Attempt]) -> Iterator[str]:
    """Name attempts that a later one has done again as a whole, such as another training of a sweep."""
    if names := sorted(launch.folder.name for launch in launches if launch.files and not launch.counted):
        yield f"{', '.join(names)} is not read, as a later attempt began anew; to read one, name its folder"


def _differing(settings: Sequence[RunSettings]) -> Iterator[str]:
    values = [of_a_file.to_json() for of_a_file in settings]
    if keys := sorted({key for value in values for key in value if value[key] != values[-1][key]}):
        yield f"records have different settings ({', '.join(keys)}); the last ones count"


def _settings(schema: pa.Schema) -> RunSettings:
    """The settings of a record file that holds all of :data:`COLUMNS`, and others as they are written.

    Raises:
        ValueError: it does not; says what is wrong.
    """
    try:
        settings = RunSettings.from_json(json.loads((schema.metadata or {})[_SETTINGS]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"its settings are not those of a run, so that fspo_verl has not written it: {error}"
        ) from None
    for name, kind in (COLUMNS | _OPTIONAL).items():
        actual = schema.field(name).type if name in schema.names else None
        if actual != kind and (name in COLUMNS or actual is not None):
            raise ValueError(f"its column {name} is {actual or 'missing'}, where {kind} is expected")
    return settings


def _footer(schema: pa.Schema) -> attempts.Footer:
    """Return the metadata of a file about its attempt; what another version says beside that is left out.

    Raises:
        ValueError: a field is missing, or has a value that it cannot have.
    """
    footer = json.loads((schema.metadata or {}).get(_ATTEMPT, "null"))
    if footer is None:  # a file that was made of others
        return attempts.Footer([], 1, 1)
    if not isinstance(footer, dict):
        raise ValueError(f"its attempt is {footer!r}, which says nothing of one")
    values: list[Any] = [footer.get(name) for name in ("steps", "ranks", "freq")]
    steps, ranks, freq = values
    if not isinstance(steps, list) or not steps or not all(type(step) is int and step >= 0 for step in steps):
        raise ValueError(f"its attempt has steps={steps!r}")
    if not all(type(count) is int and count >= 1 for count in (ranks, freq)):
        raise ValueError(f"its attempt has ranks={ranks!r}, freq={freq!r}")
    return attempts.Footer(steps, ranks, freq)


def _in_force(settings: RunSettings, frame: pd.DataFrame) -> RunSettings:
    """The settings with the median of eps over the responses, where it followed a clip rate."""
    if settings.band is None or not set(EPS_COLUMNS) <= set(frame):
        return settings
    eps = frame[[*EPS_COLUMNS]].median().dropna()
    return replace(settings, band=replace(settings.band, eps=None, **eps)) if len(eps) else settings
