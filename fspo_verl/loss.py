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

import functools
import logging
import math
import os
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fspo_verl.band import Band

logger = logging.getLogger("fspo_verl")

# exp() of a larger log-ratio is a number no optimiser can use (e^20 is about 5e8). Clipping decisions are taken on the
# exact log-ratio; only the exponent is capped, so that one stale sequence cannot turn the loss into inf.
MAX_LOG_RATIO = 20.0


class SequenceLoss(NamedTuple):
    """What :func:`fspo_loss` returns; all tensors are ``[B]`` and only ``loss`` carries a gradient."""

    loss: Tensor  # token-summed loss of each sequence: Σ_t of the token terms
    length: Tensor  # L, response tokens; 0 for a fully masked row
    log_ratio: Tensor  # S; 0 where not finite
    quadratic_variation: Tensor  # Q; 0 where not finite
    positive: Tensor  # Σ_t of the advantages A_t > 0; 0 where not finite
    negative: Tensor  # Σ_t of the advantages A_t < 0; 0 where not finite
    positive_tokens: Tensor  # number of response tokens with A > 0; 0 where not finite
    negative_tokens: Tensor  # number of response tokens with A < 0; 0 where not finite
    finite: Tensor  # bool: False where a response token holds NaN or inf; such a row contributes nothing
    low: Tensor  # the band's edges in log space, see Band.edges
    high: Tensor
    dual: Tensor

    @property
    def advantage(self) -> Tensor:
        """Mean over the response tokens; 0 for a fully masked row and where not finite."""
        return (self.positive + self.negative) / self.length.clip(min=1)

    @property
    def clipped_upper(self) -> Tensor:
        """bool: some token with A > 0, and S above the band."""
        return (self.log_ratio > self.high) & (self.positive > 0)

    @property
    def clipped_lower(self) -> Tensor:
        """bool: some token with A < 0, and S below the band."""
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
        """bool: S is outside the band, whatever the sign of the advantage."""
        return (self.log_ratio > self.high) | (self.log_ratio < self.low)


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
    loss, sums, finite, *edges = _ClippedLoss.apply(log_prob, old_log_prob, advantages, response_mask.bool(), band)
    return SequenceLoss._make((loss, *sums, finite, *edges))


class _ClippedLoss(torch.autograd.Function):
    """The loss as one node of the graph, with the sums and edges that it is made of.

    A sequence has two weights −clip(w), one for its tokens with A_t > 0 and one for those with A_t < 0. Its loss is
    Σ_t weight·A_t. The gradient with respect to ``log_prob[i, t]`` is weight·A_t, or 0 where the clip acts.
    """

    @staticmethod
    def forward(ctx, log_prob, old_log_prob, advantages, mask, band):
        kernels = _kernels_for(log_prob, old_log_prob)
        sums = (kernels.token_sums if kernels else _token_sums)(log_prob, old_log_prob, advantages, mask)
        finite = sums[1:5].sum(0).abs() < math.inf
        finite_bits = _bits(finite, sums.dtype)
        sums[1:].view(finite_bits.dtype).bitwise_and_(finite_bits)
        length, log_ratio, quadratic_variation, *_ = sums
        # An empty row keeps a band of one token; its advantage sums are zero, so the band decides nothing.
        low, high, dual = edges = band.edges(length.clamp(min=1), quadratic_variation)

        # In two rows: for A > 0, and for A < 0. What is clipped keeps its value and loses its gradient.
        clipped = torch.stack([torch.minimum(log_ratio, high), log_ratio.clamp(low, dual)])
        kept = clipped == log_ratio
        weights = clipped.clamp_(max=MAX_LOG_RATIO).exp_().neg_()
        loss = (weights * sums[3:5]).sum(0)

        # Autograd notices when what it saves is changed in place before the backward pass. It does not save tensors of
        # inference mode, which have no version to tell by: a copy stands for them.
        inputs = (x.clone() if x.is_inference() else x for x in (advantages, mask))
        ctx.save_for_backward(*inputs, weights.mul_(kept), finite_bits)
        ctx.dtype, ctx.kernels = log_prob.dtype, kernels
        ctx.mark_non_differentiable(sums, finite, *edges)
        ctx.set_materialize_grads(False)
        return loss, sums, finite, *edges

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        advantages, mask, weights, finite_bits = ctx.saved_tensors
        gradient = ctx.kernels.token_gradient if ctx.kernels else _token_gradient
        return gradient(advantages, mask, weights * grad_loss, finite_bits, ctx.dtype), None, None, None, None


# --- the passes over the tokens ---------------------------------------------------------------------------------------


def _token_sums(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """``[7, B]`` over response tokens: L, S, Q, the sums of A_t > 0 and of A_t < 0, and how many there are of each."""
    # float32 or wider: over thousands of tokens bfloat16 cannot tell a sequence inside the band from one outside.
    dtype = torch.float64 if torch.float64 in (log_prob.dtype, old_log_prob.dtype) else torch.float32
    all_sums = log_prob.new_empty((7, len(log_prob)), dtype=dtype)
    for rows in _row_blocks(log_prob):
        bits, sums = _bits(mask[rows], dtype), all_sums[:, rows]
        torch.sum(mask[rows].to(dtype), -1, out=sums[0])
        log_ratio = log_prob[rows].to(dtype) - old_log_prob[rows].to(dtype)
        log_ratio.view(bits.dtype).bitwise_and_(bits)
        torch.sum(log_ratio, -1, out=sums[1])
        torch.sum(log_ratio.square_(), -1, out=sums[2])
        positive, negative = signed = log_ratio.new_empty((2, *log_ratio.shape))
        torch.bitwise_and(advantages[rows].to(dtype).view(bits.dtype), bits, out=positive.view(bits.dtype))
        torch.clamp(positive, max=0, out=negative)
        positive.clamp_(min=0)
        torch.sum(signed, -1, out=sums[3:5])
        # A comparison in place writes 1.0 and 0.0, and sums of floats are several times faster than counts.
        torch.sum(signed.ne_(0), -1, out=sums[5:7])
    return all_sums


def _token_gradient(advantages: Tensor, mask: Tensor, weights: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, T]`` weight·A_t; ``weights`` ``[2, B]`` are for A_t > 0 and for A_t < 0, ``keep`` ``[B]`` holds bits."""
    upper, lower = weights.unsqueeze(-1)
    grad = torch.empty(mask.shape, dtype=dtype, device=mask.device)
    for rows in _row_blocks(grad):
        advantage = advantages[rows].to(weights.dtype)
        # One of the two products is 0; on a CPU this takes a third of the time of a choice by torch.where.
        product = (advantage.clamp(min=0) * upper[rows]).addcmul_(advantage.clamp(max=0), lower[rows])
        # Padding, and a row that is not finite, stay at zero, whatever stands there.
        bits = mask[rows].to(keep.dtype).mul_(keep[rows, None])
        product.view(bits.dtype).bitwise_and_(bits)
        grad[rows] = product
    return grad


def _bits(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """All bits set where the mask is, else none, as wide as a dtype: ``x & bits`` is x or 0, also where x is NaN.

    On a CPU this is several times as fast as masked_fill.
    """
    return mask.to(torch.int64 if dtype == torch.float64 else torch.int32).neg_()


def _row_blocks(tensor: Tensor) -> Iterator[slice]:
    """Cut ``[B, T]`` into blocks of rows, so that temporaries are as large as a block and not as the batch.

    On a CPU they then stay in its cache; on a GPU a block is large enough to fill it.
    """
    block = 2**16 if tensor.device.type == "cpu" else 2**24  # tokens
    rows = max(1, block // max(1, tensor.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(tensor), rows))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def _kernels_for(log_prob: Tensor, old_log_prob: Tensor) -> ModuleType | None:
    """The passes as kernels, for tensors that they take and where they run; None where this module's own are taken."""
    on_gpu = log_prob.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    if not on_gpu or torch.float64 in (log_prob.dtype, old_log_prob.dtype):
        return None
    return _kernels(log_prob.device)


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    """:mod:`fspo_verl.kernels`, if it gives on this device what this module gives; else a warning, once."""
    try:
        from fspo_verl import kernels

        _assert_alike(kernels, device)
    except Exception as error:  # of Triton, its compiler, the driver: training goes on without
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        logger.warning("fspo runs on %s without its kernels, which takes longer: %s", device, reason)
        return None
    return kernels


def _assert_alike(kernels: ModuleType, device: torch.device) -> None:
    """Compare both passes on responses of two blocks, with holes, NaN in the padding, and two broken ones."""
    random = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(4, 1500, generator=random) for _ in range(3))
    mask = torch.rand(4, 1500, generator=random) < torch.tensor([[1.0], [0.5], [0.5], [0.0]])
    mask[:, 0] = True
    new[~mask], advantages[~mask], new[1, 0], advantages[2, 0] = math.nan, math.nan, math.inf, math.nan
    new, old, advantages, mask = (tensor.to(device) for tensor in (new, old, advantages, mask))
    weights = torch.randn(2, 4, generator=random).to(device)
    keep = _bits(advantages[:, 0].isfinite(), torch.float32)
    sums, gradient = (new, old, advantages, mask), (advantages, mask, weights, keep, torch.float32)
    for found, true in (
        (kernels.token_sums(*sums), _token_sums(*sums)),
        (kernels.token_gradient(*gradient), _token_gradient(*gradient)),
    ):
        torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-4, equal_nan=True)
