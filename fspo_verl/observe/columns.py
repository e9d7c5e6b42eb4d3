# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What one call of a policy loss did to each response: the columns behind the metrics and the records.

For the fspo loss they come with the loss. Any other policy loss is observed from outside: a response token has lost its
gradient to the clip when its advantage is not 0 and the gradient of the loss with respect to its log-probability is.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fspo_verl.band import Band
from fspo_verl.loss import SequenceLoss, fspo_loss

_OF_SEQUENCES = ("length", "log_ratio", "quadratic_variation", "advantage", "finite")
CLIPPED = ("clipped_upper", "clipped_lower", "clipped_dual")


@torch.no_grad()
def loss_columns(sequences: SequenceLoss) -> dict[str, Tensor]:
    """Columns ``[B]`` of the fspo loss; ``clipped_*`` are shares of a response's tokens.

    A clip takes the gradient of all tokens whose advantage has one sign: of the whole response where it is constant.
    """
    tokens = sequences.length.clamp(min=1)
    up, down = sequences.positive_tokens / tokens, sequences.negative_tokens / tokens
    return {name: getattr(sequences, name) for name in _OF_SEQUENCES} | {
        "clipped_upper": torch.where(sequences.clipped_upper, up, 0.0),
        "clipped_lower": torch.where(sequences.clipped_lower, down, 0.0),
        "clipped_dual": torch.where(sequences.clipped_dual, down, 0.0),
        "outside": sequences.outside & (sequences.length > 0),
    }


def observed_columns(
    loss: Callable[[Tensor], Tensor], log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor
) -> dict[str, Tensor]:
    """Columns ``[B]`` of any policy loss, from its gradient; ``clipped_*`` are shares of a response's tokens.

    Args:
        loss: the scalar loss as a function of the log-probabilities. It is evaluated once, on a copy and before it
            trains, and leaves no trace.
        log_prob, old_log_prob, advantages, response_mask: ``[B, T]``, see :func:`fspo_verl.loss.fspo_loss`.

    The dropped tokens of a response with A < 0 count as ``dual`` where their log-ratios add up to more than 0, else as
    ``lower``. Where no token with A < 0 has kept its gradient, the sum S over the whole response decides. In a response
    that holds NaN or inf nothing counts as clipped.
    """
    device = log_prob.device
    # A loss that draws random numbers (clip_cov) draws the same ones again when it trains.
    with torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        copy = log_prob.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(copy), copy)
    with torch.no_grad():
        sequences = fspo_loss(log_prob.detach(), old_log_prob, advantages, response_mask, Band())
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
    log_prob, old_log_prob = (torch.where(mask, values.float(), 0.0) for values in (log_prob, old_log_prob))
    tokens = clips.Tokens(log_prob, old_log_prob, log_prob - old_log_prob, advantages, mask)
    return {name: (drops(tokens) & mask).sum(-1) for name, drops in clips.COLUMNS.items()}


def to_numpy(columns: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The columns as float64 arrays, in one transfer from the device."""
    dtype = columns["log_ratio"].dtype
    stacked = torch.stack([column.to(dtype) for column in columns.values()]).cpu().numpy().astype(np.float64)
    return dict(zip(columns, stacked, strict=True))
