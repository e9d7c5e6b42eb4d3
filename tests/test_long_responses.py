# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The loss on responses of thousands of tokens, in float32 and bfloat16, against float64."""

import pytest
import torch

from fspo_verl.band import Band
from fspo_verl.loss import fspo_loss

ROWS, TOKENS = 72, 8192
EPS = {torch.float32: 0.03, torch.bfloat16: 0.3}  # rounding to bfloat16 moves S/sqrt(L) by some thousandths
# A sum of 8,192 numbers of float32 is right to some 1e-5; a gradient in bfloat16 is rounded once.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-3 + 2**-8}
# S in half-widths of the range: on each side of each edge (the dual clip lies at 3), too far from it for rounding.
PLACES = torch.tensor([-2.5, -1.25, -0.75, -0.1, 0.1, 0.75, 1.25, 2.5, 3.75])


def batch_of(dtype):
    """New and old log-probs, advantages and mask ``[ROWS, TOKENS]``: 1 token to all, holes, one row without any."""
    random = torch.Generator().manual_seed(0)
    mask = torch.arange(TOKENS) < torch.logspace(0, 1, ROWS, TOKENS).round()[:, None]
    mask &= torch.rand(ROWS, TOKENS, generator=random) < 0.9
    mask[ROWS // 2] = False
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    place = PLACES[torch.randint(len(PLACES), (ROWS, 1), generator=random)]
    log_ratio = EPS[dtype] * torch.randn(ROWS, TOKENS, generator=random) * mask
    log_ratio += (place * EPS[dtype] * count.sqrt() - log_ratio.sum(-1, keepdim=True)) / count
    old = -2 * torch.rand(ROWS, TOKENS, generator=random)
    new = (old + log_ratio).masked_fill(~mask, torch.nan)
    advantages = torch.randn(ROWS, 1, generator=random).expand(ROWS, TOKENS)
    return new.to(dtype), old.to(dtype), advantages, mask


def in_float64(new, old, advantages, mask):
    """Loss ``[ROWS]`` and gradient ``[ROWS, TOKENS]``: J = min(w A, clip(w) A) with the dual clip, dJ/dS = w A."""
    s = torch.where(mask, new.double() - old.double(), 0.0).sum(-1, keepdim=True)
    length, a = mask.sum(-1, keepdim=True), advantages[:, :1].double()
    edge = EPS[new.dtype] * length.double().sqrt()
    used = torch.where(a > 0, s.minimum(edge), s.maximum(-edge).minimum(3 * edge))
    term = -a * used.clamp(max=20).exp()
    return (length * term)[:, 0], torch.where(mask & (used == s), term, 0.0)


@pytest.mark.parametrize("dtype", EPS)
def test_values_gradients_and_clips_of_long_responses_are_those_of_float64(dtype):
    batch = new, old, advantages, mask = batch_of(dtype)
    band = Band(EPS[dtype], eps_dual=3 * EPS[dtype])
    result = fspo_loss(new.clone().requires_grad_(), old, advantages, mask, band)
    assert result.clipped_upper.any() and result.clipped_lower.any() and result.clipped_dual.any()
    assert (result.length == 0).any() and result.length.max() > 0.8 * TOKENS
    leaf = new.clone().requires_grad_()
    values = fspo_loss(leaf, old, advantages, mask, band).loss
    values.sum().backward()
    for value, exact in zip((values.detach(), leaf.grad), in_float64(*batch), strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=TOLERANCE[dtype], atol=0)
