# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FSPO as pure functions of tensors: sequence log-ratio, band, clipped objective.

    S = Σ_t [log π_θ(y_t) − log π_old(y_t)]            sequence log importance-sampling ratio, no 1/L
    w = exp(S)                                         importance-sampling ratio of the whole sequence
    J = mean_i min(w_i A_i, clip(w_i) A_i)             with S clipped to [c − eps_low·s, c + eps_high·s], s = √L

Source: FSPO, arXiv 2509.09177 (v2/v3: c = 0). The realised centre and width are derived here; see :class:`Band`.

Shapes: ``[B, T]`` is (sequences, response tokens incl. padding), ``[B]`` is one value per sequence. Log-ratios are in
nats. This module knows nothing of verl.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

# exp() of a larger log-ratio is a number no optimiser can use (e^20 is about 5e8). Clipping decisions are taken on the
# exact log-ratio; only the exponent is capped, so that one stale sequence cannot turn the loss into inf.
MAX_LOG_RATIO = 20.0

BAND_WIDTHS = ("length", "realized")
BAND_CENTERS = ("zero", "constant", "realized")


@dataclass
class Band:
    """The interval of sequence log-ratios S that FSPO leaves unclipped: ``[c − eps_low·s, c + eps_high·s]``.

    Centre c and scale s are constants to the optimiser: no gradient flows through them.
    """

    eps_low: float = 0.03
    """Half-width below the centre, in units of s. The authors' value is not known; 0.03 is a third party's reading."""

    eps_high: float = 0.03
    """Half-width above the centre, in units of s."""

    eps_dual: float | None = 0.09
    """Dual clip: a sequence with A < 0 and S > c + eps_dual·s contributes no gradient; null turns it off.

    The paper lists a dual clip without giving its form. This one is a log-space band like the other two, because a
    fixed ratio bound such as verl's ``clip_ratio_c`` falls inside the band at long lengths and is unfair to them. The
    default is 3 half-widths: where eps is one to two standard deviations of S/√L it acts on outliers only (beyond 3
    standard deviations), at the same rate at every length.
    """

    length_power: float = 0.5
    """p in s = L^p: 0.5 is FSPO, 0 a fixed band on S, 1 a band on the per-token mean S/L (GSPO's shape). With
    ``realized_limit`` it is the p of that limit."""

    band_width: str = "length"
    """``length``: s = L^length_power. ``realized``: s = √Q, Q = Σ_t (log-ratio of token t)², so that eps counts
    standard deviations of S (derived here). A realised width grows with the policy's move: without ``realized_limit``
    it is no trust region."""

    realized_limit: float | None = None
    """For ``band_width: realized``: √Q counts as at most realized_limit·L^length_power, in width and centre; null sets
    no limit. Up to it the band follows the move, beyond it it is as a band of fixed eps: no response keeps its
    gradient beyond eps·realized_limit·L^length_power from the centre (derived here). At length_power 0.5 it is the
    largest root mean square of a response's token log-ratios that the band follows."""

    band_center: str = "zero"
    """``zero``: c = 0 (paper v2/v3). ``constant``: c = −drift_per_token·L (the drift of paper v1, whose estimate is not
    known). ``realized``: c = −Q/2, the drift that E_old[w] = 1 implies, per sequence (derived here)."""

    drift_per_token: float = 0.0
    """Nats per token by which S drifts down, for ``band_center: constant`` only; σ²/2 for per-token spread σ."""

    key_prefix = ""  # a class attribute, not a field: where these keys live in a config, for the error messages

    def __post_init__(self):
        def require(condition: bool, field: str, allowed: str):
            if not condition:
                raise ValueError(f"{self.key_prefix}{field}={getattr(self, field)!r} is not allowed: {allowed}")

        for field in ("eps_low", "eps_high"):
            require(_is_number(getattr(self, field)) and getattr(self, field) > 0, field, "a positive finite number")
        require(
            self.eps_dual is None or (_is_number(self.eps_dual) and self.eps_dual >= self.eps_high),
            "eps_dual",
            f"null (no dual clip) or a finite number >= eps_high={self.eps_high} "
            f"(a dual clip inside the band would undo it; 3 * eps_high is {3 * self.eps_high:g})",
        )
        require(
            _is_number(self.length_power) and 0 <= self.length_power <= 1,
            "length_power",
            "a number from 0 (fixed band) over 0.5 (FSPO) to 1 (per-token mean)",
        )
        require(self.band_width in BAND_WIDTHS, "band_width", f"one of {', '.join(BAND_WIDTHS)}")
        require(self.band_center in BAND_CENTERS, "band_center", f"one of {', '.join(BAND_CENTERS)}")
        require(
            _is_number(self.drift_per_token) and self.drift_per_token >= 0,
            "drift_per_token",
            "a finite number >= 0 (nats per token; the band is centred on -drift_per_token * L)",
        )
        require(
            (self.band_center == "constant") == (self.drift_per_token > 0),
            "drift_per_token",
            f"it must be > 0 with band_center=constant and 0 otherwise, and band_center={self.band_center!r}",
        )
        limit = self.realized_limit
        require(limit is None or (_is_number(limit) and limit > 0), "realized_limit", "null or a positive number")
        require(
            limit is None or self.band_width == "realized",
            "realized_limit",
            f"it has no effect with band_width={self.band_width!r}; leave it at null or set band_width=realized",
        )
        require(
            self.band_width == "length" or limit is not None or self.length_power == 0.5,
            "length_power",
            "it has no effect with band_width='realized' and no realized_limit; leave it at 0.5, set band_width=length "
            "or a realized_limit",
        )

    def edges(self, length: Tensor, quadratic_variation: Tensor) -> "Edges":
        """Band edges in log space for sequences of ``length`` tokens ``[B]`` and realised variation Q ``[B]``.

        A sequence whose tokens all have log-ratio 0 (the on-policy case) has drifted nowhere: its centre is 0 in every
        mode, so that the first update is the plain policy gradient.
        """
        q = quadratic_variation
        if self.realized_limit is not None:
            q = q.minimum((self.realized_limit * length.pow(self.length_power)).square())
        if self.band_width == "realized":
            scale = q.sqrt()
        else:
            scale = length.pow(self.length_power)
        if self.band_center == "realized":
            center = -q / 2
        elif self.band_center == "constant":
            center = torch.where(q > 0, -self.drift_per_token * length, 0.0)
        else:
            center = torch.zeros_like(q)
        dual = torch.full_like(q, math.inf) if self.eps_dual is None else center + self.eps_dual * scale
        return Edges(center - self.eps_low * scale, center + self.eps_high * scale, dual)

    @staticmethod
    def fields_in(settings: Mapping) -> dict:
        """The entries of a mapping that are fields of a band."""
        names = {field.name for field in fields(Band)}
        return {name: settings[name] for name in settings if name in names}

    def describe(self) -> str:
        """The band in one line, for logs."""
        scale = "sqrt(Q)" if self.band_width == "realized" else f"L^{self.length_power:g}"
        center = {"zero": "0", "constant": f"-{self.drift_per_token:g}*L", "realized": "-Q/2"}[self.band_center]
        limit = self.realized_limit
        within = "" if limit is None else f", sqrt(Q) at most {limit:g}*L^{self.length_power:g}"
        dual = "no dual clip" if self.eps_dual is None else f"dual clip +{self.eps_dual:g}*{scale}"
        return f"log-ratio band {center} [-{self.eps_low:g}, +{self.eps_high:g}]*{scale}, {dual}{within}"


class Edges(NamedTuple):
    """Band edges of each sequence in log space, all ``[B]``; ``dual`` is +inf where there is no dual clip."""

    low: Tensor
    high: Tensor
    dual: Tensor


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
    """
    shapes = [tuple(x.shape) for x in (log_prob, old_log_prob, advantages, response_mask)]
    if log_prob.dim() != 2 or len(set(shapes)) != 1:
        raise ValueError(
            "fspo_loss needs log_prob, old_log_prob, advantages and response_mask of one shape [sequences, tokens]; "
            f"got {', '.join(map(str, shapes))}"
        )
    if not (log_prob.is_floating_point() and old_log_prob.is_floating_point()):
        raise TypeError(f"log-probabilities must be floating point; got {log_prob.dtype} and {old_log_prob.dtype}")
    length, log_ratio, quadratic_variation, positive, negative = _TokenSums.apply(
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
    )


class _TokenSums(torch.autograd.Function):
    """One pass over the tokens: L, S, Q and the sums of the positive and of the negative advantages, ``[B]`` each.

    The advantage sums carry the policy gradient: constants in value, their gradient with respect to ``log_prob[i, t]``
    is A_t, as if they were Σ_t A_t·exp(log π(y_t) − sg[log π(y_t)]). Writing that product out would keep several [B, T]
    temporaries alive until the backward pass; here it is one write per token, and padding is never multiplied.
    """

    @staticmethod
    def forward(ctx, log_prob, old_log_prob, advantages, mask):
        # Plain attributes, as save_for_backward refuses tensors made in inference mode; neither is an output.
        ctx.advantages, ctx.mask, ctx.dtype = advantages, mask, log_prob.dtype
        # float32 or wider: over thousands of tokens bfloat16 cannot tell a sequence inside the band from one outside.
        dtype = torch.promote_types(torch.promote_types(log_prob.dtype, old_log_prob.dtype), torch.float32)
        sums = log_prob.new_zeros((5, len(log_prob)), dtype=dtype)
        for rows in _row_blocks(log_prob):
            padding = ~mask[rows]
            token_log_ratio = (log_prob[rows].to(dtype) - old_log_prob[rows].to(dtype)).masked_fill_(padding, 0.0)
            token_advantage = advantages[rows].to(dtype).masked_fill(padding, 0.0)
            sums[0, rows] = mask[rows].sum(-1).to(dtype)
            sums[1, rows] = token_log_ratio.sum(-1)
            sums[2, rows] = token_log_ratio.square_().sum(-1)
            sums[3, rows] = token_advantage.clamp(min=0).sum(-1)
            sums[4, rows] = token_advantage.clamp_(max=0).sum(-1)
        length, log_ratio, quadratic_variation, positive, negative = (row.clone() for row in sums)
        ctx.mark_non_differentiable(length, log_ratio, quadratic_variation)
        return length, log_ratio, quadratic_variation, positive, negative

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _length, _log_ratio, _quadratic_variation, grad_positive, grad_negative):
        grad = torch.empty(ctx.mask.shape, dtype=ctx.dtype, device=ctx.mask.device)
        for rows in _row_blocks(grad):
            advantages = ctx.advantages[rows]
            upper, lower = grad_positive[rows].unsqueeze(-1), grad_negative[rows].unsqueeze(-1)
            # A row without gradient must stay at zero even where its advantage is infinite.
            idle = ~ctx.mask[rows] | ((upper == 0) & (lower == 0))
            grad[rows] = torch.where(advantages < 0, lower, upper).mul_(advantages).masked_fill_(idle, 0.0)
        return grad, None, None, None


def _row_blocks(tensor: Tensor) -> Iterator[slice]:
    """Cut ``[B, T]`` into blocks of rows, so that temporaries are as large as a block and not as the batch.

    On a CPU they then stay in its cache; on a GPU a block is large enough to fill it.
    """
    block = 2**16 if tensor.device.type == "cpu" else 2**24  # tokens
    rows = max(1, block // max(1, tensor.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(tensor), rows))


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
