# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The test of length keeps its level, finds what is there, and every run gets a sentence."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import binom
from simulated_records import frame, simulate_run

from fspo_verl.analysis.length_effect import RARE, length_effect, length_score
from fspo_verl.analysis.verdict import percent, verdict
from fspo_verl.band import Band
from fspo_verl.observe.settings import RunSettings

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/studies/levels"))

import levels  # noqa: E402

RUNS = 60


def simulated(seed=0, **kwargs):
    return levels.simulate(np.random.default_rng(seed), **kwargs)


@pytest.mark.parametrize(
    "scenario",
    [
        "prompts with rates of their own",
        "lengths and rates that rise over training",
        "prompts of 30 epochs",
        "slopes that vary by step, mean 0, sd 0.6",
    ],
)
def test_where_lengths_are_clipped_alike_a_dependence_is_called_as_rarely_as_stated(scenario):
    called, covered, answers = levels.rejections(levels.FAIR[scenario], RUNS)
    assert answers == RUNS and called * RUNS <= binom.ppf(0.999, RUNS, RARE) and called == pytest.approx(1 - covered)


def test_a_dependence_is_found_and_the_interval_holds_it():
    called, covered, _ = levels.rejections(levels.UNFAIR["k = -0.2"], RUNS)
    assert called > 0.6 and covered * RUNS >= binom.ppf(0.001, RUNS, 1 - RARE)


@pytest.mark.parametrize("exponent", [-0.5, 0.0, 0.4])
def test_the_estimate_is_that_of_a_poisson_regression_given_the_totals_of_the_strata(exponent):
    records = simulated(exponent=exponent)

    def loss(k):
        total = 0.0
        for _, part in records.groupby(["step", "mini_batch", records.advantage > 0]):
            x = k * np.log(part.length)
            total += part.clipped.sum() * math.log(np.exp(x).sum()) - (part.clipped * x).sum()
        return total

    expected = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-6}).x
    assert length_effect(records).exponent == pytest.approx(expected, abs=1e-4)


@given(st.integers(0, 10_000), st.sampled_from([-0.3, -0.1, 0.0, 0.1, 0.3]), st.integers(2, 9))
@settings(max_examples=20, deadline=None)
def test_p_and_interval_agree_and_units_and_order_do_not_matter(seed, exponent, factor):
    records = simulated(seed, exponent=exponent, steps=12, prompts=16)
    effect = length_effect(records)
    assert effect.lower <= effect.exponent <= effect.upper and effect.depends == (effect.p < RARE)
    assert effect.depends == (not effect.lower <= 0 <= effect.upper)
    assert np.sign(effect.exponent) == -np.sign(length_score(records, 1 - records.clipped)) or not effect.exponent
    shuffled = records.sample(frac=1, random_state=seed).assign(length=lambda rows: factor * rows.length)
    assert length_effect(shuffled)[:4] == pytest.approx(effect[:4], abs=1e-4)
    side = records.assign(clipped=records.clipped.where(records.advantage > 0, 1.0))  # says nothing of lengths
    assert length_effect(side).exponent == pytest.approx(
        length_effect(records[records.advantage > 0]).exponent, abs=1e-4
    )


def test_rates_of_the_thirds_are_adjusted_for_steps_that_clip_more():
    records = simulated(steps=40, prompts=64, trend=1.5)
    pooled = [
        records.clipped[records.length.between(t.shortest, t.longest)].mean() for t in length_effect(records).thirds
    ]
    adjusted = [third.rate for third in length_effect(records).thirds]
    assert pooled[2] > 1.5 * pooled[0] and max(adjusted) < 1.25 * min(adjusted)


def test_a_prompt_that_comes_back_is_one_cluster():
    records = (
        simulated(prompt_effect=1.0).drop(columns="prompt").assign(prompt_text_hash=lambda r: np.arange(len(r)) // 8)
    )
    by_uid = records.assign(prompt=np.arange(len(records)), prompt_text_hash=records.prompt_text_hash % 19)
    assert length_effect(by_uid) is None  # 19 prompts
    assert length_effect(by_uid.drop(columns="prompt_text_hash")) is not None


# --- the sentence ----------------------------------------------------------------------------------------------------


def test_the_sentence_says_who_is_clipped_more_and_the_advice_what_to_paste():
    records = simulate_run(np.random.default_rng(0), 40, 32, kappa=0.0)
    fixed = Band(eps=0.2, length_power=0.0)
    records["clipped"] = (np.abs(records.log_ratio) > 0.2) & (records.advantage * records.log_ratio > 0)
    records.attrs["settings"] = RunSettings("fspo", fixed)
    said = verdict(records)
    assert "Longer responses are clipped more (clip rate ~ length^" in said.sentence
    assert said.sentence.startswith(f"Clips {percent(said.rate)} of {said.responses:,} responses: ")
    assert "sqrt(length)" in said.advice and said.overrides["actor_rollout_ref.actor.policy_loss.length_power"] == 0.5
    own = verdict(records.assign(clipped=np.random.default_rng(0).random(len(records)) < 0.1))
    assert "No difference between lengths" in own.sentence and own.advice.startswith("Keep") and not own.overrides


LITTLE = {
    "nothing recorded": (frame([]), "no response has an advantage"),
    "no advantage": (frame([5, 9], advantage=0), "no response has an advantage"),
    "nothing clipped": (frame([50, 90] * 100), "Clips none of 200 responses"),
    "everything clipped": (frame([50, 90] * 100, clipped=np.ones(200)), "nothing is left to compare"),
    "one length": (frame([50] * 200, clipped=np.arange(200) % 2), "All have one length"),
    "few prompts": (frame([50, 90] * 10, clipped=np.arange(20) % 2), "clips fell on 10 prompts, and a test needs 20"),
    "one prompt a stratum": (
        frame([50, 90] * 100, step=np.arange(200), clipped=np.arange(200) % 2),
        "too few mini-bat",
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", LITTLE)
def test_too_few_to_say_is_an_answer(case):
    records, text = LITTLE[case]
    said = verdict(records)
    assert text in said.sentence and said.effect is None and said.advice and not said.overrides


def test_lengths_that_decide_alone_have_an_interval_that_is_open():
    effect = length_effect(frame([50, 90] * 100, clipped=np.arange(200) % 2))
    assert effect.p < 1e-6 and effect.lower > 1 and math.isinf(effect.upper)
