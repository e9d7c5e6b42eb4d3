# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The live series are those of the records, whatever the cut, and every trainer of verl logs them."""

import asyncio
import json
from unittest.mock import MagicMock

import live_reference
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from simulated_records import frame
from verl.experimental.fully_async_policy.detach_utils import MetricsAggregator as FullyAsyncAggregator
from verl.trainer.ppo.v1.utils import MetricsAggregator as V1Aggregator
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict
from verl.utils.tracking import Tracking

import fspo_verl.config  # noqa: F401 - wraps verl's Tracking, as in every worker with a loss of this package
from fspo_verl import output
from fspo_verl.analysis import live
from fspo_verl.clips import BandClip
from fspo_verl.observe.metrics import LENGTH_BINS, as_sums, metrics

BINS = [16, 64, 256]
# Raw sums of a step of 400 rows in two mini-batches, of which 60 + 40 responses have an advantage.
SUMS = {
    "length_1_to_15/responses": 0.15,
    "length_1_to_15/clipped": 0.06,
    "length_16_to_63/responses": 0.0,
    "length_16_to_63/clipped": 0.0,
    "length_64_up/responses": 0.10,
    "length_64_up/clipped": 0.01,
    "better/responses": 0.10,
    "better/clipped": 0.01,
    "nonfinite_fraction": 0.0,
    "step_rows_max": 400.0,
    "ratio": 0.18,
    "ratio_squared": 0.2,
    "sequence_fraction": 0.9,
    "on_policy_fraction": 0.5,
    "on_policy_sigma_squared": 0.02,
    "moved_fraction": 0.4,
    "moved_sigma_squared": 0.025,
}
SERIES = {
    "fspo/clip_rate/all": 0.28,
    "fspo/clip_rate/better": 0.1,
    "fspo/clip_rate/worse": 0.4,
    "fspo/not_finite": 0.0,
    "fspo/moved_sigma": 0.25,
    "fspo/clip_rate/len_00001_00015": 0.4,
    "fspo/clip_rate/len_00064_up": 0.1,
    "fspo/ess": 0.9,
    "fspo/noise_sigma": 0.2,
    "fspo/step_responses/len_00001_00015": 60,
    "fspo/step_responses/len_00064_up": 40,
    "fspo/step_responses/better": 40,
    "fspo/step_responses/unmoved": 200,
}


def raw(sums):
    return {f"actor/fspo/{name}": value for name, value in sums.items()}


def test_series_of_a_step():
    assert live.series(raw(SUMS) | {"critic/score/mean": 0.5, "a": "text"}) == pytest.approx(SERIES)  # 40 are too few
    with_lre = SERIES | {"fspo/lre": 0.9 / 0.72 - 1}  # acceptance of the longest bin over that of all
    assert live.series(raw(SUMS), min_count=40) == pytest.approx(with_lre)
    bypassed = raw(SUMS | {"on_policy_fraction": 0.0, "on_policy_sigma_squared": 0.0})
    assert "fspo/noise_sigma" not in live.series(bypassed)
    for nothing in ({"actor/pg_clipfrac": 0.1}, dict.fromkeys(raw(SUMS), 0.0), raw({"log_ratio": 0.1})):
        assert live.series(nothing) == {}


def columns_of(records, band=None):
    """The columns that a worker has of these responses; with a band those of the loss fspo."""
    names = ("length", "log_ratio", "quadratic_variation", "advantage", "truncated")
    columns = {name: records[name] for name in names if name in records}
    columns["finite"] = records.decision != "nonfinite"
    if band is not None:
        columns["outside"] = BandClip("", "", band).outside(records)
    columns["clipped_upper"] = records.clipped * (records.advantage > 0)
    columns["clipped_lower"] = records.clipped * (records.advantage < 0)
    columns["clipped_dual"] = np.zeros(len(records))
    return {name: np.asarray(column, np.float64) for name, column in columns.items()}


def logged_by_verl(records, cut, mini_batches, band=None, before=0):
    """The metrics that verl makes of an update: ``cut`` gives the ranks, and the ends of each one's micro-batches.

    A number in place of ends is that of ragged micro-batches. ``before`` are rows that the step has had.
    """
    columns = columns_of(records, band)
    rng, updates = np.random.default_rng(len(cut)), {}
    for number, rows in enumerate(np.split(np.arange(len(records)), mini_batches)):
        step_rows, ranks = before + len(rows) * (number + 1), []
        for share, ends in zip(np.split(rows, len(cut)), cut, strict=True):
            if isinstance(ends, int):
                ends = np.sort(rng.choice(np.arange(1, len(share)), ends - 1, replace=False))
            gathered = {}
            for micro_batch in np.split(share, ends):
                part = {name: column[micro_batch] for name, column in columns.items()}
                values = metrics(part, BINS, number == 0 and not before, len(rows), len(cut), step_rows)
                append_to_dict(gathered, as_sums(Metric.from_dict(values, "mean")))  # as verl's ppo_loss makes them
            ranks.append(gathered)
        for name in ranks[0]:
            updates.setdefault(name, []).append(Metric.aggregate_dp([rank[name] for rank in ranks]))
    return reduce_metrics(updates)


def a_step(seed, rows=1200, mini_batches=1):
    """Responses of a step, some of them padding."""
    rng = np.random.default_rng(seed)
    length = np.exp(rng.uniform(0, np.log(1000), rows)).astype(int)
    length[rng.random(rows) < 0.02] = 0
    advantage = rng.normal(size=rows) * (rng.random(rows) < 0.6) * (length > 0)
    clipped = (rng.random(rows) < 0.2) & (advantage != 0)
    log_ratio = rng.normal(scale=0.05 * np.sqrt(length))
    records = frame(length, log_ratio, 0.0025 * length, advantage, clipped=clipped.astype(np.float32))
    records["mini_batch"] = np.repeat(np.arange(mini_batches), rows // mini_batches)
    return records


@st.composite
def cuts(draw):
    """Mini-batches, rows of each on a rank, and where each of 1 to 3 ranks ends its micro-batches: all have as many."""
    ranks, mini_batches, rows = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(4, 40))
    count = draw(st.integers(0, 3))
    ends = st.lists(st.integers(1, rows - 1), min_size=count, max_size=count, unique=True).map(sorted)
    return mini_batches, rows, [draw(ends) for _ in range(ranks)]


@given(cuts(), st.integers(0, 999))
def test_series_equal_what_the_records_give_whatever_the_cut(cut, seed):
    mini_batches, rows, ends = cut
    records = a_step(seed, mini_batches * rows * len(ends), mini_batches)
    got = live.series(logged_by_verl(records, ends, mini_batches), min_count=1)
    expected = live_reference.series(records[records.length > 0], None, BINS, min_count=1)
    assert got == pytest.approx({name: expected[name] for name in got}, rel=1e-6, abs=1e-9)
    assert {name for name in expected.keys() - got.keys() if "step_responses" not in name} == set()


def aggregated(aggregator, records, sizes):
    """The metrics that an asynchronous trainer makes of updates of unequal size between two weight syncs."""
    starts = np.cumsum([0, *sizes])
    for first, size in zip(starts[:-1], sizes, strict=True):
        update = logged_by_verl(records.iloc[first : first + size], [[]], 1, before=int(first))
        aggregator.add_step_metrics(update | {"perf/time_per_step": 1.0}, sample_count=size)
    return live.series(aggregator.get_aggregated_metrics(), min_count=1)


@given(st.lists(st.integers(20, 200), min_size=1, max_size=4), st.integers(0, 99))
def test_updates_of_unequal_size_are_weighted_by_the_trainer_v1(sizes, seed):
    """Its weights are samples, so that rates stay exact; counts are of all rows of the step."""
    records = a_step(seed, sum(sizes))
    records["mini_batch"] = np.repeat(np.arange(len(sizes)), sizes)
    got = aggregated(V1Aggregator(), records, sizes)
    expected = live_reference.series(records[records.length > 0], None, BINS, min_count=1)
    assert got == pytest.approx({name: expected[name] for name in got}, rel=1e-6, abs=1e-9)


def test_updates_of_unequal_size_count_alike_in_the_fully_asynchronous_trainer():
    """So a rate is exact where they have as many rows; else the mean over rows of each update counts as one."""
    sizes = [100, 300]
    records = a_step(0, 400)
    got = aggregated(FullyAsyncAggregator(total_gpus=1), records, sizes)
    parts = [part[part.advantage != 0] for part in (records[:100], records[100:])]
    above = sum(part.clipped.sum() / size for part, size in zip(parts, sizes, strict=True))
    below = sum(len(part) / size for part, size in zip(parts, sizes, strict=True))
    assert got["fspo/clip_rate/all"] == pytest.approx(above / below, rel=1e-6)
    even = aggregated(FullyAsyncAggregator(total_gpus=1), records, [200, 200])
    counted = records[records.advantage != 0]
    assert even["fspo/clip_rate/all"] == pytest.approx(counted.clipped.mean(), rel=1e-6)


def test_a_run_logs_at_most_thirty_names_with_the_default_bins():
    columns = {name: np.full(7, 1.0) for name in ("finite", "outside", "truncated", "advantage", "log_ratio")}
    columns |= {name: np.full(7, 0.5) for name in ("quadratic_variation", "clipped_upper")}
    columns |= {name: np.zeros(7) for name in ("clipped_lower", "clipped_dual")}
    columns["length"] = np.array([1, 16, 64, 256, 1024, 4096, 16384.0])
    columns |= {"rollout_length": columns["length"], "rollout_quadratic_variation": columns["quadratic_variation"]}
    columns["advantage"][::2] = -1.0
    raw_sums = metrics(columns, LENGTH_BINS, np.arange(7) < 3, 7)
    logged = live.logged(raw_sums | {"fspo/eps_low": 0.1, "fspo/eps_high": 0.1, "actor/grad_norm": 1.0})
    names = [name for name in logged if name.startswith(("fspo/", "actor/fspo/"))]
    assert len(names) == 29 + ("fspo/lre" in names) and "actor/grad_norm" in logged
    assert not any(name.startswith("actor/fspo/") for name in names)


def test_a_run_of_several_steps_is_told_by_their_log_as_by_all_of_its_responses():
    """Steps of unlike size, rate and mix: weights are counts of the log."""
    steps = [a_step(seed, rows, 2) for seed, rows in enumerate((400, 1200, 800))]
    logged = [live.series(logged_by_verl(step, [[]], 2)) for step in steps]
    got = live.of_log(live.over_steps(logged))
    together = pd.concat(steps, ignore_index=True)
    expected = live_reference.series(together[together.length > 0], None, BINS)
    of_all = {name.removeprefix("fspo/"): value for name, value in expected.items()}
    for name in got.keys() - {"lre", "ess"}:
        assert got[name] == pytest.approx(of_all[name], rel=0.01 if name in ("moved_sigma",) else 1e-9, abs=1e-12), name
    assert {one.name: one.rate for one in live.bins_of_log(got)} == pytest.approx(
        {name.removeprefix("clip_rate/"): value for name, value in of_all.items() if name.startswith("clip_rate/len")}
    )


# --- verl's trainers -------------------------------------------------------------------------------------------------


def synchronous(trainer):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    PPOTrainer.fit(trainer, agent_loop_manager=None)


def ray_trainer(trainer):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer.train_dataloader, trainer._dump_executor._shutdown = [None], False
    RayPPOTrainer.fit(trainer)


def one_step_off(trainer):
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer

    asyncio.run(OneStepOffRayTrainer.fit(trainer))


def separation(trainer):
    from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer

    trainer.logger = Tracking("p", "e", ["file"])
    trainer.metrics, trainer.timing_raw, trainer.max_steps_duration = raw(SUMS), {"step": 1}, 0
    SeparateRayPPOTrainer._fit_postprocess_step(trainer)


def fully_async(trainer):
    from verl.experimental.fully_async_policy.detach_utils import MetricsAggregator
    from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer

    trainer.logger, trainer.metrics_aggregator = Tracking("p", "e", ["file"]), MetricsAggregator(total_gpus=1)
    for clipped in (0.12, 0.0):  # two updates between two weight syncs
        update = raw(SUMS | {"length_1_to_15/clipped": clipped})
        trainer.metrics_aggregator.add_step_metrics(update | {"perf/time_per_step": 1.0}, sample_count=200)
    trainer_class = FullyAsyncTrainer.__ray_metadata__.modified_class
    trainer_class._fit_log_aggregated_training_metrics(trainer, {})


@pytest.mark.parametrize("fit", [synchronous, ray_trainer, one_step_off, separation, fully_async])
def test_every_trainer_logs_the_series(fit, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.setattr("verl.utils.skip.SkipManager.init", lambda config: None)
    trainer = MagicMock(global_steps=3, current_param_version=3)
    # What it logs first is a validation, and that is all that is asked for.
    logger = {"project_name": "p", "experiment_name": "e", "logger": ["file"]}
    trainer.config = OmegaConf.create({"trainer": logger | {"val_before_train": True, "val_only": True}})
    trainer._validate.return_value = raw(SUMS)
    fit(trainer)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    data = json.loads(line)["data"]
    assert {name: data.get(name) for name in SERIES} == pytest.approx(SERIES)
    assert not any(name.startswith("actor/fspo/") for name in data)


class Kept:
    def log(self, data, step):
        self.data = data


@pytest.fixture
def tracking():
    tracking = Tracking("p", "e", [])
    tracking.logger["kept"] = Kept()
    return tracking


def test_metrics_are_logged_where_the_series_cannot_be_and_each_cause_is_said_once(tracking, caplog):
    """Whatever the text of an error, which may hold the value of a step."""
    broken = [f"tensor({step})" for step in range(50)] + [object() for _ in range(50)]
    for step, value in enumerate(broken):
        tracking.log(data := raw({"length_1_to_15/responses": value}), step=step)
        assert tracking.logger["kept"].data == data
    warned = [record.message for record in caplog.records if record.message.startswith("no live series")]
    assert len(warned) == len(output.ONCE._causes) == 2
    assert "tensor(0)" in warned[0]


def test_the_trainers_own_metrics_are_left_alone(tracking):
    mine = raw(SUMS)
    tracking.log(data=mine, step=1, backend=["kept"])
    assert mine == raw(SUMS) and tracking.logger["kept"].data == live.series(mine)
    tracking.log(data={"timing_s/step": 1.0}, step=1)
    assert tracking.logger["kept"].data == {"timing_s/step": 1.0}
