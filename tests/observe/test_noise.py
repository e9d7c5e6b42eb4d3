# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Numerical noise: measured on responses that have not moved and on no others, and said where a band is below it."""

import math
import re
from statistics import NormalDist

import numpy as np
import pytest
from composed import composed
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from simulated_records import frame
from test_doctor import SELECT

from fspo_verl.analysis import calibration, causes
from fspo_verl.analysis.judgement import evidence_of_records
from fspo_verl.analysis.logs import Log
from fspo_verl.analysis.runs import Run
from fspo_verl.band import Band
from fspo_verl.observe import noise
from fspo_verl.observe.noise import Noise
from fspo_verl.observe.records import Records
from fspo_verl.observe.settings import RunSettings


def noisy(rng, rows, sigma, longest=500):
    """Responses that no update has moved, of normal noise."""
    length = rng.integers(1, longest, rows)
    return frame(length, sigma * np.sqrt(length) * rng.standard_normal(rows), sigma**2 * length)


def told(records, band):
    return causes.narrower(evidence_of_records(records, RunSettings("fspo", band), tested=False))


@given(seed=st.integers(0, 1000), sigma=st.floats(0.004, 0.3), eps=st.floats(0.01, 0.1))
def test_a_band_widened_as_told_is_above_the_noise_and_keeps_it_out_of_the_weights(seed, sigma, eps):
    records = noisy(np.random.default_rng(seed), 4000, sigma, longest=100)
    evidence = evidence_of_records(records, RunSettings("fspo", Band(eps)), tested=False)
    if (found := causes.narrower(evidence)) is None:
        return
    advised = re.search(r"([\d.]+) times as wide", found.advice)
    # E[w]² / E[w²] of w = e^S, whose exact value is exp(-σ²L): of noise that a wide band lets in.
    kept = math.exp(-(evidence.noise.sigma**2) * records.length.max())
    assert bool(advised) == (kept > math.exp(-(noise.EPS_IN_SIGMA**-2)))
    if advised:
        times = float(advised[1])
        assert times > 1 and times * eps == pytest.approx(noise.EPS_IN_SIGMA * sigma, rel=0.2)
        assert told(noisy(np.random.default_rng(seed + 1), 4000, sigma, 100), Band(1.2 * times * eps)) is None


@pytest.mark.parametrize("longest", [64, 512, 2048, 8192, 32768, None])
@pytest.mark.parametrize("sigma", [0.0035, 0.02, 0.051, 0.14, None])
def test_one_recipe_removes_the_noise_first_and_widens_only_by_what_was_measured(sigma, longest):
    told = Noise(sigma, longest)
    remedies = {told.remedy(), told.remedy("An eps of 0.5"), Noise(sigma, longest, weighs=False).remedy()}
    assert all(text.startswith(f"First {noise.SAME}, or {noise.FLOAT32}. {noise.PRICE}") for text in remedies)
    widens = "An eps of 0.5" in told.remedy("An eps of 0.5")
    assert widens == bool(sigma and longest and noise.EPS_IN_SIGMA * sigma * math.sqrt(longest) < 1)
    assert (noise.UNKNOWN in told.remedy()) == (None in (sigma, longest))
    # A ratio of a mean log-ratio carries next to none of it.
    assert "An eps of 0.5" in Noise(sigma, longest, weighs=False).remedy("An eps of 0.5")


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
def test_a_clip_narrower_than_the_noise_is_told_with_the_share_that_a_normal_law_puts_outside(sigma, band, warned):
    found = told(noisy(np.random.default_rng(0), 4000, sigma), band)
    assert (found is not None) == warned
    if found is not None:
        assert "float32" in found.advice
        assert found.value == pytest.approx(2 * NormalDist().cdf(-min(band.low, band.high) / sigma), abs=0.03)


def test_the_override_that_is_named_is_one():
    override = re.search(r"\((\+\+actor_rollout_ref\S+)\)", noise.FLOAT32)[1]
    key = override.split("={")[0].lstrip("+")
    told = composed([SELECT, override], lambda config: OmegaConf.select(config, key))
    assert told.param_dtype == "fp32"


@pytest.mark.parametrize(("sigma", "warned"), [(0.03, True), (1e-6, False)])
def test_calibrate_and_report_tell_the_noise(sigma, warned, tmp_path):
    """Two mini-batches a step: the first is noise of this sigma, the second that and a move of 0.02 per token."""
    rng = np.random.default_rng(0)
    length, mini_batch = rng.integers(10, 400, 2000), np.arange(2000) % 2
    spread = np.sqrt(sigma**2 + (mini_batch * 0.02) ** 2)
    log_ratio, advantage = spread * np.sqrt(length) * rng.standard_normal(2000), rng.choice([-1.0, 1.0], 2000)
    records = frame(length, log_ratio, spread**2 * length, advantage, np.arange(2000) // 4, mini_batch=mini_batch)
    run = Run("run", tmp_path, Log.of([]), Records(records, RunSettings("fspo", Band()), len(records)))
    first, *_, band = calibration.calibrate(run, 0.1)
    assert band.id == calibration.EPS and bool(band.overrides) != warned == ("nothing to paste" in band.sentence)
    assert (first.id == causes.NOISE) == warned == (noise.SAME in first.advice) == (noise.SAME in band.advice)
    assert evidence_of_records(records, run.settings).noise.sigma == pytest.approx(sigma, rel=1e-3)
