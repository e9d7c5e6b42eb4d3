# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The boundary to verl: importing this module registers the ``fspo`` policy loss.

It is imported (by the entry point :mod:`fspo_verl.plugin`) while verl itself is only partly imported; hence
``import a.b.c`` throughout, and no import of names from verl.
"""

import functools
import logging

import torch
import verl.trainer.ppo.core_algos
import verl.utils.device

import fspo_verl.loss
import fspo_verl.metrics
import fspo_verl.preflight

logger = logging.getLogger("fspo_verl")


@verl.trainer.ppo.core_algos.register_policy_loss("fspo")
def compute_policy_loss_fspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-sum-norm",
    config=None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict]:
    """FSPO under verl's policy-loss contract; the method is :func:`fspo_verl.loss.fspo_loss`.

    Args:
        old_log_prob, log_prob, advantages, response_mask: ``[B, T]``, see :func:`fspo_verl.loss.fspo_loss`.
        loss_agg_mode: any mode of verl's ``agg_loss``.
        config: verl's ``ActorConfig``; ``config.policy_loss`` holds the band (the default band where it has no schema)
            and ``config.global_batch_info`` the totals that make the loss independent of the batch split.
        rollout_is_weights: ``[B, T]`` or None; multiplies the token losses as in verl's own losses.

    Returns:
        The scalar loss, and the metrics of :mod:`fspo_verl.metrics`.
    """
    if config is None:
        raise ValueError("the fspo policy loss needs verl's ActorConfig as config, got None")
    band = _band(config.policy_loss)
    if rollout_is_weights is not None:
        # Weights are >= 0, so this leaves every advantage on its side of zero; where() because a padding weight may
        # be NaN or inf.
        advantages = torch.where(response_mask.bool(), advantages * rollout_is_weights, 0.0)
    sequences = fspo_verl.loss.fspo_loss(log_prob, old_log_prob, advantages, response_mask, band)
    loss = _aggregate(sequences, response_mask.shape[-1], loss_agg_mode, dict(config.global_batch_info))
    return loss, fspo_verl.metrics.sequence_metrics(sequences)


def _aggregate(sequences: "fspo_verl.loss.SequenceLoss", width: int, loss_agg_mode: str, batch_info: dict):
    """verl's ``agg_loss`` on one column per sequence instead of a [B, T] matrix.

    Every mode of ``agg_loss`` reads a row only through Σ_t mask·loss and Σ_t mask, so one entry that holds the mean
    token loss under a mask that holds L stands for the whole row.
    """
    length = sequences.length
    if batch_info.get("dp_size", 1) == 1:
        # verl divides by these; without them it counts the micro-batch, which is 0/0 where every row is masked.
        if batch_info.get("batch_num_tokens") is None:
            batch_info["batch_num_tokens"] = length.sum().clamp(min=1)
        if batch_info.get("global_batch_size") is None:
            batch_info["global_batch_size"] = (length > 0).sum().clamp(min=1)
    if batch_info.get("loss_scale_factor") is None:
        batch_info["loss_scale_factor"] = width  # what agg_loss reads off the full matrix
    return verl.trainer.ppo.core_algos.agg_loss(
        loss_mat=(sequences.loss / length.clamp(min=1)).unsqueeze(-1),
        loss_mask=length.unsqueeze(-1),
        loss_agg_mode=loss_agg_mode,
        **batch_info,
    )


def _band(policy_loss) -> "fspo_verl.loss.Band":
    """The band of a policy-loss config: the schema itself, or the default band for verl's own ``PolicyLossConfig``."""
    if isinstance(policy_loss, fspo_verl.loss.Band):
        return policy_loss
    return _schemaless_band(**fspo_verl.loss.Band.fields_in(policy_loss))


@functools.cache
def _schemaless_band(**fields) -> "fspo_verl.loss.Band":
    band = fspo_verl.loss.Band(**fields)
    logger.warning(
        "loss_mode=fspo without its config schema: %s is in effect. Set the band with +algorithm.policy_loss=fspo.",
        band.describe(),
    )
    return band


def _check_every_launch():
    """Run :func:`fspo_verl.preflight.check` on the composed config of a launch, before Ray starts.

    verl (0.9.1) offers no hook between Hydra's composition and ``ray.init``. ``auto_set_device(config)`` is the first
    function of verl to which the mains (main_ppo, fully-async, one-step-off) hand the whole config; this is the one
    function of verl that the package wraps. A config that never selected this package's group passes here too, which
    is how a setting that would train another loss without a word is caught.
    """
    auto_set_device = verl.utils.device.auto_set_device

    @functools.wraps(auto_set_device)
    def checked_auto_set_device(config):
        fspo_verl.preflight.check(config)
        return auto_set_device(config)

    verl.utils.device.auto_set_device = checked_auto_set_device


_check_every_launch()
