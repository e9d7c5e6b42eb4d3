# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FSPO as pure functions of tensors: sequence log-ratio, band, clipped objective.

    S = Σ_t [log π_θ(y_t) − log π_old(y_t)]            sequence log importance-sampling ratio, no 1/L
    w = exp(S)                                         importance-sampling ratio of the whole sequence
    J = mean_i min(w_i A_i, clip(w_i) A_i)             with S clipped to [c − eps_low·s, c + eps_high·s], s = √L

The loss of a sequence here is the sum of its L token terms: L times −w·A in value, and exactly its gradient. The
aggregation mode that the packaged config sets (seq-mean-token-sum-norm) takes the mean over sequences and divides by
the longest allowed response: a gradient of −∇J over that length.

Source: FSPO, arXiv 2509.09177 (v2/v3: c = 0). The realised centre and width are derived here; see :class:`Band`.

Shapes: ``[B, T]`` is (sequences, response tokens incl. padding), ``[B]`` is one value per sequence. Log-ratios are in
nats. This module knows nothing of verl.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fspo_verl.band import Band, Edges

# exp() of a larger log-ratio is a number no optimiser can use (e^20 is about 5e8). Clipping decisions are taken on the
# exact log-ratio; only the exponent is capped, so that one stale sequence cannot turn the loss into inf.
MAX_LOG_RATIO = 20.0


class SequenceLoss(NamedTuple):
    """What :func:`fspo_loss` returns; all tensors are ``[B]`` and only ``loss`` carries a gradient."""

    loss: Tensor  # token-summed loss of each sequence: Σ_t of the token terms
    length: Tensor  # L, response tokens; 0 for a fully masked row
    log_ratio: Tensor  # S; 0 where not finite
    quadratic_variation: Tensor  # Q; 0 where not finite
    advantage: Tensor  # mean over the response tokens; 0 for a fully masked row and where not finite
    edges: Edges
    clipped_upper: Tensor  # bool: some token with A > 0, and S above the band
    clipped_lower: Tensor  # bool: some token with A < 0, and S below the band
    clipped_dual: Tensor  # bool: some token with A < 0, and S above the dual clip
    finite: Tensor  # bool: False where a response token holds NaN or inf; such a row contributes nothing
    positive_tokens: Tensor  # number of response tokens with A > 0
    negative_tokens: Tensor  # number of response tokens with A < 0

    @property
    def clipped(self) -> Tensor:
        """bool ``[B]``: the sequence lost (part of) its gradient to a clip."""
        return self.clipped_upper | self.clipped_lower | self.clipped_dual

    @property
    def outside(self) -> Tensor:
        """bool ``[B]``: S is outside the band, whatever the sign of the advantage."""
        return (self.log_ratio > self.edges.high) | (self.log_ratio < self.edges.low)


def fspo_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, band: Band
) -> SequenceLoss:
    """Clipped sequence-level policy loss, before aggregation over sequences.

    A token's term is ``−A_t·exp(min(S, high))`` for A_t > 0 and ``−A_t·exp(min(max(S, low), dual))`` for A_t < 0: the
    PPO minimum, with the decision taken by the token's advantage and the ratio of its whole sequence. S on an edge
    counts as inside. Inside, the gradient with respect to ``log_prob[i, t]`` is ``−A_t·exp(S_i)``, that is
    ∇J_i = w_i A_i Σ_t ∇log π(y_t) where the advantage is constant along the sequence; outside, it is 0.

    Half-precision inputs are cast up before anything is summed: decisions and value are exactly those of the same
    numbers in float32, and the gradient is theirs rounded once (relative error up to 2⁻⁸ in bfloat16, 2⁻¹¹ in float16).

    Args:
        log_prob: ``[B, T]`` log-probabilities under the current policy, nats; the only differentiable input.
        old_log_prob: ``[B, T]`` log-probabilities under the policy that the clip refers to.
        advantages: ``[B, T]``, constant or varying along a sequence.
        response_mask: ``[B, T]`` bool, int or float, non-zero on response tokens. What stands elsewhere (NaN included)
            is never read into the result.
        band: the clip band.

    Raises:
        ValueError: if the four tensors are not of one 2-D shape.
        TypeError: if the log-probabilities are not floating point.
        RuntimeError: in the backward pass, if advantages or response_mask have been changed in place since.
    """
    shapes = [tuple(x.shape) for x in (log_prob, old_log_prob, advantages, response_mask)]
    if log_prob.dim() != 2 or len(set(shapes)) != 1:
        raise ValueError(
            "fspo_loss needs log_prob, old_log_prob, advantages and response_mask of one shape [sequences, tokens]; "
            f"got {', '.join(map(str, shapes))}"
        )
    if not (log_prob.is_floating_point() and old_log_prob.is_floating_point()):
        raise TypeError(f"log-probabilities must be floating point; got {log_prob.dtype} and {old_log_prob.dtype}")
    length, log_ratio, quadratic_variation, positive, negative, positive_tokens, negative_tokens = _TokenSums.apply(
        log_prob, old_log_prob, advantages, response_mask.bool()
    )

    with torch.no_grad():
        finite = (log_ratio + quadratic_variation + positive + negative).isfinite()
        log_ratio = torch.where(finite, log_ratio, 0.0)
        quadratic_variation = torch.where(finite, quadratic_variation, 0.0)
        advantage = torch.where(finite, (positive + negative) / length.clamp(min=1), 0.0)
        # An empty row keeps a band of one token; its advantage sums are zero, so the band decides nothing.
        low, high, dual = edges = band.edges(length.clamp(min=1), quadratic_variation)
        above, below, beyond = log_ratio > high, log_ratio < low, log_ratio > dual
        ratio_positive = _exp(torch.minimum(log_ratio, high))
        ratio_negative = _exp(torch.minimum(torch.maximum(log_ratio, low), dual))

    # A clipped sum keeps its value and loses its gradient; a non-finite row loses both.
    positive = torch.where(finite, torch.where(above, positive.detach(), positive), 0.0)
    negative = torch.where(finite, torch.where(below | beyond, negative.detach(), negative), 0.0)
    return SequenceLoss(
        loss=-(ratio_positive * positive + ratio_negative * negative),
        length=length,
        log_ratio=log_ratio,
        quadratic_variation=quadratic_variation,
        advantage=advantage,
        edges=edges,
        clipped_upper=above & (positive.detach() > 0),
        clipped_lower=below & (negative.detach() < 0),
        clipped_dual=beyond & (negative.detach() < 0),
        finite=finite,
        positive_tokens=positive_tokens,
        negative_tokens=negative_tokens,
    )


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


# --- the sums over tokens ---------------------------------------------------------------------------------------------


class _TokenSums(torch.autograd.Function):
    """One pass over the tokens: L, S, Q, the sums of the positive and of the negative advantages, and the numbers of
    tokens with either, ``[B]`` each.

    The advantage sums carry the policy gradient: constants in value, their gradient with respect to ``log_prob[i, t]``
    is A_t, as if they were Σ_t A_t·exp(log π(y_t) − sg[log π(y_t)]). Writing that product out would keep several [B, T]
    temporaries alive until the backward pass; here it is one write per token, and padding is never multiplied.
    """

    @staticmethod
    def forward(ctx, log_prob, old_log_prob, advantages, mask):
        # Saved, so that autograd notices a change in place until the backward pass. A tensor of inference mode has no
        # version by which it could, and autograd refuses to save one: a copy stands for it.
        ctx.save_for_backward(*(x.clone() if x.is_inference() else x for x in (advantages, mask)))
        ctx.dtype = log_prob.dtype
        # float32 or wider: over thousands of tokens bfloat16 cannot tell a sequence inside the band from one outside.
        dtype = torch.promote_types(torch.promote_types(log_prob.dtype, old_log_prob.dtype), torch.float32)
        integer = torch.int64 if dtype == torch.float64 else torch.int32
        sums = log_prob.new_zeros((7, len(log_prob)), dtype=dtype)
        for rows in _row_blocks(log_prob):
            # A response token has all bits set, padding has none. `x & bits` is x or 0, also where x is NaN.
            # On a CPU it is several times as fast as masked_fill.
            bits = mask[rows].to(integer).neg_()
            difference = log_prob[rows].to(dtype) - old_log_prob[rows].to(dtype)
            token_log_ratio = difference.view(integer).bitwise_and_(bits).view(dtype)
            token_advantage = advantages[rows].to(dtype).view(integer).bitwise_and(bits).view(dtype)
            sums[0, rows] = mask[rows].sum(-1).to(dtype)
            sums[1, rows] = token_log_ratio.sum(-1)
            sums[2, rows] = token_log_ratio.square_().sum(-1)
            above = token_advantage.clamp(min=0)
            below = token_advantage.clamp_(max=0)
            sums[3, rows], sums[4, rows] = above.sum(-1), below.sum(-1)
            # Comparisons in place write 1.0 and 0.0, and sums of floats are several times faster than counts.
            sums[5, rows], sums[6, rows] = above.gt_(0).sum(-1), below.lt_(0).sum(-1)
        length, log_ratio, quadratic_variation, positive, negative, *counts = (row.clone() for row in sums)
        ctx.mark_non_differentiable(length, log_ratio, quadratic_variation, *counts)
        return length, log_ratio, quadratic_variation, positive, negative, *counts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _length, _log_ratio, _quadratic_variation, grad_positive, grad_negative, *_counts):
        all_advantages, mask = ctx.saved_tensors
        grad = torch.empty(mask.shape, dtype=ctx.dtype, device=mask.device)
        for rows in _row_blocks(grad):
            advantages = all_advantages[rows]
            upper, lower = grad_positive[rows].unsqueeze(-1), grad_negative[rows].unsqueeze(-1)
            # A row without gradient must stay at zero even where its advantage is infinite.
            idle = ~mask[rows] | ((upper == 0) & (lower == 0))
            # One of the two products is 0; on a CPU this takes a third of the time of a choice by torch.where.
            product = (advantages.clamp(min=0) * upper).addcmul_(advantages.clamp(max=0), lower)
            grad[rows] = product.masked_fill_(idle, 0.0)
        return grad, None, None, None


def _row_blocks(tensor: Tensor) -> Iterator[slice]:
    """Cut ``[B, T]`` into blocks of rows, so that temporaries are as large as a block and not as the batch.

    On a CPU they then stay in its cache; on a GPU a block is large enough to fill it.
    """
    block = 2**16 if tensor.device.type == "cpu" else 2**24  # tokens
    rows = max(1, block // max(1, tensor.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(tensor), rows))
