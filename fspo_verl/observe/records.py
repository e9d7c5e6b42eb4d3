# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Per-response records of a training run: one Parquet file per training step and rank, and a reader.

A row is a response in one optimiser step; :data:`COLUMNS` says what it holds. A file appears at the end of its step,
with all mini-batches of the step or not at all. A disk that is full is a warning, and training goes on. Each file says
how many ranks there are, and how many steps were to be recorded so far: the reader finds those that are incomplete.
Where a run goes on from a checkpoint, its newest attempt counts (:mod:`fspo_verl.observe.attempts`).
"""

import atexit
import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fspo_verl import clips
from fspo_verl.observe import attempts
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
"""The band in force when a response was trained on, of runs with ``target_clip_rate`` only; see :class:`Band`."""
_OPTIONAL = CLIP_COLUMNS | EPS_COLUMNS | dict.fromkeys(OPTIONAL, pa.float32())

_SETTINGS = b"fspo_verl"  # key of the metadata entry of a file
_ATTEMPT = b"attempt"  # key of another one
_TOLD = ("ranks", "taken", "freq")  # its entries: the fields of attempts.Part that a file tells


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
            return [plain(one) for one in (part.tolist() if isinstance(part, np.ndarray) else part)]
        return part if isinstance(part, str | int | float | None) else type(part).__name__

    text = json.dumps(plain(prompt), sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class RecordWriter:
    """Writes the records of one rank.

    Args:
        folder: of this attempt; created if missing.
        settings: stored with every file.
        began: the first training step, recorded or not.
        freq: of so many training steps one is handed in.
        limit_bytes: total size of the files after which nothing more is written.
        last_step: the last training step that will be handed in, where it is known.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: RunSettings,
        began: int,
        freq: int = 1,
        limit_bytes: float = 2**30,
        last_step: int | None = None,
    ):
        self.freq, self.limit_bytes, self._last_step = freq, limit_bytes, last_step
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder, buffering=0) as probe:
            probe.write(b"0")
        self._settings = json.dumps(settings.to_json())
        self._step: list[tuple[dict, MicroBatch]] = []  # the micro-batches of the step that is being trained
        self._taken = 0  # how many steps until now
        self._is_written = True  # as far as it has come
        self._sizes: dict[int, int] = {}  # of the files, by step
        self._process = os.getpid()
        self._once = Once()
        self._mark(attempts.BEGAN, began)
        atexit.register(self.flush)  # some trainers sync no weights after their last step

    def _mark(self, what: str, step: int) -> None:
        with contextlib.suppress(OSError):  # a full disk
            (self.folder / attempts.MARK.format(what=what, step=step)).touch()

    def add(self, columns: dict[str, np.ndarray], micro_batch: MicroBatch) -> None:
        """Take the rows of one micro-batch; the file of a step is written when the step ends.

        Args:
            columns: ``[B]`` arrays of :mod:`fspo_verl.observe.columns`, token columns included.
        """
        if self._is_a_copy:
            text = "process %d is a copy of the one that records, %d, and records nothing"
            self._warn("copy", text, os.getpid(), self._process)
            return
        if self._step and micro_batch.step != self._step[-1][1].step:
            self.flush()
            self._step = []
        if not self._step:
            self._taken += 1
        if "rollout_length" in columns:
            columns = columns | {"staleness": np.array(micro_batch.staleness)}
        self._step.append((columns, micro_batch))
        self._is_written = False

    def flush(self) -> None:
        """Write the file of the step as far as it has come; warn where that fails."""
        if self._is_written or self._is_a_copy:
            return
        self._is_written = True
        step, rank = self._step[-1][1].step, self._step[-1][1].rank
        file = self.folder / attempts.RECORD.format(step=step, rank=rank)
        if self._last_step is not None and step >= self._last_step:
            self._mark(attempts.FINISHED, step)
        if step not in self._sizes and sum(self._sizes.values()) > self.limit_bytes:
            self._mark(attempts.LIMITED, max(self._sizes))
            text = "records_limit_mb is reached, nothing is recorded from step %d of rank %d on"
            self._warn("limit", text, step, rank)
            return
        try:
            self._sizes[step] = _write(self._table(), file)
        except Exception as error:  # recording must not stop training
            self._once.lost(error, f"records in {self.folder}: step {step} of rank {rank} is lost; training goes on")
            # A part of the step would pass for the whole. A file with more rows is not of this writer.
            rows = sum(len(batch.prompts) for _, batch in self._step)
            if self._sizes.pop(step, None) and _rows_in(file) <= rows:
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)

    @property
    def _is_a_copy(self) -> bool:
        """Whether this process was forked from the one that opened the writer, and holds a part of its step."""
        return os.getpid() != self._process

    def _table(self) -> pa.Table:
        step = self._step
        columns = {name: np.concatenate([columns[name] for columns, _ in step]) for name in step[0][0]}
        sizes = [len(batch.prompts) for _, batch in step]
        for name in ("step", "mini_batch"):
            columns[name] = np.repeat([getattr(batch, name) for _, batch in step], sizes)
        columns["prompt"] = np.array([prompt for _, batch in step for prompt in batch.prompts], dtype=object)
        hashes = [text_hash(text) for _, batch in step for text in batch.texts]
        columns["prompt_text_hash"] = np.array(hashes, dtype=np.int64)
        sides = {side: columns[f"clipped_{side}"] for side in ("upper", "lower", "dual")}
        columns["clipped"] = sides["upper"] + sides["lower"] + sides["dual"]
        is_so = [columns["length"] == 0, columns["finite"] == 0, *(share > 0 for share in sides.values())]
        columns["decision"] = np.select(is_so, ["rejected", "nonfinite", *sides], "kept").astype(object)
        # Those that a rollout correction has rejected have tokens, though none in the loss.
        is_response = np.maximum(columns["length"], columns.get("rollout_length", 0)) > 0
        kinds = COLUMNS | {name: kind for name, kind in _OPTIONAL.items() if name in columns}
        arrays = [pa.array(columns[name][is_response], kind) for name, kind in kinds.items()]
        attempt = dict(zip(_TOLD, (step[-1][1].ranks, self._taken, self.freq), strict=True))
        metadata = {_SETTINGS: self._settings, _ATTEMPT: json.dumps(attempt)}
        return pa.Table.from_arrays(arrays, schema=pa.schema(kinds, metadata))

    def _warn(self, cause: str, text: str, *values) -> None:
        self._once.warn(cause, f"records in %s: {text}; training goes on.", self.folder, *values)


def _write(table: pa.Table, file: Path) -> int:
    """Write a whole file, and return its size.

    Raises:
        OSError: the disk is full.
        ValueError: the file is there with more rows.
    """
    if (rows := _rows_in(file)) > len(table):
        raise ValueError(f"{file.name} is there with {rows} rows, and would be replaced by {len(table)}")
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        pq.write_table(table, unfinished, write_page_checksum=True)
        size = unfinished.stat().st_size
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return size


def _rows_in(file: Path) -> int:
    """How many rows a record file holds; 0 where there is none that can be read."""
    with contextlib.suppress(OSError, pa.ArrowException):
        return pq.read_metadata(file).num_rows
    return 0


def read_records(folder: str | Path, max_rows: int | None = None, rejected: bool = False) -> pd.DataFrame:
    """The records below a folder as one table, of a run that is going on, has ended or was killed.

    Args:
        folder: searched with all folders in it.
        max_rows: read about this many rows, a random choice (the same at every call) where there are more.
        rejected: also the responses that a rollout correction has taken out of the loss, whose length is 0.

    Returns:
        One row per response and optimiser step, of :data:`COLUMNS`, and where the run has them of :data:`CLIP_COLUMNS`,
        :data:`EPS_COLUMNS` and :data:`fspo_verl.observe.columns.OPTIONAL`; without any record an empty table.
        ``attrs["settings"]`` are the :class:`fspo_verl.observe.settings.RunSettings`, None without any record,
        ``attrs["rows"]`` how many rows of responses that trained were recorded, ``attrs["lost"]`` in how many steps
        records are missing, and ``attrs["limited_after"]`` the step after which a rank had reached
        ``records_limit_mb``, None where none has.

    A file that is damaged, or that this package has not written, is left out with a warning, and counts as missing.
    Missing records, and different settings in one folder, are warnings.
    """
    files = attempts.parts(folder)
    counted = attempts.newest(files)
    opened = [found for part in counted if (found := _opened(part))]
    share = 1.0 if max_rows is None else min(max_rows / max(sum(file.rows for file in opened), 1), 1.0)
    generator = np.random.default_rng(0)
    used, tables, total = [], [pa.schema(COLUMNS).empty_table()], 0
    for file in opened:
        if (table := _read(file.part.file)) is None:
            continue
        used.append(file)
        trained = pc.greater(table["length"], 0)
        total += pc.sum(trained).as_py() or 0
        table = table if rejected else table.filter(trained)
        tables.append(table if share == 1 else table.filter(pa.array(generator.random(len(table)) < share)))
    frame = pa.concat_tables(tables, promote_options="default").unify_dictionaries().to_pandas()
    settings = _in_force(used[-1].settings, frame) if used else None
    read = {file.part.file: file.part for file in used}
    told = [read.get(part.file, part._replace(damaged=True)) for part in counted]
    frame.attrs = {"settings": settings, "rows": total}
    frame.attrs |= {"lost": attempts.missing_steps(told), "limited_after": attempts.limited_after(told)}
    differing = _differing([file.settings for file in used])
    for text in (*_hidden_attempts(files, counted), *_incomplete(frame), *differing):
        warnings.warn(f"{folder}: {text}", stacklevel=2)
    return frame


class _Opened(NamedTuple):
    """What the metadata of a record file say."""

    part: attempts.Part
    settings: RunSettings
    rows: int


def _opened(part: attempts.Part) -> _Opened | None:
    """None, with a warning, for a file that is damaged or that this package has not written."""
    with _left_out_if_unreadable(part.file):
        file = pq.ParquetFile(part.file)
        settings = _settings(file.schema_arrow)
        return _Opened(part._replace(**_told(file.schema_arrow)), settings, file.metadata.num_rows)
    return None


def _read(file: Path) -> pa.Table | None:
    """All that is known of the columns; None, with a warning, where the file is damaged."""
    with _left_out_if_unreadable(file):
        opened = pq.ParquetFile(file, page_checksum_verification=True)
        return opened.read([*COLUMNS, *_OPTIONAL]).replace_schema_metadata(None)
    return None


@contextlib.contextmanager
def _left_out_if_unreadable(file: Path) -> Iterator[None]:
    """Turn an error of a file into a warning."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        warnings.warn(f"{file} is left out, it cannot be read: {error}", stacklevel=5)


def _hidden_attempts(files: list[attempts.Part], counted: list[attempts.Part]) -> Iterator[str]:
    """Attempts that a later one has done again as a whole, such as another training of a sweep."""
    if hidden := {part.file.parent for part in files} - {part.file.parent for part in counted}:
        names = ", ".join(sorted(place.name for place in hidden))
        yield f"{names} is not read, as a later attempt began anew; to read one, name its folder"


def _incomplete(frame: pd.DataFrame) -> Iterator[str]:
    if lost := frame.attrs["lost"]:
        yield f"steps with missing records: {lost:,}; files are damaged, gone or were not written"
    if (last := frame.attrs["limited_after"]) is not None:
        yield f"records_limit_mb was reached, so that after step {last} not every rank has recorded"


def _differing(settings: Sequence[RunSettings]) -> Iterator[str]:
    values = [one.to_json() for one in settings]
    if keys := sorted({key for one in values for key in one if one[key] != values[-1][key]}):
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
        found = schema.field(name).type if name in schema.names else None
        if found != kind and (name in COLUMNS or found is not None):
            raise ValueError(f"its column {name} is {found or 'missing'}, where {kind} is expected")
    return settings


def _told(schema: pa.Schema) -> dict:
    """The fields of :data:`_TOLD`; what another version says beside them is left out.

    Raises:
        ValueError: a field has a value that it cannot have.
    """
    told = json.loads((schema.metadata or {}).get(_ATTEMPT, "{}"))
    if not isinstance(told, dict):
        raise ValueError(f"its attempt is {told!r}, which says nothing of one")
    told = {name: told[name] for name in _TOLD if name in told}
    if wrong := [f"{name}={value!r}" for name, value in told.items() if type(value) is not int or value < 1]:
        raise ValueError(f"its attempt has {', '.join(wrong)}")
    return told


def _in_force(settings: RunSettings, frame: pd.DataFrame) -> RunSettings:
    """The settings with the median of eps over the responses, where it followed a clip rate."""
    if settings.band is None or not set(EPS_COLUMNS) <= set(frame):
        return settings
    eps = frame[[*EPS_COLUMNS]].median().dropna()
    return replace(settings, band=replace(settings.band, eps=None, **eps)) if len(eps) else settings
