# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The studies of the law of S and of coverage: estimates by definition, and published numbers against their records."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from simulated_records import frame, simulate_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fspo_verl.observe.records import read_records

STUDY = Path(__file__).parents[2] / "scripts/studies/law"
COVERAGE = STUDY.with_name("coverage")
sys.path[:0] = [str(STUDY), str(COVERAGE)]
import bootstrap  # noqa: E402
import draw  # noqa: E402
import law  # noqa: E402
import measure  # noqa: E402
import simulate_paired  # noqa: E402
from spread import law_of_s  # noqa: E402

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}|{% endif %}"
EDGES = np.array([1, 12, 25, 50, 100, 200, 400, 2000])
SMALL = "--responses 120 --group 4 --max-tokens 60 --train-tokens 20 --mini-batch 1 --lr 1e-3 --rows 100".split()
CELLS = "grpo-4-float32:01 random-4-float32 grpo-rollout-float32 grpo-4-float32:trained still-0-bfloat16".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random Llama of two layers and a tokenizer of bytes; a response ends after 40 tokens or so."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(["<end>", *alphabet])}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", chat_template=CHAT).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words.get_vocab()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def log_probs_by_hand(policy, prompt, response, temperature):
    logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


@pytest.mark.parametrize("count", [2, 4, 10])
def test_the_clustered_bootstrap_of_few_equal_deviations_is_students_t_interval(count):
    value = 0.3 + np.resize([1.0, -1.0], count)
    columns = np.stack([np.ones(count), value], -1)
    mean = lambda totals: totals[..., 1:] / totals[..., :1]  # noqa: E731
    estimate = bootstrap.clustered_bootstrap(np.arange(count), columns, mean, np.random.default_rng(0), draws=40_000)
    expected = stats.t.interval(0.95, count - 1, 0.3, stats.sem(value))
    # The spread of 40,000 draws is known to 0.4%; without sqrt(n/(n-1)) it would be 5% off, or more.
    np.testing.assert_allclose(
        [estimate.lower[0], estimate.upper[0]], expected, rtol=0, atol=0.02 * (expected[1] - 0.3)
    )


def test_estimates_are_plain_means():
    rng = np.random.default_rng(0)
    records = simulate_run(rng).query("mini_batch > 0")  # the others have not moved, and are left out
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


@pytest.mark.long
def test_the_records_hold_what_was_measured_and_the_study_draws_them(model, tmp_path, monkeypatch):
    command = ["--model", str(model), "--output", str(tmp_path), *SMALL]
    law.main([*command, "--cells", *CELLS[:2]])
    law.main([*command, "--cells", *CELLS])  # more cells, and nothing of the first two again
    monkeypatch.setattr(measure, "load", None)
    law.main([*command, "--cells", *CELLS])  # no model is needed where everything is measured
    with pytest.raises(SystemExit, match="was measured with"):
        law.main([*command, "--seed", "1"])
    monkeypatch.undo()

    responses = pd.concat(map(pd.read_parquet, sorted((tmp_path / "responses").glob("*.parquet"))), ignore_index=True)
    held_out = responses[responses.role == "measured"]
    random = read_records(tmp_path / "records/random-4-float32")
    assert len(random) == len(held_out) and (random.mini_batch == 4).all()
    start = measure.load(str(model), torch.float32, "cpu")
    moved = law.load_state(law.parse_args(command), "random-4", "float32")
    with torch.no_grad():
        log_ratios = [
            log_probs_by_hand(moved, list(row.prompt_ids), list(row.ids), 0.7)
            - log_probs_by_hand(start, list(row.prompt_ids), list(row.ids), 0.7)
            for row in held_out.itertuples()
        ]
    expected = sorted(float(values.double().sum()) for values in log_ratios)
    np.testing.assert_allclose(sorted(random.log_ratio), expected, atol=1e-4)
    sums = pd.read_parquet(tmp_path / "records/random-4-float32" / draw.POSITIONS)
    totals = sums.groupby("response").quadratic_variation.sum()
    np.testing.assert_allclose(sorted(totals), sorted(random[random.length >= 32].quadratic_variation), rtol=1e-4)

    rollout = read_records(tmp_path / "records/grpo-rollout-float32")
    assert set(rollout.mini_batch) == {0, 1, 2, 3}
    assert ((rollout.quadratic_variation == 0) == (rollout.mini_batch == 0)).all()
    trained = read_records(tmp_path / "records/grpo-4-float32-trained")
    assert all(prompt.startswith("trained") for prompt in trained.prompt)
    assert set(read_records(tmp_path / "records/grpo-4-float32").prompt.astype(str)) < set(random.prompt.astype(str))

    draw.main([str(tmp_path / "records"), "--output", str(tmp_path)])
    assert set(pd.read_csv(tmp_path / "numbers.csv").cell) == {law.Cell.parse(cell).folder for cell in CELLS}


@pytest.mark.long
def test_the_published_numbers_are_those_of_the_published_records(tmp_path):
    subprocess.run([sys.executable, STUDY / "draw.py", "--output", tmp_path], check=True)
    for name in ("numbers.csv", "rates.csv"):
        pd.testing.assert_frame_equal(pd.read_csv(tmp_path / name), pd.read_csv(STUDY / name), rtol=1e-3)
    assert (tmp_path / "law.png").stat().st_size > 50_000


def test_the_published_coverage_is_that_of_the_scripts_settings():
    paired = json.loads((COVERAGE / "paired_coverage.json").read_text())
    cells = [(law, seeds) for law in simulate_paired.LAWS for seeds in simulate_paired.SEEDS]
    assert [(row["law"], row["seeds"]) for row in paired["rows"]] == cells
    # What is exact for six seeds of a symmetric law, within three standard errors.
    exact = next(row["flips"] for row in paired["rows"] if row["law"] == "normal" and row["seeds"] == 6)
    assert exact == pytest.approx(1 - 2 / 64, abs=3 * (2 / 64 / paired["comparisons"]) ** 0.5)


@pytest.mark.long
def test_a_small_simulation_writes_numbers_and_table(tmp_path):
    command = [sys.executable, COVERAGE / "simulate_paired.py", "--comparisons", "2", "--output", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    assert "| normal | 6 |" in (tmp_path / "results.md").read_text()
