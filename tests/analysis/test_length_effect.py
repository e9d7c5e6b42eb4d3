# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The test of length keeps its level, sees lines and curves, and says no more than so many steps can tell."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import binom
from simulated_records import frame

from fspo_verl.analysis.length_effect import BY_SIDE, ENDS, LONGER, MIDDLE, RARE, SHORTER, _Strata, length_effect

POWER = 0.9  # of kinds of dependence that are plain, where a test also holds its level for slopes that persist
RUNS = 60


def simulated(seed=0, steps=15, prompts=32, group=8, rate=0.1, *, log_rate=np.zeros_like, slopes=0.0, **effects):
    """Records whose clip rate goes like exp(log_rate(x)), x = log length less its centre; lengths alike in a prompt.

    Args:
        slopes: standard deviation between steps of a slope in x, of mean 0.
        effects: ``prompt``: standard deviation of the log rate between prompts; ``epochs``: how often each prompt comes
            back; ``trend``: rise of the log rate, and of the log length, from the first to the last step; ``sides``:
            difference of both between A > 0 and A < 0.
    """
    rng = np.random.default_rng(seed)
    step = np.repeat(np.arange(steps), prompts * group)
    slot = np.tile(np.repeat(np.arange(prompts), group), steps)
    epochs, trend, sides = (effects.get(name, default) for name, default in (("epochs", 1), ("trend", 0), ("sides", 0)))
    pool = steps * prompts // epochs
    prompt = np.concatenate([rng.permutation(pool) for _ in range(epochs)])[step * prompts + slot]
    positive = rng.random(len(step)) < 0.5
    drift = trend * (step / max(steps - 1, 1) - 0.5) + sides * (positive - 0.5)
    x = rng.normal(0, 0.7, pool)[prompt] + rng.normal(0, 0.4, len(step)) + drift
    odds = np.exp(log_rate(x) + slopes * rng.standard_normal(steps)[step] * x + drift)
    odds *= np.exp(effects.get("prompt", 0) * rng.standard_normal(pool)[prompt])
    odds /= odds.mean()
    return pd.DataFrame(
        {
            "step": step,
            "mini_batch": slot * 4 // prompts,
            "prompt": prompt,
            "length": np.exp(4 + x).round().clip(1).astype(int),
            "advantage": np.where(positive, 1.0, -1.0),
            "clipped": (rng.random(len(step)) < rate * odds).astype(float),
        }
    )


def power(k):
    return lambda x: k * x


def bend(b):
    return lambda x: b * np.square(x)


def by_tenths(*rates):
    """The log of these rates, one for each tenth of the length."""
    return lambda x: np.log(np.array(rates))[np.digitize(x, np.quantile(x, np.arange(1, 10) / 10))]


# --- level and power -------------------------------------------------------------------------------------------------

ALIKE = {
    "prompts with rates of their own": {"prompt": 1.0},
    "lengths and rates that rise over training": {"trend": 1.5},
    "sides with other rates and lengths": {"sides": 1.0},
    "prompts of 30 epochs": {"steps": 30, "group": 4, "epochs": 30, "prompt": 1.0},
    "slopes that differ by step": {"slopes": 0.6},
    "ten steps whose slopes differ": {"slopes": 0.6, "steps": 10},
    "thirty steps whose slopes differ": {"slopes": 0.6, "steps": 30},
}


@pytest.mark.parametrize("scenario", ALIKE)
def test_where_lengths_are_clipped_alike_a_dependence_is_called_as_rarely_as_stated(scenario):
    found = [length_effect(simulated(seed, **ALIKE[scenario])) for seed in range(RUNS)]
    assert sum(effect.depends for effect in found) <= binom.ppf(0.999, RUNS, RARE)
    assert all(effect.who is None and not effect.is_line for effect in found if not effect.depends)


@pytest.mark.parametrize(
    ("log_rate", "who"),
    [
        (by_tenths(32, 7, 3, 3, 3, 3, 4, 4, 8, 33), ENDS),
        (by_tenths(12, 12, 11, 8, 7, 7, 8, 10, 13, 14), ENDS),
        (by_tenths(3, 6, 10, 14, 16, 16, 14, 10, 6, 3), MIDDLE),
        (by_tenths(30, 25, 10, 8, 7, 6, 5, 4, 3, 2), SHORTER),
        (power(0.6), LONGER),
    ],
)
def test_lines_and_curves_are_seen_and_named(log_rate, who):
    found = [length_effect(simulated(seed, steps=30, log_rate=log_rate)) for seed in range(20)]
    assert sum(effect.depends and effect.who == who for effect in found) >= 18


def test_a_line_has_its_power_and_an_interval_that_holds_it_and_a_curve_has_none():
    found = [length_effect(simulated(seed, log_rate=power(-0.5))) for seed in range(RUNS)]
    assert {effect.who for effect in found} <= {SHORTER, None}
    assert sum(effect.depends for effect in found) >= binom.ppf(0.001, RUNS, POWER)
    held = [effect.lower <= -0.5 <= effect.upper for effect in found]
    assert sum(held) >= binom.ppf(0.001, RUNS, 1 - RARE)
    assert sum(effect.is_line for effect in found) >= binom.ppf(0.001, RUNS, 1 - RARE)
    assert not any(length_effect(simulated(seed, log_rate=bend(0.6))).is_line for seed in range(20))


@pytest.mark.parametrize(("log_rate", "factor"), [(power(0.15), 1.36), (bend(0.12), 1.13), (np.zeros_like, 1.0)])
def test_the_factor_that_is_named_as_compatible_holds_the_true_one(log_rate, factor):
    """True: exp of what the log rate differs by between -1.03 and 1.03, the first and the last tenth of x."""
    found = [length_effect(simulated(seed, steps=12, log_rate=log_rate)) for seed in range(RUNS)]
    named = [effect.factor for effect in found if not effect.depends]
    assert len(named) > RUNS / 2 and sum(one >= factor for one in named) >= binom.ppf(0.001, len(named), 1 - RARE)
    assert np.median(named) < 4 and all(math.isnan(effect.factor) for effect in found if effect.depends)


# --- estimates and symmetries ----------------------------------------------------------------------------------------


def log_likelihood(records, terms):
    """Return the terms of x in a linear log rate that make the clips most likely, given the totals of the strata."""

    def loss(values):
        total = 0.0
        for _, part in records.groupby(["step", "mini_batch", records.advantage > 0]):
            x = np.log(part.length) - np.log(records.length).mean()
            line = sum(value * x ** (order + 1) for order, value in enumerate(values))
            total += part.clipped.sum() * math.log(np.exp(line).sum()) - (part.clipped * line).sum()
        return total

    return minimize(loss, np.zeros(terms), method="BFGS").x


@pytest.mark.parametrize("exponent", [-0.5, 0.0, 0.4])
def test_the_estimate_is_that_of_a_poisson_regression_given_the_totals_of_the_strata(exponent):
    records = simulated(log_rate=power(exponent), steps=6)
    assert length_effect(records).exponent == pytest.approx(log_likelihood(records, 1)[0], abs=1e-3)


@given(st.integers(0, 10_000), st.sampled_from([-0.3, -0.1, 0.0, 0.1, 0.3]), st.integers(2, 9))
@settings(max_examples=20, deadline=None)
def test_units_order_and_what_is_alike_in_a_stratum_do_not_matter(seed, exponent, factor):
    records = simulated(seed, log_rate=power(exponent), steps=12, prompts=16)
    effect = length_effect(records)
    assert effect.lower <= effect.exponent <= effect.upper and effect.depends == (effect.p < RARE)
    assert not (effect.is_line and effect.lower <= 0 <= effect.upper) and (effect.who is not None) == effect.depends
    score = _Strata.of(records, records.clipped.to_numpy()).score(0.0)[0].item()
    assert np.sign(effect.exponent) == np.sign(score) or not effect.exponent
    shuffled = records.sample(frac=1, random_state=seed).assign(length=lambda rows: factor * rows.length)
    assert length_effect(shuffled)[:4] == pytest.approx(effect[:4], abs=1e-4)
    side = records.assign(clipped=records.clipped.where(records.advantage > 0, 0.0))  # says nothing of lengths
    assert length_effect(side)[:4] == pytest.approx(length_effect(records[records.advantage > 0])[:4], abs=1e-4)


@pytest.mark.parametrize("log_rate", [power(0.6), bend(0.4), bend(-0.4)])
def test_above_half_clipped_it_is_the_test_of_what_is_kept(log_rate):
    records = simulated(log_rate=log_rate, steps=30)
    clipped, kept = length_effect(records), length_effect(records, 1 - records.clipped)
    assert kept.of_kept and not clipped.of_kept and kept[:4] == pytest.approx(clipped[:4])
    assert (clipped.who, kept.who) in {(LONGER, SHORTER), (ENDS, MIDDLE), (MIDDLE, ENDS)}


def test_sides_whose_slopes_are_opposite_are_seen_and_one_side_alone_is_no_such_thing():
    def tilted(seed, better, worse):
        records = simulated(seed, steps=30, log_rate=power(better))
        other = simulated(seed, steps=30, log_rate=power(worse))
        return records.assign(clipped=np.where(records.advantage > 0, records.clipped, other.clipped))

    found = [length_effect(tilted(seed, 0.4, -0.4)) for seed in range(20)]
    assert sum(effect.depends and effect.who == BY_SIDE for effect in found) >= 18
    assert all(length_effect(tilted(seed, 0.6, 0.6)).who == LONGER for seed in range(5))
    one = [tilted(seed, 0.5, 0.5) for seed in range(5)]
    alone = [length_effect(part.assign(clipped=part.clipped.where(part.advantage > 0, 0.0))) for part in one]
    assert all(effect.who == LONGER for effect in alone)


def test_a_prompt_that_comes_back_is_one_cluster():
    records = simulated(prompt=1.0).drop(columns="prompt").assign(prompt_text_hash=lambda r: np.arange(len(r)) // 8)
    by_uid = records.assign(prompt=np.arange(len(records)), prompt_text_hash=records.prompt_text_hash % 19)
    assert length_effect(by_uid) is None  # 19 prompts
    assert length_effect(by_uid.drop(columns="prompt_text_hash")) is not None


@pytest.mark.parametrize(("steps", "is_of_run"), [(1, False), (9, False), (10, True)])
def test_fewer_than_ten_steps_speak_of_themselves_alone(steps, is_of_run):
    effect = length_effect(simulated(steps=steps, prompts=64))
    assert (effect.steps, effect.is_of_run) == (steps, is_of_run)


def test_lengths_that_decide_alone_have_an_interval_that_is_open():
    effect = length_effect(frame([50, 90] * 100, clipped=np.arange(200) % 2))
    assert effect.p < 1e-6 and effect.lower > 1 and math.isinf(effect.upper) and effect.who == LONGER
