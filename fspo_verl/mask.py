# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A length-fair mask: responses on which trainer and rollout engine disagree too much train nothing.

d is a token's log π_trainer − log π_engine before the update, in nats; S_r is its sum over the L_r tokens of a
response. With c, the mean of d over all tokens of an update on all ranks, a response is masked where

    |S_r − c·L_r| > mismatch_eps·√L_r

(derived here), and its advantages are 0. Everything is known before the update, so it is decided there once, and does
not depend on mini-batches and micro-batches; nothing is carried from one update to the next. Masks of tokens stay as
they are: losses have the same denominators, and entropy and KL the same tokens.

:mod:`fspo_verl.verl_patches` calls :func:`masked_copy` before an update.
"""

import torch

from fspo_verl.observe.columns import MASKED, OF_ENGINES, mismatch_columns


def masked_copy(data, eps: float, device: str = "cpu", counts_here: bool = True):
    """The rows with advantage 0 where they are masked. All ranks of the default group take part.

    Args:
        data: TensorDict of the rows of this rank, as verl's trainer hands it to an update. It stays as it is.
        eps: half-width, nats per √token.
        device: of the tensor that is summed over the ranks.
        counts_here: whether this rank's responses count. Of ranks that share responses one does.

    Returns:
        A copy that also tells of each row whether it is masked. One with NaN or inf is not, and has no part in c.

    Raises:
        KeyError: the rows do not hold ``old_log_probs``, ``rollout_log_probs`` and ``loss_mask``.
    """
    padded = data.select(*OF_ENGINES).to_padded_tensor()
    columns = mismatch_columns(*(padded[name].double() for name in OF_ENGINES))
    length, s = columns["rollout_length"], columns["rollout_log_ratio"]  # 0 and NaN where it is not finite
    sums = torch.stack([s.nansum(), length.sum()]).to(device) * counts_here
    torch.distributed.all_reduce(sums)
    total, tokens = sums.tolist()
    masked = (s - total / max(tokens, 1) * length).abs() > eps * length.sqrt()
    advantages = data["advantages"].clone()
    for row in masked.nonzero().flatten().tolist():
        advantages[row].zero_()
    data = data.copy()
    data["advantages"], data[MASKED] = advantages, masked
    return data
