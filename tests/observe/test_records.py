# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Records: what is written is what the loss saw, on every disk and after every kind of end."""

import asyncio
import dataclasses
import itertools
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import namedtuple
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_records
import torch
import verl
from hypothesis import given
from hypothesis import strategies as st
from patched import wrapped_anew
from small_records import SETTINGS, add, columns, problem, write
from test_policy_loss import CUTS, MiniBatch, actor_config, padded_batch
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch, register
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers import engine_workers
from verl.workers.utils.losses import ppo_loss

from fspo_verl import clips
from fspo_verl.analysis import judgement
from fspo_verl.analysis.evidence import evidence_of
from fspo_verl.clips import CLIPS
from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig
from fspo_verl.observe import attempts, microbatch, observer
from fspo_verl.observe.attempts import record_files
from fspo_verl.observe.quotients import quotients, sums_of
from fspo_verl.observe.records import CLIP_COLUMNS, COLUMNS, RecordWriter, read_records, text_hash
from fspo_verl.observe.settings import RunSettings


@pytest.fixture
def counted_ppo_loss(monkeypatch):
    """verl's ``ppo_loss`` as its workers call it where records are on."""
    wrapped_anew(monkeypatch, ppo_loss=ppo_loss)
    return engine_workers.ppo_loss


@pytest.fixture
def worker(monkeypatch):
    """verl's worker class where records are on, and the weight syncs that reached it: arguments of each."""
    synced = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int = None, mode: str = "auto"):
        synced.append((global_steps, mode))

    worker = engine_workers.ActorRolloutRefWorker
    monkeypatch.setattr(worker, "update_weights", update_weights)
    monkeypatch.setattr(observer, "flush_records", lambda: synced.append("settled"))
    wrapped_anew(monkeypatch, ppo_loss=lambda config, model_output, data, dp_group: microbatch.current())
    return worker, synced


@pytest.fixture
def writers(monkeypatch):
    """The writers that the registered losses make, to wait for."""
    monkeypatch.setattr(observer, "_WRITERS", made := {})
    return made.values()


def train(counted_ppo_loss, config, steps, cut):
    """Two optimiser steps per training step; returns the values of each metric, row by row."""
    values = {}
    for micro_batches in cut:
        batch = MiniBatch()
        for step, _mini_batch in itertools.product(steps, range(2)):
            for rows in micro_batches:
                output, data = batch.micro_batch(rows, dp_size=len(cut))
                tu.assign_non_tensor_stack(data, "uid", [f"prompt {row // 2}" for row in rows])
                tu.assign_non_tensor_stack(data, "raw_prompt", [problem(row // 2) for row in rows])
                tu.assign_non_tensor_stack(data, "global_steps", [step] * len(rows))
                for name, metric in counted_ppo_loss(config, output, data)[1].items():
                    if name.startswith("actor/fspo/"):
                        values.setdefault(name.removeprefix("actor/fspo/"), []).extend(metric.values)
    return values


@pytest.mark.parametrize("cut", ["one", "ragged", "single rows"])
@pytest.mark.parametrize("schema, loss", [(FSPOPolicyLossConfig, "fspo"), (ObservedPolicyLossConfig, "gspo")])
def test_metrics_equal_what_the_records_give(counted_ppo_loss, writers, tmp_path, schema, loss, cut):
    band = {"eps_low": 0.05, "eps_high": 0.04} if loss == "fspo" else {"loss_mode": loss}
    config = actor_config(policy_loss=schema(records_dir=str(tmp_path), **band), clip_ratio_low=3e-4)
    values = train(counted_ppo_loss, config, steps=[7, 8], cut=CUTS[cut])
    assert {len(rows) for rows in values.values()} == {len(values["rows"])}  # at every call, a value per row
    (writer,) = writers
    writer.flush()
    records = read_records(tmp_path)

    assert list(records.columns) == [*COLUMNS, *CLIP_COLUMNS]
    assert len(records) == np.sum(values["sequence_fraction"]) == 2 * 2 * 7
    assert len(read_records(tmp_path, rejected=True)) == len(records)  # padding is in no file
    assert records.groupby(["step", "mini_batch"]).size().to_dict() == {(s, m): 7 for s in (7, 8) for m in (0, 1)}
    texts = {f"prompt {number}": text_hash(problem(number)) for number in range(4)}
    assert (records.prompt_text_hash == records.prompt.map(texts).astype(np.int64)).all() and len(
        set(texts.values())
    ) == 4
    has_advantage = records.advantage != 0
    in_bin = records.length.between(16, 63) & has_advantage
    counts = {
        "clip_fraction": records.clipped.sum(),
        "clip_fraction_upper": (records.clipped * (records.decision == "upper")).sum(),
        "clip_fraction_lower": (records.clipped * (records.decision == "lower")).sum(),
        "clip_fraction_dual": (records.clipped * (records.decision == "dual")).sum(),
        "nonzero_advantage_fraction": has_advantage.sum(),
        "length_16_to_63/responses": in_bin.sum(),
        "length_16_to_63/clipped": records.clipped[in_bin].sum(),
    }
    for name, count in counts.items():
        assert np.sum(values[name]) == count, name
    assert 0 < counts["clip_fraction"] < len(records)
    sums = {
        "log_ratio": records.log_ratio,
        "log_ratio_per_token": records.log_ratio / records.length,
        "log_ratio_per_sqrt_length": records.log_ratio / np.sqrt(records.length),
        "sigma_squared": records.quadratic_variation / records.length,
    }
    for name, column in sums.items():
        assert np.sum(values[name]) == pytest.approx(column.sum(), rel=1e-5), name

    settings = records.attrs["settings"]
    assert (settings.loss, settings.clip_ratio_low) == (loss, 3e-4)
    assert settings.versions["verl"] == verl.__version__ and not settings.old_log_probs_from_rollout
    if loss == "fspo":
        band = settings.band
        assert (band.low, band.high, band.dual) == (0.05, 0.04, 0.12)
        outside = np.sum(values["outside_band_fraction"])
        scale = np.sqrt(records.length)
        assert outside == ((records.log_ratio > 0.04 * scale) | (records.log_ratio < -0.05 * scale)).sum()

    # verl logs means over the rows of a step, which hold two mini-batches; nothing has moved in the first.
    logged = {f"actor/fspo/{name}": np.mean(rows) for name, rows in values.items()}
    live, recorded = evidence_of(logged, settings), judgement.evidence_of_records(records, settings, tested=False)
    first = records[records.mini_batch == 0]
    sigma = np.sqrt((first.quadratic_variation / first.length).mean())
    assert (live.noise_sigma, recorded.noise_sigma) == pytest.approx((sigma, sigma), rel=1e-6)
    if loss == "fspo":
        assert 0 < live.noise_outside < 1 and live.noise_outside == pytest.approx(recorded.noise_outside)
    # Records lack the empty rows, so that the sums differ by their share, and no rate does.
    rates, of_records = (quotients(one) for one in (sums_of(logged), judgement.sums(records, settings)))
    del rates["clip_rate/all"], rates["clip_rate/worse"]  # their totals are by length bin
    assert len(rates) > 3 and {name: of_records[name] for name in rates} == pytest.approx(rates, rel=1e-6)


def test_one_step_of_several_is_recorded(counted_ppo_loss, writers, tmp_path):
    config = actor_config(policy_loss=FSPOPolicyLossConfig(records_dir=str(tmp_path), records_freq=3))
    values = train(counted_ppo_loss, config, steps=range(4, 11), cut=CUTS["ragged"])
    (writer,) = writers
    writer.flush()
    assert read_records(tmp_path).groupby(["step", "mini_batch"]).size().to_dict() == {
        (s, m): 7 for s in (6, 9) for m in (0, 1)
    }
    assert np.sum(values["sequence_fraction"]) == 7 * 2 * 7  # metrics are of every step


Sync = namedtuple("Sync", "step")
Update = namedtuple("Update", "drawn")  # the steps in which its two prompts were drawn; None where they do not tell
RUNS = {  # what a worker is told -> step and mini-batch of each update
    "synchronous": (
        [Sync(0), Update((1, 1)), Update((1, 1)), Sync(1), Update((2, 2)), Update((2, 2))],
        [(1, 0), (1, 1), (2, 0), (2, 1)],
    ),
    "asynchronous": (  # prompts are drawn a step ahead, and an update takes those that are ready
        [Sync(0), Update((1, 1)), Update((1, 1)), Sync(1), Update((1, 2)), Update((1, 1)), Sync(2), Update((2, 3))],
        [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)],
    ),
    "resumed": ([Sync(4), Update((4, 4)), Update((3, 5)), Sync(5), Update((5, 5))], [(5, 0), (5, 1), (6, 0)]),
    "warm-up of a critic": ([Sync(0), Sync(1), Sync(2), Update((2, 2)), Sync(3), Update((3, 4))], [(3, 0), (4, 0)]),
    "reward model in a validation": (
        [Sync(0), Update((1, 1)), Sync(1), Sync(None), Update((1, 2)), Update((2, 2))],
        [(1, 0), (2, 0), (2, 1)],
    ),
    "syncs not seen": ([Update((7, 7)), Update((7, 7)), Update((8, 8))], [(7, 0), (7, 1), (8, 0)]),
    "prompts that do not tell": (
        [Sync(2), Update(None), Update(None), Sync(3), Update(None)],
        [(3, 0), (3, 1), (4, 0)],
    ),
    "syncs before the step": ([Sync(2), Sync(3), Update(None), Sync(4), Update(None)], [(3, 0), (4, 0)]),
}


@pytest.mark.parametrize("run", RUNS)
def test_steps_are_those_of_verl(worker, run):
    worker, synced = worker
    events, expected = RUNS[run]
    places = []
    for event in events:
        if isinstance(event, Sync):
            asyncio.run(worker.update_weights(None, event.step, mode="tcp"))
            continue
        for row in range(2):  # a micro-batch each
            data = tu.get_tensordict({"row": torch.zeros(1)}, {"dp_size": 1, "global_batch_size": 2})
            if event.drawn:
                tu.assign_non_tensor_stack(data, "global_steps", [event.drawn[row]])
            place = engine_workers.ppo_loss(None, None, data)
        places.append((place.step, place.mini_batch))
    assert places == expected
    syncs = [(event.step, "tcp") for event in events if isinstance(event, Sync)]
    assert synced == [seen for sync in syncs for seen in ("settled", sync)]  # records are written before each
    assert getattr(worker.update_weights, MAGIC_ATTR)["blocking"] is False  # what verl dispatches by is still there


@pytest.mark.usefixtures("worker")
def test_a_batch_that_dynamic_context_parallelism_dealt_out_has_no_place():
    sample_ids = pytest.importorskip("verl.utils.dynamic_cp_scheduler").DCP_SAMPLE_IDS
    told = {"dp_size": 1, "global_batch_size": 2}
    dealt = tu.get_tensordict({"row": torch.zeros(1)}, {**told, sample_ids: [3]})
    assert engine_workers.ppo_loss(None, None, dealt) is None
    assert engine_workers.ppo_loss(None, None, tu.get_tensordict({"row": torch.zeros(1)}, told)) is not None


def test_a_loss_called_outside_verls_ppo_loss_says_that_nothing_is_recorded(tmp_path, caplog):
    observer._warn_unknown_step.cache_clear()
    batch = padded_batch()
    config = actor_config(policy_loss=FSPOPolicyLossConfig(records_dir=str(tmp_path)))
    with caplog.at_level(logging.WARNING, logger="fspo_verl"):
        get_policy_loss_fn("fspo")(**batch, loss_agg_mode="token-mean", config=config)
    assert "nothing is recorded" in caplog.text and not list(tmp_path.iterdir())


def test_responses_to_prompts_without_ids_are_not_recorded_as_if_to_one(counted_ppo_loss, tmp_path, caplog):
    observer._warn_unknown_step.cache_clear()
    config = actor_config(policy_loss=FSPOPolicyLossConfig(records_dir=str(tmp_path)))
    output, data = MiniBatch().micro_batch(CUTS["one"][0][0], dp_size=1)
    with caplog.at_level(logging.WARNING, logger="fspo_verl"):
        counted_ppo_loss(config, output, data)
    assert "step or prompts of a micro-batch are not known" in caplog.text and not list(tmp_path.iterdir())


def test_a_file_appears_with_its_whole_step(tmp_path):
    writer = RecordWriter(tmp_path, SETTINGS)
    for step, mini_batch in ((1, 0), (1, 1), (2, 0)):
        add(writer, step, mini_batch)
        add(writer, step, mini_batch)
    # Written as the next step begins.
    assert read_records(tmp_path).groupby(["step", "mini_batch"]).size().to_dict() == {(1, 0): 8, (1, 1): 8}
    writer.flush()
    add(writer, 2, 1)  # where a step goes on after a weight sync, its file is written again
    writer.flush()
    assert read_records(tmp_path).groupby(["step", "mini_batch"]).size().to_dict()[2, 1] == 4
    assert [file.name for file in record_files(tmp_path)] == [f"step-00000{i}-rank-0000.parquet" for i in (1, 2)]
    assert record_files(tmp_path) == sorted(writer.folder.glob("*.parquet"))


@pytest.mark.filterwarnings("error", "ignore:.*a later attempt began anew")
def test_of_a_run_that_goes_on_the_newest_attempt_counts_and_nothing_is_overwritten(tmp_path):
    for rank in (0, 1):
        write(tmp_path, range(1, 6), run="first", rank=rank, ranks=2)
    strays = ["step-backup.parquet", "step-000004-rank-0000 (copy).parquet", "step-4.parquet~"]
    for name in strays:
        shutil.copy(record_files(tmp_path)[0], record_files(tmp_path)[0].with_name(name))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    write(tmp_path, [4], run="second", rank=0, ranks=1, seed=1)  # from a checkpoint of step 3, on one rank; then killed
    records = read_records(tmp_path)
    assert records.groupby("step").size().to_dict() == {1: 8, 2: 8, 3: 8, 4: 4}
    assert records[records.step == 4].log_ratio.to_numpy() == pytest.approx(columns(seed=1)["log_ratio"], rel=1e-6)
    assert before.items() <= {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}.items()
    write(tmp_path, [3], run="third", seed=2)
    assert read_records(tmp_path).groupby("step").size().to_dict() == {1: 8, 2: 8, 3: 4}


def test_writing_ends_at_the_limit_with_a_warning(tmp_path, caplog):
    writer = RecordWriter(tmp_path, SETTINGS, limit_bytes=15_000)
    for step in range(20):
        add(writer, step)
    writer.flush()
    files = record_files(tmp_path)
    assert 1 < len(files) < 20 and sum(file.stat().st_size for file in files) < 15_000 + files[0].stat().st_size
    assert caplog.text.count("records_limit_mb is reached") == 1
    with pytest.warns(UserWarning, match=f"after step {len(files) - 1} ") as warned:
        records = read_records(tmp_path)
    assert len(warned) == 1 and records.attrs["lost"] == 0
    assert records.attrs["limited_after"] == records.step.max() == len(files) - 1


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full while this holds something: then no byte can be written, and no count of what is lost."""
    full, write_table, touch = [], pq.write_table, Path.touch

    def where_there_is_room(write):
        def write_or_fail(*args, **kwargs):
            if full:
                raise OSError(28, "No space left on device")
            return write(*args, **kwargs)

        return write_or_fail

    monkeypatch.setattr(pq, "write_table", where_there_is_room(write_table))
    monkeypatch.setattr(Path, "open", where_there_is_room(Path.open))
    monkeypatch.setattr(Path, "write_text", where_there_is_room(Path.write_text))
    monkeypatch.setattr(Path, "touch", touch)  # an empty file needs no room
    return full


def test_a_step_that_a_full_disk_cuts_is_missing_and_leaves_no_part(tmp_path, disk, caplog):
    writer = RecordWriter(tmp_path, SETTINGS)
    add(writer, 1)
    add(writer, 2, mini_batch=0)
    writer.flush()
    disk.append(True)
    add(writer, 2, mini_batch=1)  # the first mini-batch of the step is on the disk
    writer.flush()
    assert {part.step for part in attempts.parts(tmp_path)} == {1}
    add(writer, 3)
    writer.flush()
    disk.clear()
    add(writer, 4)
    writer.flush()
    assert caplog.text.count("training goes on") == 1 and "step 2 of rank 0 is lost" in caplog.text
    with pytest.warns(UserWarning, match="missing records: 2;"):
        records = read_records(tmp_path)
    assert set(records.step) == {1, 4} and len(records) == records.attrs["rows"]
    assert records.attrs["lost"] == 2
    write(tmp_path, [3, 4])  # resumed after step 2: what is done again is not missing
    with pytest.warns(UserWarning, match="missing records: 1;"):
        read_records(tmp_path)


def trained(disk, where, steps, full, run="run", ranks=1, freq=1, last_step=None, **settings):
    """What ranks record of a run whose disk is full while ``full`` names the pair of step and rank."""
    writers = [RecordWriter(where, SETTINGS, run, freq=freq, last_step=last_step, **settings) for _ in range(ranks)]
    for step in steps:
        if step % freq == 0:
            for rank, writer in enumerate(writers):
                disk[:] = [True] if full(step, rank) else []
                add(writer, step, rank=rank, ranks=ranks)
                writer.flush()
                disk.clear()


def never(step, rank):
    return False


FULL = {  # what is trained, in attempts -> steps of which records are missing
    "a run of unknown length": ([{"steps": range(1, 11), "full": never}], 0),
    "resumed after steps that were lost": (
        [
            {"steps": range(1, 51), "full": lambda s, _: s >= 33, "last_step": 60},
            {"steps": range(49, 61), "full": never, "last_step": 60, "run": "second"},
        ],
        16,
    ),
    "resumed, and its first steps lost": (
        [
            {"steps": range(1, 11), "full": never, "last_step": 20},
            {"steps": range(6, 21), "full": lambda s, _: s in (6, 7), "last_step": 20, "run": "second", "ranks": 2},
        ],
        2,
    ),
    "resumed from the start": (
        [
            {"steps": range(1, 11), "full": lambda s, _: s > 4, "last_step": 20},
            {"steps": range(1, 21), "full": never, "last_step": 20, "run": "second"},
        ],
        0,
    ),
    "prolonged after its end": (
        [
            {"steps": range(1, 11), "full": never, "last_step": 10},
            {"steps": range(11, 21), "full": never, "last_step": 20, "run": "second"},
        ],
        0,
    ),
    "after a critic's warm-up": ([{"steps": range(5, 11), "full": never, "last_step": 10}], 0),
}


@pytest.mark.filterwarnings("ignore:.*missing records")
@pytest.mark.parametrize("case", FULL)
def test_the_reader_counts_what_a_full_disk_took(tmp_path, disk, case):
    """Of several attempts; a property below has those of one."""
    attempts, steps = FULL[case]
    for attempt in attempts:
        trained(disk, tmp_path, **attempt)
    assert read_records(tmp_path).attrs["lost"] == steps


@pytest.mark.filterwarnings("ignore:.*records_limit_mb", "ignore:.*missing records")
def test_steps_beyond_the_limit_of_one_rank_alone_are_not_missing(tmp_path, disk):
    """The other has lost five steps before, so it comes to its limit later."""
    behind = {"full": lambda step, rank: rank == 1 and step <= 5, "ranks": 2, "last_step": 30}
    trained(disk, tmp_path, range(1, 31), **behind, limit_bytes=40_000)
    records = read_records(tmp_path)
    assert records.attrs["limited_after"] < records.step.max() < 30
    assert records.attrs["lost"] == 5


@pytest.mark.filterwarnings("error")
def test_a_limit_that_the_last_step_reaches_is_none(tmp_path, disk):
    trained(disk, tmp_path, [1], never, last_step=1, limit_bytes=1)
    assert read_records(tmp_path).attrs["limited_after"] is None


def test_processes_that_start_at_once_share_the_attempt_of_their_run(tmp_path):
    start, got = threading.Barrier(24), []

    def worker(run):
        start.wait()
        got.append((run, attempts.attempt(tmp_path, run)))

    threads = [threading.Thread(target=worker, args=(f"run-{number % 3}",)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for run, own in got:
        for rank in range(2):
            add(writer := RecordWriter(tmp_path, SETTINGS, run), step=1, rank=rank, ranks=2)
            assert writer.folder in {where for of, where in got if of == run} or own.parent == tmp_path
            writer.flush()
    assert read_records(tmp_path).attrs["lost"] == 0 and len(read_records(tmp_path)) == 8


def in_a_process(how, folder):
    return subprocess.Popen([sys.executable, small_records.__file__, how, folder])


def test_a_process_that_ends_without_a_weight_sync_writes_its_last_step(tmp_path):
    """As of one-step-off, which syncs before a step."""
    in_a_process("end", tmp_path).wait()
    records = read_records(tmp_path)
    assert set(records.step) == {1, 2}
    assert set(records.prompt_text_hash) == {text_hash(problem(number)) for number in (0, 1)}  # as in this process


@pytest.mark.parametrize("how", ["exits", "flushes", "records", "written"])
def test_a_copy_of_a_process_writes_nothing(tmp_path, how):
    process = subprocess.run([sys.executable, small_records.__file__, f"fork {how}", tmp_path], capture_output=True)
    records = read_records(tmp_path)
    assert records.groupby(["step", "mini_batch"]).size().to_dict() == {(1, 0): 4, (1, 1): 4}
    assert (b"is a copy of the one that records" in process.stderr) == (how == "records")


@pytest.mark.parametrize("fewer", [True, False])
def test_a_file_is_never_replaced_by_one_with_fewer_rows(tmp_path, fewer, caplog):
    """As by a worker that is started again in the middle of a step that it had recorded whole."""
    writer = RecordWriter(tmp_path, SETTINGS, "run")
    add(writer, 1, rows=8)
    writer.flush()
    again = RecordWriter(tmp_path, SETTINGS, "run")
    for _ in range(3):
        add(again, 1, rows=6 if fewer else 8, seed=1)
        again.flush()
        if fewer:
            break
    records = read_records(tmp_path)
    seed, rows = (0, 8) if fewer else (1, 8)
    assert len(records) == (8 if fewer else 24)
    assert records.log_ratio.to_numpy()[:8] == pytest.approx(columns(rows, seed)["log_ratio"], rel=1e-6)
    assert ("step 1 of rank 0 is lost" in caplog.text) == fewer


def test_a_whole_file_of_another_is_not_deleted_for_a_part_of_ones_own(tmp_path, caplog):
    writer, other = RecordWriter(tmp_path, SETTINGS, "run"), RecordWriter(tmp_path, SETTINGS, "run")
    add(writer, 1, rows=2)
    writer.flush()
    add(other, 1, rows=8, seed=1)
    other.flush()
    add(writer, 1, rows=2)
    writer.flush()
    assert read_records(tmp_path).log_ratio.to_numpy() == pytest.approx(columns(8, 1)["log_ratio"], rel=1e-6)
    assert "step 1 of rank 0 is lost" in caplog.text


def test_the_hash_of_a_prompt_is_that_of_what_it_says():
    found = [text_hash(prompt) for prompt in ("text", problem(1), problem(2), [{"image": object()}], [{"image": ""}])]
    assert len(set(found)) == len(found) and all(-(2**63) <= value < 2**63 for value in found)
    assert text_hash([{"image": object()}]) == found[3]  # another object
    assert text_hash(np.array([{"a": 1, "b": 2}])) == text_hash([{"b": 2, "a": 1}])  # as a data set may hold messages


@pytest.mark.parametrize("where", ["/dev/full/records", "/proc/records"])
@pytest.mark.usefixtures("writers")
def test_a_folder_that_cannot_be_written_fails_before_the_first_update(counted_ppo_loss, where):
    config = actor_config(policy_loss=FSPOPolicyLossConfig(records_dir=where, records_freq=50))
    with pytest.raises(ValueError, match=f"records_dir={where} cannot be written .* Choose another"):
        train(counted_ppo_loss, config, steps=[1], cut=CUTS["one"])


# --- which run a folder belongs to, and which of its attempts counts --------------------------------------------------


@pytest.mark.parametrize("case", ["another run's", "nobody's"])
def test_a_folder_that_is_taken_is_refused_and_a_free_one_named(tmp_path, case):
    where, own = tmp_path / "records", tmp_path / "checkpoints"
    if case == "another run's":
        attempts.claim(where, tmp_path / "others")
    write(where, [1])
    (tmp_path / "records-2").mkdir()
    before = sorted(where.rglob("*"))
    reason = {"another run's": f"another run, with checkpoints in {tmp_path}/others", "nobody's": "no run has claimed"}
    with pytest.raises(ValueError, match=f"is taken: .*{reason[case]}.*; records_dir={where}-3$"):
        attempts.claim(where, own)
    assert sorted(where.rglob("*")) == before


@pytest.mark.parametrize("content", ["null", "[]", "{}", '{"checkpoints": 3}'])
def test_a_file_that_names_no_owner_is_nobodys(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    attempts.claim(tmp_path, tmp_path / "checkpoints")


def test_a_run_keeps_its_folder_however_often_it_starts(tmp_path):
    for launch in range(3):
        attempts.claim(tmp_path, tmp_path / "checkpoints")
        write(tmp_path, [1], seed=launch)
    assert read_records(tmp_path).log_ratio.to_numpy() == pytest.approx(columns(seed=2)["log_ratio"], rel=1e-6)


def test_of_many_that_start_at_once_one_run_gets_the_folder(tmp_path):
    where, start, got = tmp_path / "records", threading.Barrier(24), []

    def launch(run):
        start.wait()
        try:
            attempts.claim(where, tmp_path / run)
            got.append(run)
        except ValueError:
            pass

    threads = [threading.Thread(target=launch, args=(f"run-{number % 3}",)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) >= 1 and len(set(got)) == 1


@pytest.mark.filterwarnings("error")
def test_of_two_launches_that_train_at_once_nothing_is_lost_and_the_newest_is_read(tmp_path):
    """Twins, or a machine that comes back after its run was resumed elsewhere."""
    launches = {run: [RecordWriter(tmp_path, SETTINGS, run) for _ in range(2)] for run in ("old", "new")}
    for step in range(1, 6):
        for seed, (run, writers) in enumerate(launches.items()):
            if run == "new" and step < 3:  # it goes on from a checkpoint of step 2
                continue
            for rank, writer in enumerate(writers):
                add(writer, step, rank=rank, ranks=2, seed=seed)
                writer.flush()
    late = RecordWriter(tmp_path, SETTINGS, "old")  # a rank that starts again joins the attempt of its launch
    add(late, 6, rank=0, ranks=2)
    late.flush()
    records, [(old, *_), (new, *_)] = read_records(tmp_path), launches.values()
    assert records.groupby("step").size().to_dict() == {step: 8 for step in range(1, 6)}
    assert records[records.step > 2].log_ratio.to_numpy() == pytest.approx(
        np.tile(columns(seed=1)["log_ratio"], 6), rel=1e-6
    )
    assert read_records(old.folder).step.value_counts().to_dict() == {step: 8 for step in range(1, 6)} | {6: 4}
    assert len(read_records(new.folder)) == 3 * 8


def test_the_ranks_of_a_training_share_an_attempt_and_two_trainings_do_not(tmp_path):
    for training in (1, 2):
        ranks = [in_a_process(f"rank {rank} {training}", tmp_path) for rank in range(2)]
        assert [rank.wait() for rank in ranks] == [0, 0]
        assert len(read_records(tmp_path)) == 2 * 4
    files = attempts.parts(tmp_path)
    assert [(part.number, part.rank) for part in files] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert len({part.run for part in files}) == 2


# what each attempt trains and records: first step, last step, freq -> steps that count, by attempt
RESUMED = {
    "with a larger freq": ([(1, 15, 1), (11, 30, 10)], {1: range(1, 11), 2: [20, 30]}),
    "with a smaller freq": ([(1, 15, 10), (11, 14, 1)], {1: [10], 2: range(11, 15)}),
    "before it recorded a step": ([(1, 15, 1), (11, 14, 10)], {1: range(1, 11)}),
    "twice, of which one recorded none": ([(1, 15, 1), (11, 14, 10), (15, 17, 1)], {1: range(1, 11), 3: range(15, 18)}),
    "from a later step": ([(1, 9, 1), (6, 14, 5), (12, 14, 1)], {1: range(1, 6), 2: [10], 3: range(12, 15)}),
    "anew": ([(1, 9, 1), (1, 2, 5)], {}),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", RESUMED)
def test_an_attempt_counts_from_the_step_at_which_it_resumed_recorded_or_not(counted_ppo_loss, tmp_path, case):
    trained, expected = RESUMED[case]
    for number, (first, last, freq) in enumerate(trained, 1):
        observer._WRITERS.clear()
        observer._run.cache_clear()
        config = actor_config(
            policy_loss=FSPOPolicyLossConfig(records_dir=str(tmp_path), records_freq=freq, eps=number)
        )
        train(counted_ppo_loss, config, range(first, last + 1), CUTS["one"])
        observer.flush_records()
        microbatch._POSITION = microbatch._Position()
    counted = {}
    for part in attempts.newest(attempts.parts(tmp_path)):
        counted.setdefault(part.number, []).append(part.step)
    assert counted == {number: list(steps) for number, steps in expected.items()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert read_records(tmp_path).attrs["lost"] == 0
    assert any("attempt-0001-" in str(one.message) for one in warned) == (case == "anew")  # nothing of it counts


def test_a_writer_that_is_not_told_when_it_began_has_trained_what_was_not_due(tmp_path):
    for run, steps, freq in (("first", range(1, 16), 1), ("second", [20, 30], 10)):
        writer = RecordWriter(tmp_path, SETTINGS, run, freq=freq, last_step=30)
        for step in steps:
            add(writer, step)
        writer.flush()
    records = read_records(tmp_path)
    assert sorted(set(records.step)) == [*range(1, 11), 20, 30] and records.attrs["lost"] == 0


# --- where they lie ---------------------------------------------------------------------------------------------------


LINKS = {  # a folder with records elsewhere -> what is made of it in the run's folder
    "to a link": lambda run, disk: [(run / "a").symlink_to(run / "b"), (run / "b").symlink_to(disk / "records")],
    "twice": lambda run, disk: [(run / name).symlink_to(disk / "records") for name in ("a", "b")],
    "around in a circle": lambda run, disk: [
        *((run / name).symlink_to(disk / "records") for name in ("records", "z")),
        (disk / "records/back").symlink_to(run),
        (disk / "records/here").symlink_to("."),
        (run / "up").symlink_to(".."),
        (run / "loop").symlink_to("loop"),
    ],
    "nowhere": lambda run, disk: [(run / "a").symlink_to(disk / "gone"), (run / "b").symlink_to(disk / "records")],
    "to each file": lambda run, disk: [
        (run / "records").mkdir(),
        *((run / "records" / part.name).symlink_to(part) for part in record_files(disk)),
    ],
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", LINKS)
def test_records_behind_a_link_are_found_and_counted_once(tmp_path, case):
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    write(disk / "records", range(1, 4))
    LINKS[case](run, disk)
    assert len(read_records(run)) == 12
    (tmp_path / "named").symlink_to(run)
    assert len(read_records(tmp_path / "named")) == 12


@pytest.mark.filterwarnings("error")
def test_an_attempt_that_was_moved_to_another_disk_is_still_one(tmp_path):
    """By the name of the link; a link beside it that says which is the latest names nothing new."""
    for run, first in (("first", 1), ("second", 3)):
        write(tmp_path / "records", range(first, first + 3), run=run)
    for number, folder in enumerate(sorted((tmp_path / "records").iterdir())):
        folder.rename(tmp_path / f"store-{number}")
        folder.symlink_to(tmp_path / f"store-{number}")
    (tmp_path / "records/a-latest").symlink_to(folder)
    assert read_records(tmp_path / "records").groupby("step").size().to_dict() == dict.fromkeys(range(1, 6), 4)


def test_what_lies_behind_links_is_searched_up_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "MOST_BEHIND_LINKS", 20)
    write(tmp_path / "run/records", range(1, 4))
    for number in range(30):
        (tmp_path / f"disk/{number}/deeper").mkdir(parents=True)
        (tmp_path / f"run/{number}").mkdir()
    read_records(tmp_path / "run")  # not a link
    (tmp_path / "run/link").symlink_to(tmp_path / "disk")
    with pytest.warns(UserWarning, match="more than 20 folders lie behind links"):
        assert len(read_records(tmp_path / "run")) == 12


@pytest.mark.filterwarnings("error")
def test_a_killed_run_leaves_what_can_be_read(tmp_path):
    process = in_a_process("train", tmp_path)
    while len(record_files(tmp_path)) < 20:
        time.sleep(0.01)
        assert process.poll() is None
    read_records(tmp_path)  # a live run
    process.kill()
    process.wait()
    records = read_records(tmp_path)
    assert (records.groupby("step").size() == 500).all() and records.step.nunique() >= 20


def test_a_folder_without_records_is_an_empty_table(tmp_path):
    empty = read_records(tmp_path)
    assert len(empty) == 0 and list(empty.columns) == list(COLUMNS) and empty.attrs["settings"] is None


@pytest.mark.filterwarnings("error")
def test_records_without_a_column_of_a_newer_clip_are_read_and_say_what_they_cannot_judge(tmp_path):
    write(tmp_path, range(1, 5))
    for file in record_files(tmp_path)[:2]:
        rewrite(file, lambda table: table.drop_columns(["tokens_clipped_ctpo"]))
    records = read_records(tmp_path)
    assert len(records) == 16 and records.tokens_clipped_ctpo.isna().tolist() == [True] * 8 + [False] * 8
    assert "Not judged: CTPO." in clips.unjudged(records)
    newer = records[records.step > 2]
    assert clips.unjudged(newer) is None and CLIPS["ctpo"].clipped(newer).tolist() == pytest.approx(
        [1, 1 / 2, 1 / 3, 1 / 4] * 2
    )
    for file in record_files(tmp_path):
        rewrite(file, lambda table: table.drop_columns(list(CLIP_COLUMNS)[:1]))
    assert "Not judged: GRPO, CTPO." in clips.unjudged(read_records(tmp_path))


@pytest.mark.filterwarnings("error")
def test_every_committed_record_is_read():
    folders = {part.folder for part in attempts.parts(Path(__file__).parents[1] / "recorded")}
    assert folders
    for one in folders:
        records = read_records(one)
        assert len(records) == records.attrs["rows"] > 0 and records.attrs["lost"] == 0
        assert CLIPS["grpo"].judges(records)  # the other came after them


def at(name):
    return list(COLUMNS).index(name)


def cut_footer(file):
    file.write_bytes(file.read_bytes()[:-10])


def flip_a_bit(file):
    """In the last byte of a column, where it can still be decoded."""
    content = bytearray(file.read_bytes())
    column = pq.read_metadata(file).row_group(0).column(at("log_ratio"))
    content[column.dictionary_page_offset + column.total_compressed_size - 1] ^= 1
    file.write_bytes(content)


def rewrite(file, change=lambda table: table, **metadata):
    table = change(pq.read_table(file))
    pq.write_table(table.replace_schema_metadata(metadata or table.schema.metadata), file)


def told(file, key, **entries):
    """Change entries of one of the two JSON objects in a file's metadata."""
    metadata = {name.decode(): text for name, text in pq.read_schema(file).metadata.items()}
    rewrite(file, **metadata | {key: json.dumps(json.loads(metadata[key]) | entries)})


BAD = {  # what is wrong with a file -> what is done to it, what the warning must hold
    "cut off": (cut_footer, "magic bytes"),
    "a damaged page": (flip_a_bit, "CRC"),
    "another program's": (lambda file: rewrite(file, pandas="{}"), "fspo_verl has not written it"),
    "a band that none is": (
        lambda file: rewrite(file, fspo_verl='{"loss": "fspo", "band": {"eps_low": "wide"}}'),
        "eps_low='wide'",
    ),
    "an attempt of another kind": (lambda file: told(file, "attempt", ranks="two", freq=0), "ranks='two', freq=0"),
    "another dtype of an optional column": (
        lambda file: rewrite(file, lambda t: t.append_column("staleness", pa.array(["old"] * len(t)))),
        "column staleness is string, where float is expected",
    ),
    "a missing column": (lambda file: rewrite(file, lambda t: t.drop_columns(["length"])), "column length is missing"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_named_and_the_others_are_read(tmp_path, fault):
    damage, words = BAD[fault]
    write(tmp_path, range(1, 4))
    damage(record_files(tmp_path)[1])
    for max_rows in (None, 5):
        with pytest.warns(UserWarning, match="step-000002-rank-0000.parquet is left out") as warned:
            records = read_records(tmp_path, max_rows=max_rows)
        assert words in str(warned[0].message) and "missing records: 1;" in str(warned[1].message) and len(warned) == 2
        assert records.attrs["rows"] == 8 and records.attrs["lost"] == 1 and records.attrs["settings"].loss == "fspo"
        assert set(records.step) <= {1, 3} and (max_rows or len(records) == 8)


@pytest.mark.filterwarnings("error")
def test_a_file_of_a_later_version_that_says_more_is_read(tmp_path):
    write(tmp_path, range(1, 4))
    for file in record_files(tmp_path):
        told(file, "attempt", node="a", limit_bytes=1e9)
        told(file, "fspo_verl", width="measured")
    records = read_records(tmp_path)
    assert len(records) == 12 and records.attrs["lost"] == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda one: st.lists(one, max_size=2) | st.dictionaries(st.text(max_size=3), one, max_size=2),
    max_leaves=3,
)
KEYS = ("ranks", "taken", "freq", "last_step", "limit_bytes", "started", "later")
KEYS_OF = {"attempt": KEYS, "fspo_verl": [*(field.name for field in dataclasses.fields(RunSettings)), "later"]}


@given(data=st.data(), key=st.sampled_from([*KEYS_OF]))
@pytest.mark.filterwarnings("ignore")
def test_whatever_a_file_says_of_itself_the_others_are_read(data, key):
    entries = data.draw(st.dictionaries(st.sampled_from(KEYS_OF[key]), JSON, min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as folder:
        write(folder, range(1, 4))
        told(record_files(folder)[1], key, **entries)
        records = read_records(folder)
        assert len(records) == records.attrs["rows"] in (8, 12) and {1, 3} <= set(records.step)
        if len(records) == 8:
            assert records.attrs["lost"] == 1


@given(
    data=st.data(),
    steps=st.integers(1, 5),
    ranks=st.integers(1, 3),
    freq=st.sampled_from([1, 3]),
    finished=st.booleans(),
)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_missing_like_one_that_is_gone(data, steps, ranks, freq, finished):
    """Of a run that may go on nobody knows of a step without any file at its end, nor whether the last is whole."""
    due = [freq * number for number in range(1, steps + 1)]
    fate = {(s, r): data.draw(st.sampled_from(["there", "gone", "damaged"])) for s in due for r in range(ranks)}
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            writer = RecordWriter(folder, SETTINGS, "run", freq=freq, last_step=due[-1] + freq * (not finished))
            for step in due:
                add(writer, step, rank=rank, ranks=ranks)
            writer.flush()
        for part in attempts.parts(folder):
            if (what := fate[part.step, part.rank]) == "gone":
                part.file.unlink()
            elif what == "damaged":
                part.file.write_bytes(b"PAR1")
        records = read_records(folder)
    readable = [step for step in due if "there" in {fate[step, rank] for rank in range(ranks)}]
    of = {step: {fate[step, rank] for rank in range(ranks)} for step in due}
    damaged = {step for step in due if "damaged" in of[step]}
    if not readable:
        expected = damaged
    elif finished:
        expected = {step for step in due if of[step] != {"there"}}
    else:
        expected = damaged | {step for step in due if step < readable[-1] and of[step] != {"there"}}
    assert records.attrs["lost"] == len(expected)
    assert set(records.step) == set(readable)


def test_records_of_two_losses_in_one_folder_are_a_warning(tmp_path):
    write(tmp_path / "a", [1])
    writer = RecordWriter(tmp_path / "b", RunSettings("gspo"))
    add(writer, 1)
    writer.flush()
    with pytest.warns(UserWarning, match=r"different settings \(loss\)"):
        read_records(tmp_path)


def test_a_choice_of_rows(tmp_path):
    writer = RecordWriter(tmp_path, SETTINGS)
    for step in range(10):
        add(writer, step, rows=1000)
    writer.flush()
    records = read_records(tmp_path, max_rows=2000)
    assert records.attrs["rows"] == 10_000
    assert 2000 - 160 < len(records) < 2000 + 160  # four standard deviations
    pd.testing.assert_frame_equal(records, read_records(tmp_path, max_rows=2000))
