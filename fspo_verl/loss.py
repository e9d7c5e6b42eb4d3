# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FSPO as pure functions of tensors: sequence log-ratio, clip range, clipped objective.

    S = Σ_t [log π_θ(y_t) − log π_old(y_t)]            sequence log importance-sampling ratio, no 1/L
    w = exp(S)                                         importance-sampling ratio of the whole sequence
    J = mean_i min(w_i A_i, clip(w_i) A_i)             with S clipped to [c − eps_low·s, c + eps_high·s], s = √L

The loss of a sequence here is the sum of its L token terms: L times −w·A in value, and exactly its gradient. The
aggregation mode that the packaged config sets (seq-mean-token-sum-norm) takes the mean over sequences and divides by
the longest allowed response: a gradient of −∇J over that length.

Source: FSPO, arXiv 2509.09177 (v2/v3: c = 0). The drift-corrected centre is derived here; see :class:`Band`.

Shapes: ``[B, T]`` is (sequences, response tokens incl. padding), ``[B]`` is one value per sequence. Log-ratios are in
nats. This module knows nothing of verl.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fspo_verl.band import Band

# exp() of a larger log-ratio is a number no optimiser can use (e^20 is about 5e8). Clipping decisions are taken on the
# exact log-ratio; only the exponent is capped, so that one stale sequence cannot turn the loss into inf.
MAX_LOG_RATIO = 20.0


class SequenceLoss(NamedTuple):
    """Result of :func:`fspo_loss`; all tensors are ``[B]`` and only ``loss`` carries a gradient."""

    loss: Tensor  # token-summed loss of each sequence: Σ_t of the token terms
    length: Tensor  # L, response tokens; 0 for a fully masked row
    log_ratio: Tensor  # S; 0 where not finite
    quadratic_variation: Tensor  # Q; 0 where not finite
    positive: Tensor  # Σ_t of the advantages A_t > 0; 0 where not finite
    negative: Tensor  # Σ_t of the advantages A_t < 0; 0 where not finite
    positive_tokens: Tensor  # number of response tokens with A > 0; 0 where not finite
    negative_tokens: Tensor  # number of response tokens with A < 0; 0 where not finite
    finite: Tensor  # bool: False where a response token holds NaN or inf; such a row contributes nothing
    low: Tensor  # the edges of the range in log space, see Band.edges
    high: Tensor
    dual: Tensor

    @property
    def advantage(self) -> Tensor:
        """Mean over the response tokens; 0 for a fully masked row and where not finite."""
        return (self.positive + self.negative) / self.length.clip(min=1)

    @property
    def clipped_upper(self) -> Tensor:
        """bool: some token with A > 0, and S above the range."""
        return (self.log_ratio > self.high) & (self.positive > 0)

    @property
    def clipped_lower(self) -> Tensor:
        """bool: some token with A < 0, and S below the range."""
        return (self.log_ratio < self.low) & (self.negative < 0)

    @property
    def clipped_dual(self) -> Tensor:
        """bool: some token with A < 0, and S above the dual clip."""
        return (self.log_ratio > self.dual) & (self.negative < 0)

    @property
    def clipped(self) -> Tensor:
        """bool: the sequence lost (part of) its gradient to a clip."""
        return self.clipped_upper | self.clipped_lower | self.clipped_dual

    @property
    def outside(self) -> Tensor:
        """bool: S is outside the range, whatever the sign of the advantage."""
        return (self.log_ratio > self.high) | (self.log_ratio < self.low)


def fspo_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, band: Band
) -> SequenceLoss:
    """Compute the clipped sequence-level policy loss, before aggregation over sequences.

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
        band: the clip range.

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
    loss, sums, finite, *edges = _ClippedLoss.apply(log_prob, old_log_prob, advantages, response_mask.bool(), band)
    return SequenceLoss._make((loss, *sums, finite, *edges))


class _ClippedLoss(torch.autograd.Function):
    """The loss as one node of the graph, with the sums and edges that it is made of.

    Plain autograd gives the same numbers, but takes several times as long and keeps temporaries as large as the batch.

    A sequence has two weights −clip(w), one for its tokens with A_t > 0 and one for those with A_t < 0. Its loss is
    Σ_t weight·A_t. The gradient with respect to ``log_prob[i, t]`` is weight·A_t, or 0 where it is clipped.
    """

    @staticmethod
    def forward(ctx, log_prob, old_log_prob, advantages, mask, band):
        blocks = [_token_sums(*block) for block in _row_blocks(log_prob, old_log_prob, advantages, mask)]
        sums = torch.cat(blocks, dim=-1) if len(blocks) > 1 else blocks[0]
        finite = sums[1:5].sum(0).abs() < math.inf
        sums[1:] = torch.where(finite, sums[1:], 0.0)
        length, log_ratio, quadratic_variation, *_ = sums
        # An empty row keeps the range of one token; its advantage sums are zero, so the range decides nothing.
        low, high, dual = edges = band.edges(length.clamp(min=1), quadratic_variation)

        # In two rows: for A > 0, and for A < 0. What is clipped keeps its value and loses its gradient.
        clipped = torch.stack([torch.minimum(log_ratio, high), log_ratio.clamp(low, dual)])
        weights = -clipped.clamp(max=MAX_LOG_RATIO).exp()
        loss = (weights * sums[3:5]).sum(0)

        # Autograd notices when what it saves is changed in place before the backward pass. It does not save tensors of
        # inference mode, which have no version to tell by: a copy stands for them.
        inputs = (x.clone() if x.is_inference() else x for x in (advantages, mask))
        ctx.save_for_backward(*inputs, weights * (clipped == log_ratio), finite)
        ctx.dtype = log_prob.dtype
        ctx.mark_non_differentiable(sums, finite, *edges)
        ctx.set_materialize_grads(False)
        return loss, sums, finite, *edges

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        advantages, mask, weights, finite = ctx.saved_tensors
        upper, lower = weights * grad_loss
        gradient = torch.empty(mask.shape, dtype=ctx.dtype, device=mask.device)
        for block, *tokens in _row_blocks(gradient, advantages, mask, upper, lower, finite):
            block.copy_(_token_gradient(*tokens))
        return gradient, None, None, None, None


def _token_sums(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return ``[7, B]`` over response tokens: L, S, Q, the sums of A_t > 0 and of A_t < 0, and their counts."""
    # float32 or wider: over thousands of tokens bfloat16 cannot tell a sequence inside the range from one outside.
    dtype = torch.float64 if torch.float64 in (log_prob.dtype, old_log_prob.dtype) else torch.float32
    log_ratio = torch.where(mask, log_prob.to(dtype) - old_log_prob.to(dtype), 0.0)
    s, q = log_ratio.sum(-1), log_ratio.square().sum(-1)
    advantage = torch.where(mask, advantages.to(dtype), 0.0)
    positive, negative = advantage.clamp(min=0), advantage.clamp(max=0)
    counts = positive.sign().sum(-1), -negative.sign().sum(-1)  # faster than to count what is not 0
    return torch.stack([mask.sum(-1, dtype=dtype), s, q, positive.sum(-1), negative.sum(-1), *counts])


def _token_gradient(advantages: Tensor, mask: Tensor, upper: Tensor, lower: Tensor, finite: Tensor) -> Tensor:
    """Return ``[B, T]``: A_t times ``upper`` if A_t > 0, else times ``lower``; 0 at padding and in rows not finite."""
    advantage = advantages.to(upper.dtype)
    # One of the two products is 0. A CPU computes both faster than it chooses a weight for each token.
    product = (advantage.clamp(min=0) * upper[:, None]).addcmul_(advantage.clamp(max=0), lower[:, None])
    return torch.where(mask & finite[:, None], product, 0.0)


def _row_blocks(tokens: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors with one row per sequence into blocks of the same rows, the first of them ``[B, T]``.

    Temporaries are then as large as a block and not as the batch. On a CPU they stay in its cache; on a GPU a block is
    large enough to fill it.
    """
    size = 2**16 if tokens.device.type == "cpu" else 2**24  # tokens
    rows = max(1, size // max(1, tokens.shape[1]))
    if rows >= len(tokens):  # where cutting would cost as much as a sum
        return iter([(tokens, *others)])
    return zip(*(tensor.split(rows) for tensor in (tokens, *others)), strict=True)
