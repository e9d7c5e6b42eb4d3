# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Numerical noise: measured on responses that have not moved and on no others, and said where a band is below it."""

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from simulated_records import frame
from test_doctor import SELECT
from test_mismatch import Bypass, run, worker_of
from test_policy_loss import actor_config
from test_records import counted_ppo_loss, writers  # noqa: F401  fixtures

from fspo_verl.analysis import calibration, conclusion, numerical_noise
from fspo_verl.analysis.runs import Run
from fspo_verl.analysis.verdict import verdict
from fspo_verl.band import Band
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.launch import doctor
from fspo_verl.observe import microbatch, noise
from fspo_verl.observe.records import read_records
from fspo_verl.observe.settings import RunSettings

ON_POLICY = ("on_policy_fraction", "on_policy_sigma_squared", "on_policy_outside_fraction")


# --- the live metric -------------------------------------------------------------------------------------------------


def test_log_probs_of_the_rollout_engine_are_not_called_noise(counted_ppo_loss, writers, tmp_path):  # noqa: F811
    config = actor_config(policy_loss=FSPOPolicyLossConfig(eps=0.01, records_dir=str(tmp_path)))
    values = []
    for step in range(6, 11):
        microbatch.synced(step, worker_of(True))
        values.append(run(counted_ppo_loss, config, "ragged", Bypass()))
    assert all(np.sum(of[f"actor/fspo/{name}"]) == 0 for of in values for name in ON_POLICY)
    assert np.sum(values[0]["actor/fspo/sigma_squared"]) > 0
    for writer in writers:
        writer.flush()
    records = read_records(tmp_path)
    assert numerical_noise.of_records(records, records.attrs["settings"], Band()) is None


# --- whether the band lies below it ----------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 1000),
    sigma=st.floats(1e-6, 1.0),
    rows=st.integers(100, 500),
    band=st.sampled_from([Band(), Band(length_power=1.0), Band(eps_low=0.01, eps_high=0.05), Band(length_power=0.0)]),
)
def test_a_band_widened_as_told_leaves_the_share_outside(seed, sigma, rows, band):
    rng = np.random.default_rng(seed)
    length = rng.integers(1, 500, rows)
    records = frame(length, sigma * np.sqrt(length) * rng.standard_normal(rows), sigma**2 * length)
    widen = numerical_noise.of_records(records, None, band).widen

    def outside(factor):
        low, high = (factor * eps for eps in (band.low, band.high))
        scaled = Band(eps_low=low, eps_high=high, length_power=band.length_power)
        return numerical_noise.of_records(records, None, scaled).outside

    assert outside(widen * 1.001) <= noise.SHARE < outside(widen * 0.999)


@pytest.mark.parametrize(
    ("sigma", "band", "warned"),
    [
        (0.054, Band(), True),  # bfloat16 on a CPU
        (0.02, Band(), True),
        (0.008, Band(), False),
        (1e-7, Band(), False),
        (0.054, Band(0.15), False),
    ],
)
def test_the_remedy_names_what_helps_and_its_band_ends_it(sigma, band, warned):
    rng = np.random.default_rng(0)
    length = rng.integers(10, 500, 1000)
    records = frame(length, sigma * np.sqrt(length) * rng.standard_normal(1000), sigma**2 * length)
    found = numerical_noise.of_records(records, None, band)
    assert (noise.finding(found, band) is not None) == warned
    if warned:
        text = noise.remedy(found)
        assert "float32" in text and "docs/noise.md" in text
        times = float(re.search(r"([\d.]+) times as wide", text)[1])
        assert times == pytest.approx(found.widen, rel=0.1)
        wider = Band(times * band.eps)
        assert noise.finding(numerical_noise.of_records(records, None, wider), wider) is None


# --- the remedy that is named ------------------------------------------------------------------------


def test_the_override_that_is_named_is_one():
    override = re.search(r"\((\+\+actor_rollout_ref\S+)\)", noise.HELP)[1]
    key = override.split("={")[0].lstrip("+")
    told = doctor.with_config("verl.trainer.main_ppo", [SELECT, override], lambda c: OmegaConf.select(c, key))
    assert told.param_dtype == "fp32"


# --- calibrate and report --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "warned"), [(0.03, True), (1e-6, False)])
def test_calibrate_and_report_tell_the_noise(sigma, warned, tmp_path):
    """Two mini-batches a step: the first is noise of this sigma, the second that and a move of 0.02 per token."""
    rng = np.random.default_rng(0)
    length, mini_batch = rng.integers(10, 400, 2000), np.arange(2000) % 2
    spread = np.sqrt(sigma**2 + (mini_batch * 0.02) ** 2)
    log_ratio, advantage = spread * np.sqrt(length) * rng.standard_normal(2000), rng.choice([-1.0, 1.0], 2000)
    records = frame(length, log_ratio, spread**2 * length, advantage, np.arange(2000) // 4, mini_batch=mini_batch)
    records.attrs["settings"] = RunSettings("fspo", Band())
    run = Run("run", tmp_path, pd.DataFrame(), records, None, [])
    calibrated = calibration.calibrate(records, 0.1)
    assert calibrated.noise.sigma == pytest.approx(sigma, rel=1e-3)
    assert ("nothing to paste: numerical noise" in calibration.text(calibrated, run)) == warned
    said = verdict(records)
    assert (said.cause == conclusion.NOISE) == warned == ("times as wide" in said.advice)
