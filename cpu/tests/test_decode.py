# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The CPU rollout's sampler against transformers' own generation and against plain forward passes."""

from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from fspo_verl_cpu.decode import Sampling, sample
from fspo_verl_cpu.rollout import HFServer

VOCABULARY, EOS, MAX_TOKENS = 23, 1, 40
SIZES = dict(
    vocab_size=VOCABULARY + 5,  # more rows than tokens, as padded embedding matrices have
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.5,  # far from uniform
    eos_token_id=EOS,
    pad_token_id=0,
    bos_token_id=None,
)


@pytest.fixture(params=[(Qwen3ForCausalLM, Qwen3Config), (LlamaForCausalLM, LlamaConfig)], ids=["qwen3", "llama"])
def model(request):
    architecture, config = request.param
    torch.manual_seed(0)
    return architecture(config(**SIZES)).eval()


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in (3, 17, 1, 8) * 8]


@torch.no_grad()
def log_probs_of(model, prompt, response, temperature=1.0):
    """Log-probabilities of a response's tokens from one forward pass without a cache, [tokens]."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, :VOCABULARY]
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


def test_greedy_is_what_transformers_generates_one_by_one(model, prompts):
    responses = sample(model, prompts, [Sampling(MAX_TOKENS, temperature=0)] * len(prompts), [EOS], VOCABULARY)
    assert len({len(response.token_ids) for response in responses}) > 3, "the test wants responses of many lengths"
    for prompt, response in zip(prompts, responses, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            suppress_tokens=list(range(VOCABULARY, VOCABULARY + 5)),
        )
        assert response.token_ids == expected[0, len(prompt) :].tolist()
        torch.testing.assert_close(
            torch.tensor(response.log_probs), log_probs_of(model, prompt, response.token_ids), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_distribution_sampled_from(model, prompts, temperature):
    torch.manual_seed(1)
    responses = sample(model, prompts, [Sampling(MAX_TOKENS, temperature)] * len(prompts), [EOS], VOCABULARY)
    for prompt, response in zip(prompts, responses, strict=True):
        expected = log_probs_of(model, prompt, response.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=1e-4, rtol=1e-4)


def test_a_response_ends_with_eos_or_at_its_own_limit(model, prompts):
    torch.manual_seed(2)
    limits = [1 + index for index in range(len(prompts))]
    responses = sample(model, prompts, [Sampling(limit) for limit in limits], [EOS, 2], VOCABULARY)
    for limit, (token_ids, log_probs) in zip(limits, responses, strict=True):
        assert len(token_ids) == len(log_probs) <= limit
        assert token_ids[-1] in (EOS, 2) or len(token_ids) == limit
        assert not {EOS, 2} & set(token_ids[:-1])
        assert max(token_ids) < VOCABULARY


def test_finished_rows_leave_the_batch(model, prompts):
    rows = []
    model.register_forward_hook(lambda module, args, kwargs, output: rows.append(len(output.logits)), with_kwargs=True)
    sample(model, prompts, [Sampling(1 + index) for index in range(len(prompts))], [], VOCABULARY)
    assert rows[0] == len(prompts) and len(rows) == len(prompts)
    assert rows == sorted(rows, reverse=True) and rows[-1] == 1


def test_draws_follow_the_distribution(model):
    prompt, draws = [5, 9, 2], 20_000
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1, :VOCABULARY].softmax(-1)
    torch.manual_seed(3)
    responses = sample(model, [prompt] * draws, [Sampling(1)] * draws, [EOS], VOCABULARY)
    counts = torch.bincount(torch.tensor([r.token_ids[0] for r in responses]), minlength=VOCABULARY)
    # Five standard errors of a frequency, and room for tokens that are expected about never.
    assert ((counts / draws - expected).abs() <= 5 * (expected / draws).sqrt() + 1e-3).all()


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 3), (0.7, -1), (0.9, 2)])
def test_top_p_and_top_k_renormalise_what_they_keep(model, top_p, top_k):
    prompt = [5, 9, 2]
    with torch.no_grad():
        probs = model(torch.tensor([prompt])).logits[0, -1, :VOCABULARY].softmax(-1).tolist()
    kept, mass = [], 0.0
    for token in sorted(range(VOCABULARY), key=lambda token: -probs[token]):
        if kept and (mass >= top_p or len(kept) == top_k):
            break
        kept.append(token)
        mass += probs[token]
    torch.manual_seed(4)
    sampling = Sampling(1, top_p=top_p, top_k=top_k)
    # Rows keep their own filters: every other one has none.
    responses = sample(model, [prompt] * 4000, [sampling, Sampling(1)] * 2000, [EOS], VOCABULARY)
    assert {r.token_ids[0] for r in responses[::2]} == set(kept)
    for token_ids, log_probs in responses[::2]:
        assert log_probs[0] == pytest.approx(torch.tensor(probs[token_ids[0]] / mass).log().item(), abs=1e-4)
    for token_ids, log_probs in responses[1::2]:
        assert log_probs[0] == pytest.approx(torch.tensor(probs[token_ids[0]]).log().item(), abs=1e-4)


def test_a_policy_that_gives_nan_is_named(model, prompts):
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        sample(model, prompts, [Sampling(8, 0.0)] * len(prompts), [EOS], VOCABULARY)


def test_a_limit_on_threads_is_kept(untrained_model, monkeypatch, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    HFServer(untrained_model, "bfloat16", seed=0, max_num_seqs=8, response_length=8)
    assert torch.get_num_threads() == 1
