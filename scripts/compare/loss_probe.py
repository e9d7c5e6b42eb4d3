# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes down what the policy loss of a verl training is given, and what comes back: its value, and its gradient.

  VERL_USE_EXTERNAL_MODULES=loss_probe LOSS_PROBE=FOLDER python -m verl.trainer.main_ppo ...

A worker writes a line of JSON per call, into a file of its own. This module shares nothing with fspo_verl.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import wrapt

PLACE = "probe"  # in the folder of a run
FIELDS = ("eps", "eps_low", "eps_high", "eps_dual", "length_power", "normalization", "target_clip_rate", "inner")
"""Fields that are written of the config of a policy loss."""


def probed(name: str, find: Callable) -> Callable:
    """A policy loss of verl that is written down at each call in which something is trained.

    Args:
        find: verl's ``get_policy_loss_fn``.
    """

    def call(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        given = {"old_log_prob": old_log_prob, "advantages": advantages, "response_mask": response_mask}
        given |= {"loss_agg_mode": loss_agg_mode, "config": config, "rollout_is_weights": rollout_is_weights}
        kept = {key: x.detach().clone() if isinstance(x, torch.Tensor) else x for key, x in given.items()}
        here = log_prob.view_as(log_prob)  # the gradient of this loss alone arrives here
        value, metrics = find(name)(log_prob=here, **given)
        if here.requires_grad:
            gradient = _gradient(value, here)
            known = {field: getattr(config.policy_loss, field, None) for field in FIELDS}
            as_verls_own = None
            if known["inner"]:
                alone = log_prob.detach().clone().requires_grad_()
                own = find(known["inner"])(log_prob=alone, **kept)[0]
                as_verls_own = torch.equal(own, value) and torch.equal(_gradient(own, alone), gradient)
            _write(
                {
                    "loss": name,
                    "loss_agg_mode": loss_agg_mode,
                    "config": known,
                    "totals": dict(config.global_batch_info) | {"width": here.shape[1]},
                    "value": value.item(),
                    "rounding": torch.finfo(gradient.dtype).eps,
                    "as_verls_own": as_verls_own,
                    "responses": _responses(log_prob.detach(), gradient, **kept),
                }
            )
        return value, metrics

    return call


def _gradient(value: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a loss at a place of its graph; 0 where it has none."""
    if not value.requires_grad:
        return torch.zeros_like(place)
    (gradient,) = torch.autograd.grad(value, place, retain_graph=True, allow_unused=True)
    return torch.zeros_like(place) if gradient is None else gradient


@torch.no_grad()
def _responses(
    log_prob, gradient, old_log_prob, advantages, response_mask, rollout_is_weights, **_
) -> dict[str, list[float]]:
    """Sums over the response tokens in float64, those of advantage and gradient by the sign of the advantage.

    ``uneven`` is how far the gradient of a token is from its share of that sum: the loss of a sequence has none.
    """
    mask = response_mask.bool()
    advantage = advantages.double() if rollout_is_weights is None else advantages.double() * rollout_is_weights
    advantage = torch.where(mask, advantage, 0.0)
    log_ratio = torch.where(mask, log_prob.double() - old_log_prob.double(), 0.0)
    gradient = gradient.double()
    columns = {"length": mask.sum(-1), "log_ratio": log_ratio.sum(-1), "variation": log_ratio.square().sum(-1)}
    share = torch.zeros_like(gradient)
    for side, sign in (("better", 1), ("worse", -1)):
        of_side = (advantage * sign).clamp(min=0) * sign
        total, pulled = of_side.sum(-1), (gradient * (of_side != 0)).sum(-1)
        columns |= {side: total, f"gradient_{side}": pulled}
        share += of_side * (pulled / torch.where(total == 0, 1.0, total))[:, None]
    columns["uneven"] = (gradient - share).abs().amax(-1)
    return {name: column.tolist() for name, column in columns.items()}


def _write(call: dict) -> None:
    folder = Path(os.environ["LOSS_PROBE"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{os.uname().nodename}-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(call, default=float) + "\n")


def environment(folder: Path) -> dict[str, str]:
    """Return the environment in which calls of a loss are written below a folder; workers of Ray inherit it."""
    modules = filter(None, (os.environ.get("VERL_USE_EXTERNAL_MODULES"), __name__))
    paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    return {
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        "PYTHONPATH": os.pathsep.join(paths),
        "LOSS_PROBE": str(folder / PLACE),
    }


def probe(losses) -> None:
    """Have what verl's ``ppo_loss`` calls written down, whoever has registered it, and when."""
    find = losses.get_policy_loss_fn
    losses.get_policy_loss_fn = lambda name: probed(name, find)


if "LOSS_PROBE" in os.environ:
    wrapt.register_post_import_hook(probe, "verl.workers.utils.losses")
