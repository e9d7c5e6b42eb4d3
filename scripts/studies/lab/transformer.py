# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A small transformer that learns the tasks of :mod:`walks`: the same walks and rewards, on a GPU if there is one.

Two layers of 32 dimensions and two heads, rotary positions, attention to the last 16 tokens; 25,000 weights. The
tasks share all weights but an embedding of the task. One transformer per seed, all seeds in one batch. Success has no
closed form here: it is the mean reward of a rollout, before the updates on it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from walks import DIGITS, FREE, RESPONSES, Rollout, Seeds, grpo_advantages

VOCABULARY = FREE + DIGITS  # free symbols, then digits
HIDDEN, HEADS, LAYERS, WINDOW = 32, 2, 2, 16
_WARM_UP, _WARM_UP_RATE, _WARM_UP_LENGTH = 1500, 3e-3, 128


class Transformers(Seeds):
    """A transformer per seed. It stands in for :class:`walks.Policies`.

    A token is a number that holds the task, the token before and itself, so that a response alone has all that its
    log-probs depend on.
    """

    def __init__(self, lengths: Sequence[int], seeds: Sequence[int]):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        shapes = {"embedding": (VOCABULARY, HIDDEN), "task": (len(lengths), HIDDEN), "out": (HIDDEN, VOCABULARY)}
        for layer in range(LAYERS):
            shapes |= {f"qkv{layer}": (HIDDEN, 3 * HIDDEN), f"attended{layer}": (HIDDEN, HIDDEN)}
            shapes |= {f"up{layer}": (HIDDEN, 4 * HIDDEN), f"down{layer}": (4 * HIDDEN, HIDDEN)}
        scales = {name: 1.0 if name in ("embedding", "task") else shape[0] ** -0.5 for name, shape in shapes.items()}
        parts = {name: (shape, scales[name]) for name, shape in shapes.items()}
        super().__init__(lengths, seeds, parts, self.device)
        self._generators = [torch.Generator(self.device).manual_seed(seed) for seed in seeds]
        self._reward = torch.full((len(seeds), self.count), math.nan)
        self._warm_up()

    def _embedded(self, w: dict[str, Tensor], ids: Tensor, task: Tensor) -> Tensor:
        """``[S, rows, HIDDEN]`` of ids and tasks ``[S, rows]``, by products of matrices, whose gradients repeat."""
        tokens = functional.one_hot(ids, VOCABULARY).float() @ w["embedding"]
        return tokens + functional.one_hot(task, self.count).float() @ w["task"]

    def _scores(self, w: dict[str, Tensor], ids: Tensor, task: Tensor) -> Tensor:
        """Logits ``[S, n, L, VOCABULARY]`` after each of the ids ``[S, n, L]``."""
        seeds, n, length = ids.shape
        flat = lambda x: x.reshape(seeds, n * length, -1)  # noqa: E731
        x = self._embedded(w, ids.flatten(1), task[..., None].expand_as(ids).flatten(1))
        place = torch.arange(length, device=ids.device)
        size = min(WINDOW, length)
        blocks = -(-length // size)
        seen = torch.arange(2 * size, device=ids.device) - size - torch.arange(size, device=ids.device)[:, None]
        seen = (seen <= 0) & (seen > -WINDOW)  # [size, 2 size]: the last WINDOW tokens
        seen = seen.repeat(blocks, 1, 1)
        seen[0, :, :size] = False  # there is no block before the first one
        for layer in range(LAYERS):
            qkv = (_normed(x) @ w[f"qkv{layer}"]).view(seeds, n, length, 3, HEADS, -1).permute(3, 0, 1, 4, 2, 5)
            q, k = (_rotated(part, place) for part in qkv[:2])  # [S, n, HEADS, L, HIDDEN / HEADS]
            q, k, v = (
                functional.pad(part, (0, 0, 0, blocks * size - length)).unflatten(3, (blocks, size))
                for part in (q, k, qkv[2])
            )
            k, v = (torch.cat([functional.pad(part, (0, 0, 0, 0, 1, 0))[:, :, :, :-1], part], 4) for part in (k, v))
            weight = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen, -math.inf).softmax(-1)
            attended = (weight @ v).flatten(3, 4)[:, :, :, :length].transpose(2, 3)
            x = x + flat(attended) @ w[f"attended{layer}"]
            x = x + functional.gelu(_normed(x) @ w[f"up{layer}"]) @ w[f"down{layer}"]
        return (_normed(x) @ w["out"]).view(seeds, n, length, -1)

    def table(self) -> Tensor:
        """Return the weights, from which log-probs are computed."""
        return self.weights

    def log_prob(self, weights: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-prob of each token ``[S·n, L]``, in nats."""
        tokens = tokens.view(len(weights), -1, tokens.shape[-1])
        ids, before, task = tokens % VOCABULARY, tokens // VOCABULARY % VOCABULARY, tokens[..., 0] // VOCABULARY**2
        symbols, digits = self._log_probs(self._parts(weights), before, task)
        symbols = symbols.gather(-1, ids[..., ::2, None])
        digits = digits.gather(-1, ids[..., 1::2, None] - FREE)
        return torch.cat([symbols, digits], -1).flatten(2).flatten(0, 1)

    def _log_probs(self, w: dict[str, Tensor], before: Tensor, task: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs of free symbols ``[S, n, L/2, FREE]``, and of digits ``[S, n, L/2, DIGITS]``."""
        scores = self._scores(w, before, task).unflatten(2, (-1, 2))
        return scores[..., 0, :FREE].log_softmax(-1), scores[..., 1, FREE:].log_softmax(-1)

    def _warm_up(self) -> None:
        """Learn walks in which the permutation errs so often, and free symbols are equally likely."""
        seeds, task = len(self.weights), torch.arange(self.count, device=self.device).repeat_interleave(4)
        of = torch.arange(seeds, device=self.device)[:, None]

        def loss() -> Tensor:
            # Digits at random, and not as the walk goes, so that a rare one is learnt as well.
            shape = len(task), _WARM_UP_LENGTH // 2
            digits, free = self._uniform(shape, DIGITS), self._uniform(shape, FREE)
            ids = torch.stack([digits + FREE, free], -1).flatten(2)
            symbols, following = self._log_probs(self._parts(self.weights), ids, task.expand(seeds, -1))
            wished = self._target[of[..., None], task[:, None], digits]
            return -(wished * following).sum(-1).mean((1, 2)).sum() - symbols.mean((1, 2, 3)).sum()

        optimizer = torch.optim.Adam([self.weights], _WARM_UP_RATE)
        self._fit(loss, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _WARM_UP), _WARM_UP)

    def _uniform(self, shape: tuple[int, ...], count: int) -> Tensor:
        """Whole numbers below count, those of each seed from its generator."""
        return torch.stack([torch.randint(count, shape, generator=g, device=self.device) for g in self._generators])

    def success(self) -> Tensor:
        """Mean reward of the last rollout, ``[S, C]``."""
        return self._reward

    @torch.no_grad()
    def roll_out(self, prompts: int) -> Rollout:
        """Responses to so many prompts of each task, at temperature 1, with GRPO's advantages."""
        w, rows = self._parts(self.weights), prompts * RESPONSES
        found, rewards = Rollout([], [], []), []
        for task, length in enumerate(self.lengths):
            first = self._uniform((prompts,), DIGITS).repeat_interleave(RESPONSES, 1)
            draws = torch.stack([torch.rand(length, rows, generator=g, device=self.device) for g in self._generators])
            tasks = torch.full_like(first, task)
            ids = self._walk(w, first + FREE, tasks, draws)  # [S, rows, 1 + L], with the prompt
            digits = ids[..., ::2] - FREE
            following = self._next[:, task, None].expand(-1, rows, -1).gather(2, digits[..., :-1])
            right = (following == digits[..., 1:]).all(-1).float()
            tokens = (task * VOCABULARY + ids[..., :-1]) * VOCABULARY + ids[..., 1:]
            shape = len(self.weights), prompts, RESPONSES
            found.tokens.append(tokens.view(*shape, length))
            parts = found.tokens[-1].split(2, 1)  # of the size of an update, for memory
            old = [self.log_prob(self.weights, part).view(part.shape) for part in parts]
            found.old_log_prob.append(torch.cat(old, 1))
            found.advantages.append(grpo_advantages(right.view(shape)))
            rewards.append(right.mean(1))
        self._reward = torch.stack(rewards, 1).cpu()
        return found

    def _walk(self, w: dict[str, Tensor], first: Tensor, task: Tensor, draws: Tensor) -> Tensor:
        """Tokens ``[S, rows, 1 + L]`` from the first ones ``[S, rows]`` on; draws ``[S, L, rows]``."""
        seeds, rows = first.shape
        ring = torch.zeros(LAYERS, 2, seeds, rows, HEADS, WINDOW, HIDDEN // HEADS, device=self.device)
        ids, places = [first], torch.arange(draws.shape[1], device=self.device)
        for place, draw in enumerate(draws.unbind(1)):
            x = self._embedded(w, ids[-1], task)
            held, at = min(place + 1, WINDOW), place % WINDOW
            for layer in range(LAYERS):
                q, k, v = (_normed(x) @ w[f"qkv{layer}"]).view(seeds, rows, 3, HEADS, -1).unbind(2)
                q, k = (_rotated(part[..., None, :], places[place : place + 1]) for part in (q, k))
                keys, values = ring[layer]
                keys[..., at, :], values[..., at, :] = k[..., 0, :], v
                keys, values = keys[..., :held, :], values[..., :held, :]
                weight = (q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
                x = x + (weight @ values).reshape(seeds, rows, -1) @ w[f"attended{layer}"]
                x = x + functional.gelu(_normed(x) @ w[f"up{layer}"]) @ w[f"down{layer}"]
            scores = _normed(x) @ w["out"]
            allowed = slice(FREE, None) if place % 2 else slice(FREE)
            chances = scores[..., allowed].softmax(-1).cumsum(-1)
            chosen = (chances[..., :-1] < draw[..., None]).sum(-1)
            ids.append(chosen + (FREE if place % 2 else 0))
        return torch.stack(ids, -1)


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def _rotated(x: Tensor, place: Tensor) -> Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864) of ``[..., tokens, size]`` at places ``[tokens]``."""
    half = x.shape[-1] // 2
    angle = place[:, None] * 100.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
