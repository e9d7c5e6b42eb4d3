# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains one cell of the study: a policy by reinforcement learning under one clip, on one core.

A step is verl's: responses at temperature 1, verl's GRPO advantages, and ``EPOCHS`` times ``MINI_BATCHES`` updates by a
policy loss that verl has registered, called with verl's ``ActorConfig``. Neither Ray nor verl's trainer takes part. The
optimiser is Adam, which does not see the scale of a loss, so that aggregations differ in weights alone. Gradients are
not clipped for the same reason.
"""

import contextlib
import copy
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from stairs import PAD, Policy, Problem, draw_problem, sample
from torch import Tensor
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_policy_loss_fn
from verl.workers.config import ActorConfig, FSDPActorConfig

import fspo_verl.register  # noqa: F401  # the policy loss fspo
from fspo_verl.analysis.fit import Unreachable, measured_shape
from fspo_verl.band import Band
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.loss import fspo_loss
from fspo_verl.observe.columns import CLIPPED, loss_columns, to_numpy

POWERS = {"fixed": 0.0, "sqrt": 0.5, "linear": 1.0, "measured": 0.5}  # of the width where an arm starts
ARMS = [*POWERS, "random", "none"]
PROMPTS, RESPONSES, MINI_BATCHES, MICRO_BATCHES = 64, 8, 4, 4  # a step, its prompts' responses, and how it is cut
LEARNING_RATE = 3e-4
EPS, EPS_LENGTH = 0.05, 15  # eps of sqrt(length) at the start; all widths are equal at this length there
EPS_MAX = 1e3  # out of reach: with four epochs eps rises to more than the default, ten times its start
RECORDED = 5  # steps from which the arm ``measured`` takes its shape; until then it is ``sqrt``
EVALUATED = 1024  # problems at the end, the same for every cell; training draws from the same 1,440
QUANTILES = (0.1, 0.5, 0.9)
KEY = ("aggregation", "arm", "seed")  # of a cell within its experiment


class Cell(NamedTuple):
    """One run of the study."""

    experiment: str
    arm: str
    seed: int
    aggregation: str = "seq-mean-token-sum"
    rate: float = 0.1  # the clip rate that a band is held at
    epochs: int = 1
    steps: int = 40

    @property
    def key(self) -> tuple:
        """Its name in the file of its experiment."""
        return tuple(getattr(self, name) for name in KEY)


def actor_config(cell: Cell, **band) -> ActorConfig:
    """verl's config of the actor, with the arm's band or with the fields of another one.

    Those of ``none`` and ``random`` have no edges.
    """
    if not band and cell.arm in POWERS:
        band = {"length_power": POWERS[cell.arm], "eps": EPS * EPS_LENGTH ** (0.5 - POWERS[cell.arm])}
    held = {"target_clip_rate": cell.rate, "eps_max": EPS_MAX} if cell.arm in POWERS else {"eps": math.inf}
    policy_loss = FSPOPolicyLossConfig(**band, **held)
    return FSDPActorConfig(
        rollout_n=RESPONSES,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=policy_loss,
        loss_agg_mode=cell.aggregation,
    )


def policy_loss(config: ActorConfig, tokens: Sequence[Tensor], batch_tokens: int, batch_rows: int) -> Tensor:
    """The loss of one micro-batch as verl's worker has it, by the registered policy loss that the config names.

    Args:
        tokens: log_prob, old_log_prob, advantages and response_mask, ``[B, T]``.
        batch_tokens: response tokens of the whole mini-batch.
        batch_rows: responses of the whole mini-batch.
    """
    totals = {"dp_size": 1, "batch_num_tokens": batch_tokens, "global_batch_size": batch_rows}
    config.global_batch_info.update(totals, loss_scale_factor=config.loss_scale_factor)
    log_prob, old_log_prob, advantages, response_mask = tokens
    loss, _ = get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
    )
    return loss


class Rollout(NamedTuple):
    """What a step trains on; rows are responses, those to one prompt beside each other."""

    prompts: Tensor  # [B, PROMPT]
    responses: Tensor  # [B, T]
    mask: Tensor  # [B, T], bool
    rewards: Tensor  # [B]
    advantages: Tensor  # [B, T]


def roll_out(policy: Policy, problems: Sequence[Problem], count: int, generator: torch.Generator) -> Rollout:
    """``count`` responses to each problem, with verl's GRPO advantages."""
    problems = [problem for problem in problems for _ in range(count)]
    prompts = torch.tensor([problem.prompt for problem in problems])
    responses = sample(policy, prompts, generator)
    mask = responses != PAD
    pairs = zip(problems, responses, mask, strict=True)
    rewards = torch.tensor([problem.reward(row[kept].tolist()) for problem, row, kept in pairs])
    scores = torch.zeros(mask.shape)
    scores[:, 0] = rewards  # GRPO takes the sum over the tokens
    advantages, _ = compute_grpo_outcome_advantage(scores, mask.float(), np.arange(len(problems)) // count)
    return Rollout(prompts, responses, mask, rewards, advantages)


def updates(epochs: int, lengths: Tensor, generator: torch.Generator) -> Iterator[list[Tensor]]:
    """The micro-batches of each update, as row numbers. A prompt's responses share a mini-batch.

    A micro-batch holds responses of like length, which spares padding and leaves the gradient as it is.
    """
    for _ in range(epochs):
        for prompts in torch.randperm(PROMPTS, generator=generator).chunk(MINI_BATCHES):
            rows = (prompts[:, None] * RESPONSES + torch.arange(RESPONSES)).flatten()
            yield list(rows[lengths[rows].argsort(stable=True)].chunk(MICRO_BATCHES))


def train(cell: Cell, warm: Policy, shares: Sequence[float] | None = None) -> dict:
    """Train a cell, and return its numbers: one list per quantity over the steps, and the end.

    Args:
        warm: the policy to start from, which stays as it is.
        shares: for the arm ``random``, the clip rate of each step to follow, that of the arm ``sqrt``.
    """
    policy, config = copy.deepcopy(warm), actor_config(cell)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    rng, generator = random.Random(cell.seed), torch.Generator().manual_seed(cell.seed)
    series, records = [], []
    for step in range(cell.steps):
        rollout = roll_out(policy, [draw_problem(rng) for _ in range(PROMPTS)], RESPONSES, generator)
        share = 0.0 if shares is None else shares[step]
        controller = config.policy_loss.controller
        eps = {} if controller is None else dict(controller.eps)
        with contextlib.nullcontext() if controller is None else controller.step():
            table = _train_step(policy, optimizer, config, rollout, cell.epochs, share, generator)
        records.append(table.assign(step=step))
        series.append(_summary(rollout, table, eps))
        if cell.arm == "measured" and step + 1 == RECORDED:
            # Of the first update the ratio is 1: it has not moved, but for rounding.
            moved = pd.concat(records).query("update > 0").rename(columns={"update": "mini_batch"})
            with contextlib.suppress(Unreachable):  # too little has moved: the width stays sqrt(length)
                config = actor_config(cell, **controller.eps, shape=measured_shape(moved, cell.rate))
    rng = random.Random("evaluation")
    end = roll_out(policy, [draw_problem(rng) for _ in range(EVALUATED)], 1, torch.Generator().manual_seed(0))
    found = {name: [_rounded(row[name]) for row in series] for name in series[0]}
    found["accuracy"], found["length_evaluated"] = end.rewards.mean().item(), end.mask.sum(1).float().mean().item()
    return {**cell._asdict(), "shape": config.policy_loss.shape, **found}


def _train_step(policy, optimizer, config, rollout, epochs, share, generator) -> pd.DataFrame:
    """Update the policy on a rollout; return a row per response and update, with what the loss did to it."""
    lengths, tables = rollout.mask.sum(1), []
    chunks = list(updates(epochs, lengths, generator))
    old_log_prob = torch.zeros(rollout.mask.shape)
    with torch.no_grad():
        for rows in (rows for micro_batches in chunks[:MINI_BATCHES] for rows in micro_batches):
            width = int(lengths[rows].max())
            old_log_prob[rows, :width] = policy.log_probs(rollout.prompts[rows], rollout.responses[rows, :width])
    for update, micro_batches in enumerate(chunks):
        optimizer.zero_grad()
        every = torch.cat(micro_batches)
        for rows in micro_batches:
            width = int(lengths[rows].max())
            log_prob = policy.log_probs(rollout.prompts[rows], rollout.responses[rows, :width])
            advantages = rollout.advantages[rows, :width]
            # No clip takes anything of the first update; the others make up for it.
            chance = share * len(chunks) / (len(chunks) - 1) if update else 0.0
            dropped = torch.rand(len(rows), generator=generator) < chance if share else torch.zeros(len(rows)) > 0
            given = advantages.masked_fill(dropped[:, None], 0.0)
            tokens = log_prob, old_log_prob[rows, :width], given, rollout.mask[rows, :width]
            policy_loss(config, tokens, int(lengths[every].sum()), len(every)).backward()
            columns = _columns(config, (log_prob.detach(), *tokens[1:]))
            columns["clipped"] = dropped.numpy() | (sum(columns.pop(name) for name in CLIPPED) > 0)
            live = advantages[:, 0].numpy()
            tables.append(pd.DataFrame(columns | {"advantage": live, "update": update, "prompt": rows // RESPONSES}))
        optimizer.step()
    return pd.concat(tables, ignore_index=True)


def _columns(config: ActorConfig, tokens: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """What the band in force does to each response ``[B]``."""
    controller = config.policy_loss.controller
    band: Band = config.policy_loss if controller is None else controller.band
    return to_numpy(loss_columns(fspo_loss(*tokens, band)))


def _summary(rollout: Rollout, table: pd.DataFrame, eps: dict[str, float]) -> dict[str, float]:
    """The numbers of a step."""
    lengths = rollout.mask.sum(1).float()
    live = table[table.advantage != 0]
    third = np.searchsorted(np.quantile(lengths.numpy(), [1 / 3, 2 / 3]), live.length, "left")
    return {
        "reward": rollout.rewards.mean().item(),
        "length": lengths.mean().item(),
        **{f"length_{q:.0%}": lengths.quantile(q).item() for q in QUANTILES},
        "clip_rate": live.clipped.mean(),
        **{f"clip_rate_{name}": live.clipped[third == n].mean() for n, name in enumerate(("short", "middle", "long"))},
        **eps,
    }


def _rounded(value: float) -> float | None:
    """Five significant digits; None for NaN."""
    return None if math.isnan(value) else float(f"{value:.5g}")
