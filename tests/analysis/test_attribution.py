# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of the clips, on simulated runs whose truth is known."""

import numpy as np
import pytest
import simulated_parts
from hypothesis import given
from hypothesis import strategies as st

from fspo_verl.analysis.attribution import MISMATCH, MISMATCH_OR_AGE, MOVEMENT, NOISE, attribution, shapley

MOST = 0.1  # mean error of a share, above which it must not be printed


@pytest.mark.parametrize("name", simulated_parts.CELLS)
def test_no_share_is_further_off_than_it_may_be_to_be_printed(name):
    found = simulated_parts.errors(name, 4)
    assert len(found) == 4 and (found.abs().mean() <= MOST).all(), found.abs().mean()


def simulated(name):
    return simulated_parts.simulate(np.random.default_rng(0), simulated_parts.CELLS[name])[0]


def attributed(records):
    return attribution(records, records.attrs["settings"])


def test_of_a_pure_cause_no_other_is_named():
    for name, part in (("noise only", NOISE), ("mismatch only", MISMATCH), ("movement only", MOVEMENT)):
        found = attributed(simulated(name))
        assert found[part] > 0.9 and sum(found.values()) == pytest.approx(1)


def test_what_cannot_be_told_apart_is_named_together():
    records = simulated("mismatch, age and movement")
    for staleness in (2.0, np.nan):  # all alike, or not known
        found = attributed(records.assign(staleness=staleness))
        assert set(found) == {MISMATCH_OR_AGE, MOVEMENT}
    assert set(attributed(records.drop(columns="staleness"))) == {MISMATCH_OR_AGE, MOVEMENT}


def test_nothing_is_said_of_few_clips_or_without_a_first_mini_batch():
    records = simulated("noise and as much movement")
    clips = records.index[records.clipped > 0]
    assert attributed(records.assign(clipped=records.clipped.where(records.index <= clips[40], 0.0))) is None
    assert attributed(records[records.mini_batch > 0]) is None
    assert attributed(records.assign(advantage=0.0)) is None


@given(st.dictionaries(st.frozensets(st.sampled_from("abc"), min_size=1), st.floats(-1, 1)))
def test_shapleys_value_shares_out_the_whole_and_treats_likes_alike(values):
    def value(parts):
        return values.get(parts, 0.0)

    found = shapley(list("abc"), value)
    assert sum(found.values()) == pytest.approx(value(frozenset("abc")), abs=1e-9)
    alike = shapley(list("abc"), lambda parts: value(frozenset({"c"} & parts)) + len({"a", "b"} & parts) ** 2)
    assert alike["a"] == pytest.approx(alike["b"])
