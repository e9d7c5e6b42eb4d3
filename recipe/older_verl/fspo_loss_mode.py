# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FSPO on verl 0.6 to 0.8, which have no plugins: a file of your own registers the loss. README.md says how."""

from verl.trainer.ppo.core_algos import register_policy_loss

from fspo_verl.band import Band
from fspo_verl.loss import fspo_loss

BAND = Band(eps=0.03)
MAX_RESPONSE_LENGTH = 8192  # data.max_response_length of your script


@register_policy_loss("fspo")
def fspo(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="", config=None, rollout_is_weights=None):
    if rollout_is_weights is not None:
        advantages = advantages * rollout_is_weights
    found = fspo_loss(log_prob, old_log_prob, advantages, response_mask, BAND)
    totals = getattr(config, "global_batch_info", {})
    responses = totals.get("global_batch_size") or (found.length > 0).sum().clamp(min=1)
    loss = found.loss.sum() * totals.get("dp_size", 1) / responses / MAX_RESPONSE_LENGTH
    live = found.advantage != 0
    clipped = (found.clipped & live).sum() / live.sum().clamp(min=1)
    kl = -found.log_ratio.sum() / found.length.sum().clamp(min=1)
    return loss, {"actor/pg_clipfrac": clipped.item(), "actor/ppo_kl": kl.item(), "actor/pg_clipfrac_lower": 0.0}
