# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks of set lengths, and small policies that are to learn them all; one policy per seed, all seeds at once.

A response of a task is a walk over ten digits: a free symbol, then the next digit, and so on. Each task has one
permutation of the digits, and a response has the reward 1 if every digit follows from the one before. Any free symbol
is right, so that it adds to the log-ratio of a response and nothing to its reward. A prompt is the first digit.

The policy is a network of two hidden layers that sees the task, the last digit and the last free symbol. Each task has
weights of its own. Its log-probs of all that can come next make a small table, which a response's log-probs are looked
up in. Success has a closed form, so that evaluation adds no noise.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DIGITS, FREE, HIDDEN = 10, 4, 32
ENTRIES = DIGITS * FREE * (1 + DIGITS)  # of a task's table: a free symbol after each digit, and a digit after both
RESPONSES = 8  # to a prompt
START = 0.2  # success of every task before training
_WARM_UP, _WARM_UP_RATE = 900, 5e-3


class Rollout(NamedTuple):
    """Responses to each task; lists hold a tensor per task."""

    tokens: list[Tensor]  # [S, prompts, RESPONSES, L], places in the table of log-probs
    old_log_prob: list[Tensor]  # [S, prompts, RESPONSES, L]
    advantages: list[Tensor]  # [S, prompts, RESPONSES]


class _LookUp(torch.autograd.Function):
    """``table[places]``; the sum of the gradients of a place is a weighted count, several times as fast as verl's."""

    @staticmethod
    def forward(ctx, table, places):
        ctx.save_for_backward(places)
        ctx.size = table.numel()
        return table[places]

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        return torch.bincount(places.flatten(), grad.flatten(), ctx.size).to(grad.dtype), None


class Seeds:
    """A policy per seed, all of them one tensor of weights; S seeds, C tasks, N weights.

    Args:
        lengths: tokens of a response to each task.
        seeds: of the weights, the permutations and all responses. A seed's numbers do not depend on the others.
        parts: shape and scale of each part of a policy's weights.
    """

    def __init__(self, lengths: Sequence[int], seeds: Sequence[int], parts: dict[str, tuple], device="cpu"):
        self.lengths, self.count = tuple(lengths), len(lengths)
        self._shapes = {name: shape for name, (shape, _) in parts.items()}
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

        def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
            own = [(scale * torch.randn(shape, generator=generator)).flatten() for shape, scale in parts.values()]
            return torch.cat(own), *walks(lengths, generator)

        drawn = zip(*map(draw, self._generators), strict=True)
        weights, self._next, error = (torch.stack(each).to(device) for each in drawn)  # two of [S, C, DIGITS]
        self.weights = weights.requires_grad_()  # [S, N]
        # What a policy learns before training: the chance of each digit after each one, [S, C, DIGITS, DIGITS].
        self._target = (error / (DIGITS - 1))[..., None].repeat(1, 1, 1, DIGITS)
        self._target.scatter_(3, self._next[..., None], 1 - error[..., None])

    def copy(self):
        """The same policies, which go on to draw the same numbers."""
        other = copy.copy(self)
        other.weights = self.weights.detach().clone().requires_grad_()
        other._generators = [generator.clone_state() for generator in self._generators]
        return other

    def _parts(self, weights: Tensor) -> dict[str, Tensor]:
        split = weights.split([math.prod(shape) for shape in self._shapes.values()], 1)
        return {name: part.view(-1, *shape) for (name, shape), part in zip(self._shapes.items(), split, strict=True)}

    def _fit(self, loss: Callable[[], Tensor], schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> None:
        for _ in range(steps):
            schedule.optimizer.zero_grad()
            loss().backward()
            schedule.optimizer.step()
            schedule.step()
        self.weights.grad = None


class Policies(Seeds):
    """A network of two hidden layers per seed and task."""

    def __init__(self, lengths: Sequence[int], seeds: Sequence[int]):
        groups, out = len(lengths), FREE + DIGITS
        parts = {
            "digit": ((groups, DIGITS, 1, HIDDEN), 0.7),
            "symbol": ((groups, 1, FREE + 1, HIDDEN), 0.7),  # the last one is none yet
            "task": ((groups, 1, 1, HIDDEN), 0.7),
            "hidden": ((groups, HIDDEN, HIDDEN), HIDDEN**-0.5),
            "hidden_bias": ((groups, 1, HIDDEN), 0.0),
            "out": ((groups, HIDDEN, out), HIDDEN**-0.5),
            "out_bias": ((groups, 1, out), 0.0),
        }
        super().__init__(lengths, seeds, parts)
        self._visits = self._visited()
        target = self._target[:, :, :, None].expand(-1, -1, -1, FREE, -1)

        def loss() -> Tensor:
            """Return the logits of the table that errs so often, and in which free symbols are equally likely."""
            symbols, digits = self._log_probs()
            return -(target * digits).sum() / FREE - symbols.sum() / FREE

        optimizer = torch.optim.Adam([self.weights], _WARM_UP_RATE)
        self._fit(loss, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, _WARM_UP), _WARM_UP)

    def _visited(self) -> Tensor:
        """How often a right response leaves each digit ``[S, C, DIGITS (first), DIGITS]``."""
        visits = torch.zeros(*self._next.shape, DIGITS)
        for task, length in enumerate(self.lengths):
            at = torch.arange(DIGITS).expand(len(self._next), DIGITS)
            for _ in range(length // 2):
                visits[:, task] += torch.nn.functional.one_hot(at, DIGITS)
                at = self._next[:, task].gather(1, at)
        return visits

    def _log_probs(self) -> tuple[Tensor, Tensor]:
        """Return log-probs of free symbols ``[S, C, DIGITS, FREE]`` and of digits ``[S, C, DIGITS, FREE, DIGITS]``."""
        w, seeds = self._parts(self.weights), len(self.weights)
        hidden = (w["digit"] + w["symbol"] + w["task"]).tanh()  # [S, C, DIGITS, FREE + 1, HIDDEN]
        hidden = hidden.view(seeds, self.count, -1, HIDDEN)
        hidden = (hidden @ w["hidden"] + w["hidden_bias"]).tanh()
        logits = (hidden @ w["out"] + w["out_bias"]).view(seeds, self.count, DIGITS, FREE + 1, -1)
        return logits[..., FREE, :FREE].log_softmax(-1), logits[..., :FREE, FREE:].log_softmax(-1)

    def table(self) -> Tensor:
        """Log-probs of all that can come next, flat: ENTRIES of each task of each seed."""
        return torch.cat([part.flatten(2) for part in self._log_probs()], 2).flatten()

    @staticmethod
    def log_prob(table: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-prob of each token, in nats."""
        return _LookUp.apply(table, tokens)

    @torch.no_grad()
    def success(self) -> Tensor:
        """The chance of a right response to a prompt at temperature 1, ``[S, C]``."""
        symbols, digits = self._log_probs()
        right = digits.gather(4, self._next[:, :, :, None, None].expand(-1, -1, -1, FREE, 1))[..., 0]
        step = (symbols + right).logsumexp(-1)  # [S, C, DIGITS]
        return (self._visits @ step[..., None])[..., 0].exp().mean(-1)

    @torch.no_grad()
    def roll_out(self, prompts: int) -> Rollout:
        """Responses to so many prompts of each task, at temperature 1, with GRPO's advantages."""
        symbols, digits = self._log_probs()
        pairs = (symbols[..., None] + digits).exp().view(-1, FREE * DIGITS)  # [S·C·DIGITS, FREE·DIGITS]
        kept, other = alias_tables(pairs)
        table, rows = self.table(), prompts * RESPONSES
        found = Rollout([], [], [])
        for task, length in enumerate(self.lengths):
            draws, first = [], []
            for generator in self._generators:
                first.append(torch.randint(DIGITS, (prompts,), generator=generator))
                draws.append(torch.rand(length // 2, rows, generator=generator))
            draws = torch.stack(draws, 1).flatten(1) * (FREE * DIGITS)  # [L/2, S·rows]
            at = torch.stack(first).repeat_interleave(RESPONSES, 1).flatten()
            place = torch.arange(len(self._generators)).repeat_interleave(rows) * self.count + task
            column = draws.int()
            rest = draws - column
            column += place.int() * (DIGITS * FREE * DIGITS)
            digits_at, chosen = [at], []
            for own, part in zip(column, rest, strict=True):
                cell = at * (FREE * DIGITS) + own
                pair = torch.where(part < kept[cell], own % (FREE * DIGITS), other[cell])
                at = pair % DIGITS
                chosen.append(pair)
                digits_at.append(at)
            pair, at = torch.stack(chosen), torch.stack(digits_at)
            following = self._next[:, task].repeat_interleave(rows, 0)
            right = (following.gather(1, at[:-1].T.long()) == at[1:].T).all(1)
            symbol = at[:-1] * FREE + pair // DIGITS
            digit = DIGITS * FREE + at[:-1] * (FREE * DIGITS) + pair
            tokens = torch.stack([symbol, digit], 1).long()
            tokens += place * ENTRIES
            shape = len(self._generators), prompts, RESPONSES
            found.tokens.append(tokens.flatten(0, 1).T.contiguous().view(*shape, length))
            found.old_log_prob.append(table[found.tokens[-1]])
            found.advantages.append(grpo_advantages(right.view(shape).float()))
        return found


def walks(lengths: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The permutation of each task, and how often it errs at first after each digit, ``[C, DIGITS]``."""
    count = len(lengths)
    permutations = torch.stack([torch.randperm(DIGITS, generator=generator) for _ in range(count)])
    noise = torch.exp(0.7 * torch.randn(count, DIGITS, generator=generator))
    error = torch.tensor([1 - START ** (2 / length) for length in lengths])
    errors = error[:, None] * noise / noise.mean(1, keepdim=True)
    return permutations, errors.clamp(max=0.6)


def alias_tables(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Walker's tables of distributions ``[N, K]``: of a column the share that it keeps, and who has the rest, flat.

    A column drawn at random gives itself with the share that it keeps, and the other outcome otherwise (Walker 1977,
    doi:10.1145/355744.355749).
    """
    rows, count = torch.arange(len(probabilities)), probabilities.shape[1]
    rest = probabilities / probabilities.sum(1, keepdim=True) * count
    kept, other = torch.ones_like(rest), torch.arange(count).repeat(len(rest), 1)
    for _ in range(count - 1):  # the smallest column is filled up by the largest one, and done
        small, large = rest.argmin(1), rest.where(rest.isfinite(), -math.inf).argmax(1)
        share = rest[rows, small]
        kept[rows, small], other[rows, small] = share, large
        rest[rows, large] -= 1 - share
        rest[rows, small] = math.inf
    return kept.flatten(), other.int().flatten()


def grpo_advantages(rewards: Tensor) -> Tensor:
    """verl's ``compute_grpo_outcome_advantage`` of ``[..., RESPONSES]``, without its loop over the prompts."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-6)
