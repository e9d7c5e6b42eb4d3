# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Records: what is written is what the loss saw, on every disk and after every kind of end."""

import functools
import itertools
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_policy_loss import CUTS, MiniBatch, actor_config, padded_batch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers import engine_workers
from verl.workers.utils.losses import ppo_loss

import fspo_verl.register
from fspo_verl import microbatch
from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig
from fspo_verl.loss import Band
from fspo_verl.records import COLUMNS, RecordWriter, read_records, record_files

SETTINGS = json.dumps({"loss": "fspo"})


def columns(rows=4, seed=0):
    generator = np.random.default_rng(seed)
    names = ("length", "log_ratio", "quadratic_variation", "advantage", "finite", "tokens_clipped")
    values = {name: np.ones(rows) for name in names}
    values |= {f"quadratic_variation_{part}": np.ones(rows) for part in ("last", "top")}
    values |= {f"clipped_{side}": np.zeros(rows) for side in ("upper", "lower", "dual")}
    return values | {"log_ratio": generator.standard_normal(rows), "length": np.arange(1.0, rows + 1)}


def add(writer, step, mini_batch=0, rank=0, ranks=1, rows=4, ends_mini_batch=True, seed=0):
    prompts = [f"prompt {step}-{row // 2}" for row in range(rows)]
    place = {"step": step, "mini_batch": mini_batch, "rank": rank, "ranks": ranks, "prompts": prompts}
    writer.add(columns(rows, seed), **place, ends_mini_batch=ends_mini_batch)


def write(folder, steps, **kwargs):
    writer = RecordWriter(folder, SETTINGS)
    for step in steps:
        add(writer, step, **kwargs)
    writer.close()


@pytest.fixture
def counted_ppo_loss(monkeypatch):
    """verl's ``ppo_loss`` as its workers call it where records are on."""
    monkeypatch.setattr(engine_workers, "ppo_loss", ppo_loss)
    microbatch.install()
    return engine_workers.ppo_loss


@pytest.fixture
def writers(monkeypatch):
    """The writers that the registered losses make, to wait for."""
    made, make = [], fspo_verl.register._writer.__wrapped__
    monkeypatch.setattr(fspo_verl.register, "_writer", functools.cache(lambda *a: made.append(make(*a)) or made[-1]))
    return made


def train(counted_ppo_loss, config, steps, cut):
    """Two optimiser steps per training step; returns the values of each metric, row by row."""
    values = {}
    for micro_batches in cut:
        batch = MiniBatch()
        for step, mini_batch in itertools.product(steps, range(2)):
            for rows in micro_batches:
                output, data = batch.micro_batch(rows, dp_size=len(cut))
                tu.assign_non_tensor(data, update_lr_scheduler=mini_batch == 1)
                tu.assign_non_tensor_stack(data, "uid", [f"prompt {row // 2}" for row in rows])
                tu.assign_non_tensor_stack(data, "global_steps", [step] * len(rows))
                for name, metric in counted_ppo_loss(config, output, data)[1].items():
                    if name.startswith("actor/fspo/"):
                        values.setdefault(name.removeprefix("actor/fspo/"), []).extend(metric.values)
    return values


@pytest.mark.parametrize("schema, loss", [(FSPOPolicyLossConfig, "fspo"), (ObservedPolicyLossConfig, "gspo")])
def test_metrics_equal_what_the_records_give(counted_ppo_loss, writers, tmp_path, schema, loss):
    band = {"eps_low": 0.05, "eps_high": 0.04} if loss == "fspo" else {"loss_mode": loss}
    config = actor_config(policy_loss=schema(records_dir=str(tmp_path), **band), clip_ratio_low=3e-4)
    values = train(counted_ppo_loss, config, steps=[7, 8], cut=CUTS["ragged"])
    (writer,) = writers
    writer.close()
    records = read_records(tmp_path)

    assert list(records.columns) == list(COLUMNS)
    assert len(records) == np.sum(values["sequence_fraction"]) == 2 * 2 * 7
    assert records.groupby(["step", "mini_batch"]).size().to_dict() == {(s, m): 7 for s in (7, 8) for m in (0, 1)}
    assert set(records.prompt) == {f"prompt {i}" for i in range(4)}
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
        "ratio": records.ratio,
    }
    for name, column in sums.items():
        assert np.sum(values[name]) == pytest.approx(column.sum(), rel=1e-5), name

    settings = records.attrs["settings"]
    assert settings["loss"] == loss and settings["clip_ratio_low"] == 3e-4
    if loss == "fspo":
        band = Band(**settings["band"])
        assert (band.eps_low, band.eps_high, band.eps_dual) == (0.05, 0.04, 0.09)
        outside = np.sum(values["outside_band_fraction"])
        scale = np.sqrt(records.length)
        assert outside == ((records.log_ratio > 0.04 * scale) | (records.log_ratio < -0.05 * scale)).sum()


def test_one_step_of_several_is_recorded(counted_ppo_loss, writers, tmp_path):
    config = actor_config(policy_loss=FSPOPolicyLossConfig(records_dir=str(tmp_path), records_every=3))
    values = train(counted_ppo_loss, config, steps=range(4, 11), cut=CUTS["ragged"])
    (writer,) = writers
    writer.close()
    assert read_records(tmp_path).groupby(["step", "mini_batch"]).size().to_dict() == {
        (s, m): 7 for s in (6, 9) for m in (0, 1)
    }
    assert np.sum(values["sequence_fraction"]) == 7 * 2 * 7  # metrics are of every step


def test_a_loss_called_outside_verls_ppo_loss_says_that_nothing_is_recorded(tmp_path, caplog):
    fspo_verl.register._warn_unknown_step.cache_clear()
    batch = padded_batch()
    config = actor_config(policy_loss=FSPOPolicyLossConfig(records_dir=str(tmp_path)))
    with caplog.at_level(logging.WARNING, logger="fspo_verl"):
        get_policy_loss_fn("fspo")(**batch, loss_agg_mode="token-mean", config=config)
    assert "nothing is recorded" in caplog.text and not list(tmp_path.iterdir())


def test_a_file_appears_whole_after_each_mini_batch(tmp_path):
    writer = RecordWriter(tmp_path, SETTINGS)
    add(writer, step=1, mini_batch=0, ends_mini_batch=False)
    add(writer, step=1, mini_batch=0)
    add(writer, step=1, mini_batch=1, ends_mini_batch=False)
    writer.close()
    assert len(read_records(tmp_path)) == 8  # the third micro-batch is of an optimiser step that never came
    assert [file.name for file in tmp_path.iterdir()] == ["step-000001-rank-0000.parquet"]


def test_a_run_that_goes_on_replaces_the_steps_it_does_again(tmp_path):
    for rank in (0, 1):
        write(tmp_path, range(1, 6), rank=rank, ranks=2)
    write(tmp_path, [4], rank=0, ranks=1, seed=1)  # from a checkpoint of step 3, on one rank; then killed
    records = read_records(tmp_path)
    assert records.groupby("step")["rank"].nunique().to_dict() == {1: 2, 2: 2, 3: 2, 4: 1}
    assert records[records.step == 4].log_ratio.to_numpy() == pytest.approx(columns(seed=1)["log_ratio"], rel=1e-6)


def test_a_share_of_the_prompts_is_the_same_on_every_rank_and_keeps_groups_whole(tmp_path):
    for rank in (0, 1):
        writer = RecordWriter(tmp_path, SETTINGS, fraction=0.3)
        add(writer, step=1, rank=rank, ranks=2, rows=2000)
        writer.close()
    records = read_records(tmp_path)
    sizes = records.groupby(["prompt"], observed=True).size()
    assert (sizes == 4).all()
    assert 1000 * 0.3 - 60 < len(sizes) < 1000 * 0.3 + 60  # four standard deviations


def test_writing_ends_at_the_limit_with_a_warning(tmp_path, caplog):
    writer = RecordWriter(tmp_path, SETTINGS, limit_bytes=15_000)
    for step in range(20):
        add(writer, step)
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert 1 < len(files) < 20 and sum(file.stat().st_size for file in files) < 15_000 + files[0].stat().st_size
    assert caplog.text.count("records_limit_mb is reached") == 1


def test_a_full_disk_is_a_warning(caplog):
    """/dev/full takes no byte: no folder can be made there, as on a disk that is full or gone."""
    writer = RecordWriter("/dev/full/records", SETTINGS)
    for step in range(3):
        add(writer, step)
    writer.close()
    assert caplog.text.count("training goes on") == 1 and "step 0 of rank 0 is lost" in caplog.text


def train_for_ever(folder):
    writer = RecordWriter(folder, SETTINGS)
    for step in itertools.count():
        add(writer, step, rows=500)
        time.sleep(0.002)


@pytest.mark.filterwarnings("error")
def test_a_killed_run_leaves_what_can_be_read(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_records; test_records.train_for_ever(sys.argv[2])"
    process = subprocess.Popen([sys.executable, "-c", code, Path(__file__).parent, tmp_path])
    while len(record_files(tmp_path)) < 20:
        time.sleep(0.01)
        assert process.poll() is None
    read_records(tmp_path)  # a live run
    process.kill()
    process.wait()
    records = read_records(tmp_path)
    assert (records.groupby("step").size() == 500).all() and records.step.nunique() >= 20


def test_reading_what_is_not_there_or_not_whole(tmp_path):
    empty = read_records(tmp_path)
    assert len(empty) == 0 and list(empty.columns) == list(COLUMNS) and empty.attrs["settings"] is None
    write(tmp_path / "records", range(3))
    torn = tmp_path / "records" / "step-000001-rank-0000.parquet"
    torn.write_bytes(torn.read_bytes()[:-10])
    with pytest.warns(UserWarning, match="step-000001-rank-0000.parquet is left out"):
        records = read_records(tmp_path)
    assert set(records.step) == {0, 2}


def test_records_of_two_losses_in_one_folder_are_a_warning(tmp_path):
    write(tmp_path / "a", [1])
    writer = RecordWriter(tmp_path / "b", json.dumps({"loss": "gspo"}))
    add(writer, 1)
    writer.close()
    with pytest.warns(UserWarning, match="different settings"):
        read_records(tmp_path)


def test_a_choice_of_rows_and_columns(tmp_path):
    writer = RecordWriter(tmp_path, SETTINGS)
    for step in range(10):
        add(writer, step, rows=1000)
    writer.close()
    records = read_records(tmp_path, columns=["step", "length"], max_rows=2000)
    assert list(records.columns) == ["step", "length"] and records.attrs["rows"] == 10_000
    assert 2000 - 160 < len(records) < 2000 + 160  # four standard deviations
    pd.testing.assert_frame_equal(records, read_records(tmp_path, columns=["step", "length"], max_rows=2000))
