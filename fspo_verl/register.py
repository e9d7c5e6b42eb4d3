# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The boundary to verl: importing this module registers the policy losses ``fspo`` and ``observed``.

The entry point :mod:`fspo_verl.plugin` imports it when verl's ``core_algos`` has been imported.
"""

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from verl.trainer.ppo import core_algos

from fspo_verl.band import Band
from fspo_verl.loss import SequenceLoss, fspo_loss
from fspo_verl.observe import observer
from fspo_verl.observe.columns import loss_columns, observed_columns
from fspo_verl.observe.metrics import SERIES
from fspo_verl.output import ONCE


@core_algos.register_policy_loss("fspo")
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
        config: verl's ``ActorConfig``; ``config.policy_loss`` holds the range (the default where it has no schema)
            and ``config.global_batch_info`` the totals that make the loss independent of the batch split.
        rollout_is_weights: ``[B, T]`` or None; multiplies the token losses as in verl's own losses.

    Returns:
        The scalar loss, and the metrics of :mod:`fspo_verl.observe.metrics`.
    """
    if config is None:
        raise ValueError("the fspo policy loss needs verl's ActorConfig as config, got None")
    controller = getattr(config.policy_loss, "controller", None)
    if controller is not None:
        band = controller.band
    else:
        band = config.policy_loss if isinstance(config.policy_loss, Band) else _default_band()
    tokens = (log_prob, old_log_prob, _weighted(advantages, response_mask, rollout_is_weights), response_mask)
    sequences = fspo_loss(*tokens, band)
    loss = _aggregate(sequences, response_mask.shape[-1], loss_agg_mode, dict(config.global_batch_info))
    columns, metrics = observer.observe(loss_columns(sequences), tokens, config, "fspo", band)
    if controller is not None:
        controller.count(columns)
        metrics |= {SERIES + name: eps for name, eps in controller.eps.items()}
    return loss, _verl_metrics(columns) | metrics


@core_algos.register_policy_loss("observed")
def compute_policy_loss_observed(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict]:
    """Another registered policy loss, ``config.policy_loss.inner``, trained as it is, with metrics and records added.

    Arguments and result as those of :func:`compute_policy_loss_fspo`; loss and gradient are the inner loss's own. It is
    called once, on the tensors that verl hands over. Its backward pass runs once more, down to ``log_prob``.

    Raises:
        RuntimeError: the gradient of the inner loss cannot be taken twice.
    """
    inner = config.policy_loss.inner
    # What has the weight 0 has no gradient either, and was not clipped.
    weighted = _weighted(advantages, response_mask, rollout_is_weights)
    # The loss may change its arguments in place: what is measured are copies, and the place of log_prob in the graph.
    tokens = tuple(tensor.detach().clone() for tensor in (log_prob, old_log_prob, weighted, response_mask))
    place = get_gradient_edge(log_prob) if log_prob.requires_grad else None
    loss, metrics = core_algos.get_policy_loss_fn(inner)(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
    )
    gradient = _gradient(loss, place, inner)
    if gradient is None:
        if tokens[-1].any():
            ONCE.warn(
                ("no gradient", inner),
                "loss_mode=%s has returned a loss without a gradient with respect to the log-probs: such a call trains "
                "nothing by them, and all of its tokens count as clipped.",
                inner,
            )
        gradient = torch.zeros_like(tokens[0])
    _, observed = observer.observe(observed_columns(gradient, *tokens), tokens, config, inner)
    return loss, metrics | observed


def _gradient(loss: torch.Tensor, place: GradientEdge | None, inner: str) -> torch.Tensor | None:
    """Return the gradient of a loss at a place of its graph, which is kept for the training; None if it has none."""
    if place is None or not loss.requires_grad:
        return None
    try:
        return torch.autograd.grad(loss, place, retain_graph=True, allow_unused=True)[0]
    except RuntimeError as error:
        raise RuntimeError(
            f"algorithm.policy_loss=observed cannot measure loss_mode={inner}, whose gradient cannot be taken twice "
            f"({error}); train it without observation"
        ) from error


def _weighted(
    advantages: torch.Tensor, response_mask: torch.Tensor, rollout_is_weights: torch.Tensor | None
) -> torch.Tensor:
    """Return the advantages times the weights of verl's rollout correction, by which its losses multiply token losses.

    Weights are >= 0, so every advantage stays on its side of zero. A padding weight may be NaN or inf.
    """
    if rollout_is_weights is None:
        return advantages
    return torch.where(response_mask.bool(), advantages * rollout_is_weights, 0.0)


def _verl_metrics(columns: dict) -> dict:
    """Return the metrics that verl's own losses return, means over the tokens of one call."""
    tokens = max(columns["length"].sum(), 1)
    clipped = columns["clipped_upper"] + columns["clipped_lower"] + columns["clipped_dual"]
    return {
        "actor/pg_clipfrac": float((clipped * columns["length"]).sum() / tokens),
        "actor/pg_clipfrac_lower": float((columns["clipped_dual"] * columns["length"]).sum() / tokens),
        "actor/ppo_kl": float(-columns["log_ratio"].sum() / tokens),
    }


def _aggregate(sequences: SequenceLoss, width: int, loss_agg_mode: str, batch_info: dict):
    """Call verl's ``agg_loss`` on one column per sequence instead of a [B, T] matrix.

    Every mode of ``agg_loss`` reads a row only through Σ_t mask·loss and Σ_t mask, so one entry that holds the mean
    token loss under a mask that holds L stands for the whole row.
    """
    length = sequences.length
    total = "batch_num_tokens" if loss_agg_mode == "token-mean" else "global_batch_size"
    if batch_info.get("dp_size", 1) == 1 and batch_info.get(total) is None:
        # verl divides by it; without it verl counts the micro-batch, which is 0/0 where every row is masked.
        batch_info[total] = (length if total == "batch_num_tokens" else length > 0).sum().clamp(min=1)
    if batch_info.get("loss_scale_factor") is None:
        batch_info["loss_scale_factor"] = width  # what agg_loss reads off the full matrix
    return core_algos.agg_loss(
        loss_mat=(sequences.loss / length.clamp(min=1)).unsqueeze(-1),
        loss_mask=length.unsqueeze(-1),
        loss_agg_mode=loss_agg_mode,
        **batch_info,
    )


def _default_band() -> Band:
    """Return the default range, for verl's own ``PolicyLossConfig``, which has none."""
    text = "loss_mode=fspo without its config schema: %s is in effect. Set the range with algorithm.policy_loss=fspo."
    ONCE.warn("no schema", text, Band().describe())
    return Band()
