# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A length-fair mask: responses on which trainer and rollout engine disagree too much train nothing.

d is a token's log π_trainer − log π_engine before the update, in nats; S_r is its sum over the L_r tokens of a
response. With c, the median of S_r/L_r over the responses of an update on all ranks, a response is masked where

    |S_r − c·L_r| > mismatch_eps·√L_r

(derived here), and its advantages are 0. The median stays where it is as long as less than half of the responses are
broken. A response with NaN or inf among its d is masked, and has no part in c. The mask is decided once before an
update. It does not depend on mini-batches, micro-batches or earlier updates. Masks of tokens stay as they are: losses
have the same denominators, and entropy and KL the same tokens.

:mod:`fspo_verl.verl_patches` calls :func:`masked_copy` before an update.
"""

import functools
import logging

import numpy as np
import torch

from fspo_verl.observe.columns import MASKED, OF_ENGINES, mismatch_columns

logger = logging.getLogger("fspo_verl")


def masked_copy(data, eps: float, counts_here: bool = True):
    """The rows with advantage 0 where they are masked. All ranks of the default group take part.

    Args:
        data: TensorDict of the rows of this rank, as verl's trainer hands it to an update. It stays as it is.
        eps: half-width, nats per √token.
        counts_here: whether this rank's responses count. Of ranks that share responses one does.

    Returns:
        A copy that also tells of each row whether it is masked.

    Raises:
        KeyError: the rows do not hold ``old_log_probs``, ``rollout_log_probs`` and ``loss_mask``.
    """
    padded = data.select(*OF_ENGINES).to_padded_tensor()
    columns = mismatch_columns(*(padded[name].double() for name in OF_ENGINES))
    s, length = columns["rollout_log_ratio"], padded["loss_mask"].bool().sum(-1)
    own = torch.stack([s, length.double()]).cpu().numpy()
    every: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own if counts_here else own[:, :0])
    sums, lengths = np.concatenate(every, axis=-1)
    measured = np.isfinite(sums) & (lengths > 0)
    center = float(np.median(sums[measured] / lengths[measured])) if measured.any() else 0.0

    def is_masked(s, length):  # the comparison is False for NaN, so that its opposite masks
        return (length > 0) & ~(abs(s - center * length) <= eps * length**0.5)

    if 2 * is_masked(sums, lengths).sum() > (lengths > 0).sum() and torch.distributed.get_rank() == 0:
        _warn_that_most_are_masked(eps)
    masked = is_masked(s, length)
    advantages = data["advantages"].clone()
    for row in masked.nonzero().flatten().tolist():
        advantages[row].zero_()
    data = data.copy()
    data["advantages"], data[MASKED] = advantages, masked
    return data


@functools.cache
def _warn_that_most_are_masked(eps: float) -> None:
    logger.warning(
        "mismatch_eps=%g masks more than half of the responses of an update: trainer and rollout engine disagree on "
        "them, and they train nothing. fspo/mismatch_masked is the share, fspo/mismatch_sigma what a token is off by; "
        "1.645 times that masks 10%% of responses with independent tokens. Said once.",
        eps,
    )
