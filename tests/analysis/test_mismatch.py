# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trainer against rollout engine: each rule against its definition in plain Python, and laws of S_r that are known."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from simulated_records import frame, judged

from fspo_verl.analysis import causes, logs, runs
from fspo_verl.analysis.judgement import evidence_of_records
from fspo_verl.analysis.mismatch import dropped, mismatch
from fspo_verl.findings import NOTE
from fspo_verl.observe.columns import MISMATCH, mismatch_columns
from fspo_verl.observe.records import Records
from fspo_verl.observe.settings import RunSettings
from fspo_verl.report import page as report


def responses(rng, count, sigma, shared=0.0, low=20, high=2000):
    """Token mismatches d of responses that an engine sampled, so that E exp(d) = 1; ``shared``: alike in a response."""
    lengths = np.exp(rng.uniform(math.log(low), math.log(high), count)).astype(int)
    noise = sigma * rng.standard_normal(lengths.sum()) - sigma**2 / 2
    common = np.repeat(shared * rng.standard_normal(count), lengths)
    return lengths, np.split(noise + common, np.cumsum(lengths)[:-1])


def records_of(lengths, tokens):
    """Records of these responses, four to a prompt, a quarter of them in the first mini-batch."""
    width = max(lengths)
    padded = torch.tensor(np.stack([np.pad(d, (0, width - len(d))) for d in tokens]), dtype=torch.float32)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    measured = mismatch_columns(padded, torch.zeros_like(padded), mask)
    measured = {name: column.numpy() for name, column in measured.items()}
    prompt = np.arange(len(lengths)) // 4
    records = frame(lengths, 0.0, 4e-4 * np.asarray(lengths), 1.0, prompt, staleness=0.0, **measured)
    return records.assign(mini_batch=(prompt % 4).astype(np.int32))


# --- each rule, of one response and its d ----------------------------------------------------------------------------


def ratio(d):
    return math.exp(sum(d))


DEFINITIONS = {
    "width √L": lambda d: abs(sum(d)) > 0.03 * math.sqrt(len(d)),
    "verl, sum of tokens": lambda d: not 0.5 <= 1 / ratio(d) <= 2,
    "verl, mean of tokens": lambda d: not 0.999 <= math.exp(-sum(d) / len(d)) <= 1.001,
    "IcePop": lambda d: sum(not 0.5 <= math.exp(x) <= 5 for x in d) / len(d),
    "truncated weight": lambda d: 1 - min(ratio(d), 2) / ratio(d),
}


def test_every_rule_takes_what_its_definition_says():
    rng = np.random.default_rng(0)
    lengths, tokens = responses(rng, 600, 0.04, shared=0.003)
    tokens[7][:3] = 2.0, -1.0, 0.1  # a token that IcePop masks on either side
    table = dropped(records_of(lengths, tokens))
    usual = table[~table.index.get_level_values("range").str.startswith("scaled")].droplevel("range")
    assert set(usual.index) == set(DEFINITIONS)
    # Whole lengths from either end, until they hold a third of the responses.
    ordered = np.sort(lengths)
    third = (lengths > ordered[(len(lengths) - 1) // 3]).astype(int) + (lengths >= ordered[-((len(lengths) + 2) // 3)])
    for name, definition in DEFINITIONS.items():
        each = np.array([float(definition(d.tolist())) for d in tokens])
        expected = [each.mean(), *(each[third == number].mean() for number in range(3))]
        assert 0 < expected[0] < 1 and usual.loc[name].tolist() == pytest.approx(expected, rel=1e-5), name


# --- laws that are known ----------------------------------------------------------------------------------------------


def test_independent_noise_spreads_like_the_root_and_only_that_width_is_even():
    found = mismatch(records_of(*responses(np.random.default_rng(2), 8000, 0.01)))
    assert found.sigma == pytest.approx(0.01, rel=0.01) and found.kl == pytest.approx(0.01**2 / 2, rel=0.02)
    assert found.mean == pytest.approx(-(0.01**2) / 2, abs=4 * 0.01 / math.sqrt(8000 * 400))
    scaled = found.dropped.xs("scaled to 10%", level="range")
    assert scaled["all"].to_numpy() == pytest.approx(0.1, abs=0.001)
    assert scaled.loc["width √L", "shortest"] == pytest.approx(scaled.loc["width √L", "longest"], abs=0.03)
    assert scaled.loc["verl, sum of tokens", "longest"] > 0.25 > 0.001 > scaled.loc["verl, sum of tokens", "shortest"]
    assert scaled.loc["verl, mean of tokens", "shortest"] > 0.25 > 0.001 > scaled.loc["verl, mean of tokens", "longest"]


# --- what is said -----------------------------------------------------------------------------------------------------


def test_mismatch_is_weighed_against_movement():
    """The clip does not see it: a note, where it is notable."""
    records = records_of(*responses(np.random.default_rng(5), 400, 0.02)).assign(mini_batch=1)  # tokens move by 0.02
    records.attrs["settings"] = RunSettings("fspo")
    (said,) = [one for one in judged(records).findings if one.id == causes.MISMATCH]
    assert said.severity == NOTE and said.value == pytest.approx(0.5, abs=0.01) and "0.02 nats" in said.sentence
    small = records.assign(rollout_quadratic_variation=records.rollout_quadratic_variation / 100)
    for quiet in (small, frame([10, 20])):
        quiet.attrs = records.attrs
        assert causes.MISMATCH not in [one.id for one in judged(quiet).findings]
    assert mismatch(frame([10, 20])) is None


@pytest.mark.parametrize("sigma", [0.005, 0.02])
def test_in_bypass_mode_the_first_mini_batch_is_the_mismatch(sigma):
    """S of the first mini-batch is what the engines differ by, and S of later ones holds a move of 0.02 as well."""
    lengths, tokens = responses(np.random.default_rng(7), 2000, sigma)
    s, q = (np.array([part.sum() for part in parts]) for parts in (tokens, [d**2 for d in tokens]))
    mini_batch = (np.arange(2000) // 4 % 4).astype(np.int32)
    q = q + (mini_batch > 0) * 0.02**2 * lengths
    records = frame(lengths, s, q, 1.0, np.arange(2000) // 4, mini_batch=mini_batch)
    assert mismatch(records) is None
    bypass = RunSettings("fspo", old_log_probs_from_rollout=True)
    found, engines = evidence_of_records(records, bypass, tested=False), mismatch(records, bypass)
    assert found.engines.sigma == pytest.approx(sigma, rel=0.03) and engines.sigma == pytest.approx(sigma, rel=0.03)
    assert engines.responses == 500
    assert found.engines.share == pytest.approx(sigma**2 / (sigma**2 + 0.75 * 0.02**2), rel=0.1)
    assert math.isnan(engines.kl)
    share = (np.abs(s) > 0.03 * np.sqrt(lengths))[mini_batch == 0].mean()
    assert engines.dropped.loc[("width √L", "|S_r| up to 0.03·√L"), "all"] == pytest.approx(share)
    same = {f"rollout_{name}": records[name] * (mini_batch == 0) for name in ("length", "log_ratio")}
    same["rollout_quadratic_variation"] = records.quadratic_variation * (mini_batch == 0)
    measured = records.assign(**same, rollout_k3=0.5 * same["rollout_quadratic_variation"], tokens_masked_icepop=0.0)
    again = mismatch(measured, bypass)
    assert again.sigma == engines.sigma and again.kl == pytest.approx(sigma**2 / 2, rel=0.06)
    pd.testing.assert_frame_equal(*(one.dropped.drop("IcePop", level="rule") for one in (again, engines)))


def test_the_report_shows_it_where_records_hold_it_and_rejected_responses_count(monkeypatch):
    monkeypatch.setattr(report.figures, "render", lambda draw, *kinds: [b"picture"] * len(kinds))
    records = records_of(*responses(np.random.default_rng(6), 400, 0.03))
    is_rejected = records.rollout_log_ratio.abs() > math.log(2)
    of_loss = ("length", "advantage", "log_ratio", "quadratic_variation")
    records = records.assign(**{name: records[name].where(~is_rejected, 0) for name in of_loss})
    without = records[records.length > 0].drop(columns=[*MISMATCH, "staleness"])
    measured, plain = (
        runs.Run("run", Path("run"), logs.Log.of([]), Records(one, RunSettings("gspo"), len(one)))
        for one in (records, without)
    )
    files = report.build(report.analyses_of([measured, plain]))
    assert "Trainer and rollout engine" in files["report.html"].decode()
    found, nothing = (one["mismatch"] for one in json.loads(files["report.json"])["runs"])
    assert nothing is None and found["responses"] == 400 and 0.02 < found["sigma"] < 0.04
    assert found["rejected"] == is_rejected.mean() > 0
    shares = {(row["rule"], row["range"]): row["all"] for row in found["dropped"]}
    assert shares["verl, sum of tokens", "ratio 0.5 to 2"] == pytest.approx(is_rejected.mean())
    assert "rollout engine</summary>" not in report.build(report.analyses_of([plain]))["report.html"].decode()
