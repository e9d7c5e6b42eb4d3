# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Per-response records of a training run: one Parquet file per training step and rank, and a reader.

A row is a response in one optimiser step; :data:`COLUMNS` says what it holds. A file appears at the end of its step,
with all mini-batches of the step or not at all. A disk that is full is a warning, and training goes on; what is lost is
counted in the folder (:mod:`fspo_verl.observe.folder`). A run that goes on from a checkpoint replaces its own later
steps.
"""

import atexit
import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fspo_verl import clips
from fspo_verl.observe import folder as folders
from fspo_verl.observe.columns import MASKED, MISMATCH
from fspo_verl.observe.microbatch import MicroBatch
from fspo_verl.observe.settings import RunSettings

logger = logging.getLogger("fspo_verl")

COLUMNS = {
    "step": pa.int32(),  # training step
    "mini_batch": pa.int32(),  # optimiser step within the training step, from 0
    "prompt": pa.dictionary(pa.int32(), pa.string()),  # id; the responses to one prompt share it within a step
    "prompt_text_hash": pa.int64(),  # see text_hash; the same in every step that draws the prompt
    "length": pa.int32(),  # L, response tokens
    "log_ratio": pa.float32(),  # S, nats; 0 where not finite
    "quadratic_variation": pa.float32(),  # Q, nats²; 0 where not finite
    "advantage": pa.float32(),  # mean over the response tokens; 0 where mismatch_masked
    "clipped": pa.float32(),  # share of the response's tokens that lost their gradient to the clip
    # Which side of the clip took (part of) the gradient: kept (none), upper (A > 0), lower (A < 0, S low), dual (A < 0,
    # S high); nonfinite for a response that holds NaN or inf; rejected for one that a rollout correction left no token.
    "decision": pa.dictionary(pa.int32(), pa.string()),
    **dict.fromkeys(clips.COLUMNS, pa.int32()),  # numbers of tokens that single clips drop
}
EPS_COLUMNS = {name: pa.float64() for name in ("eps_low", "eps_high", "eps_dual")}
"""The band in force when a response was trained on, of runs with ``target_clip_rate`` only; see :class:`Band`."""
MISMATCH_COLUMNS = dict.fromkeys(MISMATCH, pa.float32()) | {"staleness": pa.float32()}
"""Trainer against rollout engine (:func:`fspo_verl.observe.columns.mismatch_columns`), and by how many training steps
the weights that sampled a response's first token are behind; of runs whose engine hands on its log-probs."""
_OPTIONAL = EPS_COLUMNS | MISMATCH_COLUMNS | {MASKED: pa.float32()}  # 0 or 1, of runs with mismatch_eps

_SETTINGS = b"fspo_verl"  # key of the metadata entry of a file


def text_hash(prompt) -> int:
    """A number for what a prompt says, the same in every process and run: 64 bits of BLAKE2b of its JSON.

    Args:
        prompt: chat messages, or a text. What JSON cannot hold, such as an image, counts by its type alone.
    """

    def plain(part):
        return part.tolist() if isinstance(part, np.ndarray) else type(part).__name__

    text = json.dumps(prompt, sort_keys=True, default=plain)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class RecordWriter:
    """Writes the records of one rank.

    Args:
        folder: created if missing.
        settings: stored with every file.
        fraction: share of the prompts that are recorded.
        limit_bytes: total size of the files after which nothing more is written.
        claim: the claim by which the folder is that of this run, see :func:`fspo_verl.observe.folder.claim`; None for
            a folder that no training run writes to.
        last_step: the last training step of the run, where it is known.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: RunSettings,
        fraction: float = 1.0,
        limit_bytes: float = 2**30,
        claim: Path | None = None,
        last_step: int | None = None,
    ):
        self.folder, self.fraction, self.limit_bytes = Path(folder), fraction, limit_bytes
        self._claim, self._last_step = claim, last_step
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder, buffering=0) as probe:
            probe.write(b"0")
        run = claim.read_text() if claim else "{}"
        self._metadata = {_SETTINGS: json.dumps(settings.to_json()), b"claim": run}
        self._step: list[tuple[dict, MicroBatch]] = []  # the micro-batches of the step that is being trained
        self._is_written = True  # as far as it has come
        self._sizes: dict[Path, int] = {}
        self._said: set[str] = set()
        atexit.register(self.flush)  # some trainers sync no weights after their last step

    def add(self, columns: dict[str, np.ndarray], micro_batch: MicroBatch) -> None:
        """Take the rows of one micro-batch; the file of a step is written when the step ends.

        Args:
            columns: ``[B]`` arrays of :mod:`fspo_verl.observe.columns`, token columns included.
        """
        if self._step and micro_batch.step != self._step[-1][1].step:
            self.flush()
            self._step = []
        if "rollout_length" in columns:
            columns = columns | {"staleness": np.array(micro_batch.staleness)}
        self._step.append((columns, micro_batch))
        self._is_written = False

    def flush(self) -> None:
        """Write the file of the step as far as it has come; count the step as lost where that fails."""
        if self._is_written:
            return
        self._is_written = True
        if self._claim and folders.successor(self._claim).exists():
            self._warn("another run has taken the folder over, nothing more is recorded")
            return
        try:
            self._write_file(self._step[-1][1], self._table())
        except Exception as error:  # recording must not stop training
            self._lose(self._step[-1][1], error)

    def _chosen(self, columns: Mapping[str, np.ndarray], prompts: Iterable[str]) -> np.ndarray:
        """bool ``[rows]``: the responses to record, by prompt, so that groups stay whole, and alike on all ranks.

        Those that a rollout correction has rejected are recorded, too: they have tokens, though none in the loss.
        """
        is_response = np.maximum(columns["length"], columns.get("rollout_length", 0)) > 0
        if self.fraction == 1:
            return is_response
        draw = np.array([zlib.crc32(prompt.encode()) / 2**32 for prompt in prompts])
        return is_response & (draw < self.fraction)

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
        is_so = [columns["length"] == 0, columns["finite"] == 0, *(share > 0 for share in sides.values())]
        columns["clipped"] = sides["upper"] + sides["lower"] + sides["dual"]
        columns["decision"] = np.select(is_so, ["rejected", "nonfinite", *sides], "kept").astype(object)
        chosen = self._chosen(columns, columns["prompt"])
        kinds = COLUMNS | {name: kind for name, kind in _OPTIONAL.items() if name in columns}
        arrays = [pa.array(columns[name][chosen], kind) for name, kind in kinds.items()]
        return pa.Table.from_arrays(arrays, schema=pa.schema(kinds, self._metadata))

    def _write_file(self, batch: MicroBatch, table: pa.Table) -> None:
        file = self._file_of(batch)
        if not self._sizes:
            self._make_room(batch)
        if self._claim and self._last_step is not None and batch.step >= self._last_step:
            folders.finished(self._claim).touch()
        if file not in self._sizes and sum(self._sizes.values()) > self.limit_bytes:
            where = f"step {batch.step} of rank {batch.rank}"
            self._warn(f"records_limit_mb is reached, nothing is recorded from {where} on")
            return
        unfinished = self.folder / f".{file.name}.{os.getpid()}"
        try:
            pq.write_table(table, unfinished, write_page_checksum=True)
            self._sizes[file] = unfinished.stat().st_size
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)

    def _file_of(self, batch: MicroBatch) -> Path:
        return self.folder / folders.RECORD.format(step=batch.step, rank=batch.rank)

    def _make_room(self, batch: MicroBatch) -> None:
        """Remove what a run that goes on from a checkpoint does again, maybe on fewer ranks."""
        for step, rank, file in folders.numbered(self.folder.iterdir()):
            if step >= batch.step and (rank == batch.rank or (batch.rank == 0 and rank >= batch.ranks)):
                file.unlink()
        lost = self.folder / folders.LOST.format(rank=batch.rank)
        if lost.exists():
            kept = [f"{step},{count}\n" for step, count in folders.losses(lost) if step < batch.step]
            lost.write_text("".join(kept))

    def _lose(self, batch: MicroBatch, error: Exception) -> None:
        """Count the step as lost, and leave no part of it: that would pass for the whole."""
        self._warn(f"step {batch.step} of rank {batch.rank} is lost: {error}")
        with contextlib.suppress(OSError):
            self._file_of(batch).unlink(missing_ok=True)
        responses = int(sum(self._chosen(columns, batch.prompts).sum() for columns, batch in self._step))
        lost = self.folder / folders.LOST.format(rank=batch.rank)
        with contextlib.suppress(OSError), lost.open("a") as file:  # a few bytes often fit where a step did not
            file.write(f"{batch.step},{responses}\n")

    def _warn(self, message: str) -> None:
        """Once per message, as a condition tends to last; the training goes on."""
        kind = re.sub(r"\d+", "", message)
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("records in %s: %s; training goes on. Said once.", self.folder, message)


def read_records(folder: str | Path, max_rows: int | None = None, rejected: bool = False) -> pd.DataFrame:
    """The records below a folder as one table, of a run that is going on, has ended or was killed.

    Args:
        folder: searched with all folders in it.
        max_rows: read about this many rows, a random choice (the same at every call) where there are more.
        rejected: also the responses that a rollout correction has taken out of the loss, whose length is 0.

    Returns:
        One row per response and optimiser step, of :data:`COLUMNS`, and of :data:`EPS_COLUMNS`,
        :data:`MISMATCH_COLUMNS` and ``mismatch_masked`` where the run has them; without any record an empty table.
        ``attrs["settings"]`` are the :class:`fspo_verl.observe.settings.RunSettings`, None without any record,
        ``attrs["rows"]`` how many rows of responses that trained were recorded, ``attrs["lost"]`` the (steps,
        responses) whose records were lost while the run trained.

    A file that is damaged, or that this package has not written, is left out with a warning. Lost records, and
    different settings in one folder, are warnings.
    """
    rows, settings = {}, []
    for file in folders.record_files(folder):
        with _left_out_if_unreadable(file):
            opened = pq.ParquetFile(file)
            settings.append(_settings(opened.schema_arrow))
            rows[file] = opened.metadata.num_rows
    share = 1.0 if max_rows is None else min(max_rows / max(sum(rows.values()), 1), 1.0)
    generator = np.random.default_rng(0)
    tables, total = [pa.schema(COLUMNS).empty_table()], 0
    for file in rows:
        with _left_out_if_unreadable(file):
            opened = pq.ParquetFile(file, page_checksum_verification=True)
            table = opened.read([*COLUMNS, *_OPTIONAL]).replace_schema_metadata(None)
            trained = pc.greater(table["length"], 0)
            total += pc.sum(trained).as_py() or 0
            table = table if rejected else table.filter(trained)
            tables.append(table if share == 1 else table.filter(pa.array(generator.random(len(table)) < share)))
    frame = pa.concat_tables(tables, promote_options="default").unify_dictionaries().to_pandas()
    losses = [loss for file in Path(folder).rglob(folders.LOST_FILES) for loss in folders.losses(file)]
    steps, responses = len({step for step, _ in losses}), sum(count for _, count in losses)
    if losses:
        text = f"{folder}: the records of {responses:,} responses in {steps:,} steps were lost while the run trained"
        warnings.warn(text, stacklevel=2)
    found = [one.to_json() for one in settings]
    if differing := sorted({key for one in found for key in one if one[key] != found[-1][key]}):
        text = f"{folder} holds records with different settings ({', '.join(differing)}); the last ones count"
        warnings.warn(text, stacklevel=2)
    in_force = _in_force(settings[-1], frame) if settings else None
    frame.attrs = {"settings": in_force, "rows": total, "lost": (steps, responses)}
    return frame


@contextlib.contextmanager
def _left_out_if_unreadable(file: Path) -> Iterator[None]:
    """Make a warning of what is wrong with a file."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        warnings.warn(f"{file} is left out, it cannot be read: {error}", stacklevel=4)


def _settings(schema: pa.Schema) -> RunSettings:
    """The settings of a record file that holds all of :data:`COLUMNS`.

    Raises:
        ValueError: it does not; says what is wrong.
    """
    try:
        settings = RunSettings.from_json(json.loads((schema.metadata or {})[_SETTINGS]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"its settings are not those of a run, so that fspo_verl has not written it: {error}"
        ) from None
    for name, kind in COLUMNS.items():
        found = schema.field(name).type if name in schema.names else "missing"
        if found != kind:
            raise ValueError(f"its column {name} is {found}, where {kind} is expected")
    return settings


def _in_force(settings: RunSettings, frame: pd.DataFrame) -> RunSettings:
    """The settings with the median of eps over the responses, where it followed a clip rate."""
    if settings.band is None or not set(EPS_COLUMNS) <= set(frame):
        return settings
    eps = frame[[*EPS_COLUMNS]].median().dropna()
    return replace(settings, band=replace(settings.band, eps=None, **eps)) if len(eps) else settings
