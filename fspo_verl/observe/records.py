# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Per-response records of a training run: one Parquet file per training step and rank, and a reader.

A row is a response in one optimiser step; :data:`COLUMNS` says what it holds. Writing can neither stop nor slow a run:
it happens in a thread of its own, a file appears whole or not at all, and a disk that is full, or too slow for the end
of a step, is a warning.

Every file names the run that it is of (:func:`run_name`), so that a run that goes on from a checkpoint replaces the
records of its own later steps, and those of no other run.
"""

import json
import logging
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fspo_verl import clips
from fspo_verl.loss import MAX_LOG_RATIO
from fspo_verl.observe.microbatch import MicroBatch
from fspo_verl.observe.settings import RunSettings

logger = logging.getLogger("fspo_verl")

COLUMNS = {
    "step": pa.int32(),  # training step
    "mini_batch": pa.int32(),  # optimiser step within the training step, from 0
    "rank": pa.int32(),  # data-parallel rank
    "prompt": pa.dictionary(pa.int32(), pa.string()),  # id; the responses to one prompt share it within a step
    "length": pa.int32(),  # L, response tokens
    "log_ratio": pa.float32(),  # S, nats; 0 where not finite
    "quadratic_variation": pa.float32(),  # Q, nats²; 0 where not finite
    "quadratic_variation_last": pa.float32(),  # the part of Q in the last 4 tokens
    "quadratic_variation_top": pa.float32(),  # the part of Q in the largest ceil(L/100) tokens
    "advantage": pa.float32(),  # mean over the response tokens
    "ratio": pa.float32(),  # importance-sampling ratio exp(S), capped at e^20
    "clipped": pa.float32(),  # share of the response's tokens that lost their gradient to the clip
    # Which side of the clip took (part of) the gradient: kept (none), upper (A > 0), lower (A < 0, S low), dual (A < 0,
    # S high); nonfinite for a response that holds NaN or inf.
    "decision": pa.dictionary(pa.int32(), pa.string()),
    # What single clips need; see fspo_verl.clips.
    **{column.name: pa.type_for_alias(column.dtype) for column in clips.COLUMNS},
}
_OF_CLIPS = {column.name for column in clips.COLUMNS}

_FILE = "step-{step:06d}-rank-{rank:04d}.parquet"
_NAME = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")
_SETTINGS = b"fspo_verl"  # key of the metadata entry of a file
_PENDING = 1024  # micro-batches that wait for a slow disk before records are dropped


class RecordWriter:
    """Writes the records of one rank.

    Args:
        folder: created if missing.
        settings: JSON of :class:`fspo_verl.observe.settings.RunSettings`; stored with every file.
        fraction: share of the prompts that are recorded.
        limit_bytes: total size of the files after which nothing more is written.
    """

    def __init__(self, folder: str | Path, settings: str, fraction: float = 1.0, limit_bytes: float = 2**30):
        self.folder, self.fraction, self.limit_bytes = Path(folder), fraction, limit_bytes
        self._run = json.loads(settings).get("run")
        self._schema = pa.schema(COLUMNS).with_metadata({_SETTINGS: settings})
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._pending: list[Future] = []
        self._is_slow = False
        # From here on only the thread's business.
        self._step, self._tables = None, []
        self._sizes: dict[Path, int] = {}
        self._said: set[str] = set()

    def add(self, columns: dict[str, np.ndarray], **micro_batch) -> None:
        """Take the rows of one micro-batch; after the last of a mini-batch the step's file is written anew.

        Args:
            columns: ``[B]`` arrays of :mod:`fspo_verl.observe.columns`, token columns included.
            micro_batch: all fields of :class:`fspo_verl.observe.microbatch.MicroBatch`.
        """
        batch = MicroBatch(**micro_batch)
        self._pending = [job for job in self._pending if not job.done()]
        if len(self._pending) >= _PENDING:
            self._warn(f"the disk is too slow, records of step {batch.step} are lost")
            return
        self._pending.append(self._thread.submit(self._take, columns, batch))

    def settle(self, seconds: float = 10.0) -> None:
        """Wait until everything taken is written, but not long; where that was in vain once, not again.

        A run may end with any step, and Ray then leaves a worker a fraction of a second.
        """
        if not self._is_slow and wait(self._pending, seconds).not_done:
            self._is_slow = True
            self._warn(f"not written within {seconds:g} s of the end of a step; those of the last steps may be lost")

    def close(self) -> None:
        """Wait until everything taken is written."""
        self._thread.shutdown()

    def _take(self, columns, batch: MicroBatch) -> None:
        try:
            if batch.step != self._step:
                self._step, self._tables = batch.step, []
            self._tables.append(self._table(columns, batch))
            if batch.ends_mini_batch:
                self._write(batch)
        except Exception as error:  # nothing that goes wrong here is worth a training run
            self._warn(f"step {batch.step} of rank {batch.rank} is lost: {error}")

    def _table(self, columns, batch: MicroBatch) -> pa.Table:
        chosen = columns["length"] > 0
        if self.fraction < 1:
            # By prompt, so that groups stay whole, and by its id alone, so that all ranks choose alike.
            draw = np.array([zlib.crc32(prompt.encode()) / 2**32 for prompt in batch.prompts])
            chosen &= draw < self.fraction
        sides = {side: columns[f"clipped_{side}"] for side in ("upper", "lower", "dual")}
        is_so = [columns["finite"] == 0, *(share > 0 for share in sides.values())]
        values = columns | {name: np.full(len(chosen), getattr(batch, name)) for name in ("step", "mini_batch", "rank")}
        values |= {
            "prompt": np.array(batch.prompts, dtype=object),
            "ratio": np.exp(np.minimum(columns["log_ratio"], MAX_LOG_RATIO)),
            "clipped": sum(sides.values()),
            "decision": np.select(is_so, ["nonfinite", *sides], "kept").astype(object),
        }
        arrays = [pa.array(values[name][chosen], dtype) for name, dtype in COLUMNS.items()]
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def _write(self, batch: MicroBatch) -> None:
        file = self.folder / _FILE.format(step=batch.step, rank=batch.rank)
        if not self._sizes:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(batch)
        if file not in self._sizes and sum(self._sizes.values()) > self.limit_bytes:
            where = f"step {batch.step} of rank {batch.rank}"
            self._warn(f"records_limit_mb is reached, nothing is recorded from {where} on")
            return
        unfinished = self.folder / f".{file.name}.{os.getpid()}"
        try:
            table = pa.concat_tables(self._tables).unify_dictionaries()
            pq.write_table(table, unfinished, write_page_checksum=True)
            self._sizes[file] = unfinished.stat().st_size
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)

    def _make_room(self, batch: MicroBatch) -> None:
        """Remove what a run that goes on from a checkpoint does again, maybe on fewer ranks.

        Raises:
            ValueError: the folder holds records of another run; none is removed, and none will be added.
        """
        mine = [
            (step, file)
            for step, rank, file in sorted(_numbered(self.folder.iterdir()))
            if rank == batch.rank or (batch.rank == 0 and rank >= batch.ranks)
        ]
        superseded = [file for step, file in mine if step >= batch.step]
        # Besides those in the way one more, as a folder holds the records of one run.
        if other := of_another_run([*(file for _, file in mine[:1]), *superseded], self._run):
            raise ValueError(f"{other} is of another run, so nothing is recorded; choose another records_dir")
        for file in superseded:
            file.unlink()

    def _warn(self, message: str) -> None:
        """Once per message, as a condition tends to last; the training goes on."""
        kind = re.sub(r"\d+", "", message)
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("records in %s: %s; training goes on. Said once.", self.folder, message)


def run_name(folder: str | Path, checkpoints: str | None) -> str | None:
    """What the records of a run name it by: the way from their folder to that of its checkpoints.

    It stays the same where both are moved together. None where the checkpoints are not known.
    """
    return os.path.relpath(checkpoints, folder) if checkpoints else None


def of_another_run(files: Iterable[Path], run: str | None) -> Path | None:
    """The first of these files that was not written by the run of this name, or does not say by which.

    A file that holds nothing, such as one cut off by a loss of power, is of no run.
    """
    for file in files:
        try:
            settings = json.loads((pq.read_metadata(file).metadata or {}).get(_SETTINGS, "{}"))
        except (pa.ArrowInvalid, FileNotFoundError):  # or another rank has just removed it
            continue
        except (OSError, ValueError):
            return file
        if not isinstance(settings, dict) or run is None or settings.get("run") != run:
            return file
    return None


def step_of(file: Path) -> int:
    """The step of a record file, from its name."""
    return int(_NAME.fullmatch(file.name)[1])


def _numbered(files: Iterable[Path]) -> Iterator[tuple[int, int, Path]]:
    """Step, rank and path of the record files among these; copies and other strays are passed over."""
    for file in files:
        if match := _NAME.fullmatch(file.name):
            yield int(match[1]), int(match[2]), file


def record_files(folder: str | Path) -> list[Path]:
    """The record files below a folder, in the order of steps and ranks."""
    return sorted(file for _, _, file in _numbered(Path(folder).rglob("step-*.parquet")))


def read_records(folder: str | Path, columns: Sequence[str] | None = None, max_rows: int | None = None) -> pd.DataFrame:
    """The records below a folder as one table, of a run that is going on, has ended or was killed.

    Args:
        folder: searched with all folders in it.
        columns: names out of :data:`COLUMNS`; all by default. What only single clips need, and the records of earlier
            versions lack, is then left out.
        max_rows: read about this many rows, a random choice (the same at every call) where there are more.

    Returns:
        One row per response and optimiser step; without any record an empty table. ``attrs["settings"]`` are the
        :class:`fspo_verl.observe.settings.RunSettings`, None without any record, ``attrs["rows"]`` the number of rows
        recorded.

    A file that is damaged, or that this package has not written, is left out with a warning. A band that this version
    does not know, and different settings in one folder, are warnings.
    """
    names = list(columns or COLUMNS)
    required = [name for name in names if columns or name not in _OF_CLIPS]
    readable, settings, lacking = [], [], set()
    for file in record_files(folder):
        try:
            opened, found = _open(file, required)
        except _UNREADABLE as error:
            _warn_left_out(file, error)
            continue
        readable.append((file, opened.metadata.num_rows))
        settings.append(found)
        lacking |= set(names) - set(opened.schema_arrow.names)
    names = [name for name in names if name not in lacking]

    rows = sum(count for _, count in readable)
    share = 1.0 if max_rows is None or rows <= max_rows else max_rows / rows
    generator = np.random.default_rng(0)
    tables = [pa.schema(COLUMNS).empty_table().select(names)]
    for file, count in readable:
        chosen = None if share == 1 else pa.array(generator.random(count) < share)
        try:
            table = _open(file, names)[0].read(names).select(names).replace_schema_metadata(None)
        except _UNREADABLE as error:
            _warn_left_out(file, error)
            rows -= count
            continue
        tables.append(table if chosen is None else table.filter(chosen))
    frame = pa.concat_tables(tables).unify_dictionaries().to_pandas()
    frame.attrs = {"settings": _last(settings, folder), "rows": rows}
    return frame


_UNREADABLE = (OSError, ValueError, pa.ArrowException)


def _open(file: Path, names: Sequence[str]) -> tuple[pq.ParquetFile, dict]:
    """A record file that holds these columns, and its settings.

    Raises:
        OSError, ValueError, ArrowException: it does not, or is damaged; says what is wrong.
    """
    opened = pq.ParquetFile(file, page_checksum_verification=True)
    schema = opened.schema_arrow
    try:
        settings = json.loads((schema.metadata or {})[_SETTINGS])
        settings["loss"]
    except (KeyError, TypeError, ValueError):
        raise ValueError("it holds no settings that name a loss, so that fspo_verl has not written it") from None
    for name in names:
        found = schema.field(name).type if name in schema.names else "missing"
        if found != COLUMNS[name]:
            raise ValueError(f"its column {name} is {found}, where {COLUMNS[name]} is expected")
    return opened, settings


def _warn_left_out(file: Path, error: Exception) -> None:
    warnings.warn(f"{file} is left out, it cannot be read: {error}", stacklevel=3)


def _last(settings: list[dict], folder: str | Path) -> RunSettings | None:
    """The settings of the last file; without its band where this version does not know it."""
    if not settings:
        return None
    last = {"band": None} | settings[-1]
    keys = sorted(set().union(*settings))
    differing = [key for key in keys if any(other.get(key) != last.get(key) for other in settings)]
    if differing:
        text = f"{folder} holds records with different settings ({', '.join(differing)}); the last ones count"
        warnings.warn(text, stacklevel=3)
    try:
        return RunSettings.from_json(last)
    except (TypeError, ValueError) as error:
        text = f"{folder} was recorded with a band that this version of fspo_verl does not know, so it is not shown"
        warnings.warn(f"{text}: {error}; pip install --upgrade fspo_verl", stacklevel=3)
        return RunSettings.from_json(last | {"band": None})
