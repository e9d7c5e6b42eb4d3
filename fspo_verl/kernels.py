# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The two passes of the loss over the tokens as kernels of Triton, which comes with torch for CUDA.

On a GPU an operation of torch costs the host a launch, whatever its size. :mod:`fspo_verl.loss` takes these two for
some twenty. Each program sums a response, or writes a block of its gradient, in float32. With ``TRITON_INTERPRET=1``
they run on a CPU, for tests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens that a program reads at a time


def token_sums(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """As those of :mod:`fspo_verl.loss`, for log-probabilities of 32 bits or fewer."""
    rows, width = log_prob.shape
    sums = torch.empty((7, rows), dtype=torch.float32, device=log_prob.device)
    tokens = log_prob, old_log_prob, advantages, mask.view(torch.uint8)
    strides = [stride for tensor in tokens for stride in tensor.stride()]
    if rows:
        with torch.cuda.device_of(log_prob):
            _sum[(rows,)](*tokens, sums, rows, width, *strides, BLOCK)
    return sums


def token_gradient(advantages: Tensor, mask: Tensor, weights: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """As that of :mod:`fspo_verl.loss`, for weights in float32."""
    gradient = torch.empty(mask.shape, dtype=torch.float32, device=mask.device)
    rows, width = mask.shape
    tokens = advantages, mask.view(torch.uint8)
    strides = [stride for tensor in tokens for stride in tensor.stride()]
    if gradient.numel():
        with torch.cuda.device_of(mask):
            grid = rows, triton.cdiv(width, BLOCK)
            _write_gradient[grid](*tokens, weights, keep, gradient, rows, width, *strides, BLOCK)
    return gradient.to(dtype)  # torch rounds to nearest, Triton's interpreter does not


@triton.jit
def _sum(
    log_prob,
    old_log_prob,
    advantages,
    mask,
    sums,  # [7, rows]
    rows,
    width,
    log_prob_row,  # strides: from a row to the next, and from a token to the next
    log_prob_token,
    old_row,
    old_token,
    advantages_row,
    advantages_token,
    mask_row,
    mask_token,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.zeros([BLOCK], tl.float32)
    log_ratio = tl.zeros([BLOCK], tl.float32)
    quadratic_variation = tl.zeros([BLOCK], tl.float32)
    positive = tl.zeros([BLOCK], tl.float32)
    negative = tl.zeros([BLOCK], tl.float32)
    positive_tokens = tl.zeros([BLOCK], tl.float32)
    negative_tokens = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        token = start + tl.arange(0, BLOCK).to(tl.int64)
        # What the mask leaves out is not loaded, NaN or not.
        is_token = tl.load(mask + row * mask_row + token * mask_token, token < width, other=0) != 0
        new = tl.load(log_prob + row * log_prob_row + token * log_prob_token, is_token, other=0).to(tl.float32)
        old = tl.load(old_log_prob + row * old_row + token * old_token, is_token, other=0).to(tl.float32)
        a = tl.load(advantages + row * advantages_row + token * advantages_token, is_token, other=0).to(tl.float32)
        up = tl.where(a <= 0, 0.0, a)  # NaN goes into both sums, so that the response is found not to be finite
        down = tl.where(a >= 0, 0.0, a)
        length += is_token.to(tl.float32)
        log_ratio += new - old
        quadratic_variation += (new - old) * (new - old)
        positive += up
        negative += down
        positive_tokens += (up != 0).to(tl.float32)
        negative_tokens += (down != 0).to(tl.float32)
    sums += row
    tl.store(sums, tl.sum(length))
    tl.store(sums + rows, tl.sum(log_ratio))
    tl.store(sums + 2 * rows, tl.sum(quadratic_variation))
    tl.store(sums + 3 * rows, tl.sum(positive))
    tl.store(sums + 4 * rows, tl.sum(negative))
    tl.store(sums + 5 * rows, tl.sum(positive_tokens))
    tl.store(sums + 6 * rows, tl.sum(negative_tokens))


@triton.jit
def _write_gradient(
    advantages,
    mask,
    weights,  # [2, rows]: of tokens with A > 0, and of those with A < 0
    keep,  # [rows]: 0 where the response is not finite
    gradient,  # [rows, width]
    rows,
    width,
    advantages_row,
    advantages_token,
    mask_row,
    mask_token,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = token < width
    is_token = (tl.load(mask + row * mask_row + token * mask_token, inside, other=0) != 0) & (tl.load(keep + row) != 0)
    a = tl.load(advantages + row * advantages_row + token * advantages_token, is_token, other=0).to(tl.float32)
    value = a * tl.where(a > 0, tl.load(weights + row), tl.load(weights + rows + row))
    tl.store(gradient + row * width + token, tl.where(is_token, value, 0.0), inside)
