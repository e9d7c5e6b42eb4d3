# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Batched sampling from a transformers language model, for batches whose responses differ widely in length."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

# Taking rows out of the cache costs about one decoding step, so wait until enough of them have finished.
_COMPACT_BELOW = 0.85


class Sampling(NamedTuple):
    """How to sample one response. ``temperature=0`` is greedy; ``top_k=-1`` and ``top_p=1`` switch the filters off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


class Response(NamedTuple):
    """One sampled response and the log-probability of each token under the distribution it was drawn from."""

    token_ids: list[int]
    log_probs: list[float]


def eos_token_ids(model: PreTrainedModel, tokenizer) -> list[int]:
    """The tokens that end a response: those of the model's generation settings, or else the tokenizer's."""
    eos = model.generation_config.eos_token_id
    return eos if isinstance(eos, list) else [tokenizer.eos_token_id if eos is None else eos]


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    prompts: list[list[int]],
    sampling: list[Sampling],
    eos_token_ids: list[int],
    vocab_size: int,
) -> list[Response]:
    """Sample one response per prompt. A response ends with an end-of-sequence token or at its ``max_tokens``.

    Rows that finish leave the batch, so that one long response does not make hundreds of short ones wait: unlike
    ``model.generate``, the cost of a step follows the number of unfinished rows.

    Tokens from ``vocab_size`` on (rows that only pad the embedding matrix) are never sampled.
    """
    batch, width, steps = len(prompts), max(map(len, prompts)), max(s.max_tokens for s in sampling)
    new_ids = torch.zeros(batch, width, dtype=torch.long)  # left-padded prompts at first, one token per row later
    mask = torch.zeros(batch, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        new_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)

    limits, temperature, top_p, top_k = (torch.tensor(column) for column in zip(*sampling, strict=True))
    eos = torch.tensor(eos_token_ids)
    token_ids = torch.zeros(batch, steps, dtype=torch.long)
    log_probs = torch.zeros(batch, steps)
    lengths = torch.zeros(batch, dtype=torch.long)
    requests = torch.arange(batch)  # which request each row of the model's batch answers
    active = torch.ones(batch, dtype=torch.bool)  # per row; finished rows ride along until enough have gathered

    for step in range(steps):
        logits = model(
            input_ids=new_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1, :vocab_size]
        drawn, log_prob = _draw(logits.float(), temperature[requests], top_p[requests], top_k[requests])
        token_ids[requests, step], log_probs[requests, step] = drawn, log_prob
        lengths[requests[active]] = step + 1

        active &= ~torch.isin(drawn, eos) & (step + 1 < limits[requests])
        remaining = int(active.sum())
        if remaining == 0:
            break
        if remaining <= _COMPACT_BELOW * len(active):
            cache.batch_select_indices(active)
            requests, drawn, mask, positions = (rows[active] for rows in (requests, drawn, mask, positions))
            active = active[active]
        new_ids, mask, positions = drawn[:, None], F.pad(mask, (0, 1), value=1), positions[:, -1:] + 1

    return [
        Response(ids[:length], values[:length])
        for ids, values, length in zip(token_ids.tolist(), log_probs.tolist(), lengths.tolist(), strict=True)
    ]


def _draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row of ``logits`` [rows, vocab] (the rest: [rows]); return tokens and log-probs, [rows].

    Raises:
        FloatingPointError: a logit is NaN, as when training has diverged.
    """
    greedy = temperature == 0
    log_p = torch.log_softmax(logits / temperature.masked_fill(greedy, 1.0)[:, None], dim=-1)
    if (top_p < 1).any() or (top_k > 0).any():
        ranked, order = log_p.sort(dim=-1, descending=True)
        mass_above = ranked.exp().cumsum(-1) - ranked.exp()
        excluded = mass_above >= top_p[:, None]
        excluded |= (torch.arange(ranked.shape[-1]) >= top_k[:, None]) & (top_k > 0)[:, None]
        excluded[:, 0] = False  # the likeliest token always stays
        ranked = torch.log_softmax(ranked.masked_fill(excluded, -torch.inf), dim=-1)
        log_p = torch.empty_like(log_p).scatter(-1, order, ranked)
    # One random number a row: on a CPU many times as fast as torch.multinomial or a random number per token.
    cumulative = log_p.exp().cumsum(-1)
    total = cumulative[:, -1:]
    if total.isnan().any():
        raise FloatingPointError("the policy gives logits that are NaN")
    place = torch.minimum(torch.rand_like(total) * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, place, right=True).squeeze(-1)  # the first token that lies beyond
    drawn = torch.where(greedy, log_p.argmax(-1), drawn)
    return drawn, log_p.gather(-1, drawn[:, None]).squeeze(-1)
