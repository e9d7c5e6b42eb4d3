# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Columns per response of one call of a policy loss, from which metrics and records are made.

For the fspo loss they come with the loss. Any other policy loss is observed from outside: a response token has lost its
gradient to the clip when its advantage is not 0 and the gradient of the loss with respect to its log-probability is.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fspo_verl.band import Band
from fspo_verl.loss import MAX_LOG_RATIO, SequenceLoss, fspo_loss

_OF_SEQUENCES = ("length", "log_ratio", "quadratic_variation", "advantage", "finite")
_OF_LOSS = SequenceLoss._fields[1:]  # all but the loss itself
CLIPPED = ("clipped_upper", "clipped_lower", "clipped_dual")
MISMATCH = (
    *("rollout_length", "rollout_log_ratio", "rollout_quadratic_variation", "rollout_k3"),
    "tokens_masked_icepop",
)
"""The result of :func:`mismatch_columns`."""
OF_ENGINES = ("old_log_probs", "rollout_log_probs", "loss_mask")
"""verl's names of what the mismatch is computed from."""
TRUNCATED = "truncated"
"""Column ``[B]``: whether the response, tokens of tools included, fills what it was allowed. One that ended there by
itself counts, too: the loss sees no token ids."""
OPTIONAL = (*MISMATCH, "staleness", TRUNCATED)
"""Columns that a run may have, and then records hold. Staleness is by how many training steps the weights that sampled
a response's first token are behind; it and the mismatch are of runs whose engine hands on its log-probs."""
ICEPOP = (0.5, 5.0)
"""Ratios of trainer to rollout engine that IcePop keeps; a token outside weighs nothing (verl's ``"0.5_5.0"``)."""


def loss_columns(sequences: SequenceLoss) -> dict[str, Tensor]:
    """Sums and edges ``[B]`` of the fspo loss; :func:`to_numpy` makes its columns of them, after the transfer."""
    return {name: getattr(sequences, name) for name in _OF_LOSS}


def _clip_columns(sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns ``[B]`` of the fspo loss, from those of :func:`loss_columns`; ``clipped_*`` are shares of tokens.

    A clip removes the gradient of all tokens whose advantage has one sign: of the whole response where it is constant.
    """
    length, log_ratio = sums["length"], sums["log_ratio"]
    tokens = np.maximum(length, 1)
    up, down = sums["positive_tokens"] / tokens, sums["negative_tokens"] / tokens
    above, below = log_ratio > sums["high"], log_ratio < sums["low"]
    return {
        "length": length,
        "log_ratio": log_ratio,
        "quadratic_variation": sums["quadratic_variation"],
        "advantage": (sums["positive"] + sums["negative"]) / tokens,
        "finite": sums["finite"],
        "clipped_upper": above * up,
        "clipped_lower": below * down,
        "clipped_dual": (log_ratio > sums["dual"]) * down,
        "outside": (above | below) & (length > 0),
    }


@torch.no_grad()
def observed_columns(
    gradient: Tensor, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor
) -> dict[str, Tensor]:
    """Columns ``[B]`` of any policy loss, from its gradient; ``clipped_*`` are shares of a response's tokens.

    Args:
        gradient: ``[B, T]`` of the loss, with respect to ``log_prob``.
        log_prob, old_log_prob, advantages, response_mask: ``[B, T]``, see :func:`fspo_verl.loss.fspo_loss`.

    The dropped tokens of a response with A < 0 count as ``dual`` where their log-ratios add up to more than 0, else as
    ``lower``. Where no token with A < 0 has kept its gradient, the sum S over the whole response decides. In a response
    that holds NaN or inf nothing counts as clipped.
    """
    sequences = fspo_loss(log_prob, old_log_prob, advantages, response_mask, Band())
    tokens = sequences.length.clamp(min=1)
    dropped = response_mask.bool() & (gradient == 0) & sequences.finite.unsqueeze(-1)
    down = dropped & (advantages < 0)
    moved = torch.where(down, log_prob - old_log_prob, 0.0).sum(-1)
    upward = torch.where(down.sum(-1) == sequences.negative_tokens, sequences.log_ratio, moved) > 0
    negative = down.sum(-1) / tokens
    return {name: getattr(sequences, name) for name in _OF_SEQUENCES} | {
        "clipped_upper": (dropped & (advantages > 0)).sum(-1) / tokens,
        "clipped_lower": torch.where(upward, 0.0, negative),
        "clipped_dual": torch.where(upward, negative, 0.0),
    }


@torch.no_grad()
def token_columns(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor
) -> dict[str, Tensor]:
    """The columns ``[B]`` that single clips need, see :data:`fspo_verl.clips.COLUMNS`; for records only."""
    from fspo_verl import clips  # not at the top: it imports pandas, which the losses do without

    mask = response_mask.bool()
    tokens = clips.Tokens(torch.where(mask, log_prob.float() - old_log_prob.float(), 0.0), advantages, mask)
    return {name: (drops(tokens) & mask).sum(-1) for name, drops in clips.COLUMNS.items()}


@torch.no_grad()
def mismatch_columns(old_log_prob: Tensor, rollout_log_prob: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Columns ``[B]`` of the trainer against the rollout engine, both at the policy before the update.

    With d = log π_trainer − log π_engine of a token, in nats, they are ``rollout_length`` (L_r, tokens),
    ``rollout_log_ratio`` (S_r = Σ d), ``rollout_quadratic_variation`` (Q_r = Σ d²), ``rollout_k3`` (Σ exp(d) − 1 − d,
    whose mean over tokens is verl's ``rollout_corr/k3_kl``, an estimate of KL(engine ‖ trainer)) and
    ``tokens_masked_icepop``. A response with NaN or inf is not measured: its sums are NaN, and its length is 0.

    Args:
        old_log_prob, rollout_log_prob: ``[B, T]`` of trainer and engine.
        loss_mask: ``[B, T]``, response tokens before any rejection: verl's rollout correction reduces
            ``response_mask``, and a response that it has rejected is to be measured, too.
    """
    mask, dtype = loss_mask.bool(), torch.promote_types(old_log_prob.dtype, torch.float32)
    d = torch.where(mask, old_log_prob.to(dtype) - rollout_log_prob.to(dtype), 0.0)
    ratio = d.clamp(max=MAX_LOG_RATIO)
    low, high = map(math.log, ICEPOP)
    columns = (mask, d, d.square(), ratio.expm1() - ratio, (d < low) | (d > high))
    length, *sums = (column.sum(-1).to(dtype) for column in columns)
    finite = sums[1].isfinite()
    sums = [torch.where(finite, column, math.nan) for column in sums]
    return dict(zip(MISMATCH, (torch.where(finite, length, 0.0), *sums), strict=True))


def to_numpy(columns: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The columns as float64 arrays, in one transfer from the device."""
    dtype = columns["log_ratio"].dtype
    same = [column if column.dtype is dtype else column.to(dtype) for column in columns.values()]
    arrays = dict(zip(columns, torch.stack(same).cpu().numpy(), strict=True))
    if arrays.keys() >= {*_OF_LOSS}:  # edges and S are compared as the loss has compared them, before they are cast
        sums = {name: arrays.pop(name) for name in _OF_LOSS}
        arrays |= _clip_columns(sums)
    return dict(zip(arrays, np.array([*arrays.values()], dtype=np.float64), strict=True))
