# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The study of the law of S finds a law that is known, with intervals that hold it."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from simulated_records import assert_covered, holds, simulate_run

from fspo_verl.analysis.clip_rates import prompts_of

sys.path.insert(0, str(Path(__file__).parents[1] / "law"))
import law  # noqa: E402


@pytest.mark.parametrize("count", [2, 4, 10])
def test_the_interval_of_few_equal_deviations_is_students_t_interval(count):
    value = 0.3 + np.resize([1.0, -1.0], count)
    found = law.interval(value.mean(), (value - value.mean()) / count, np.arange(count))
    assert found[1:] == pytest.approx(stats.t.interval(0.95, count - 1, value.mean(), stats.sem(value)))


@pytest.mark.parametrize("power", [0.3, 1.0])
def test_the_interval_of_the_exponent_holds_the_truth_as_often_as_it_says(power):
    rng, hits = np.random.default_rng(0), []
    for _ in range(150):
        records = simulate_run(rng, steps=8, power=power, kappa=0.0).query("mini_batch == 3")
        s, length = (records[name].to_numpy(np.float64) for name in ("log_ratio", "length"))
        hits.append(holds(law.exponent(s, length, prompts_of(records)), power))
    assert_covered(hits, 0.93)


def test_independent_tokens_are_found_to_follow_the_root_of_the_length():
    """Records as the study has them: S of a response in blocks of 1, 2, 4, ... tokens."""
    rng, rows = np.random.default_rng(0), []
    for prompt in range(120):
        center = np.exp(rng.uniform(2, 7.2))
        for _ in range(4):
            ratio = 0.05 * rng.standard_normal(int(np.clip(center * np.exp(0.2 * rng.standard_normal()), 2, 1000)))
            s = np.add.reduceat(ratio, 2 ** np.arange(len(ratio).bit_length()) - 1)
            row = {"s": s, "log_ratio": s.sum(), "quadratic_variation": np.square(ratio).sum(), "length": len(ratio)}
            rows.append(row | {"prompt": str(prompt), "kind": ("text", "chat", "steps")[prompt % 3]})
    records = pd.DataFrame(rows).assign(step=1, mini_batch=4, advantage=rng.choice([-1.0, 1.0], len(rows)))
    for last in (127, 511):
        found = law.exponent_within(records, last)
        assert holds(found, 0.5) and found.upper - found.lower < 0.5
    k = {width: law.dependence(records, width).value for width in law.WIDTHS}
    assert k["L"] < -0.3 < k["√L"] < 0.3 < k["fixed"] and abs(k["a fitted power"]) < 0.3
