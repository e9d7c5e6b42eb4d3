# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a mix of tasks under one clip: all seeds of an arm at once, on one core.

A rollout is verl's: responses at temperature 1, GRPO's advantages, and updates by a policy loss as it is, this
package's ``fspo_loss`` or one that verl has registered. Each update takes as many prompts of every task. The optimiser
is Adam with verl's limit on the norm of the gradient. Neither Ray nor verl's trainer takes part.

An arm with a rate is held at it, each side of each seed by itself: see :class:`Control`. So arms differ in whom they
clip, and not in how many.
"""

import copy
import functools
import itertools
import math
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformer import Transformers
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from walks import RESPONSES, Policies, Rollout

from fspo_verl.band import Edges
from fspo_verl.loss import fspo_loss

sys.path.append(str(Path(__file__).resolve().parents[1]))
from fitted import fitted_power  # noqa: E402

PROMPTS = 2  # of each task in an update
GRADIENT_NORM = 1.0  # verl's clip_grad
UNIT = 64  # tokens: where a width is 1
RECORDED = 10  # rollouts that a power is fitted to
DUAL = 3  # of the wider side: the dual clip of an arm at a rate that sets none


class Arm(NamedTuple):
    """A clip: a range on S ∝ L^power, or a loss that verl has registered; nothing is clipped without either."""

    power: float | str | None = None  # "fitted": see fitted.fitted_power
    rate: float | None = None  # the clip rate that it is held at; without one the ranges stay
    loss: str | None = None
    aggregation: str = "seq-mean-token-sum-norm"
    ranges: tuple[float, float] | None = None  # below and above, as the loss takes them; of a range in nats per L^power
    dual: float | None = None  # dual clip in upper edges; None: at DUAL times the wider side, or off with set ranges


class Regime(NamedTuple):
    """Settings that all arms of an experiment have in common."""

    lengths: tuple[int, ...]  # tokens of a response to each task
    mini_batches: int
    epochs: int = 1
    rollouts: int = 30
    transformer: bool = False
    stale: int = 0  # by how many rollouts the policy that sampled is older than the one that trains
    tries: bool = True  # each rollout is trained on twice, the first time to see which eps has the rate


class Control:
    """Holds both sides of every seed at a clip rate; its eps is that of the next rollout.

    The rate that is wished for makes good what the rollouts so far have missed, by responses.

    Args:
        eps: ``[S, 2]``, below and above.
    """

    TRIM, LARGEST = 0.5, 1.0  # the largest correction of the rate, relative to it; the largest move of log eps

    def __init__(self, eps: Tensor, rate: float | None):
        self.eps, self.rate = eps.double(), rate
        self._missed, self._counted = torch.zeros_like(self.eps), torch.ones_like(self.eps)

    def wished(self) -> Tensor:
        """``[S, 2]``"""
        return self.rate * (1 + (self._missed / self._counted / self.rate).clamp(-self.TRIM, self.TRIM))

    def saw(self, clipped: Tensor, counted: Tensor) -> None:
        """Take the responses of a rollout, ``[S, 2]``."""
        self._counted = counted.clamp(min=1)
        self._missed += self.rate * counted - clipped

    def follow(self, clipped: Tensor, counted: Tensor) -> None:
        """Move log eps by the log ratio of two normal quantiles: that of the wished rate and that of the rate seen."""
        seen = torch.where(counted > 0, clipped / counted.clamp(min=1), self.rate)
        quantile = torch.distributions.Normal(0.0, 1.0).icdf
        step = torch.log(quantile(1 - self.wished()) / quantile(1 - seen.clamp(0.002, 0.45)))
        self.eps = self.eps * step.clamp(-self.LARGEST, self.LARGEST).exp()


class Taken(NamedTuple):
    """The effect of a loss on the responses of a task in an update, ``[S, n]``."""

    task: int
    advantage: Tensor
    log_ratio: Tensor
    quadratic_variation: Tensor
    clipped: Tensor  # of a token clip the share of the tokens
    reach: (
        Tensor  # [S, n, k], what eps is compared with, towards the advantage: S per width, or ratio − 1 of some tokens
    )


def joined(found: Sequence[Taken], name: str) -> Tensor:
    """A field of all responses ``[S, R]``."""
    return torch.cat([getattr(taken, name) for taken in found], 1)


class Clip:
    """The clip of an arm in force.

    Args:
        scale: widths in units of eps, ``[S, C]``.
        eps: ``[S, 2]``; None clips nothing.
    """

    def __init__(self, arm: Arm, regime: Regime, scale: Tensor, eps: Tensor | None):
        self.arm, self.regime = arm, regime
        self.scale = torch.ones_like(scale) if arm.loss else scale
        self.control = Control(torch.full((len(scale), 2), math.inf) if eps is None else eps, arm.rate)

    def loss(self, task: int, log_prob: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, Taken]:
        """Return, of one task's responses in a mini-batch, the sum over the seeds, and what it did to each response.

        Args:
            log_prob, old: ``[S·n, L]``, the seeds one after the other.
            advantages: ``[S·n]``.
        """
        each, lengths = PROMPTS * RESPONSES, self.regime.lengths
        given, mask = advantages[:, None].expand_as(old), torch.ones_like(old, dtype=torch.bool)
        eps = self.control.eps * self.scale[:, task, None]
        low, high = eps.to(old).repeat_interleave(each, 0).unbind(1)
        sign = advantages.sign()[:, None]
        if self.arm.loss is None:
            dual = torch.full_like(high, math.inf) if self.arm.ranges else DUAL * torch.maximum(low, high)
            dual = dual if self.arm.dual is None else self.arm.dual * high
            band = SimpleNamespace(edges=lambda *_: Edges(-low, high, dual))  # of each row: seeds have their own eps
            found = fspo_loss(log_prob, old, given, mask, band)
            tokens = lengths[task] if self.arm.aggregation == "seq-mean-token-mean" else max(lengths)
            loss = found.loss.sum() / (each * len(lengths) * tokens)
            s, q, clipped = found.log_ratio.detach(), found.quadratic_variation.detach(), found.clipped.float()
            reach = sign * s[:, None]
        else:
            leaf = log_prob.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self._registered(leaf, old, given, mask, low, high), leaf)
            clipped = ((gradient == 0) & (given != 0)).float().mean(1)
            ratio = leaf.detach() - old
            s, q = ratio.sum(1), ratio.square().sum(1)
            reach = sign * (ratio[:, :: max(1, ratio.shape[1] // 8)].exp() - 1)
            loss = self._registered(log_prob, old, given, mask, low, high)
        columns = (column.cpu().unflatten(0, (len(self.scale), -1)) for column in (advantages, s, q, clipped, reach))
        taken = Taken(task, *columns)
        return loss, taken._replace(reach=taken.reach / self.scale[:, task, None, None])

    def _registered(self, log_prob, old, given, mask, low, high) -> Tensor:
        """The loss of verl, of each seed's mini-batch divided by that seed's totals."""
        each, lengths = PROMPTS * RESPONSES, self.regime.lengths
        config = FSDPActorConfig(
            rollout_n=RESPONSES,
            ppo_micro_batch_size_per_gpu=1,
            loss_agg_mode=self.arm.aggregation,
            policy_loss=PolicyLossConfig(loss_mode=self.arm.loss),
            clip_ratio_low=low[:, None],
            clip_ratio_high=high[:, None],
        )
        totals = {"dp_size": 1, "batch_num_tokens": each * sum(lengths), "global_batch_size": each * len(lengths)}
        config.global_batch_info.update(totals, loss_scale_factor=max(lengths))
        return get_policy_loss_fn(self.arm.loss)(
            old_log_prob=old,
            log_prob=log_prob,
            advantages=given,
            response_mask=mask,
            loss_agg_mode=self.arm.aggregation,
            config=config,
        )[0]


def widths(powers: Sequence[float], lengths: Sequence[int]) -> Tensor:
    """``[S, C]``: 1 at UNIT tokens."""
    return torch.tensor([[(length / UNIT) ** power for length in lengths] for power in powers])


class Run:
    """All seeds of an arm, as far as they have come."""

    def __init__(self, regime: Regime, clip: Clip, policies: Policies | Transformers, learning_rate: float, seeds):
        self.regime, self.clip, self.policies, self.seeds = regime, clip, policies, seeds
        self.optimizer = torch.optim.Adam([policies.weights], learning_rate)
        self.order = torch.Generator().manual_seed(0)
        self.rows: list[pd.DataFrame] = []
        self.found: list[list[Taken]] = []  # of recorded rollouts
        self._prompts = PROMPTS * regime.mini_batches
        self._waiting = deque(policies.roll_out(self._prompts) for _ in range(regime.stale))

    def rollout(self, recorded: bool = False) -> None:
        """Sample, and train on what was sampled before."""
        self._waiting.append(self.policies.roll_out(self._prompts))
        sampled, rollout = self.policies.success(), self._waiting.popleft()
        shuffled = (torch.randperm(self._prompts, generator=self.order) for _ in range(self.regime.epochs))
        orders, control = [part for order in shuffled for part in order.split(PROMPTS)], self.clip.control
        held = control.rate is not None
        for _ in range(held * (self.regime.tries or not self.rows) * (1 if self.rows else 2)):
            kept = self.policies.weights.detach().clone(), copy.deepcopy(self.optimizer.state_dict())
            control.eps = eps_of(self._train(rollout, orders)[0], control.wished())
            self.policies.weights.data.copy_(kept[0])
            self.optimizer.load_state_dict(kept[1])
        found, norms = self._train(rollout, orders)
        self.rows.append(self._summary(found, norms, sampled if self.regime.transformer else self.policies.success()))
        if recorded:
            self.found.append(found)
        if held:
            control.saw(*sides(found))
            if not self.regime.tries:
                control.follow(*sides(found))

    def _train(self, rollout: Rollout, orders: Sequence[Tensor]) -> tuple[list[Taken], Tensor]:
        """Update by update; returns what the loss did, and the norms of the gradients ``[updates, S]``."""
        found, norms = [], []
        for prompts in orders:
            table, total = self.policies.table(), 0.0
            for task, (tokens, old, advantages) in enumerate(zip(*rollout, strict=True)):
                given = advantages[:, prompts].flatten()
                log_prob = self.policies.log_prob(table, tokens[:, prompts].flatten(0, 2))
                loss, taken = self.clip.loss(task, log_prob, old[:, prompts].flatten(0, 2), given)
                found.append(taken)
                total = total + loss
            self.policies.weights.grad = None
            total.backward()
            gradient = self.policies.weights.grad
            norms.append(gradient.norm(dim=1))
            gradient *= (GRADIENT_NORM / (norms[-1] + 1e-6)).clamp(max=1)[:, None]
            self.optimizer.step()
        return found, torch.stack(norms).cpu()

    def _summary(self, found: Sequence[Taken], norms: Tensor, success: Tensor) -> pd.DataFrame:
        """A row per seed and task; norms ``[updates, S]``, success ``[S, C]``."""
        tables = []
        for task, length in enumerate(self.regime.lengths):
            own = [taken for taken in found if taken.task == task]
            advantage = joined(own, "advantage")
            live = (advantage != 0).float()
            clipped, away = live * joined(own, "clipped"), advantage * joined(own, "log_ratio") < 0
            columns = {
                "success": success[:, task],
                "live": live.sum(1),
                "clipped": clipped.sum(1),
                "dual_clipped": (away * clipped).sum(1),  # moved against their advantage
                "norm_median": norms.median(0).values,
                "norm_largest": norms.max(0).values,
            }
            rows = pd.DataFrame({name: column.numpy() for name, column in columns.items()})
            tables.append(rows.assign(seed=self.seeds, rollout=len(self.rows), length=length))
        return pd.concat(tables, ignore_index=True)

    def powers(self, rate: float) -> list[float]:
        """The power that is fitted to each seed's records."""
        found = list(itertools.chain.from_iterable(self.found))
        length = np.concatenate([np.full(taken.advantage.shape[1], self.regime.lengths[taken.task]) for taken in found])
        columns = {name: joined(found, name) for name in ("log_ratio", "quadratic_variation", "advantage")}
        records = pd.DataFrame({name: column.flatten().numpy() for name, column in columns.items()})
        records = records.assign(length=np.tile(length, len(self.seeds)), seed=np.repeat(self.seeds, len(length)))
        return [fitted_power(own, rate) for _, own in records.groupby("seed")]


def sides(found: Sequence[Taken]) -> tuple[Tensor, Tensor]:
    """Clipped and counted responses of each side, ``[S, 2]``."""
    advantage = joined(found, "advantage")
    counted = torch.stack([advantage < 0, advantage > 0], -1).double()
    return (joined(found, "clipped")[..., None] * counted).sum(1), counted.sum(1)


def eps_of(found: Sequence[Taken], rate: Tensor) -> Tensor:
    """Eps that would have clipped these rates on each side, all ``[S, 2]``."""
    reach = torch.cat([taken.reach.flatten(1) for taken in found], 1).double()
    sign = torch.cat([taken.advantage[..., None].expand_as(taken.reach).flatten(1) for taken in found], 1)
    eps = torch.ones_like(rate)
    for seed, side in itertools.product(range(len(rate)), (0, 1)):
        own = reach[seed][sign[seed] * (2 * side - 1) > 0]
        eps[seed, side] = own.quantile(1 - rate[seed, side]) if len(own) else 1.0
    return eps.clamp(min=1e-6)


@functools.cache
def warm(lengths: tuple[int, ...], transformer: bool, seeds: tuple[int, ...]) -> Policies | Transformers:
    """Return the start of all arms of these seeds."""
    return (Transformers if transformer else Policies)(lengths, seeds)


def begun(regime: Regime, arm: Arm, learning_rate: float, seeds: Sequence[int]) -> Run:
    """The run of an arm before its first rollout."""
    start = warm(regime.lengths, regime.transformer, tuple(seeds))
    powers = [arm.power if isinstance(arm.power, float) else 0.5] * len(seeds)
    if arm.power == "fitted":
        first = begun(regime, arm._replace(power=0.5), learning_rate, seeds)
        for _ in range(RECORDED):
            first.rollout(recorded=True)
        powers = first.powers(arm.rate)
    scale, eps = widths(powers, regime.lengths), None  # eps is found where a rate is to be held
    if arm.ranges:
        low, high = arm.ranges
        unit = UNIT ** (arm.power or 0.0) if arm.loss is None else 1.0
        eps = torch.tensor([[low * unit, high * unit]]).repeat(len(seeds), 1)
    return Run(regime, Clip(arm, regime, scale, eps), start.copy(), learning_rate, seeds)


def train(regime: Regime, arm: Arm, learning_rate: float, seeds: Sequence[int]) -> pd.DataFrame:
    """Train an arm; a row per seed, rollout and task."""
    run = begun(regime, arm, learning_rate, seeds)
    for _ in range(regime.rollouts):
        run.rollout()
    return pd.concat(run.rows, ignore_index=True)


def curves_by_task(table: pd.DataFrame, curves: Sequence[str], sums: Sequence[str]) -> pd.DataFrame:
    """A row per seed and task of :func:`train`: curves by rollout, and sums over the rollouts."""
    columns = {name: (name, lambda values: values.to_numpy(np.float32)) for name in curves}
    columns |= {name: (name, "sum") for name in sums}
    return table.sort_values("rollout").groupby(["seed", "length"]).agg(**columns).reset_index()
