# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`fspo-verl forecast`: its rates are those of simulated tokens, and its figures come from where it says."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fspo_verl import cli
from fspo_verl.analysis import forecast
from fspo_verl.clips import CLIPS, MATCHED_RATE

RULES = sorted(forecast._RULES)
LAW = Path(__file__).parents[2] / "scripts/studies/law/records/log_ratios.parquet"


@pytest.mark.parametrize("sigma", [0.003, 0.03])
@pytest.mark.parametrize("name", RULES)
def test_a_rate_is_that_of_independent_tokens(name, sigma):
    rng, length, rule = np.random.default_rng(0), 400, forecast._RULES[name]
    tokens = -(sigma**2) / 2 + sigma * rng.standard_normal((4000, length), dtype=np.float32)
    advantage = rng.choice([-1.0, 1.0], 4000)
    columns = {"log_ratio": tokens.sum(1), "quadratic_variation": (tokens**2).sum(1), "advantage": advantage}
    simulated = rule.clipped(pd.DataFrame(columns).assign(length=length)).mean()
    error = math.sqrt(max(simulated * (1 - simulated), 1e-3) / 4000)
    assert forecast.expected_rate(rule, length, sigma) == pytest.approx(simulated, abs=4 * error)


@pytest.mark.parametrize("name", ["fspo", "gspo", "fixed_band"])
def test_a_forecast_meets_recorded_responses_where_tokens_are_alike_and_misses_others(name):
    """Plain text of a real model, where tokens spread alike, and chat, where those of short responses spread more."""
    found = {}
    for kind in ("text", "chat"):
        cell = f"temperature == 1 and direction == 'grpo' and mini_batch == 4 and kind == '{kind}'"
        rows = pd.read_parquet(LAW).query(f"{cell} and advantage != 0")
        rows = rows.assign(log_ratio=rows.s.map(np.sum), quadratic_variation=rows.q.map(np.sum))
        sigma = math.sqrt(rows.quadratic_variation.sum() / rows.length.sum())
        rule = CLIPS[name].matched(rows, MATCHED_RATE)
        lengths = rows.length.sort_values()[::8]
        found[kind] = np.mean([forecast.expected_rate(rule, length, sigma) for length in lengths])
    assert found["text"] == pytest.approx(MATCHED_RATE, abs=0.05)
    assert name != "fspo" or found["chat"] == pytest.approx(0.02, abs=0.005)  # what the help says


def test_the_answer_names_the_loss_first_and_what_to_do_last(capsys):
    assert cli.main("forecast --lengths 100,8000 --k3 0.00005 --loss gspo --clip 0.0003 0.0004".split()) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("Noise of 0.01 nats per token alone makes GSPO clip 36.4% at 100 tokens, 0.6% at 8,000")
    assert last.startswith("next: ")


@pytest.mark.parametrize("k3", forecast.K3)
def test_a_run_gives_noise_movement_and_lengths(k3, tmp_path, capsys):
    lengths = dict(zip(forecast.LENGTHS, (20, 50, 400), strict=True))
    lines = [{"step": step, "data": {k3: 5e-5, forecast.KL: 2e-4} | lengths} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["forecast", str(tmp_path), "--loss", "fspo"]) == 0
    shown = capsys.readouterr().out
    assert "Noise of 0.01 nats" in shown and all(length in shown for length in ("20", "50", "400"))
    rule, rates = forecast._RULES["fspo"], shown.splitlines()[-2].split()[-3:]
    assert rates == [f"{forecast.expected_rate(rule, n, math.hypot(0.01, 0.02)):.1%}" for n in (20, 50, 400)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--sigma 0.01", "--lengths"),
        ("--lengths 10", "--sigma"),
        ("--lengths 10 --k3 -1", "--sigma"),
        ("--lengths 10 --sigma -1", "--sigma"),
        ("--lengths 10 --sigma 0.01 --clip 1 2", "--loss"),
        ("--lengths 10 --sigma 0.01 --loss vanilla", "gspo"),
    ],
)
def test_what_is_missing_is_named(options, words, capsys):
    assert cli.main(["forecast", *options.split()]) == 2 and words in capsys.readouterr().err
