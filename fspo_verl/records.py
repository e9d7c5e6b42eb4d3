# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Per-response records of a training run: one Parquet file per training step and rank, and a reader.

A row is a response in one optimiser step; :data:`COLUMNS` says what it holds. Writing can neither stop nor slow a run:
it happens in a thread of its own, a file appears whole or not at all, and a disk that is full is a warning.
"""

import json
import logging
import os
import re
import warnings
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fspo_verl.loss import MAX_LOG_RATIO

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
    "decision": pa.dictionary(
        pa.int32(), pa.string()
    ),  # which side of the clip took (part of) the gradient: kept (none),
    # upper (A > 0), lower (A < 0, S low), dual (A < 0, S high); nonfinite for a response that holds NaN or inf
    "tokens_clipped": pa.int32(),  # tokens that a token-level PPO clip (1 ± 0.2, dual clip 3) drops
}

_FILE = "step-{step:06d}-rank-{rank:04d}.parquet"
_NAME = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")
_SETTINGS = b"fspo_verl"  # key of the metadata entry of a file
_PENDING = 1024  # micro-batches that wait for a slow disk before records are dropped


class RecordWriter:
    """Writes the records of one rank.

    Args:
        folder: created if missing.
        settings: JSON of what trains (name of the loss, band, clip range); stored with every file.
        fraction: share of the prompts that are recorded.
        limit_bytes: total size of the files after which nothing more is written.
    """

    def __init__(self, folder: str | Path, settings: str, fraction: float = 1.0, limit_bytes: float = 2**30):
        self.folder, self.fraction, self.limit_bytes = Path(folder), fraction, limit_bytes
        self._schema = pa.schema(COLUMNS).with_metadata({_SETTINGS: settings})
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._pending: list[Future] = []
        # From here on only the thread's business.
        self._step, self._tables = None, []
        self._sizes: dict[Path, int] = {}
        self._said: set[str] = set()

    def add(
        self,
        columns: dict[str, np.ndarray],
        *,
        step: int,
        mini_batch: int,
        rank: int,
        ranks: int,
        prompts: Sequence[str],
        ends_mini_batch: bool,
    ) -> None:
        """Take the rows of one micro-batch; after the last of a mini-batch the step's file is written anew.

        Args:
            columns: ``[B]`` arrays of :mod:`fspo_verl.observation`, token columns included.
            step, mini_batch, rank, ranks, prompts, ends_mini_batch: see :class:`fspo_verl.microbatch.MicroBatch`.
        """
        self._pending = [job for job in self._pending if not job.done()]
        if len(self._pending) >= _PENDING:
            self._warn(f"the disk is too slow, records of step {step} are lost")
            return
        row = {"step": step, "mini_batch": mini_batch, "rank": rank}
        self._pending.append(self._thread.submit(self._take, columns, row, ranks, prompts, ends_mini_batch))

    def close(self) -> None:
        """Wait until everything taken is written."""
        self._thread.shutdown()

    def _take(self, columns, row: dict[str, int], ranks: int, prompts: Sequence[str], write: bool) -> None:
        try:
            if row["step"] != self._step:
                self._step, self._tables = row["step"], []
            self._tables.append(self._table(columns, row, prompts))
            if write:
                self._write(row["step"], row["rank"], ranks)
        except Exception as error:  # nothing that goes wrong here is worth a training run
            self._warn(f"step {row['step']} of rank {row['rank']} is lost: {error}")

    def _table(self, columns, row: dict[str, int], prompts: Sequence[str]) -> pa.Table:
        chosen = columns["length"] > 0
        if self.fraction < 1:
            # By prompt, so that groups stay whole, and by its id alone, so that all ranks choose alike.
            draw = np.array([zlib.crc32(prompt.encode()) / 2**32 for prompt in prompts])
            chosen &= draw < self.fraction
        sides = {side: columns[f"clipped_{side}"] for side in ("upper", "lower", "dual")}
        decision = np.select(
            [columns["finite"] == 0, *(share > 0 for share in sides.values())], ["nonfinite", *sides], "kept"
        )
        values = columns | {name: np.full(len(chosen), value) for name, value in row.items()}
        values |= {
            "prompt": np.array(prompts, dtype=object),
            "ratio": np.exp(np.minimum(columns["log_ratio"], MAX_LOG_RATIO)),
            "clipped": sum(sides.values()),
            "decision": decision.astype(object),
        }
        arrays = []
        for name, dtype in COLUMNS.items():
            if pa.types.is_dictionary(dtype):
                arrays.append(pa.array(values[name][chosen], pa.string()).cast(dtype))
            else:
                arrays.append(pa.array(values[name][chosen].astype(dtype.to_pandas_dtype())))
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def _write(self, step: int, rank: int, ranks: int) -> None:
        file = self.folder / _FILE.format(step=step, rank=rank)
        if not self._sizes:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_superseded(step, rank, ranks)
        if file not in self._sizes and sum(self._sizes.values()) > self.limit_bytes:
            self._warn(f"records_limit_mb is reached, nothing is recorded from step {step} of rank {rank} on")
            return
        unfinished = self.folder / f".{file.name}.{os.getpid()}"
        try:
            pq.write_table(pa.concat_tables(self._tables).unify_dictionaries(), unfinished)
            self._sizes[file] = unfinished.stat().st_size
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)

    def _remove_superseded(self, step: int, rank: int, ranks: int) -> None:
        """A run that goes on from a checkpoint does the steps after it again, maybe on fewer ranks."""
        for file in self.folder.glob("step-*.parquet"):
            found_step, found_rank = map(int, _NAME.fullmatch(file.name).groups())
            if found_step >= step and (found_rank == rank or (rank == 0 and found_rank >= ranks)):
                file.unlink()

    def _warn(self, message: str) -> None:
        """Once per message, as a condition tends to last; the training goes on."""
        kind = re.sub(r"\d+", "", message)
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("records in %s: %s; training goes on. Said once.", self.folder, message)


def record_files(folder: str | Path) -> list[Path]:
    """The record files below a folder, in the order of steps and ranks."""
    return sorted(file for file in Path(folder).rglob("step-*.parquet") if _NAME.fullmatch(file.name))


def read_records(folder: str | Path, columns: Sequence[str] | None = None, max_rows: int | None = None) -> pd.DataFrame:
    """The records below a folder as one table, of a run that is going on, has ended or was killed.

    Args:
        folder: searched with all folders in it.
        columns: names out of :data:`COLUMNS`; all by default.
        max_rows: read about this many rows, a random choice (the same at every call) where there are more.

    Returns:
        One row per response and optimiser step; without any record an empty table. ``attrs["settings"]`` is what the
        run trained with, ``attrs["rows"]`` the number of rows recorded.

    A file that cannot be read, and records of differently configured losses in one folder, are warnings.
    """
    names = list(columns or COLUMNS)
    readable, settings = [], []
    for file in record_files(folder):
        try:
            metadata = pq.read_metadata(file)
        except (OSError, pa.ArrowInvalid) as error:
            warnings.warn(f"{file} is left out, it cannot be read: {error}", stacklevel=2)
            continue
        readable.append((file, metadata.num_rows))
        settings.append(metadata.metadata[_SETTINGS])
    if len(set(settings)) > 1:
        warnings.warn(f"{folder} holds records of losses with different settings; the last ones count", stacklevel=2)

    rows = sum(count for _, count in readable)
    share = 1.0 if max_rows is None or rows <= max_rows else max_rows / rows
    generator = np.random.default_rng(0)
    tables = [pa.schema(COLUMNS).empty_table().select(names)]
    for file, count in readable:
        table = pq.read_table(file, columns=names).replace_schema_metadata(None)
        if share < 1:
            table = table.filter(pa.array(generator.random(count) < share))
        tables.append(table)
    frame = pa.concat_tables(tables).unify_dictionaries().to_pandas()
    frame.attrs = {"settings": json.loads(settings[-1]) if settings else None, "rows": rows}
    return frame
