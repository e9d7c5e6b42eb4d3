# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Facts from metrics without our series, on tables of which the truth is known."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fspo_verl.analysis import logs
from fspo_verl.analysis.judgement import judge
from fspo_verl.analysis.metric_facts import course, cut_off, facts
from fspo_verl.analysis.runs import Run
from fspo_verl.observe.records import read


def run_of(config=None, **metrics) -> Run:
    """A run with these metrics, a value per step from 1, None where it is not logged; ``__`` stands for a slash."""
    steps = range(len(next(iter(metrics.values()))))
    rows = [
        (step + 1, {k.replace("__", "/"): v[step] for k, v in metrics.items() if v[step] is not None}) for step in steps
    ]
    return Run("a", Path("a"), logs.Log.of(rows), read(Path("/nowhere")), config)


def fact(run, about):
    return next((found.value for found in facts(run) if found.id == about), None)


@given(st.lists(st.floats(0, 1) | st.sampled_from([None, math.nan, math.inf]), min_size=1, max_size=60))
def test_a_course_is_of_the_finite_values(values):
    run = run_of(actor__pg_clipfrac=values, actor__lr=[1e-6] * len(values))
    found = course(run.metrics.get("actor/pg_clipfrac", run.metrics["actor/lr"] * math.nan))
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        assert found is None and fact(run, "clipped") is None
        return
    tenth = max(len(finite) // 10, 1)
    ends = (np.mean(finite[:tenth]), np.mean(finite[-tenth:]), max(finite))
    assert (found.first, found.last, found.highest) == pytest.approx(ends)
    assert "at most" not in found.text("") or found.text("").endswith(f"in step {values.index(max(finite)) + 1})")
    assert fact(run, "clipped") == found.last


@given(
    st.integers(1, 20),
    st.integers(0, 5),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.sampled_from(["actor__grad_norm", "critic__vf_loss", "rollout_corr__kl"]),
)
def test_what_is_not_finite_is_named_first_with_the_step_where_it_begins(before, later, value, name):
    steps = before + 3 + later
    broken = [0.1] * before + [value, None, value] + [0.1] * later
    run = run_of(**{name: broken}, perf__mfu=[math.nan] * steps, actor__pg_clipfrac=[0.1] * steps)
    found = judge(run).findings[0]
    assert found.id == "not finite" and f"{name.replace('__', '/')} from step {before + 1} on" in found.sentence
    assert "perf" not in found.sentence


LIMIT = {"data": {"max_response_length": 100}}


@pytest.mark.parametrize(
    ("config", "longest", "counted", "expected"),
    [
        (None, [100] * 10, [0.5] * 10, [0.5] * 10),  # always as long: that is the limit
        (None, [90, 91, 95, 93], [0.01] * 4, []),  # the longest of each step, and no limit
        (None, [100], [0.1], []),
        (None, [100], [0.5], [0.5]),  # half of the responses do not have one length by chance
        (LIMIT, [100, 90], [0.5, 0.25], [0.5, 0.0]),  # the second step reached no limit
        (LIMIT, [90, 100], [0.01, 0.5], [0.0, 0.5]),
        (None, [90, 100], [0.0, 0.0], []),
        (None, [1900] * 10, [0.0] * 10, []),  # the longest is the longest
    ],
)
def test_verls_count_of_cut_off_responses_is_taken_where_its_longest_is_the_limit(config, longest, counted, expected):
    run = run_of(config, response_length__max=longest, response_length__clip_ratio=counted)
    assert cut_off(run).to_list() == expected
    assert any(one.id == "cut off unknown" for one in facts(run)) == (any(counted) and not expected)


@pytest.mark.parametrize(("first", "broke"), [(0.01, True), (0.3, False)])
def test_where_few_were_cut_off_before_the_policy_has_broken(first, broke):
    shares = [first] * 10 + [0.5] * 10
    found = judge(run_of(LIMIT, response_length__max=[100] * 20, response_length__clip_ratio=shares)).findings[0]
    assert found.id == "cut off" and found.value == 0.5
    assert ("from step 11 on" in found.sentence) == broke == ("learning rate" in found.advice)
    assert ("max_response_length" in found.advice) != broke


ONE_STEP = {
    "data": {"train_batch_size": 64},
    "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 64, "ppo_epochs": 1}},
}
ADVANTAGES = {"critic__advantages__max": [1.0, 0.0, 0.0, None], "critic__advantages__min": [-1.0, 0.0, -0.5, 0.0]}


@pytest.mark.parametrize(
    ("metrics", "config", "about", "value"),
    [
        # A rollout of one step is told by the config, or by ratios of exactly 1.
        ({"actor__pg_clipfrac": [0.0, 0.0], "actor__ppo_kl": [0.0, 0.0]}, None, "one step", 1),
        ({"actor__pg_clipfrac": [0.0, 0.0], "actor__ppo_kl": [0.0, 1e-9]}, None, "one step", None),
        ({"actor__pg_clipfrac": [0.0, 0.1]}, None, "one step", None),
        ({"actor__pg_clipfrac": [0.0, 0.0], "actor__lr": [0.0, 0.0]}, None, "one step", None),  # three digits
        ({"actor__pg_clipfrac": [0.1, 0.1]}, ONE_STEP, "one step", 1),
        ({"actor__pg_clipfrac": [0.1, 0.1]}, ONE_STEP | {"data": {"train_batch_size": 128}}, "one step", None),
        ({"actor__kl_loss": [0.1, 0.1]}, None, "one step", None),
        # Others are those of the last steps.
        ({"rollout_corr__k3_kl": [1e-3, 2e-4]}, None, "mismatch", 2e-4),
        ({"response_length__mean": [10.0, 20.0]}, None, "lengths", 20),
        (ADVANTAGES, None, "no advantage", pytest.approx(1 / 3)),
        ({"critic__advantages__max": [0.0]}, None, "no advantage", None),
    ],
)
def test_facts(metrics, config, about, value):
    assert fact(run_of(config, **metrics), about) == value


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"rs_seq_masked_fraction": 0.41}, 0.41),
        ({"rs_seq_masked_fraction": 0.2}, None),
        ({"rs_seq_masked_fraction": 0.41, "rs_token_k1_mean": 0.1}, None),  # each of these has lost a token, or more
        ({"is_eff_sample_size": 0.04, "is_mean": 0.06}, 0.04),
        ({"is_eff_sample_size": 0.6, "is_mean": 0.9}, None),
        ({"is_eff_sample_size": 0.04, "rs_seq_masked_fraction": 0.41}, 0.41),
    ],
)
def test_what_a_rollout_correction_leaves_of_the_gradient_is_read_from_a_log(metrics, told):
    logged = {f"rollout_corr__rollout_{name}": [value] * 12 for name, value in metrics.items()}
    first, *_ = judge(run_of(actor__pg_clipfrac=[0.01] * 12, **logged)).findings
    assert (first.id == "mismatch") == (told is not None)
    assert told is None or (first.value == pytest.approx(told) and "rollout_is=token" in first.advice)
