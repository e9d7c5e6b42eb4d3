# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Intervals cover what they claim to, the LRE behaves, and at one clip rate the shapes rank as the law says."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from simulated_records import assert_covered, frame, group_lengths, holds

from fspo_verl.analysis import clip_rates
from fspo_verl.analysis.clip_rates import length_edges
from fspo_verl.analysis.length_effect import LONGER, SHORTER, length_effect
from fspo_verl.clips import CLIPS
from fspo_verl.report.numbers import at_one_rate, measured

SEEDS = 200
EDGES = np.array([1, 30, 100, 1000])


# --- intervals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correlated", [False, True])
def test_rate_intervals_cover(correlated):
    """Clustered Wilson intervals, where the responses to a prompt are clipped together and where they are not."""
    truth = np.array([0.05, 0.1, 0.3])
    hits = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        length, prompt = group_lengths(rng, 150, 8, high=200)
        rate = truth[np.searchsorted(EDGES, length, "right") - 1]
        own, shared = rng.random(len(length)), rng.random(150)[prompt]
        clipped = np.where(correlated & (rng.random(len(length)) < 0.5), shared, own) < rate
        table = clip_rates.rate_by_length(length, clipped, EDGES, clusters=prompt)
        hits.append([holds(row, value) for row, value in zip(table.itertuples(), truth, strict=True)])
    for covered in zip(*hits, strict=True):
        assert_covered(covered)


@given(st.integers(2, 400), st.integers(1, 399))
def test_the_rate_interval_is_wilsons_with_students_t(n, k):
    k = min(k, n - 1)
    row = clip_rates.rate_by_length(np.full(n, 7), np.arange(n) < k, [7, 8], np.arange(n)).loc[0]
    ends, quantile = np.array([row.lower, row.upper]), stats.t.ppf((1 + clip_rates.CONFIDENCE) / 2, n - 1)
    assert (row.n, row.rate) == (n, pytest.approx(k / n))
    assert np.square(ends - k / n) == pytest.approx(quantile**2 * ends * (1 - ends) / (n - 1))


def test_prompts_that_differ_less_than_chance_do_not_narrow_the_interval():
    clipped = np.tile([True, False], 400)  # one of two responses of every prompt
    clustered = clip_rates.rate_by_length(np.full(800, 5), clipped, [5, 6], clusters=np.arange(800) // 2).loc[0]
    independent = stats.binomtest(400, 800).proportion_ci(method="wilson")
    assert clustered.lower <= independent.low < 0.5 < independent.high <= clustered.upper


# --- bins, rates, LRE ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=50), st.integers(1, 12))
def test_edges_cover_all_lengths(lengths, bins):
    edges = length_edges(lengths, bins)
    assert 1 <= len(edges) - 1 <= bins and (np.diff(edges) > 0).all() and np.issubdtype(edges.dtype, np.integer)
    assert edges[0] == min(lengths) and edges[-1] == max(lengths) + 1
    table = clip_rates.rate_by_length(lengths, np.zeros(len(lengths)), edges, np.arange(len(lengths)))
    for row in table.itertuples():
        assert row.n == sum(row.low <= length <= row.high for length in lengths)
    assert table.n.sum() == len(lengths)


def table_of(counts, rates):
    return pd.DataFrame({"n": counts, "rate": rates})


def test_lre_by_hand():
    # Acceptance 1, .8, .5 and over all (100 + 160 + 50) / 400 = .775.
    lre = clip_rates.length_reweighting_error(table_of([100, 200, 100, 10, 0], [0, 0.2, 0.5, 1.0, math.nan]), 50)
    accepted = 310 / 410
    worst = 1 - 0.5 / accepted
    assert lre == pytest.approx(worst) and worst > max(1 / accepted - 1, abs(0.8 / accepted - 1))


counts_and_clips = st.lists(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=2)


@given(counts_and_clips, st.integers(1, 5))
def test_lre_is_zero_for_equal_rates_and_blind_to_order_and_sample_size(bins, factor):
    counts, clips = np.array(bins).T
    tables = [(counts, clips), (counts[::-1], clips[::-1]), (counts * factor, clips * factor), (counts, 0.3 * counts)]
    lre, turned, larger, equal = (
        clip_rates.length_reweighting_error(table_of(n, clipped / n), 1) for n, clipped in tables
    )
    assert (turned, larger) == pytest.approx((lre, lre), nan_ok=True) and equal == pytest.approx(0, abs=1e-12)
    assert lre >= 0 if clips.sum() < counts.sum() else math.isnan(lre)


def test_a_bin_of_few_prompts_takes_no_part_however_many_responses_it_has():
    length = np.r_[np.full(100, 10), np.full(100, 50), np.full(900, 200)]
    prompt = np.r_[np.arange(100), 100 + np.arange(100) // 10, 200 + np.arange(900) // 100]  # 100, 10 and 9 prompts
    table = clip_rates.rate_by_length(length, np.arange(1100) % 2, EDGES, clusters=prompt)
    assert table.clusters.tolist() == [100, 10, 9] and clip_rates.has_enough_data(table).tolist() == [True, True, False]


# --- clips at one rate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma, kappa, fair", [(0.02, 0, {"fspo"}), (0.15, 1, {"fspo_drift_corrected"})])
def test_at_one_clip_rate_the_shapes_rank_as_the_law_says(sigma, kappa, fair):
    """A range of width sqrt(L) treats lengths alike if S has variance sigma²·L; with drift it must follow the drift."""
    rng = np.random.default_rng(0)
    length, prompt = group_lengths(rng, 5000, 4)
    q = sigma**2 * length
    s = np.sqrt(q) * rng.standard_normal(len(q)) - kappa * q / 2
    records = frame(length, s, q, rng.choice([-1, 1], len(q)), prompt)
    edges = length_edges(length, 6)
    bands = {name: CLIPS[name] for name in ("fspo", "fspo_drift_corrected", "gspo", "fixed_band")}
    clipped = {clip.name: clip.clipped(records) for clip in at_one_rate(records, bands)}
    p = {name: measured(records, one, edges).overall["p"] for name, one in clipped.items()}
    effects = {name: length_effect(records, one) for name, one in clipped.items()}
    for name in fair:
        assert p[name] > 0.01
        for unfair in {"gspo", "fixed_band"} if kappa == 0 else {"gspo", "fixed_band", "fspo"}:
            assert p[unfair] < 1e-6 and abs(effects[unfair].exponent) > 3 * abs(effects[name].exponent)
    assert (effects["gspo"].who, effects["fixed_band"].who) == (SHORTER, LONGER)


def test_an_estimate_shows_the_interval_that_it_has():
    nan, estimate = math.nan, clip_rates.Estimate
    shown = [
        f"{of:.1f}" for of in (estimate(1, 0, 2), estimate(1, nan, 2), estimate(1, nan, nan), estimate(nan, nan, nan))
    ]
    assert shown == ["1.0 [0.0, 2.0]", "1.0 [-, 2.0]", "1.0", "-"]
