# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Per-response records of a training run: one Parquet file per training step and rank, and a reader.

A row is a response in one optimiser step; :data:`COLUMNS` says what it holds. Once a run trains, writing can neither
stop nor slow it: it happens in a thread of its own, and a disk that is full, or too slow for the end of a step, is a
warning. A file appears at the end of its step, with all mini-batches of the step or not at all; what is lost is counted
in the folder (:mod:`fspo_verl.observe.folder`). A run that goes on from a checkpoint replaces its own later steps.
"""

import contextlib
import json
import logging
import os
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fspo_verl import clips
from fspo_verl.observe import folder as folders
from fspo_verl.observe.microbatch import MicroBatch
from fspo_verl.observe.settings import RunSettings

logger = logging.getLogger("fspo_verl")

COLUMNS = {
    "step": pa.int32(),  # training step
    "mini_batch": pa.int32(),  # optimiser step within the training step, from 0
    "prompt": pa.dictionary(pa.int32(), pa.string()),  # id; the responses to one prompt share it within a step
    "length": pa.int32(),  # L, response tokens
    "log_ratio": pa.float32(),  # S, nats; 0 where not finite
    "quadratic_variation": pa.float32(),  # Q, nats²; 0 where not finite
    "quadratic_variation_last": pa.float32(),  # the part of Q in the last 4 tokens
    "quadratic_variation_top": pa.float32(),  # the part of Q in the largest ceil(L/100) tokens
    "advantage": pa.float32(),  # mean over the response tokens
    "clipped": pa.float32(),  # share of the response's tokens that lost their gradient to the clip
    # Which side of the clip took (part of) the gradient: kept (none), upper (A > 0), lower (A < 0, S low), dual (A < 0,
    # S high); nonfinite for a response that holds NaN or inf.
    "decision": pa.dictionary(pa.int32(), pa.string()),
    # What single clips need; see fspo_verl.clips.
    **{column.name: pa.type_for_alias(column.dtype) for column in clips.COLUMNS},
}
_SETTINGS = b"fspo_verl"  # key of the metadata entry of a file
_PENDING = 1024  # micro-batches that wait for a slow disk before records are dropped


class RecordWriter:
    """Writes the records of one rank.

    Args:
        folder: created if missing.
        settings: JSON of :class:`fspo_verl.observe.settings.RunSettings`; stored with every file.
        fraction: share of the prompts that are recorded.
        limit_bytes: total size of the files after which nothing more is written.
        claim: makes the folder that of this run, see :func:`fspo_verl.observe.folder.claim`; None for one that no
            training run writes to.
        last_step: the last training step of the run, where it is known.

    Raises:
        OSError: the folder cannot be written.
        ValueError: it is that of another run.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: str,
        fraction: float = 1.0,
        limit_bytes: float = 2**30,
        claim: Callable[[], Path] | None = None,
        last_step: int | None = None,
    ):
        self.folder, self.fraction, self.limit_bytes = Path(folder), fraction, limit_bytes
        self._make_claim, self._last_step = claim, last_step
        self._settings = settings
        self._open()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._pending: list[Future] = []
        self._dropped = Counter()  # by step, responses for which the disk was too slow
        self._rank = 0
        self._is_slow = False
        # From here on only the thread's business.
        self._batch: MicroBatch | None = None  # the last of the step that is being taken
        self._tables: list[pa.Table] = []  # of that step
        self._is_new = False  # not written yet
        self._sizes: dict[Path, int] = {}
        self._said: set[str] = set()

    def add(self, columns: dict[str, np.ndarray], **micro_batch) -> None:
        """Take the rows of one micro-batch; the file of a step is written when the step ends.

        Args:
            columns: ``[B]`` arrays of :mod:`fspo_verl.observe.columns`, token columns included.
            micro_batch: all fields of :class:`fspo_verl.observe.microbatch.MicroBatch`.
        """
        batch = MicroBatch(**micro_batch)
        self._rank = batch.rank
        self._pending = [job for job in self._pending if not job.done()]
        if len(self._pending) >= _PENDING:
            self._dropped[batch.step] += int((columns["length"] > 0).sum())
            return
        self._pending.append(self._thread.submit(self._take, columns, batch))

    def settle(self, seconds: float = 10.0) -> None:
        """A step has ended: write its file, and wait for it, but not long; where that was in vain once, not again.

        A run may end with any step, and Ray then leaves a worker a fraction of a second.
        """
        self._pending.append(self._thread.submit(self._write))
        if not self._is_slow and wait(self._pending, seconds).not_done:
            self._is_slow = True
            self._warn(f"not written within {seconds:g} s of the end of a step; those of the last steps may be lost")

    def close(self) -> None:
        """Write all that was taken, and wait for it."""
        self._thread.submit(self._write, last=True)
        self._thread.shutdown()

    def _open(self) -> None:
        """Claim the folder and try to write to it."""
        self._claim = self._make_claim and self._make_claim()
        folders.try_folder(self.folder)
        run = self._claim.read_text() if self._claim else "{}"
        self._schema = pa.schema(COLUMNS).with_metadata({_SETTINGS: self._settings, "claim": run})

    def _take(self, columns, batch: MicroBatch) -> None:
        if self._batch is None or batch.step != self._batch.step:
            self._write()
            self._tables = []
        self._batch, self._is_new = batch, True
        try:
            self._tables.append(self._table(columns, batch))
        except Exception as error:  # recording must not stop training
            self._warn(f"a micro-batch of step {batch.step} is lost: {error!r}")
            self._dropped[batch.step] += int((columns["length"] > 0).sum())

    def _table(self, columns, batch: MicroBatch) -> pa.Table:
        chosen = columns["length"] > 0
        if self.fraction < 1:
            # By prompt, so that groups stay whole, and by its id alone, so that all ranks choose alike.
            draw = np.array([zlib.crc32(prompt.encode()) / 2**32 for prompt in batch.prompts])
            chosen &= draw < self.fraction
        sides = {side: columns[f"clipped_{side}"] for side in ("upper", "lower", "dual")}
        is_so = [columns["finite"] == 0, *(share > 0 for share in sides.values())]
        values = columns | {name: np.full(len(chosen), getattr(batch, name)) for name in ("step", "mini_batch")}
        values |= {
            "prompt": np.array(batch.prompts, dtype=object),
            "clipped": sum(sides.values()),
            "decision": np.select(is_so, ["nonfinite", *sides], "kept").astype(object),
        }
        arrays = [pa.array(values[name][chosen], dtype) for name, dtype in COLUMNS.items()]
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def _write(self, last: bool = False) -> None:
        """Write the step that is being taken, as far as it has come; count it as lost where that fails.

        Args:
            last: nothing will follow.
        """
        if self._claim and folders.successor(self._claim).exists():
            self._warn("another run has taken the folder over, nothing more is recorded")
            return
        reached = self._batch.step if self._batch else -1
        dropped = {step: self._dropped.pop(step) for step in list(self._dropped) if last or step <= reached}
        if self._is_new:
            self._is_new, rows = False, dropped.pop(reached, 0)
            file = self.folder / folders.RECORD.format(step=reached, rank=self._rank)
            try:
                if rows:
                    raise OSError(f"{rows} of its responses could not be taken")
                self._write_file(file)
            except Exception as error:  # recording must not stop training
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)  # a part of a step would pass for the whole
                self._lose(reached, rows + sum(map(len, self._tables)), error)
        for step, rows in dropped.items():
            self._lose(step, rows, "the disk is too slow")

    def _write_file(self, file: Path) -> None:
        if not (self._claim or self.folder).exists():
            self._warn("the folder was removed, and is made again")
            self._open()
        if not self._sizes:
            self._make_room(self._batch)
        if self._claim and self._last_step is not None and self._batch.step >= self._last_step:
            folders.finished(self._claim).touch()
        if file not in self._sizes and sum(self._sizes.values()) > self.limit_bytes:
            where = f"step {self._batch.step} of rank {self._batch.rank}"
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
        """Remove what a run that goes on from a checkpoint does again, maybe on fewer ranks."""
        for step, rank, file in folders.numbered(self.folder.iterdir()):
            if step >= batch.step and (rank == batch.rank or (batch.rank == 0 and rank >= batch.ranks)):
                file.unlink()
        lost = self.folder / folders.LOST.format(rank=batch.rank)
        if lost.exists():
            kept = [f"{step},{count}\n" for step, count in folders.losses(lost) if step < batch.step]
            lost.write_text("".join(kept))

    def _lose(self, step: int, responses: int, error: Exception | str) -> None:
        self._warn(f"step {step} of rank {self._rank} is lost: {error}")
        lost = self.folder / folders.LOST.format(rank=self._rank)
        with contextlib.suppress(OSError), lost.open("a") as file:  # a few bytes often fit where a step did not
            file.write(f"{step},{responses}\n")

    def _warn(self, message: str) -> None:
        """Once per message, as a condition tends to last; the training goes on."""
        kind = re.sub(r"\d+", "", message)
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("records in %s: %s; training goes on. Said once.", self.folder, message)


def read_records(folder: str | Path, columns: Sequence[str] | None = None, max_rows: int | None = None) -> pd.DataFrame:
    """The records below a folder as one table, of a run that is going on, has ended or was killed.

    Args:
        folder: searched with all folders in it.
        columns: names out of :data:`COLUMNS`; all by default.
        max_rows: read about this many rows, a random choice (the same at every call) where there are more.

    Returns:
        One row per response and optimiser step; without any record an empty table. ``attrs["settings"]`` are the
        :class:`fspo_verl.observe.settings.RunSettings`, None without any record, ``attrs["rows"]`` the number of rows
        recorded, ``attrs["lost"]`` the (steps, responses) whose records were lost while the run trained.

    A file that is damaged, or that this package has not written, is left out with a warning. Lost records, a band that
    this version does not know, and different settings in one folder, are warnings.
    """
    names = list(columns or COLUMNS)
    readable, settings = [], []
    for file in folders.record_files(folder):
        try:
            opened, found = _open(file, names)
        except _UNREADABLE as error:
            _warn_left_out(file, error)
            continue
        readable.append((file, opened.metadata.num_rows))
        settings.append(found)

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
    losses = [loss for file in folders.loss_files(folder) for loss in folders.losses(file)]
    lost = len({step for step, _ in losses}), sum(count for _, count in losses)
    if losses:
        text = f"{folder}: the records of {lost[1]:,} responses in {lost[0]:,} steps were lost while the run trained"
        warnings.warn(text, stacklevel=2)
    frame.attrs = {"settings": _last(settings, folder), "rows": rows, "lost": lost}
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
