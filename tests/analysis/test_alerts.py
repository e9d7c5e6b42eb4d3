# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Alerts of a run: once per cause, in the words of the conclusion, and never in the way of training."""

import dataclasses
import math
from itertools import pairwise
from operator import attrgetter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_records import frame
from test_live import SUMS, Kept, logged_by_verl, raw
from verl.utils.tracking import Tracking

from fspo_verl import output
from fspo_verl.analysis import alerts, live
from fspo_verl.analysis import causes as c
from fspo_verl.analysis.evidence import Evidence, evidence_of
from fspo_verl.analysis.judgement import evidence_of_records
from fspo_verl.band import Band
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.observe.quotients import Counted, parts
from fspo_verl.observe.settings import RunSettings

MOVED = {"moved_sigma_squared": 0.88, "on_policy_outside_fraction": 0.0, "length_1_to_15/clipped": 0.01}


def step(sums=(), others=()):
    """The metrics of a sound step as they are logged, with these sums in place of its own."""
    return dict(live.logged(raw(SUMS | MOVED | dict(sums)) | dict(others)))


SOUND = step()
FIRES = {
    "NaN in log-probs": (c.NOT_FINITE, {"nonfinite_fraction": 0.02}, {}),
    "NaN in the gradient": (c.NOT_FINITE, {}, {"actor/grad_norm": math.nan}),
    "NaN in a tensor": (c.NOT_FINITE, {}, {"actor/grad_norm": torch.tensor(math.nan)}),
    "cut off": (c.CUT_OFF, {"truncated_fraction": 0.9 * 0.3}, {}),
    "noise": (c.NOISE, {"on_policy_outside_fraction": 0.2}, {}),
    "noise is what moves": (c.NOISE, {"moved_sigma_squared": 0.02}, {}),
    "rejected": (c.MISMATCH, {"rollout_rejected_fraction": 0.95}, {}),
    "rejected, as verl counts it": (c.MISMATCH, {}, {"rollout_corr/rollout_rs_seq_masked_fraction": 0.3}),
    "few of the ratios": (c.WEIGHTS, {"ratio": 0.1, "ratio_squared": 0.5}, {}),
    "few of the rollout's weights": (c.MISMATCH, {}, {"rollout_corr/rollout_is_eff_sample_size": 0.04}),
    "level": (c.LEVEL, {"length_1_to_15/clipped": 0.1, "length_64_up/clipped": 0.07}, {}),
    "length": (c.LENGTH, {"length_1_to_15/clipped": 0.06}, {}),
}


def config(**fields):
    schema = "fspo_verl.config.FSPOPolicyLossConfig"
    policy_loss = {"_target_": schema, "loss_mode": "fspo", "eps": 0.03, "length_power": 0.5} | fields
    return {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 64, "policy_loss": policy_loss}}}


def causes(found):
    return [one.id for one in found]


@pytest.mark.parametrize("name", FIRES)
def test_a_cause_is_said_once_when_it_fires(name):
    """One step is enough to say that a run is broken, and too few for advice on its clip."""
    cause, sums, others = FIRES[name]
    run, bad = alerts.Alerts(config()), step(sums, others)
    first = 1 if cause in c.HEALTH else c.STEPS
    said = [run.of_step(bad) for _ in range(30)]
    assert list(map(causes, said)) == [[]] * (first - 1) + [[cause]] + [[]] * (30 - first)
    (finding,) = said[first - 1]
    assert finding.sentence and finding.advice
    assert run.of_step(SOUND) == run.of_step(bad) == []


@pytest.mark.parametrize("health", ["NaN in log-probs", "cut off", "noise", "rejected"])
@pytest.mark.parametrize("tuning", ["level", "length"])
def test_advice_on_the_clip_waits_until_the_run_is_sound(health, tuning):
    run = alerts.Alerts(config())
    (cause, broken, others), (later, unlike, _) = FIRES[health], FIRES[tuning]
    both = step(unlike | broken, others)
    assert causes(one for _ in range(15) for one in run.of_step(both)) == [cause]
    assert causes(one for _ in range(15) for one in run.of_step(step(unlike))) == [later]


def test_one_field_turns_them_off():
    run = alerts.Alerts(config(alerts=False))
    assert not [one for _, sums, others in FIRES.values() for one in run.of_step(step(sums, others))]
    with pytest.raises(ValueError, match="alerts="):
        FSPOPolicyLossConfig(alerts="no")


@pytest.mark.parametrize("bypass", [False, True])
def test_metrics_give_the_evidence_that_records_give(bypass):
    """All of a step's responses; whatever the cut of the batch, by another code."""
    rng = np.random.default_rng(0)
    length = np.exp(rng.uniform(1, np.log(1000), 1200)).astype(int)
    mini_batch = np.repeat([0, 1, 2], 400).astype(np.int32)
    q = length * rng.gamma(4, 0.25, 1200) * (0.01**2 + (0.02 * mini_batch) ** 2)
    advantage, clipped = rng.choice([-1.0, 0.0, 1.0], 1200), (rng.random(1200) < 8 / length).astype(np.float32)
    records = frame(length, np.sqrt(q), q, advantage, clipped=clipped * (advantage != 0), mini_batch=mini_batch)
    settings = RunSettings("observed", None, old_log_probs_from_rollout=bypass)
    logged = logged_by_verl(records, [3, 3], 3)
    if bypass:  # as a worker logs them
        first = records[mini_batch == 0]
        for name in ("fraction", "sigma_squared"):
            logged[f"actor/fspo/moved_{name}"] += logged[f"actor/fspo/on_policy_{name}"]
        logged |= {name: 0.0 for name in logged if "on_policy" in name}
        logged["actor/fspo/rollout_length"] = first.length.sum() / 1200
        logged["actor/fspo/rollout_quadratic_variation"] = first.quadratic_variation.sum() / 1200
    shown, recorded = evidence_of(live.logged(logged), settings), evidence_of_records(records, settings)
    for name in ("clip_rate", "noise.share", "noise.sigma", "engines.share", "not_finite", "sides", "responses"):
        assert attrgetter(name)(shown) == pytest.approx(attrgetter(name)(recorded)), name
    assert not shown.one_step and not recorded.one_step and shown.moved is recorded.moved is True
    counted = records[records.advantage != 0]
    for part in (shown.thirds[0], shown.thirds[-1]):
        chosen = counted[counted.length.between(part.shortest, np.nan_to_num(part.longest, nan=np.inf))]
        assert part.responses == pytest.approx(len(chosen)) and part.clipped == pytest.approx(chosen.clipped.sum())
    ten = dataclasses.replace(shown, steps=c.STEPS)
    assert causes(alerts.alarming(c.conclude(ten), ten)) == [c.LENGTH]


@given(st.lists(st.tuples(st.floats(1, 1000), st.floats(0, 1)), min_size=2, max_size=9))
def test_thirds_are_the_bins_joined(bins):
    bins = [Counted(10.0 * i + 1, 10.0 * i + 10, n, n * rate) for i, (n, rate) in enumerate(bins)]
    thirds = parts(bins)
    if not thirds:  # one bin has nearly all
        return
    for name in ("responses", "clipped"):
        assert sum(getattr(one, name) for one in thirds) == pytest.approx(sum(getattr(one, name) for one in bins))
    assert len(thirds) in (2, 3) and all(a.longest < b.shortest for a, b in pairwise(thirds))


def test_lengths_of_few_clips_are_no_alert():
    few = [Counted(1, 9, 20, 4), Counted(10, 19, 20, 2), Counted(20, 29, 20, 1)]
    many = [one._replace(responses=one.responses * 100, clipped=one.clipped * 100) for one in few]
    for thirds, said in ((few, [c.UNKNOWN]), (many, [c.LENGTH])):
        assert causes(c.conclude(Evidence(clip_rate=0.1, thirds=tuple(thirds)))) == said


def test_a_band_that_follows_a_clip_rate_is_held_against_noise_as_it_is():
    settings = RunSettings("fspo", Band())
    assert evidence_of(SOUND | {"fspo/eps_low": 0.2, "fspo/eps_high": 0.3}, settings).band.high == 0.3
    assert evidence_of(SOUND, settings).band == Band()


# --- in verl's logger ------------------------------------------------------------------------------------------------


def tracking(config):
    tracking = Tracking("p", "e", [], config=config)
    tracking.logger["kept"] = Kept()
    return tracking


def test_the_logger_of_a_trainer_says_them_with_the_step(caplog):
    cut_off = raw(SUMS | MOVED | {"truncated_fraction": 0.5})
    run = tracking(config())
    for step in range(7, 12):
        run.log(cut_off, step=step)
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("step 7: 56% of the responses are cut off") and "max_response_length" in said
    tracking(config()).log(cut_off, 1)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("config", [{"actor_rollout_ref": 3}, None])
def test_whatever_breaks_is_said_once_per_cause_and_training_goes_on(config, caplog, monkeypatch):
    """Whatever its text, which may hold the value of a step."""

    def broken(metrics, *_):
        if (step := metrics["actor/lr"]) < 25:
            raise ValueError(f"{step} responses")
        raise KeyError(step)

    monkeypatch.setattr(alerts, "evidence_of", broken)
    run = tracking(config)
    for step in range(50):
        run.log(raw(SUMS | MOVED) | {"actor/lr": float(step)}, step)
        assert run.logger["kept"].data.keys() >= SOUND.keys()
    causes_said = [record.message.split(": ")[1] for record in caplog.records if alerts._LOST in record.message]
    assert causes_said[-2:] == ["ValueError", "KeyError"] and len(causes_said) == len(output.ONCE._causes) == 2
    assert "Traceback" not in caplog.text


def test_metrics_of_another_loss_are_not_looked_at(caplog, monkeypatch):
    monkeypatch.setattr(alerts.Alerts, "of_step", None)
    tracking(config()).log({"actor/grad_norm": math.nan, "actor/pg_clipfrac": 0.9}, 1)
    assert not caplog.records


def test_a_logger_that_was_built_before_the_wraps_gives_alerts_without_a_config(caplog):
    run = tracking(config())
    del run.fspo_alerts
    run.log(raw(SUMS | MOVED) | {"actor/grad_norm": math.nan}, 1)
    assert "step 1: " in caplog.text and "actor/grad_norm" in caplog.text
