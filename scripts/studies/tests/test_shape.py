# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The laboratory of the shape study trains on the gradients of verl's worker, and repeats itself to the last digit."""

import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "shape"))

import lab  # noqa: E402
import qwen  # noqa: E402
import stairs  # noqa: E402
import through_verl  # noqa: E402
from run import run_seed, stored  # noqa: E402

from fspo_verl.config import FSPOPolicyLossConfig  # noqa: E402

LENGTHS = (1, 3, 40, 17, 96, 8)
MICRO_BATCHES = ([0, 1], [3, 5], [2, 4])


def tokens_of(rows, log_prob):
    """log_prob, old_log_prob, advantages and mask of some rows, padded to the longest of them."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.2 * torch.randn(len(LENGTHS), max(LENGTHS), generator=generator)
    advantage = torch.randn(len(LENGTHS), 1, generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    width = max(LENGTHS[row] for row in rows)
    every = log_prob, log_prob.detach() + noise, advantage.expand_as(mask), mask
    return [column[rows, :width] for column in every]


def gradient_of_laboratory(config, log_prob):
    for rows in MICRO_BATCHES:
        lab.policy_loss(config, tokens_of(rows, log_prob), sum(LENGTHS), len(LENGTHS)).backward()


def gradient_of_worker(config, log_prob):
    """verl's ``ppo_loss`` on what its engine hands over: nested tensors, the output at place i scoring token i + 1."""
    nest = lambda rows: torch.nested.as_nested_tensor(rows, layout=torch.jagged)  # noqa: E731
    prompt = torch.zeros(stairs.PROMPT, dtype=torch.long)
    for rows in MICRO_BATCHES:
        columns = zip(*tokens_of(rows, log_prob), strict=True)
        new, old, advantages, mask = zip(*([part[row[3]] for part in row] for row in columns), strict=True)
        outputs = [torch.cat([torch.zeros(len(prompt) - 1), row, torch.zeros(1)]) for row in new]
        data = {
            "prompts": nest([prompt] * len(rows)),
            "responses": nest([row.long() for row in mask]),
            "response_mask": nest([row.long() for row in mask]),
            "old_log_probs": nest(list(old)),
            "advantages": nest(list(advantages)),
        }
        totals = {"dp_size": 1, "batch_num_tokens": sum(LENGTHS), "global_batch_size": len(LENGTHS)}
        loss, _ = ppo_loss(config, {"log_probs": nest(outputs)}, tu.get_tensordict(data, totals))
        loss.backward()


@pytest.mark.parametrize("aggregation", ["seq-mean-token-sum", "token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss", ["fspo", "vanilla"])
def test_the_gradient_is_that_of_verls_worker(loss, aggregation):
    band = FSPOPolicyLossConfig(eps=0.2) if loss == "fspo" else PolicyLossConfig(loss_mode=loss)
    gradients = []
    for of in (gradient_of_laboratory, gradient_of_worker):
        config = FSDPActorConfig(
            rollout_n=2, ppo_micro_batch_size_per_gpu=1, policy_loss=band, loss_agg_mode=aggregation
        )
        log_prob = torch.full((len(LENGTHS), max(LENGTHS)), -1.0, requires_grad=True)
        of(config, log_prob)
        gradients.append(log_prob.grad)
    assert torch.equal(*gradients)
    trained = (gradients[0] != 0).sum(1)
    assert 0 < trained.sum() < sum(LENGTHS)  # the clip took some and left some


def test_a_seed_repeats_itself_to_the_last_digit_and_goes_on_where_it_was_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr(stairs, "WARM_UPDATES", 3)
    monkeypatch.setattr(lab, "EVALUATED", 16)
    monkeypatch.setattr(lab, "PROMPTS", 8)
    arms = ["sqrt"]
    monkeypatch.setattr("run.cells", lambda name, seed: [lab.Cell(name, arm, seed, steps=2) for arm in arms])
    run_seed("a", 3, tmp_path / "in two runs")
    arms.append("none")
    for folder in ("in two runs", "in one"):
        run_seed("a", 3, tmp_path / folder)
    first, second = (file.read_bytes() for file in tmp_path.rglob("*.parquet"))
    assert first == second
    arms.append("random")
    monkeypatch.setattr("run.train", lambda cell, warm, shares: {**cell._asdict(), "shares": shares})  # of it alone
    run_seed("a", 3, tmp_path / "in one")
    found = {cell["arm"]: cell for cell in stored("a", tmp_path / "in one").table().to_pylist()}
    assert found["random"]["shares"] == found["sqrt"]["clip_rate"] and len(found["sqrt"]["length"]) == 2
    assert {arm for arm, cell in found.items() if cell["shares"] is None} == {"sqrt", "none"}
    torch.distributed.destroy_process_group()


@given(seed=st.integers(0, 10_000))
def test_verl_reads_and_rewards_the_tokens_of_the_laboratory(seed):
    tokenizer, rng = through_verl.tokenizer(), random.Random(seed)
    problem, other = stairs.draw_problem(rng), stairs.draw_problem(rng)
    row = through_verl.data_set(random.Random(seed), 1).iloc[0]
    assert tokenizer.apply_chat_template(row.prompt, add_generation_prompt=True)["input_ids"] == problem.prompt
    for response in (stairs.demonstrate(problem, rng), stairs.demonstrate(other, rng), [stairs.EOS]):
        text = tokenizer.decode(response, skip_special_tokens=True)
        assert tokenizer(text).input_ids == response[:-1]
        assert stairs.compute_score("", text, "", row.extra_info) == problem.reward(response)


@pytest.mark.parametrize("make", [stairs.Policy, qwen.Qwen])
def test_a_policy_samples_from_the_distribution_that_it_scores(make):
    torch.manual_seed(0)
    policy, rows, tokens = make(), torch.arange(8), torch.randint(0, stairs.PAD, (8, 14))
    prompts, responses = tokens[:, : stairs.PROMPT], tokens[:, stairs.PROMPT :]
    expected, cache = policy.log_probs(prompts, responses), policy.new_cache(8)
    logits = policy(prompts, cache, 0)[:, -1]
    for place in range(responses.shape[1]):
        chosen = logits.log_softmax(-1).gather(-1, responses[rows, place, None])[:, 0]
        torch.testing.assert_close(chosen, expected[rows, place], atol=1e-4, rtol=1e-4)
        if place == 4:  # some responses end
            kept = torch.arange(8) % 3 > 0
            rows, cache = rows[kept], policy.kept(cache, kept)
        logits = policy(responses[rows, place, None], cache, stairs.PROMPT + place)[:, -1]
