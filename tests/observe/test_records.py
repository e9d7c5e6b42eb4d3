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
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict
from verl.workers import engine_workers

from fspo_verl.analysis import judgement, live
from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig
from fspo_verl.observe import attempts, microbatch, observer
from fspo_verl.observe import records as records_module
from fspo_verl.observe.records import CLIP_COLUMNS, COLUMNS, MOST_ROWS, read, read_records, text_hash
from fspo_verl.observe.settings import RunSettings


def record_files(folder):
    return [file.path for attempt in attempts.attempts_below(folder) for file in attempt.files]


def steps_of(records):
    """How many rows each step has."""
    return records.groupby("step").size().to_dict()


def train(counted_ppo_loss, config, steps, cut):
    """Two optimiser steps per training step; returns what verl makes of the metrics of each training step."""
    logged = []
    for step, batch in itertools.product(steps, [MiniBatch()]):
        updates = []
        for _mini_batch in range(2):
            gathered = {}
            for rows in cut[0]:
                output, data = batch.micro_batch(rows)
                tu.assign_non_tensor_stack(data, "uid", [f"prompt {row // 2}" for row in rows])
                tu.assign_non_tensor_stack(data, "raw_prompt", [problem(row // 2) for row in rows])
                tu.assign_non_tensor_stack(data, "global_steps", [step] * len(rows))
                append_to_dict(gathered, counted_ppo_loss(config, output, data)[1])
            updates.append({name: Metric.aggregate_dp([metric]) for name, metric in gathered.items()})
        observer.flush_records()
        logged.append(reduce_metrics({name: [update[name] for update in updates] for name in updates[0]}))
    return logged


@pytest.mark.parametrize("cut", ["one", "ragged", "single rows"])
@pytest.mark.parametrize("schema, loss", [(FSPOPolicyLossConfig, "fspo"), (ObservedPolicyLossConfig, "gspo")])
@pytest.mark.usefixtures("recorded")
def test_metrics_equal_what_the_records_give(counted_ppo_loss, tmp_path, schema, loss, cut):
    band = {"eps_low": 0.05, "eps_high": 0.04} if loss == "fspo" else {"loss_mode": loss}
    config = actor_config(policy_loss=schema(records_dir=str(tmp_path), **band), clip_ratio_low=3e-4)
    logged = [live.logged(metrics) for metrics in train(counted_ppo_loss, config, steps=[7, 8], cut=CUTS[cut])]
    recorded = read(tmp_path)
    records, settings = recorded.table, recorded.settings
    assert list(records.columns) == [*COLUMNS, *CLIP_COLUMNS]
    assert len(read_records(tmp_path, rejected=True)) == len(records)  # padding is in no file
    assert records.groupby(["step", "mini_batch"]).size().to_dict() == {(s, m): 7 for s in (7, 8) for m in (0, 1)}
    texts = {f"prompt {number}": text_hash(problem(number)) for number in range(4)}
    assert (records.prompt_text_hash == records.prompt.map(texts).astype(np.int64)).all()
    assert len(set(texts.values())) == 4
    assert (settings.loss, settings.clip_ratio_low) == (loss, 3e-4)
    assert settings.versions["verl"] == verl.__version__ and not settings.old_log_probs_from_rollout
    if loss == "fspo":
        assert (settings.band.low, settings.band.high, settings.band.dual) == (0.05, 0.04, 0.04)
    together, alone = live.of_log(live.over_steps(logged)), live.of_log(judgement.series(records, settings))
    assert {"clip_rate/all", "noise_sigma", "moved_sigma", "step_responses/unmoved", "ess"} <= together.keys()
    assert ("noise_outside" in together) == (loss == "fspo")
    of_all_lengths = {name for name in alone.keys() & together.keys() if "len_" not in name}
    assert {name: together[name] for name in of_all_lengths} == pytest.approx(
        {name: alone[name] for name in of_all_lengths}, rel=1e-5
    )
    assert 0 < alone["clip_rate/all"] < 1


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
    wrapped_anew(lambda config, model_output, data, dp_group: (microbatch.current(), {}))
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
            place, _ = engine_workers.ppo_loss(None, None, data)
        places.append((place.step, place.mini_batch))
    assert places == expected
    assert synced == [(event, "tcp") for event in events if not isinstance(event, tuple)]
    assert getattr(worker.update_weights, MAGIC_ATTR)["blocking"] is False  # what verl dispatches by is still there


@pytest.mark.usefixtures("worker")
def test_a_batch_that_dynamic_context_parallelism_dealt_out_has_no_place():
    sample_ids = pytest.importorskip("verl.utils.dynamic_cp_scheduler").DCP_SAMPLE_IDS
    dealt = {"dp_size": 1, "global_batch_size": 2, sample_ids: [3]}
    assert engine_workers.ppo_loss(None, None, tu.get_tensordict({"row": torch.zeros(1)}, dealt))[0] is None


@pytest.mark.parametrize("lacks", ["ppo_loss", "ids of prompts"])
def test_what_has_no_place_is_not_recorded_and_that_is_said(counted_ppo_loss, tmp_path, caplog, lacks):
    config = actor_config(policy_loss=FSPOPolicyLossConfig(records_dir=str(tmp_path)))
    with caplog.at_level(logging.WARNING, logger="fspo_verl"):
        if lacks == "ppo_loss":
            get_policy_loss_fn("fspo")(**padded_batch(), loss_agg_mode="token-mean", config=config)
        else:
            counted_ppo_loss(config, *MiniBatch().micro_batch(CUTS["one"][0][0]))
    assert "nothing is recorded" in caplog.text and not list(tmp_path.iterdir())


def test_a_file_is_written_whole_after_each_update_and_holds_thirty_steps(tmp_path):
    writer = opened(tmp_path)
    for step, mini_batch in itertools.product(range(1, 65), (0, 1)):
        add(writer, step, mini_batch)
        writer.flush()
        records = read_records(tmp_path)
        assert steps_of(records) == {s: 8 for s in range(1, step)} | {step: 4 + 4 * mini_batch}
    names = [file.name for file in record_files(tmp_path)]
    assert names == [f"step-{first:06d}-rank-0000.parquet" for first in (1, 31, 61)]
    add(writer, 65, rows=MOST_ROWS)
    add(writer, 66)
    writer.flush()
    assert record_files(tmp_path)[-1].name == "step-000066-rank-0000.parquet" and len(read_records(tmp_path)) > 4096


def test_of_ranks_that_share_responses_one_writes(tmp_path):
    """Ranks of tensor or sequence parallelism have one data-parallel rank."""
    source, other = opened(tmp_path), opened(tmp_path)
    for step in (1, 2):
        for writer in (source, other):
            add(writer, step)
        source.flush(writes=True)
        other.flush(writes=False)
    other.close()
    assert steps_of(read_records(tmp_path)) == {1: 4, 2: 4}


def test_one_line_of_pandas_reads_the_records(tmp_path):
    for rank in (0, 1):
        write(tmp_path / "run-1", [1, 2], run="a", rank=rank, ranks=2, last_step=2)
    assert len(pd.read_parquet(tmp_path)) == len(read_records(tmp_path)) == 16


@pytest.mark.filterwarnings("error", "ignore:.*a later attempt began anew")
def test_of_a_run_that_goes_on_the_newest_attempt_counts_and_nothing_is_overwritten(tmp_path):
    for rank in (0, 1):
        write(tmp_path, range(1, 6), run="first", rank=rank, ranks=2)
    for name in ["step-backup.parquet", "step-000001-rank-0000 (copy).parquet", "step-4.parquet~"]:
        shutil.copy(record_files(tmp_path)[0], record_files(tmp_path)[0].with_name(name))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    write(tmp_path, [4], run="second", seed=1)  # from a checkpoint of step 3, on one rank; then killed
    records = read_records(tmp_path)
    assert steps_of(records) == {1: 8, 2: 8, 3: 8, 4: 4}
    assert records[records.step == 4].log_ratio.to_numpy() == pytest.approx(columns(seed=1)["log_ratio"], rel=1e-6)
    assert before.items() <= {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}.items()
    write(tmp_path, [3], run="third", seed=2)
    assert steps_of(read_records(tmp_path)) == {1: 8, 2: 8, 3: 4}


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full while this holds something: then no byte can be written, but an empty file."""
    full, write_table = [], pq.write_table

    def write_or_fail(*args, **kwargs):
        if full:
            raise OSError(28, "No space left on device")
        return write_table(*args, **kwargs)

    monkeypatch.setattr(pq, "write_table", write_or_fail)
    return full


def test_what_a_full_disk_does_not_take_waits_for_room(tmp_path, disk, caplog):
    writer = opened(tmp_path, last_step=40)
    for step in range(1, 41):
        disk[:] = [True] * (5 <= step < 40)
        add(writer, step)
        writer.flush()
        expected = min(step, 4) if step < 40 else 40
        assert set(read_records(tmp_path).step) == set(range(1, expected + 1))
    assert caplog.text.count("training goes on") == 1 and "No space left on device" in caplog.text
    assert not list(tmp_path.rglob(".step*"))  # no part


@pytest.mark.filterwarnings("ignore:.*missing records")
def test_a_disk_that_stays_full_costs_whole_files_that_are_named_and_counted(tmp_path, disk, caplog):
    writer = opened(tmp_path)
    for step in range(1, 301):
        disk[:] = [True] * (35 <= step < 280)
        add(writer, step)
        writer.flush()
    recorded = read(tmp_path)
    lost = set(range(1, 301)) - set(recorded.table.step)
    assert "step-000031-rank-0000.parquet is lost, with up to 30 steps" in caplog.text
    assert lost and min(lost) >= 35 and recorded.incomplete_steps == len(lost) and len(lost) % 30 in (0, 26)
    assert len(writer._waiting) <= 4


@pytest.mark.parametrize("where", ["/dev/full/records", "/proc/records"])
def test_a_folder_that_cannot_be_written_is_one_warning_and_training_goes_on(counted_ppo_loss, recorded, where, caplog):
    config = actor_config(policy_loss=FSPOPolicyLossConfig(records_dir=where))
    assert len(train(counted_ppo_loss, config, steps=[1, 2, 3], cut=CUTS["one"])) == 3
    assert caplog.text.count("training goes on") == 1 and f"records in {where} cannot be written now" in caplog.text


def test_a_disk_that_hangs_is_one_warning_and_training_goes_on(tmp_path):
    """It costs an update some seconds, once, and the end of the process as well."""
    process = subprocess.run(
        [sys.executable, small_records.__file__, "hang", tmp_path], capture_output=True, timeout=60
    )
    said = process.stderr.decode()
    assert process.returncode == 0 and set(read_records(tmp_path).step) == {1, 2}
    assert said.count("the disk takes more than 5 s") == 1 and "the process ends before step-000001" in said


def in_a_process(how, folder):
    return subprocess.Popen([sys.executable, small_records.__file__, how, folder])


def test_a_process_that_ends_writes_what_nobody_has_had_written(tmp_path):
    in_a_process("end", tmp_path).wait()
    records = read_records(tmp_path)
    assert set(records.step) == {1, 2}
    assert set(records.prompt_text_hash) == {text_hash(problem(number)) for number in (0, 1)}  # as in this process


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("part", [0, 0.5, 1])
def test_a_write_that_is_cut_off_leaves_the_whole_file_of_the_update_before(tmp_path, part):
    assert in_a_process(f"die {part}", tmp_path).wait() == 0
    assert [path.stat().st_size > 0 for path in tmp_path.rglob(".step*")] == [part > 0]
    recorded = read(tmp_path)
    assert steps_of(recorded.table) == {1: 4, 2: 4} and recorded.incomplete_steps == 0


def test_columns_that_come_later_are_null_before(tmp_path):
    writer = opened(tmp_path)
    add(writer, 1)
    add(writer, 2, values=columns() | {"truncated": np.ones(4)})
    writer.flush()
    assert read_records(tmp_path).groupby("step").truncated.sum().to_dict() == {1: 0, 2: 4}


@pytest.mark.parametrize("how", ["exits", "flushes", "records", "written"])
def test_a_copy_of_a_process_writes_nothing(tmp_path, how):
    process = subprocess.run([sys.executable, small_records.__file__, f"fork {how}", tmp_path], capture_output=True)
    records = read_records(tmp_path)
    assert records.groupby(["step", "mini_batch"]).size().to_dict() == {(1, 0): 4, (1, 1): 4}
    assert (b"is a copy of the one that records" in process.stderr) == (how == "records")
    assert b"is lost" not in process.stderr


def test_a_file_of_another_writer_is_never_replaced(tmp_path, caplog):
    """A worker that is started again writes it, or a second run into the folder of a main that nobody sees."""
    for seed in (0, 1):
        add(writer := opened(tmp_path), 1, seed=seed)
        writer.flush()
    assert read_records(tmp_path).log_ratio.to_numpy() == pytest.approx(columns(seed=0)["log_ratio"], rel=1e-6)
    assert "step-000001-rank-0000.parquet is there already, and is not overwritten" in caplog.text


def test_the_hash_of_a_prompt_is_that_of_what_it_says():
    odd_keys = {1: "a", "b": 2}, {("x", 1): "y"}
    prompts = ("text", problem(1), problem(2), [{"image": object()}], [{"image": ""}], *odd_keys)
    found = [text_hash(prompt) for prompt in prompts]
    assert len(set(found)) == len(found) and all(-(2**63) <= value < 2**63 for value in found)
    assert text_hash([{"image": object()}]) == found[3]  # another object
    assert text_hash(np.array([{"a": 1, "b": 2}])) == text_hash([{"b": 2, "a": 1}])  # as a data set may hold messages


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
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        recorded = read(tmp_path)
    assert set(recorded.table.step) == {step for steps in expected.values() for step in steps}
    assert recorded.incomplete_steps == 0
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
        *((run / "records" / file.name).symlink_to(file) for file in record_files(disk)),
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
    """The link has its name; a link beside it that says which is the latest names nothing new."""
    for run, first in (("first", 1), ("second", 3)):
        write(tmp_path / "records", range(first, first + 3), run=run)
    for number, folder in enumerate(sorted((tmp_path / "records").iterdir())):
        folder.rename(tmp_path / f"store-{number}")
        folder.symlink_to(tmp_path / f"store-{number}")
    (tmp_path / "records/a-latest").symlink_to(folder.resolve())
    assert steps_of(read_records(tmp_path / "records")) == dict.fromkeys(range(1, 6), 4)


@pytest.mark.filterwarnings("error")
def test_a_killed_run_leaves_all_but_the_update_that_was_trained(tmp_path):
    process = in_a_process("train", tmp_path)
    try:
        while len(record_files(tmp_path)) < 2:
            time.sleep(0.01)
            assert process.poll() is None
        read_records(tmp_path)  # a live run
    finally:
        process.kill()
        process.wait()
    records = read_records(tmp_path)
    assert set(steps_of(records).values()) == {500} and set(records.step) == set(range(records.step.max() + 1))


def test_a_folder_without_records_is_an_empty_table(tmp_path):
    empty = read(tmp_path)
    assert len(empty.table) == empty.rows == 0 and list(empty.table.columns) == list(COLUMNS)
    assert empty.settings is None


@pytest.mark.filterwarnings("error")
def test_every_committed_record_is_read():
    folders = {found.folder for found in attempts.attempts_below(Path(__file__).parents[1] / "recorded")}
    assert folders
    for one in folders:
        recorded = read(one)
        assert len(recorded.table) == recorded.rows > 0 and recorded.incomplete_steps == 0


def at(name):
    return list(COLUMNS).index(name)


def cut_footer(file):
    file.write_bytes(file.read_bytes()[:-10])


def flip_a_bit(file):
    """Change the last byte of a column, so that it can still be decoded."""
    content = bytearray(file.read_bytes())
    column = pq.read_metadata(file).row_group(0).column(at("log_ratio"))
    content[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    file.write_bytes(content)


def rewrite(file, change=lambda table: table, **metadata):
    table = change(pq.read_table(file))
    pq.write_table(table.replace_schema_metadata(metadata or table.schema.metadata), file)


def change_metadata(file, key, **entries):
    """Change entries of one of the two JSON objects in a file's metadata."""
    metadata = {name.decode(): text for name, text in pq.read_schema(file).metadata.items()}
    rewrite(file, **metadata | {key: json.dumps(json.loads(metadata[key]) | entries)})


BAD = {  # what is wrong with a file -> what is done to it, a word of the reason
    "cut off": (cut_footer, "magic bytes"),
    "a damaged page": (flip_a_bit, "CRC"),
    "another program's": (lambda file: rewrite(file, pandas="{}"), "fspo_verl has not written it"),
    "another dtype of an optional column": (
        lambda file: rewrite(file, lambda t: t.append_column("staleness", pa.array(["old"] * len(t)))),
        "column staleness is string, where float is expected",
    ),
    "a missing column": (lambda file: rewrite(file, lambda t: t.drop_columns(["length"])), "column length is missing"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_named_and_the_others_are_read(tmp_path, fault):
    damage, words = BAD[fault]
    write(tmp_path, range(1, 91))
    damage(record_files(tmp_path)[1])
    for max_rows in (None, 100):
        with pytest.warns(UserWarning, match="step-000031-rank-0000.parquet is left out") as warned:
            recorded = read(tmp_path, max_rows=max_rows)
        assert words in str(warned[0].message) and "missing records: 30;" in str(warned[1].message) and len(warned) == 2
        assert (recorded.rows, recorded.incomplete_steps, recorded.settings.loss) == (240, 30, "fspo")
        assert set(recorded.table.step) <= {*range(1, 31), *range(61, 91)}
        assert max_rows or len(recorded.table) == 240


@pytest.mark.filterwarnings("error")
def test_a_file_of_a_later_version_that_says_more_is_read(tmp_path):
    write(tmp_path, range(1, 62))
    for file in record_files(tmp_path):
        change_metadata(file, "attempt", node="a")
        change_metadata(file, "fspo_verl", width="measured")
    recorded = read(tmp_path)
    assert len(recorded.table) == 61 * 4 and recorded.incomplete_steps == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda one: st.lists(one, max_size=2) | st.dictionaries(st.text(max_size=3), one, max_size=2),
    max_leaves=3,
)
KEYS = ("ranks", "steps", "freq", "later")
KEYS_OF = {"attempt": KEYS, "fspo_verl": [*(field.name for field in dataclasses.fields(RunSettings)), "later"]}


@given(data=st.data(), key=st.sampled_from([*KEYS_OF]))
@pytest.mark.filterwarnings("ignore")
def test_whatever_a_file_says_of_itself_the_others_are_read(data, key):
    entries = data.draw(st.dictionaries(st.sampled_from(KEYS_OF[key]), JSON, min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(3):
            write(folder, [1, 2], run="a", rank=rank, ranks=3, last_step=2)
        change_metadata(record_files(folder)[1], key, **entries)
        recorded = read(folder)
        assert len(recorded.table) == recorded.rows in (16, 24) and set(recorded.table.step) == {1, 2}
        assert recorded.incomplete_steps == 2 or recorded.rows == 24


@given(
    data=st.data(),
    files=st.integers(1, 4),
    ranks=st.integers(1, 3),
    freq=st.sampled_from([1, 3]),
    finished=st.booleans(),
)
@pytest.mark.filterwarnings("ignore")
def test_every_step_that_lacks_a_file_of_a_rank_is_counted(data, files, ranks, freq, finished):
    """Nobody knows which steps a run that may go on has after the last that can be read, nor whether that is whole."""
    due = [freq * number for number in range(1, 2 * files + 1)]
    fate = {
        (f, r): data.draw(st.sampled_from(["there", "gone", "damaged"])) for f in range(files) for r in range(ranks)
    }
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "MOST_STEPS", 2)
        for rank in range(ranks):
            writer = opened(folder, freq=freq, last_step=due[-1] + freq * (not finished))
            for step in due:
                add(writer, step, rank=rank, ranks=ranks)
                writer.flush()
        for attempt in attempts.attempts_below(folder):
            for file in attempt.files:
                what = fate[due.index(file.step) // 2, file.rank]
                if what == "gone":
                    file.path.unlink()
                elif what == "damaged":
                    file.path.write_bytes(b"PAR1")
        recorded = read(folder)
    fates = {step: {fate[due.index(step) // 2, rank] for rank in range(ranks)} for step in due}
    readable = [step for step in due if "there" in fates[step]]
    damaged = {step for step in due[::2] if "damaged" in fates[step]}  # the steps that name damaged files
    incomplete = {step for step in due if fates[step] != {"there"}}
    if not readable:
        expected = damaged
    elif finished:
        expected = incomplete
    else:
        last = max([*readable, *damaged])
        expected = {step for step in incomplete if step < last} | (damaged & {last})
    assert recorded.incomplete_steps == len(expected)
    assert set(recorded.table.step) == set(readable)


def test_records_of_two_losses_in_one_folder_are_a_warning(tmp_path):
    write(tmp_path / "a", [1])
    write(tmp_path / "b", [1], settings=RunSettings("gspo"))
    with pytest.warns(UserWarning, match=r"different settings \(loss\)"):
        read_records(tmp_path)


def test_a_choice_of_rows(tmp_path):
    write(tmp_path, range(10), rows=1000)
    recorded = read(tmp_path, max_rows=2000)
    records = recorded.table
    assert recorded.rows == 10_000
    assert 2000 - 160 < len(records) < 2000 + 160  # four standard deviations
    pd.testing.assert_frame_equal(records, read_records(tmp_path, max_rows=2000))
