# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the law needs from a model: token log-probabilities, and a few steps of training."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

_LOGITS = 512  # rows of the vocabulary-wide logits at a time
_TRAIN_TOKENS, _MEASURE_TOKENS = 1024, 4096  # per forward pass, with padding


class Group(NamedTuple):
    """Responses to one prompt, with their advantages where they are trained on."""

    prompt: list[int]
    responses: list[list[int]]
    advantages: list[float] | None = None


def load(path: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A causal language model in evaluation mode (its dropout, if any, would be noise in S)."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").to(device).eval()


def token_log_probs(
    model: PreTrainedModel, prompt: list[int], responses: list[list[int]], temperature: float
) -> tuple[Tensor, ...]:
    """Log-probability (float32) of every token of each response, ``[L_i]``; the prompt is computed once for all.

    It is that of sampling at a temperature, by which the logits are divided. Responses are padded on the right, where
    causal attention does not look: no mask is needed.
    """
    device, count, width = model.device, len(responses), max(map(len, responses))
    tokens = torch.zeros(count, width, dtype=torch.long)
    for row, response in enumerate(responses):
        tokens[row, : len(response)] = torch.tensor(response)
    tokens = tokens.to(device)
    cache = DynamicCache(config=model.config)
    start = model.model(torch.tensor([prompt], device=device), past_key_values=cache).last_hidden_state[:, -1:]
    hidden = start.expand(count, 1, -1)
    if width > 1:
        cache.batch_repeat_interleave(count)
        hidden = torch.cat([hidden, model.model(tokens[:, :-1], past_key_values=cache).last_hidden_state], dim=1)
    lengths = torch.tensor([len(response) for response in responses])
    used = (torch.arange(width) < lengths[:, None]).to(device)
    hidden, targets = hidden[used], tokens[used]
    log_probs = [
        -F.cross_entropy(model.lm_head(part).float() / temperature, target, reduction="none")
        for part, target in zip(hidden.split(_LOGITS), targets.split(_LOGITS), strict=True)
    ]
    return torch.cat(log_probs).split(lengths.tolist())


def micro_batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices of responses of similar length, about ``tokens`` with their padding at a time."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > tokens:
            yield batch
            batch = []
        batch.append(index)
    yield batch


@torch.inference_mode()
def measure(model: PreTrainedModel, group: Group, temperature: float) -> list[np.ndarray]:
    """Token log-probabilities ``[L]`` (float32) of a group's responses, in their order."""
    result: list[np.ndarray] = [np.empty(0)] * len(group.responses)
    for batch in micro_batches([len(response) for response in group.responses], _MEASURE_TOKENS):
        found = token_log_probs(model, group.prompt, [group.responses[i] for i in batch], temperature)
        for index, values in zip(batch, found, strict=True):
            result[index] = values.cpu().numpy()
    return result


def train(model: PreTrainedModel, batches: Sequence[Sequence[Group]], lr: float, temperature: float) -> Iterator[int]:
    """Steps of AdamW on the policy gradient, one per batch; yields the number of each, from 1, when it is taken.

    As in verl's defaults the gradient is that of Σ A_i log π(y_it) over all tokens of the batch, divided by their
    number, and clipped to norm 1; weight decay is 0.01. Everything is float32, and Adam's state is fresh. The ratio
    that multiplies the gradient in later mini-batches (near 1) is left out.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.01)
    for step, batch in enumerate(batches, 1):
        count = sum(len(response) for group in batch for response in group.responses)
        for group in batch:
            for rows in micro_batches([len(response) for response in group.responses], _TRAIN_TOKENS):
                values = token_log_probs(model, group.prompt, [group.responses[row] for row in rows], temperature)
                loss = -sum(group.advantages[row] * value.sum() for row, value in zip(rows, values, strict=True))
                (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step
