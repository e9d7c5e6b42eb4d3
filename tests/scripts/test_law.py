# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""scripts/law.py on a tiny model, its estimates on simulated records, and the page against the published records."""

import math
import sys
from pathlib import Path

import law
import numpy as np
import pandas as pd
import pytest
import torch
from simulated_records import assert_covered, frame, holds, simulate_law
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fspo_verl.analysis import clip_rates
from fspo_verl.observe.records import read_records

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts/law"))
import measure  # noqa: E402
import page  # noqa: E402
import prompts  # noqa: E402
import publish  # noqa: E402

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}|{% endif %}"


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


def group(rng, lengths, advantages=None):
    return measure.Group(
        rng.integers(1, 200, 11).tolist(), [rng.integers(1, 200, n).tolist() for n in lengths], advantages
    )


@pytest.mark.parametrize("rows", [8, 2], ids=["one micro-batch", "several"])
def test_log_probabilities_are_those_of_one_sequence_at_a_time(model, rows):
    policy = measure.load(str(model), torch.float32, "cpu")
    part = group(np.random.default_rng(0), [1, 7, 40, 3, 7])
    found = measure.measure(policy, part, temperature=0.7, rows=rows, tokens=100)
    for response, values in zip(part.responses, found, strict=True):
        with torch.no_grad():
            logits = policy(torch.tensor([part.prompt + response])).logits[0, len(part.prompt) - 1 : -1]
        expected = torch.log_softmax(logits / 0.7, -1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
        np.testing.assert_allclose(values, expected.numpy(), atol=1e-5)


def test_training_takes_the_steps_of_adamw_on_the_policy_gradient(model):
    rng = np.random.default_rng(1)
    batches = [[group(rng, [5, 9], [1.0, -1.0]), group(rng, [3, 12], [0.5, -0.5])] for _ in range(2)]
    policy, reference = (measure.load(str(model), torch.float32, "cpu") for _ in range(2))
    steps = []
    done = lambda step, _: steps.append(step)  # noqa: E731
    measure.train(policy, batches, [], lr=1e-3, temperature=0.7, tokens=20, done=done, dtype=torch.float32)

    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    for batch in batches:
        total, tokens = 0.0, 0
        for part in batch:
            for response, advantage in zip(part.responses, part.advantages, strict=True):
                logits = reference(torch.tensor([part.prompt + response])).logits[0, len(part.prompt) - 1 : -1]
                chosen = torch.log_softmax(logits / 0.7, -1).gather(-1, torch.tensor(response)[:, None])
                total, tokens = total - advantage * chosen.sum(), tokens + len(response)
        (total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert steps == [1, 2]
    for ours, theirs in zip(policy.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_a_warm_up_fills_adams_moments_and_leaves_the_policy_where_it_is(model):
    rng = np.random.default_rng(2)
    warmup = [[group(rng, [5, 9], [1.0, -1.0])] for _ in range(3)]
    step = [[group(rng, [6, 8], [1.0, -1.0])]]
    moves = {}
    for name, before in (("warm", warmup), ("fresh", [])):
        policy = measure.load(str(model), torch.float32, "cpu")
        start = {key: value.detach().clone() for key, value in policy.named_parameters()}
        last = {}

        def done(number, policy, start=start, last=last):
            last[number] = torch.cat([(v.detach() - start[k]).flatten() for k, v in policy.named_parameters()])

        measure.train(policy, step, before, lr=1e-3, temperature=1.0, tokens=100, done=done)
        assert all(not move.any() for number, move in last.items() if number <= 0)
        moves[name] = last[1]
    # Adam's first step from fresh moments is ±lr wherever there is a gradient; from warm ones it is shorter.
    assert moves["warm"].norm() < 0.9 * moves["fresh"].norm()


@pytest.mark.parametrize(
    ("kind", "target", "good", "poor"),
    [
        ("capital", "Paris", "Paris", "The capital is Paris"),
        ("add", "12", "12", "7 + 5 = 12"),
        ("sentence", "4", "Bees make sweet honey.", "Bees. They make honey."),
        ("count", "3 6", "3, 4, 5, 6", "3, 4, 6"),
        ("repeat", "moon 3", "moon moon moon", "moon"),
        ("explain", "5", "ice that moves very slowly", "ice"),
        ("essay", "moon river", "A moon above the river", "A moon"),
        ("long count", "3 6", "3 4 5 6", "3 4 5 6 7 8 9 10"),
        ("story", "2", "Chapter 1 ... Chapter 2", "Chapter 1"),
    ],
)
def test_a_reward_is_one_for_what_was_asked_and_less_for_less(kind, target, good, poor):
    reward = prompts.KINDS[kind].reward
    assert reward(good, target) == 1.0
    assert 0 <= reward(poor, target) < 1
    assert 0 <= reward("", target) < 1


def test_prompts_are_different_and_the_same_at_every_call():
    drawn = prompts.draw(300, 0)
    assert drawn == prompts.draw(300, 0) and drawn != prompts.draw(300, 1)
    assert len({prompt.text for prompt in drawn}) == len(drawn) >= 280
    assert {prompt.kind for prompt in drawn} == set(prompts.KINDS)


# --- the whole way ---------------------------------------------------------------------------------------------------

SMALL = "--responses 120 --group 4 --max-tokens 60 --train-tokens 20 --mini-batch 1 --lr 1e-3".split()
CELLS = "grpo-4-float32:01 random-4-float32 grpo-rollout-float32 grpo-4-float32:trained still-0-bfloat16".split()


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    """A working folder and published records of a few cells, in two runs of which the first was stopped."""
    output, records = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("records")
    command = ["--model", str(model), "--output", str(output), *SMALL, "--cells", *CELLS]
    with pytest.raises(SystemExit, match="goes on from here"):
        law.main([*command, "--minutes", "0"])
    law.main(command)
    law.main([*command, "--publish", str(records)])
    return command, output, records


def test_a_run_leaves_records_that_hold_what_was_measured(measured):
    command, output, records = measured
    args = law.parse_args(command)
    responses = law.read_responses(args)
    folders = {folder.name for folder in records.iterdir() if folder.is_dir()}
    assert folders == {
        "grpo-4-float32",
        "random-4-float32",
        "grpo-rollout-float32",
        "grpo-4-float32-trained",
        "still-0-bfloat16",
    }
    old, new = law.log_probs(args, "start", "float32"), law.log_probs(args, "random-4", "float32")
    held_out = responses[responses.role == "measured"]
    table = read_records(records / "random-4-float32").sort_values("log_ratio")
    assert len(table) == len(held_out)
    expected = sorted(float((new[key].astype(np.float64) - old[key]).sum()) for key in held_out.index)
    np.testing.assert_allclose(table.log_ratio, expected, atol=1e-4)
    assert (table.mini_batch == 4).all()

    rollout = read_records(records / "grpo-rollout-float32")
    assert set(rollout.mini_batch) == {0, 1, 2, 3}
    assert (rollout.quadratic_variation[rollout.mini_batch == 0] == 0).all()
    assert (rollout.quadratic_variation[rollout.mini_batch > 0] > 0).any()
    assert set(read_records(records / "grpo-4-float32").prompt.astype(str)) < set(table.prompt.astype(str))
    trained = read_records(records / "grpo-4-float32-trained")
    assert all(prompt.startswith("trained") for prompt in trained.prompt)
    assert not set(trained.prompt.astype(str)) & set(table.prompt.astype(str))


def test_a_second_run_measures_nothing_again(measured, monkeypatch):
    command, _, _ = measured

    def load(*_):
        raise AssertionError("no model is needed where everything is measured")

    monkeypatch.setattr(measure, "load", load)
    law.main(command)


def test_positions_add_up_to_the_response(measured):
    _, _, records = measured
    sums = pd.read_parquet(records / "random-4-float32" / publish.POSITIONS)
    totals = sums.groupby("response")[["tokens", "quadratic_variation"]].sum()
    assert (totals.tokens == sums.groupby("response").length.first()).all()
    table = read_records(records / "random-4-float32")
    long = table[table.length >= 32].quadratic_variation
    np.testing.assert_allclose(sorted(totals.quadratic_variation), sorted(long), rtol=1e-4)


@pytest.mark.parametrize("cell", ["sgd-4-float32", "grpo-4", "grpo-9-float32", "still-1-bfloat16", "grpo-4-float32:7"])
def test_a_cell_that_does_not_exist_is_refused(cell, capsys):
    with pytest.raises(SystemExit):
        law.parse_args(["--model", "m", "--cells", cell])
    assert cell in capsys.readouterr().err


# --- estimates -------------------------------------------------------------------------------------------------------


def simulate_positions(rng, power, prompts=30, group=4, length=128):
    """Sums by position of responses whose S after l tokens has the standard deviation 0.02·l^power."""
    ends = np.arange(1, length + 1)
    variance = np.diff(np.r_[0.0, (0.02 * ends**power) ** 2])
    shared, own = rng.standard_normal((prompts, 1, length)), rng.standard_normal((prompts, group, length))
    log_ratio = np.sqrt(variance) * (math.sqrt(0.3) * shared + math.sqrt(0.7) * own)
    zeros = np.zeros(length)
    return publish.positions(
        [(f"prompt {p}", 1.0, 1, zeros, log_ratio[p, i]) for p in range(prompts) for i in range(group)]
    )


@pytest.mark.parametrize("power", [0.2, 0.5])
def test_the_exponent_within_responses_is_found(power):
    hits = [
        holds(page.exponent_within(simulate_positions(np.random.default_rng(seed), power)), power) for seed in range(40)
    ]
    assert_covered(hits)


def test_responses_that_have_not_moved_have_no_exponent():
    still = simulate_positions(np.random.default_rng(0), 0.5).assign(log_ratio=0.0)
    assert math.isnan(page.exponent_within(still).value)


def test_the_spread_of_a_token_by_position_is_found():
    hits, length = [], 128
    truth = np.sqrt(np.diff(np.r_[0.0, 4e-4 * np.arange(1, length + 1) ** 0.6]))
    for seed in range(40):
        table = page.by_position(simulate_positions(np.random.default_rng(seed), 0.3)).set_index("low")
        expected = math.sqrt(np.mean(truth[15:31] ** 2))
        hits.append(holds(table.loc[16], expected))
    assert_covered(hits)


def test_mini_batches_that_move_further_are_seen_in_s_over_sqrt_l_and_not_in_s_over_sqrt_q():
    rng = np.random.default_rng(0)
    parts = []
    for mini_batch in range(4):
        part = simulate_law(rng, power=0.5)
        s, q = part.log_ratio * mini_batch / 10, part.quadratic_variation * mini_batch**2 / 100
        parts.append(part.assign(log_ratio=s, quadratic_variation=q, mini_batch=mini_batch))
    records = pd.concat(parts, ignore_index=True)
    table = page.spread_by_mini_batch(records)
    assert table.mini_batch.tolist() == [1, 2, 3]  # what has not moved has no spread
    np.testing.assert_allclose(table.per_length / table.per_length[0], [1, 2, 3], rtol=0.1)
    np.testing.assert_allclose(table.per_variation / table.per_variation[0], 1, rtol=0.1)
    by_mini_batch = page.over_mini_batches(records)
    assert set(by_mini_batch.length) == {1, 2, 3}
    summary = page.matched(by_mini_batch, np.arange(1, 5), page.OVER_MINI_BATCHES).summary
    lre = summary.query("side == 'all'").set_index("method").lre
    # Three Gaussians with spreads 1, 2 and 3 of which a tenth lies beyond one edge: 0.5%, 10% and 20% of each.
    assert lre["fspo"] == pytest.approx(0.109, abs=0.03)
    assert lre["fspo_studentized"] < 0.03


def test_rms_of_s_over_sqrt_q_has_one_value_where_the_law_is_one():
    rng = np.random.default_rng(3)
    length = np.repeat([5, 50, 500], 400)
    q = rng.gamma(5, 2e-4, len(length)) * length
    table = page.rms_of_ratio(
        frame(length, np.sqrt(q) * rng.standard_normal(len(q)), q), clip_rates.length_edges(length, 3)
    )
    assert table.n.sum() == len(length)
    assert all(row.lower <= 1 <= row.upper for row in table[table.n > 0].itertuples())


# --- the page --------------------------------------------------------------------------------------------------------


def test_marks_and_tables_have_to_agree():
    text = "\n".join((page._BEGIN.format("law"), "old", page._END.format("law")))
    assert "old" not in page.filled(text, {"law": "new"}) and "new" in page.filled(text, {"law": "new"})
    with pytest.raises(ValueError, match="marks"):
        page.filled(text, {"rates": "new"})


def test_a_page_is_drawn_from_any_published_records(measured, tmp_path):
    _, _, records = measured
    text = tmp_path / "law.md"
    text.write_text((REPOSITORY / "docs/law.md").read_text())
    law.main(["--redraw", "--records", str(records), "--page", str(text)])
    first, image = text.read_text(), text.with_suffix(".png").read_bytes()
    assert f"`grpo-4-float32` | {len(read_records(records / 'grpo-4-float32'))} |" in first
    law.main(["--redraw", "--records", str(records), "--page", str(text)])
    assert (text.read_text(), text.with_suffix(".png").read_bytes()) == (first, image)


def test_the_page_shows_the_published_records():
    text = (REPOSITORY / "docs/law.md").read_text()
    assert page.filled(text, page.tables(REPOSITORY / "docs/law")) == text, "python scripts/law.py --redraw"
