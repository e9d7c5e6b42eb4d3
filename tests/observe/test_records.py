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
import time
import warnings
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
from small_records import add, columns, opened, problem, write
from test_policy_loss import CUTS, MiniBatch, actor_config, padded_batch
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch, register
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers import engine_workers

from fspo_verl import output
from fspo_verl.analysis import judgement
from fspo_verl.analysis.evidence import evidence_of
from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig
from fspo_verl.observe import attempts, microbatch, observer
from fspo_verl.observe.records import CLIP_COLUMNS, COLUMNS, read_records, text_hash
from fspo_verl.observe.settings import RunSettings


def record_files(folder):
    return [part.file for part in attempts.parts(folder)]


def steps_of(records):
    """How many rows each step has."""
    return records.groupby("step").size().to_dict()


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
def test_metrics_equal_what_the_records_give(counted_ppo_loss, recorded, tmp_path, schema, loss, cut):
    band = {"eps_low": 0.05, "eps_high": 0.04} if loss == "fspo" else {"loss_mode": loss}
    config = actor_config(policy_loss=schema(records_dir=str(tmp_path), **band), clip_ratio_low=3e-4)
    values = train(counted_ppo_loss, config, steps=[7, 8], cut=CUTS[cut])
    assert {len(rows) for rows in values.values()} == {len(values["rows"])}  # at every call, a value per row
    recorded()
    records = read_records(tmp_path)
    assert list(records.columns) == [*COLUMNS, *CLIP_COLUMNS]
    assert len(records) == np.sum(values["sequence_fraction"]) == 2 * 2 * 7
    assert len(read_records(tmp_path, rejected=True)) == len(records)  # padding is in no file
    assert records.groupby(["step", "mini_batch"]).size().to_dict() == {(s, m): 7 for s in (7, 8) for m in (0, 1)}
    texts = {f"prompt {number}": text_hash(problem(number)) for number in range(4)}
    assert (records.prompt_text_hash == records.prompt.map(texts).astype(np.int64)).all()
    assert len(set(texts.values())) == 4
    settings = records.attrs["settings"]
    assert (settings.loss, settings.clip_ratio_low) == (loss, 3e-4)
    assert settings.versions["verl"] == verl.__version__ and not settings.old_log_probs_from_rollout
    if loss == "fspo":
        band = settings.band
        assert (band.low, band.high, band.dual) == (0.05, 0.04, 0.12)
        outside = np.sum(values["outside_band_fraction"])
        scale = np.sqrt(records.length)
        assert outside == ((records.log_ratio > 0.04 * scale) | (records.log_ratio < -0.05 * scale)).sum()

    # Records lack the empty rows, and their number of rows with them.
    of_records = judgement.sums(records, settings)
    for name in of_records.keys() & values.keys() - {"rows", "step_rows"}:
        assert len(records) * of_records[name] == pytest.approx(np.sum(values[name]), rel=1e-5), name
    assert 0 < of_records["clip_fraction"] < 1 and {"log_ratio", "better/clipped"} <= of_records.keys() & values.keys()

    # verl logs means over the rows of a step, which hold two mini-batches; nothing has moved in the first.
    logged = {f"actor/fspo/{name}": np.mean(rows) for name, rows in values.items()}
    live, by_records = evidence_of(logged, settings), judgement.evidence_of_records(records, settings, tested=False)
    first = records[records.mini_batch == 0]
    sigma = np.sqrt((first.quadratic_variation / first.length).mean())
    assert (live.noise_sigma, by_records.noise_sigma) == pytest.approx((sigma, sigma), rel=1e-6)
    if loss == "fspo":
        assert 0 < live.noise_outside < 1 and live.noise_outside == pytest.approx(by_records.noise_outside)


# What a worker is told, a weight sync by its step, an update by the steps in which its two prompts were drawn, () where
# they do not tell -> step and mini-batch of each update.
RUNS = {
    "synchronous": ([0, (1, 1), (1, 1), 1, (2, 2), (2, 2)], [(1, 0), (1, 1), (2, 0), (2, 1)]),
    # Prompts are drawn a step ahead, and an update takes those that are ready.
    "asynchronous": ([0, (1, 1), (1, 1), 1, (1, 2), (1, 1), 2, (2, 3)], [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]),
    "resumed": ([4, (4, 4), (3, 5), 5, (5, 5)], [(5, 0), (5, 1), (6, 0)]),
    "warm-up of a critic": ([0, 1, 2, (2, 2), 3, (3, 4)], [(3, 0), (4, 0)]),
    "reward model in a validation": ([0, (1, 1), 1, None, (1, 2), (2, 2)], [(1, 0), (2, 0), (2, 1)]),
    "syncs not seen": ([(7, 7), (7, 7), (8, 8)], [(7, 0), (7, 1), (8, 0)]),
    "prompts that do not tell": ([2, (), (), 3, ()], [(3, 0), (3, 1), (4, 0)]),
    "syncs before the step": ([2, 3, (), 4, ()], [(3, 0), (4, 0)]),
}


@pytest.fixture
def worker(monkeypatch, wrapped_anew):
    """verl's worker class where records are on, and the weight syncs that reached it: arguments of each."""
    synced = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int = None, mode: str = "auto"):
        synced.append((global_steps, mode))

    monkeypatch.setattr(engine_workers.ActorRolloutRefWorker, "update_weights", update_weights)
    monkeypatch.setattr(observer, "flush_records", lambda: synced.append("settled"))
    wrapped_anew(lambda config, model_output, data, dp_group: microbatch.current())
    return engine_workers.ActorRolloutRefWorker, synced


@pytest.mark.parametrize("run", RUNS)
def test_steps_are_those_of_verl(worker, run):
    worker, synced = worker
    events, expected = RUNS[run]
    places = []
    for event in events:
        if not isinstance(event, tuple):
            asyncio.run(worker.update_weights(None, event, mode="tcp"))
            continue
        for row in range(2):  # a micro-batch each
            data = tu.get_tensordict({"row": torch.zeros(1)}, {"dp_size": 1, "global_batch_size": 2})
            if event:
                tu.assign_non_tensor_stack(data, "global_steps", [event[row]])
            place = engine_workers.ppo_loss(None, None, data)
        places.append((place.step, place.mini_batch))
    assert places == expected
    syncs = [(event, "tcp") for event in events if not isinstance(event, tuple)]
    assert synced == [seen for sync in syncs for seen in ("settled", sync)]  # records are written before each
    assert getattr(worker.update_weights, MAGIC_ATTR)["blocking"] is False  # what verl dispatches by is still there


@pytest.mark.usefixtures("worker")
def test_a_batch_that_dynamic_context_parallelism_dealt_out_has_no_place():
    sample_ids = pytest.importorskip("verl.utils.dynamic_cp_scheduler").DCP_SAMPLE_IDS
    dealt = {"dp_size": 1, "global_batch_size": 2, sample_ids: [3]}
    assert engine_workers.ppo_loss(None, None, tu.get_tensordict({"row": torch.zeros(1)}, dealt)) is None


@pytest.mark.parametrize("lacks", ["ppo_loss", "ids of prompts"])
def test_what_has_no_place_is_not_recorded_and_that_is_said(counted_ppo_loss, tmp_path, caplog, lacks):
    observer._once = output.Once()
    config = actor_config(policy_loss=FSPOPolicyLossConfig(records_dir=str(tmp_path)))
    with caplog.at_level(logging.WARNING, logger="fspo_verl"):
        if lacks == "ppo_loss":
            get_policy_loss_fn("fspo")(**padded_batch(), loss_agg_mode="token-mean", config=config)
        else:
            counted_ppo_loss(config, *MiniBatch().micro_batch(CUTS["one"][0][0]))
    assert "nothing is recorded" in caplog.text and not list(tmp_path.iterdir())


def test_a_file_appears_with_its_whole_step(tmp_path):
    writer = opened(tmp_path)
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


@pytest.mark.filterwarnings("error", "ignore:.*a later attempt began anew")
def test_of_a_run_that_goes_on_the_newest_attempt_counts_and_nothing_is_overwritten(tmp_path):
    for rank in (0, 1):
        write(tmp_path, range(1, 6), run="first", rank=rank, ranks=2)
    for name in ["step-backup.parquet", "step-000004-rank-0000 (copy).parquet", "step-4.parquet~"]:
        shutil.copy(record_files(tmp_path)[0], record_files(tmp_path)[0].with_name(name))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    write(tmp_path, [4], run="second", seed=1)  # from a checkpoint of step 3, on one rank; then killed
    records = read_records(tmp_path)
    assert steps_of(records) == {1: 8, 2: 8, 3: 8, 4: 4}
    assert records[records.step == 4].log_ratio.to_numpy() == pytest.approx(columns(seed=1)["log_ratio"], rel=1e-6)
    assert before.items() <= {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}.items()
    write(tmp_path, [3], run="third", seed=2)
    assert steps_of(read_records(tmp_path)) == {1: 8, 2: 8, 3: 4}


def test_writing_ends_at_the_limit_with_a_warning(tmp_path, caplog):
    writer = opened(tmp_path, limit_bytes=15_000)
    for step in range(1, 21):
        add(writer, step)
    writer.flush()
    files = record_files(tmp_path)
    assert 1 < len(files) < 20 and sum(file.stat().st_size for file in files) < 15_000 + files[0].stat().st_size
    assert caplog.text.count("records_limit_mb is reached") == 1
    with pytest.warns(UserWarning, match=f"after step {len(files)} ") as warned:
        records = read_records(tmp_path)
    assert len(warned) == 1 and records.attrs["lost"] == 0
    assert records.attrs["limited_after"] == records.step.max() == len(files)


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
    writer = opened(tmp_path)
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


# steps of an attempt, which of these a rank loses to a full disk, how many ranks, the last step -> steps that lack any
LOST = {
    "a run of unknown length": ([(range(1, 11), {}, 1, None)], 0),
    "resumed after steps that were lost": ([(range(1, 51), {0: range(33, 51)}, 1, 60), (range(49, 61), {}, 1, 60)], 16),
    "resumed, and its first steps lost": (
        [(range(1, 11), {}, 1, 20), (range(6, 21), {0: [6, 7], 1: [6, 7]}, 2, 20)],
        2,
    ),
    "resumed from the start": ([(range(1, 11), {0: range(5, 11)}, 1, 20), (range(1, 21), {}, 1, 20)], 0),
    "prolonged after its end": ([(range(1, 11), {}, 1, 10), (range(11, 21), {}, 1, 20)], 0),
    "ended, and its last steps lost": ([(range(1, 11), {0: [9, 10]}, 1, 10)], 2),
    "after a critic's warm-up": ([(range(5, 11), {}, 1, 10)], 0),
    # The limit is that of some ten files. Rank 1 comes to it later.
    "up to a limit": ([(range(1, 31), {1: range(1, 6)}, 2, 30)], 5),
}


@pytest.mark.filterwarnings("ignore:.*records_limit_mb", "ignore:.*missing records", "ignore:.*began anew")
@pytest.mark.parametrize("case", LOST)
def test_the_reader_counts_what_a_full_disk_took(tmp_path, disk, case):
    """Of several attempts; a property below has those of one."""
    trained, lost = LOST[case]
    for number, (steps, full, ranks, last_step) in enumerate(trained):
        more = {"limit_bytes": 40_000} if case == "up to a limit" else {}
        writers = [opened(tmp_path, f"run{number}", steps[0], last_step=last_step, **more) for _ in range(ranks)]
        for step, (rank, writer) in itertools.product(steps, enumerate(writers)):
            disk[:] = [True] if step in full.get(rank, ()) else []
            add(writer, step, rank=rank, ranks=ranks)
            writer.flush()
        disk.clear()
    records = read_records(tmp_path)
    assert records.attrs["lost"] == lost
    limit = records.attrs["limited_after"]
    assert limit < records.step.max() < 30 if case == "up to a limit" else limit is None


@pytest.mark.filterwarnings("error")
def test_a_limit_that_the_last_step_reaches_is_none(tmp_path):
    writer = opened(tmp_path, last_step=1, limit_bytes=1)
    add(writer, 1)
    writer.flush()
    assert read_records(tmp_path).attrs["limited_after"] is None


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
    assert b"is lost" not in process.stderr


@pytest.mark.parametrize(("rows", "kept"), [(6, 0), (8, 1)])
def test_a_file_is_never_replaced_by_one_with_fewer_rows(tmp_path, rows, kept, caplog):
    """As by a worker that is started again in the middle of a step that it had recorded whole."""
    for seed, size in ((0, 8), (1, rows)):
        add(writer := opened(tmp_path), 1, rows=size, seed=seed)
        writer.flush()
    assert read_records(tmp_path).log_ratio.to_numpy() == pytest.approx(columns(8, kept)["log_ratio"], rel=1e-6)
    assert ("step 1 of rank 0 is lost" in caplog.text) == (kept == 0)


def test_a_whole_file_of_another_is_not_deleted_for_a_part_of_ones_own(tmp_path, caplog):
    writer, other = opened(tmp_path), opened(tmp_path)
    for one, rows, seed in ((writer, 2, 0), (other, 8, 1), (writer, 2, 0)):
        add(one, 1, rows=rows, seed=seed)
        one.flush()
    assert read_records(tmp_path).log_ratio.to_numpy() == pytest.approx(columns(8, 1)["log_ratio"], rel=1e-6)
    assert "step 1 of rank 0 is lost" in caplog.text


def test_the_hash_of_a_prompt_is_that_of_what_it_says():
    odd_keys = {1: "a", "b": 2}, {("x", 1): "y"}
    prompts = ("text", problem(1), problem(2), [{"image": object()}], [{"image": ""}], *odd_keys)
    found = [text_hash(prompt) for prompt in prompts]
    assert len(set(found)) == len(found) and all(-(2**63) <= value < 2**63 for value in found)
    assert text_hash([{"image": object()}]) == found[3]  # another object
    assert text_hash(np.array([{"a": 1, "b": 2}])) == text_hash([{"b": 2, "a": 1}])  # as a data set may hold messages


@pytest.mark.parametrize("where", ["/dev/full/records", "/proc/records"])
@pytest.mark.usefixtures("recorded")
def test_a_folder_that_cannot_be_written_fails_before_the_first_update(counted_ppo_loss, where):
    config = actor_config(policy_loss=FSPOPolicyLossConfig(records_dir=where, records_freq=50))
    with pytest.raises(ValueError, match=f"records_dir={where} cannot be written .* Choose another"):
        train(counted_ppo_loss, config, steps=[1], cut=CUTS["one"])


# --- which run a folder belongs to, and which of its attempts counts --------------------------------------------------


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
@pytest.mark.usefixtures("recorded")
def test_an_attempt_counts_from_the_step_at_which_it_resumed_recorded_or_not(counted_ppo_loss, tmp_path, case):
    trained, expected = RESUMED[case]
    for number, (first, last, freq) in enumerate(trained, 1):
        observer._WRITERS.clear()
        policy_loss = FSPOPolicyLossConfig(
            records_dir=f"{tmp_path}/attempt-{number:04d}", records_freq=freq, eps=number
        )
        train(counted_ppo_loss, actor_config(policy_loss=policy_loss), range(first, last + 1), CUTS["one"])
        observer.flush_records()
        microbatch._POSITION = microbatch._Position()
    counted = {}
    for part in attempts.newest(attempts.parts(tmp_path)):
        counted.setdefault(int(part.attempt[-4:]), []).append(part.step)
    assert counted == {number: list(steps) for number, steps in expected.items()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert read_records(tmp_path).attrs["lost"] == 0
    assert any("attempt-0001" in str(one.message) for one in warned) == (case == "anew")  # nothing of it counts


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
    assert steps_of(read_records(tmp_path / "records")) == dict.fromkeys(range(1, 6), 4)


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
def test_every_committed_record_is_read():
    folders = {part.folder for part in attempts.parts(Path(__file__).parents[1] / "recorded")}
    assert folders
    for one in folders:
        records = read_records(one)
        assert len(records) == records.attrs["rows"] > 0 and records.attrs["lost"] == 0


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
        told(file, "attempt", node="a")
        told(file, "fspo_verl", width="measured")
    records = read_records(tmp_path)
    assert len(records) == 12 and records.attrs["lost"] == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda one: st.lists(one, max_size=2) | st.dictionaries(st.text(max_size=3), one, max_size=2),
    max_leaves=3,
)
KEYS = ("ranks", "taken", "freq", "later")
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
            writer = opened(folder, freq=freq, last_step=due[-1] + freq * (not finished))
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
    write(tmp_path / "b", [1], settings=RunSettings("gspo"))
    with pytest.warns(UserWarning, match=r"different settings \(loss\)"):
        read_records(tmp_path)


def test_a_choice_of_rows(tmp_path):
    write(tmp_path, range(10), rows=1000)
    records = read_records(tmp_path, max_rows=2000)
    assert records.attrs["rows"] == 10_000
    assert 2000 - 160 < len(records) < 2000 + 160  # four standard deviations
    pd.testing.assert_frame_equal(records, read_records(tmp_path, max_rows=2000))
