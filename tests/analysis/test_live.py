# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The live series are those of the records, whatever the cut, and every trainer of verl logs them."""

import asyncio
import json
from unittest.mock import MagicMock

import live_reference
import numpy as np
import pytest
from omegaconf import OmegaConf
from simulated_records import frame
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.tracking import Tracking

import fspo_verl.config  # noqa: F401 - wraps verl's Tracking, as in every worker with a loss of this package
from fspo_verl import output
from fspo_verl.analysis import live
from fspo_verl.clips import BandClip
from fspo_verl.observe.metrics import metrics

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
    "sigma_squared": 0.045,
    "step_rows": 400.0,
    "rows": 200.0,
    "ratio": 0.9,
    "ratio_squared": 1.0,
    "sequence_fraction": 0.9,
    "on_policy_fraction": 0.5,
    "on_policy_sigma_squared": 0.02,
}
SERIES = {
    "fspo/clip_rate/all": 0.28,
    "fspo/clip_rate/better": 0.1,
    "fspo/clip_rate/worse": 0.4,
    "fspo/not_finite": 0.0,
    "fspo/sigma": 0.05**0.5,
    "fspo/moved_sigma": 0.25,
    "fspo/clip_rate/len_00001_00015": 0.4,
    "fspo/clip_rate/len_00064_up": 0.1,
    "fspo/ess": 0.9,
    "fspo/noise_sigma": 0.2,
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


def logged_by_verl(records, cut, mini_batches, band=None):
    """The metrics that verl makes of a step: ``cut`` gives the ranks, and how many micro-batches each has.

    With a band they are those of the loss fspo.
    """
    names = ("length", "log_ratio", "quadratic_variation", "advantage", "truncated")
    columns = {name: records[name] for name in names if name in records}
    columns["finite"] = records.decision != "nonfinite"
    if band is not None:
        columns["outside"] = BandClip("", "", band).outside(records)
    columns["clipped_upper"] = records.clipped * (records.advantage > 0)
    columns["clipped_lower"] = records.clipped * (records.advantage < 0)
    columns["clipped_dual"] = np.zeros(len(records))
    columns = {name: np.asarray(column, np.float64) for name, column in columns.items()}
    rng, updates = np.random.default_rng(len(cut)), {}
    for number, rows in enumerate(np.split(np.arange(len(records)), mini_batches)):
        ranks = []
        for share, parts in zip(np.split(rows, len(cut)), cut, strict=True):
            ends = np.sort(rng.choice(np.arange(1, len(share)), parts - 1, replace=False))  # ragged
            gathered = {}
            for micro_batch in np.split(share, ends):
                part = {name: column[micro_batch] for name, column in columns.items()}
                for name, metric in metrics(part, BINS, len(rows), number, on_policy=number == 0).items():
                    gathered.setdefault(name, Metric("mean")).extend(metric)
            ranks.append(gathered)
        for name in ranks[0]:
            updates.setdefault(name, []).append(Metric.aggregate_dp([rank[name] for rank in ranks]))
    return reduce_metrics(updates)


@pytest.mark.parametrize("mini_batches", [1, 3])
@pytest.mark.parametrize("cut", [[1], [40], [3, 1, 17, 4]], ids=str)
def test_series_equal_what_the_records_give_to_the_last_digit(cut, mini_batches):
    rng = np.random.default_rng(5)
    length = np.exp(rng.uniform(0, np.log(1000), 1200)).astype(int)
    length[rng.random(1200) < 0.02] = 0  # padding
    advantage = rng.normal(size=1200) * (rng.random(1200) < 0.6) * (length > 0)
    clipped = (rng.random(1200) < 0.2) & (advantage != 0)
    log_ratio = rng.normal(scale=0.05 * np.sqrt(length))
    records = frame(length, log_ratio, 0.0025 * length, advantage, clipped=clipped.astype(np.float32))
    records["mini_batch"] = np.repeat(np.arange(mini_batches), 1200 // mini_batches)
    got = live.series(logged_by_verl(records, cut, mini_batches))
    expected = live_reference.series(records[records.length > 0], BINS, min_count=50)
    assert 0 < expected["fspo/lre"] < 1 and ("fspo/moved_sigma" in expected) == (mini_batches > 1)
    assert got == pytest.approx(expected, rel=1e-12, abs=0)


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
    assert {name: data[name] for name in raw(SUMS)} == pytest.approx(raw(SUMS))


class Kept:
    def log(self, data, step):
        self.data = data


@pytest.fixture
def tracking():
    tracking = Tracking("p", "e", [])
    tracking.logger["kept"] = Kept()
    return tracking


def test_metrics_are_logged_where_the_series_cannot_be_and_each_cause_is_said_once(tracking, caplog, monkeypatch):
    """Whatever the text of an error, which may hold the value of a step."""
    monkeypatch.setattr(live, "_once", output.Once())
    broken = [f"tensor({step})" for step in range(50)] + [object() for _ in range(50)]
    for step, value in enumerate(broken):
        tracking.log(data := raw({"length_1_to_15/responses": value}), step=step)
        assert tracking.logger["kept"].data == data
    warned = [record.message for record in caplog.records if record.message.startswith("no live series")]
    assert len(warned) == len(live._once._causes) == 2
    assert "tensor(0)" in warned[0]


def test_the_trainers_own_metrics_are_left_alone(tracking):
    mine = raw(SUMS)
    tracking.log(data=mine, step=1, backend=["kept"])
    assert mine == raw(SUMS) and tracking.logger["kept"].data.keys() > mine.keys()
    tracking.log(data={"timing_s/step": 1.0}, step=1)
    assert tracking.logger["kept"].data == {"timing_s/step": 1.0}
