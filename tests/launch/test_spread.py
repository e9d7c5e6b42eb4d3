# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""eps against a measured spread: given as sigma, or by the records of a run."""

import re
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_doctor import POLICY_LOSS, SELECT, diagnose, found

from fspo_verl import clips
from fspo_verl.band import Band
from fspo_verl.launch import spread
from fspo_verl.observe.microbatch import MicroBatch
from fspo_verl.observe.records import RecordWriter
from fspo_verl.observe.settings import RunSettings


@pytest.mark.parametrize(
    ("sigma", "check"), [(1e-3, "eps_never_binds"), (0.015, None), (0.3, "eps_always_binds"), (0.02, None)]
)
def test_eps_is_judged_by_sigma(sigma, check, capsys):
    report = diagnose("--sigma", str(sigma), SELECT, capsys=capsys)[1]
    assert set(found(report)) == ({check} if check else set())
    if check:
        mended = diagnose("--sigma", str(sigma), SELECT, *found(report)[check]["fix"].split(), capsys=capsys)[1]
        assert "eps_never_binds" not in found(mended)


def test_drift_is_told_from_a_narrow_band(capsys):
    longest = "data.max_response_length=32768"
    report = diagnose("--sigma", "0.03", SELECT, longest, capsys=capsys)[1]
    assert f"{POLICY_LOSS}.normalization=drift_corrected" in found(report)["eps_always_binds"]["fix"]
    mended = diagnose(
        "--sigma", "0.03", SELECT, longest, f"{POLICY_LOSS}.normalization=drift_corrected", capsys=capsys
    )[1]
    assert found(mended) == {}


@given(st.integers(1, 65536), st.floats(1e-6, 0.1), st.floats(0.2, 4))
def test_outside_the_realized_band_is_the_normal_tail_at_every_length(length, sigma, z):
    band = Band(z, normalization="studentized")
    assert spread._outside(band, length, sigma) == pytest.approx(2 * NormalDist().cdf(-z), rel=1e-6)


def test_eps_is_judged_by_records(tmp_path, capsys):
    rng = np.random.default_rng(0)
    length = rng.integers(10, 512, 3000).astype(float)
    sigma = 0.01
    variation = sigma**2 * length
    names = ("advantage", "clipped_upper", "clipped_lower", "clipped_dual")
    columns = dict.fromkeys((*names, *clips.COLUMNS), np.zeros(3000))
    columns |= {"length": length, "quadratic_variation": variation, "finite": np.ones(3000)}
    columns["log_ratio"] = rng.normal(-variation / 2, np.sqrt(variation))
    writer = RecordWriter(tmp_path, RunSettings("fspo"))
    writer.add(columns, MicroBatch(step=1, mini_batch=1, rank=0, ranks=1, prompts=["p"] * 3000, texts=["p"] * 3000))
    writer.flush()

    def note(eps):
        report = diagnose("--records", str(tmp_path), SELECT, f"{POLICY_LOSS}.eps={eps}", capsys=capsys)[1]
        text = next(finding["what"] for finding in report["findings"] if finding["check"] == "outside_band")
        return found(report), text, float(re.search(r"([\d.e-]+) at all", text)[1])

    _, text, share = note(2 * sigma)
    assert "sigma=0.01:" in text and share == pytest.approx(0.05, abs=0.02)
    assert set(note(sigma / 10)[0]) == {"eps_always_binds"}
    assert set(note(0.09)[0]) == {"eps_never_binds"}


def test_records_of_a_run_that_never_moved_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no records of responses that moved"):
        spread._recorded(tmp_path)
