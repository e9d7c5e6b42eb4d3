# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A range that follows a clip rate: the rule, one training step under every cut, records and checkpoints."""

import json
import logging
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_records import columns, write
from test_policy_loss import CUTS, MiniBatch, actor_config, padded_batch
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from fspo_verl.adaptive import EPS_MIN, FILE, GAIN, MOST_UPDATES, next_eps
from fspo_verl.band import Band
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.observe.records import CLIP_COLUMNS, COLUMNS, EPS_COLUMNS, read
from fspo_verl.observe.settings import RunSettings

BAND = {"eps_low": 0.05, "eps_high": 0.04}


@pytest.fixture(scope="module", autouse=True)
def a_process_group_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def controller(target=0.1, **band):
    made = FSPOPolicyLossConfig(target_clip_rate=target, **(band or BAND)).controller
    assert made is not None
    return made


# --- the rule --------------------------------------------------------------------------------------------------------


@given(
    eps=st.floats(1e-5, 1.0),
    counted=st.integers(1, 1000),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    target=st.floats(0.001, 0.999),
    eps_max=st.floats(1.0, 10.0),
)
def test_eps_rises_with_the_rate_and_stays_in_its_bounds(eps, counted, shares, target, eps_max):
    small, large = (next_eps(eps, share * counted, counted, target, eps_max) for share in sorted(shares))
    assert EPS_MIN <= small <= large <= eps_max
    assert eps * math.exp(-GAIN) * (1 - 1e-12) <= small and large <= eps * math.exp(GAIN) * (1 + 1e-12)
    assert next_eps(eps, target * counted, counted, target, eps_max) == pytest.approx(eps, rel=1e-12)


def follow(target, counted, steps, seed):
    """The clip rate of each step where both sides have as many responses, and S is normal; from twice the right eps."""
    random, right = np.random.default_rng(seed), NormalDist().inv_cdf(1 - target)
    follows, rates = controller(target, eps=2 * right, eps_max=20 * right), []
    for _ in range(steps):
        moved = random.standard_normal((2, counted)) > [[follows.eps["eps_low"]], [follows.eps["eps_high"]]]
        follows.move(np.array([[side.sum(), counted] for side in moved]))
        rates.append(moved.mean())
    return np.array(rates)


@pytest.mark.parametrize("target, counted", [(0.25, 2), (0.1, 2), (0.1, 4), (0.1, 64), (0.01, 16), (0.01, 512)])
def test_the_mean_rate_is_the_target_with_few_responses_as_with_many(target, counted):
    rates = np.array([follow(target, counted, 600, seed)[200:] for seed in range(8)])
    error = rates.mean(1).std() / math.sqrt(8)
    assert rates.mean() == pytest.approx(target, abs=4 * error + 0.03 * target)


@pytest.mark.parametrize("target", [0.001, 0.01, 0.1, 0.25])
def test_no_target_makes_eps_swing_from_step_to_step(target):
    """A step has so many responses here that their count hardly varies: eps stays where it is."""
    rates = follow(target, 1_000_000, 60, seed=0)[30:]
    assert rates.std() < 0.1 * target


@pytest.mark.parametrize("dual", [None, 0.06, math.inf])
def test_the_dual_clip_stays_where_it_is_set_or_at_three_times_the_wider_side(dual):
    follows = controller(**BAND, eps_dual=dual, length_power=0.3)
    for _ in range(10):
        follows.move(np.array([[5, 10], [5, 10]]))
        assert follows.band.dual == (3 * max(follows.eps.values()) if dual is None else dual) >= follows.band.high
    assert follows.band.low == 0.5 and follows.band.high == min(0.4, dual or math.inf)
    assert (follows.band.length_power, follows.band.normalization) == (0.3, "plain")


def test_a_bound_is_said_once(caplog):
    follows = controller(eps_max=0.06, **BAND)
    with caplog.at_level(logging.WARNING, logger="fspo_verl"):
        for said in (1, 2, 2):
            follows.move(np.array([[10, 10], [12, 100]] if said == 1 else [[9, 10], [9, 10]]))
            assert len(caplog.messages) == said
    assert "eps_low has reached its bound 0.06" in caplog.messages[0]
    for _ in range(120):
        follows.move(np.array([[0, 10], [0, 10]]))
    assert follows.band.low == follows.band.high == EPS_MIN


@pytest.mark.parametrize("counted, said", [(5, 1), (20, 0)])
def test_a_step_too_small_for_the_target_is_said_once(caplog, counted, said):
    follows = controller(0.01)
    with caplog.at_level(logging.WARNING, logger="fspo_verl"):
        for _ in range(2):
            follows.move(np.array([[0, counted], [0, counted]]))
    assert len(caplog.messages) == said and all("some 80 such steps" in message for message in caplog.messages)


# --- a training step -------------------------------------------------------------------------------------------------


def train(cut, steps=2):
    """Steps on the same responses; returns the last batch, its metrics, and the controller."""
    config = actor_config(policy_loss=FSPOPolicyLossConfig(target_clip_rate=0.3, **BAND))
    follows = config.policy_loss.controller
    for _ in range(steps):
        batch = MiniBatch()
        with follows.update():
            metrics = batch.step(CUTS[cut], config)
        follows.end_step()
    return batch, metrics, follows


@pytest.mark.parametrize("cut", ["even", "ragged", "single rows", "two ranks"])
def test_eps_does_not_depend_on_how_the_batch_is_cut(cut):
    """The same responses replayed: eps after each step is the same to the bit, and the gradient is its range's."""
    _, _, whole = train("one")
    _, _, parts = train(cut)
    assert parts.eps == whole.eps and whole.eps["eps_low"] != 0.05 and whole.eps["eps_high"] != 0.04
    batch, metrics, _ = train(cut, steps=3)
    plain = MiniBatch()
    expected = plain.step(CUTS[cut], actor_config(policy_loss=FSPOPolicyLossConfig(**whole.eps)))
    assert torch.equal(batch.gradient, plain.gradient) and (plain.gradient != 0).any()
    for name, eps in whole.eps.items():
        assert metrics.pop(f"fspo/{name}") == pytest.approx(eps, rel=1e-12)
    assert metrics == expected


def test_each_side_counts_the_responses_with_its_sign_of_the_advantage():
    follows = controller(0.4)
    table = {  # a response with A = 0 counts on no side
        "advantage": [1, 1, 1, -1, -1, -1, -1, 0],
        "clipped_upper": [1, 0, 0, 0, 0, 0, 0, 0],
        "clipped_lower": [0, 0, 0, 1, 0, 0, 0, 0],
        "clipped_dual": [0, 0, 0, 0, 0.5, 0, 0, 0],
    }
    with follows.update():
        follows.count({name: np.array(values, dtype=float) for name, values in table.items()})
    follows.end_step()
    assert follows.eps == {"eps_low": next_eps(0.05, 2, 4, 0.4, 0.5), "eps_high": next_eps(0.04, 1, 3, 0.4, 0.4)}


def counts():
    return {name: np.ones(3) for name in ("advantage", "clipped_upper", "clipped_lower", "clipped_dual")}


def test_only_a_whole_update_on_a_rank_that_counts_moves_eps():
    follows, whole = controller(), controller()
    follows.end_step()  # the weight sync before the first update
    with follows.update(counts_here=False):
        follows.count(counts())
    with pytest.raises(ZeroDivisionError), follows.update():
        follows.count(counts())
        1 / 0  # noqa: B018
    follows.end_step()
    assert follows.eps == BAND
    with follows.update():
        follows.count(counts())
        with follows.update():  # a part: another plugin has wrapped verl's update, and it is wrapped twice
            follows.count(counts())
        follows.count(counts())
    assert follows.eps == BAND
    follows.end_step()
    whole.move(np.array([[0, 0], [9, 9]]))
    assert follows.eps == whole.eps != BAND


@settings(max_examples=20, deadline=None)
@given(updates=st.lists(st.integers(0, 3), min_size=1, max_size=6), syncs=st.integers(1, 2))
def test_eps_moves_once_a_training_step_however_many_updates_and_syncs_it_has(updates, syncs, tmp_path_factory):
    """It moves as after one update of all the responses; a checkpoint before the sync has the eps after it."""
    follows, whole = controller(), controller()
    for batches in updates:
        with follows.update():
            for _ in range(batches):
                follows.count(counts())
    folder = tmp_path_factory.mktemp("checkpoint")
    follows.save(folder)
    assert follows.eps == BAND
    for _ in range(syncs):
        follows.end_step()
    number = 3 * sum(updates)
    whole.move(np.array([[0, 0], [number, number]]))
    assert follows.eps == whole.eps
    assert {name: json.loads((folder / FILE).read_text())[name] for name in BAND} == follows.eps


def test_a_trainer_that_never_sends_weights_is_said_once_to_leave_eps_as_it_is(caplog):
    follows, synced = controller(), controller()
    for _ in range(3 * MOST_UPDATES):
        with follows.update(), synced.update():
            follows.count(counts())
            synced.count(counts())
        synced.end_step()
    assert follows.eps == BAND != synced.eps
    (said,) = (text for text in caplog.messages if "update_weights" in text)
    assert f"has not moved eps in {MOST_UPDATES} updates" in said and "set target_clip_rate=null" in said


def test_a_trainer_that_would_never_move_eps_is_refused():
    config = actor_config(policy_loss=FSPOPolicyLossConfig(target_clip_rate=0.1))
    with pytest.raises(RuntimeError, match="target_clip_rate"):
        get_policy_loss_fn("fspo")(**padded_batch(), loss_agg_mode="token-mean", config=config)


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_keeps_eps_to_the_last_bit(tmp_path, caplog):
    follows = controller()
    follows.move(np.array([[1, 7], [2, 9]]))
    follows.save(tmp_path)
    resumed = controller(eps=0.2)
    resumed.load(tmp_path)
    assert resumed.eps == follows.eps and resumed.band.low == follows.eps["eps_low"]
    bounded = controller(eps=0.02, eps_max=0.03)
    bounded.load(tmp_path)
    assert bounded.eps == {"eps_low": 0.03, "eps_high": 0.03}
    fresh = controller(eps=0.2)
    fresh.load(tmp_path / "elsewhere")
    assert fresh.eps == {"eps_low": 0.2, "eps_high": 0.2} and "elsewhere" in caplog.text


@pytest.mark.parametrize(
    ("unit", "power", "taken"),
    [
        ({"length_power": 0.3}, 0.3, True),
        ({"length_power": 0.3, "shape": None}, 0.3, True),
        ({"length_power": 1.0}, 0.5, False),
        ({"length_power": 0.5, "shape": [[10, 3.1]]}, 0.5, False),
        ({}, 0.0, False),
    ],
)
def test_an_eps_in_units_of_another_power_is_not_taken(tmp_path, caplog, unit, power, taken):
    (tmp_path / FILE).write_text(json.dumps(BAND | unit))
    resumed = controller(eps=0.2, length_power=power)
    resumed.load(tmp_path)
    assert resumed.eps == (BAND if taken else {"eps_low": 0.2, "eps_high": 0.2})
    assert ("another power of the length" in caplog.text) != taken
    assert (f"goes on with eps_low={BAND['eps_low']:.3g}" in caplog.text) == taken


CORRUPT = [
    "[" * 100_000,
    f'{{"eps_low": 1{"0" * 400}, "eps_high": 0.03}}',
    "\0" * 999,
    "",
    '{"eps_low": 0.03, "eps_hi',
    '{"eps_low": 0.03}',
    "[]",
    "null",
] + [f'{{"eps_low": {value}, "eps_high": 0.03}}' for value in ("NaN", "-1", "0", "Infinity", '"wide"', "true", "null")]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("text", CORRUPT)
def test_a_file_without_an_eps_is_an_error_on_every_rank(tmp_path, monkeypatch, text, rank):
    (tmp_path / FILE).write_text(text)
    if rank:  # is told what the first rank has found
        told, name = [], "broadcast_object_list"
        monkeypatch.setattr(torch.distributed, name, lambda found, src: told.extend(found))
        with pytest.raises(ValueError):
            controller().load(tmp_path)
        monkeypatch.setattr(torch.distributed, name, lambda found, src: found.__setitem__(0, told[0]))
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    follows = controller()
    with pytest.raises(ValueError, match=rf"{tmp_path / FILE} has no eps_low and eps_high above 0"):
        follows.load(tmp_path)
    assert follows.eps == BAND


def test_records_hold_the_eps_in_force_of_each_response_once_there_is_one(tmp_path):
    for step, eps in ((1, None), (2, 0.1), (3, 0.2), (4, 0.4)):
        settings = RunSettings("fspo", Band(**BAND), target_clip_rate=eps and 0.1)
        values = columns() | {name: np.full(4, eps) for name in EPS_COLUMNS}
        write(tmp_path, [step], settings=settings, values=values)
    with pytest.warns(UserWarning, match="target_clip_rate"):  # the run began with a fixed eps
        recorded = read(tmp_path)
    records, found = recorded.table, recorded.settings
    assert list(records.columns) == [*COLUMNS, *CLIP_COLUMNS, *EPS_COLUMNS]
    for name in EPS_COLUMNS:
        assert records[name].dropna().tolist() == [0.1] * 4 + [0.2] * 4 + [0.4] * 4
        assert records[name].isna().tolist() == [True] * 4 + [False] * 12
    assert (found.band.low, found.band.high, found.band.dual, found.target_clip_rate) == (0.2, 0.2, 0.2, 0.1)
