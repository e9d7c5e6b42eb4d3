# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The law study's estimates of the spread of S: plain means by length, and intervals that cover."""

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from simulated_records import assert_covered, frame, holds, simulate_law, simulate_tokens

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/studies/law"))

from spread import law_of_s  # noqa: E402

SEEDS = 200
EDGES = np.array([1, 12, 25, 50, 100, 200, 400, 2000])


def test_intervals_cover_with_uneven_tokens_and_clustered_prompts():
    hits = {"sigma": [], "kappa": [], "std_slope": []}
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        records, truth = simulate_tokens(rng)
        law = law_of_s(records, EDGES, rng, draws=100)
        for name, covered in hits.items():
            covered.append(holds(getattr(law, name), truth[name]))
    for covered in hits.values():
        assert_covered(covered)


def test_the_interval_of_the_slope_covers_another_exponent_too():
    hits = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        hits.append(holds(law_of_s(simulate_law(rng, power=0.4), EDGES, rng, draws=100).std_slope, 0.4))
    assert_covered(hits)


def test_estimates_are_plain_means():
    rng = np.random.default_rng(0)
    records, _ = simulate_tokens(rng)
    law = law_of_s(pd.concat([records, frame([20, 300], prompt=["x", "y"])], ignore_index=True), EDGES, rng)
    for row in law.std_by_length.itertuples():
        part = records[records.length.between(row.low, row.high)].astype({"length": float, "log_ratio": float})
        residual = part.log_ratio - part.log_ratio.sum() / part.length.sum() * part.length
        assert row.n == len(part)
        if len(part) > 1:
            assert row.value == pytest.approx(math.sqrt((residual**2).sum() / (len(part) - 1)), rel=1e-6)
    assert law.sigma.value == pytest.approx(math.sqrt((records.quadratic_variation / records.length).mean()), rel=1e-5)
    kappa = -2 * records.log_ratio.mean() / records.quadratic_variation.mean()
    assert law.kappa.value == pytest.approx(kappa, rel=1e-4)


def test_bins_with_few_responses_or_prompts_get_no_interval_and_no_part():
    rng = np.random.default_rng(0)
    records = simulate_law(rng, power=0.5, low=20, high=200)
    # Outliers that would bend any fit: many responses of few prompts, and few responses.
    odd = frame([3] * 60 + [900] * 20, [9.0, -9.0] * 40, 0.01, prompt=[f"odd {i // 12}" for i in range(80)])
    edges = np.array([1, 5, 30, 60, 100, 150, 800, 1000])
    law = law_of_s(pd.concat([records, odd], ignore_index=True), edges, rng)
    assert law.std_by_length.n.tolist()[::6] == [60, 20] and law.std_by_length.value.notna().all()
    assert law.std_by_length.upper.isna().tolist() == [True] + [False] * 5 + [True]
    assert law.std_slope.value == pytest.approx(law_of_s(records, edges, rng).std_slope.value, rel=1e-12)
    assert holds(law.std_slope, 0.5)
