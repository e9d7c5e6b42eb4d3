# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The laboratory's task, and a transformer of 100,000 parameters that learns it in a minute of one core.

A problem is a number of steps, their height and a start: after 16 steps of 7 from 3 one stands at 3 + 16·7, modulo 10.
A response writes where it stands after some of the steps, ``a0d1g2...p5<eos>``: step a is the first, p the last. How
much it writes is free. It may take all steps at once (3 tokens, often wrong), or one by one, and it may write a place
again and again (``a000d1``), which changes nothing. A response is right if it ends at the last step and the right
place, within a deadline that it cannot see: short is right for hurried problems, long for those that need working.
"""

import random
import string
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS = 16
DEADLINES = (20, 96)  # tokens, equally likely
MAX_RESPONSE = max(DEADLINES)
CARELESS = 0.03  # the chance of a wrong place in a demonstration, each time that one is written
LETTER = 10  # the token of the first step; digits are their own tokens
PAD, START, EOS = range(LETTER + STEPS, LETTER + STEPS + 3)
VOCABULARY = EOS + 1
TEXT = string.digits + string.ascii_lowercase[:STEPS]  # the characters of digits and letters, by token
PROMPT = 4  # tokens

# The styles of a demonstration, equally likely: the longest jump, and the chance to write a place once more.
JUMPS, AGAIN = (1, 1, 1, 2, 4, STEPS), (0.0, 0.4, 0.7)

WARM_UPDATES, WARM_BATCH, WARM_RATE = 700, 64, 3e-3


class Problem(NamedTuple):
    """So many steps of this height from this place, to be answered within so many tokens."""

    steps: int
    height: int
    start: int
    deadline: int

    @property
    def prompt(self) -> list[int]:
        """Its tokens."""
        return [LETTER + self.steps - 1, self.height, self.start, START]

    def place(self, step: int) -> int:
        """Where one stands after a step."""
        return (self.start + step * self.height) % 10

    def reward(self, response: list[int]) -> float:
        """1 for a response (without padding) that is right, else 0."""
        in_time = response[-1] == EOS and len(response) <= self.deadline
        step = next((token for token in reversed(response) if LETTER <= token < PAD), None)
        return float(in_time and step == self.prompt[0] and response[-2] == self.place(self.steps))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """verl's reward function: :meth:`Problem.reward` of a response as text, which has no end of its own."""
    problem = Problem(*(int(extra_info[name]) for name in Problem._fields))
    tokens = [TEXT.index(character) for character in solution_str]
    return problem.reward([*tokens, EOS]) if tokens else 0.0


def draw_problem(rng: random.Random) -> Problem:
    return Problem(rng.randint(1, STEPS), rng.randint(1, 9), rng.randint(0, 9), rng.choice(DEADLINES))


def demonstrate(problem: Problem, rng: random.Random) -> list[int]:
    """A response in a style between terse and verbose, end included."""
    jump, again = rng.choice(JUMPS), rng.choice(AGAIN)
    step, place, tokens = 0, problem.start, []
    while step < problem.steps:
        before, step = step, min(step + rng.randint((jump + 1) // 2, jump), problem.steps)
        careless = rng.randint(1, 9) if rng.random() < CARELESS else 0
        place = (place + (step - before) * problem.height + careless) % 10
        tokens += [LETTER + step - 1, place]
        while rng.random() < again:
            tokens.append(place)
    return [*tokens[: MAX_RESPONSE - 1], EOS]


class Policy(nn.Module):
    """A decoder with learned positions and pre-norm blocks."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(PROMPT + MAX_RESPONSE, width)
        self.attend = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.think = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers + 1))
        self.head = nn.Linear(width, VOCABULARY)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, tokens: Tensor, cache: list[Tensor] | None = None, start: int = 0) -> Tensor:
        """Logits ``[B, N, V]`` of what follows each of the tokens ``[B, N]``, the first of which has place ``start``.

        Args:
            cache: keys and values of each layer, ``[2, B, heads, places, width / heads]``; filled up to ``start``, and
                filled on from there. Beyond place 0 it takes one token at a time.
        """
        end = start + tokens.shape[1]
        x = self.token(tokens) + self.position.weight[start:end]
        for layer, (attend, mix, think) in enumerate(zip(self.attend, self.mix, self.think, strict=True)):
            parts = attend(self.norms[layer](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            query, keys_values = parts[0], parts[1:]
            if cache is not None:
                cache[layer][:, :, :, start:end] = keys_values
                keys_values = cache[layer][:, :, :, :end]
            seen = functional.scaled_dot_product_attention(query, *keys_values, is_causal=start == 0)
            x = x + mix(seen.transpose(1, 2).flatten(2))
            x = x + think(x)
        return self.head(self.norms[-1](x))

    def new_cache(self, rows: int) -> list[Tensor]:
        """For :meth:`forward`."""
        size = (2, rows, self.heads, PROMPT + MAX_RESPONSE, self.token.embedding_dim // self.heads)
        return [torch.empty(size) for _ in self.attend]

    @staticmethod
    def kept(cache: list[Tensor], rows: Tensor) -> list[Tensor]:
        """The cache of some rows."""
        return [layer[:, rows] for layer in cache]

    def log_probs(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Log-probabilities ``[B, T]`` of responses ``[B, T]`` to prompts ``[B, PROMPT]``, nats."""
        logits = self(torch.cat([prompts, responses[:, :-1]], 1))[:, PROMPT - 1 :]
        return -functional.cross_entropy(logits.transpose(1, 2), responses, reduction="none")


def warm_start(seed: int, make: Callable[[], nn.Module] = Policy) -> nn.Module:
    """A policy that imitates :func:`demonstrate`, the same for a seed to the last digit."""
    torch.manual_seed(seed)
    rng, policy = random.Random(seed), make()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=WARM_RATE)
    for update in range(WARM_UPDATES):
        optimizer.param_groups[0]["lr"] = WARM_RATE * min(1.0, 2 * (1 - update / WARM_UPDATES))
        problems = [draw_problem(rng) for _ in range(WARM_BATCH)]
        shown = [torch.tensor(demonstrate(problem, rng)) for problem in problems]
        responses = nn.utils.rnn.pad_sequence(shown, batch_first=True, padding_value=PAD)
        log_prob = policy.log_probs(torch.tensor([problem.prompt for problem in problems]), responses)
        loss = -log_prob[responses != PAD].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor, generator: torch.Generator) -> Tensor:
    """Responses ``[B, T]`` at temperature 1, filled with ``PAD``, to prompts ``[B, PROMPT]``."""
    cache = policy.new_cache(len(prompts))
    responses = torch.full((len(prompts), MAX_RESPONSE), PAD)
    rows, tokens, start = torch.arange(len(prompts)), prompts, 0
    for place in range(MAX_RESPONSE):
        chances = policy(tokens, cache, start)[:, -1].softmax(-1)
        tokens, start = torch.multinomial(chances, 1, generator=generator), PROMPT + place
        responses[rows, place] = tokens[:, 0]
        goes_on = tokens[:, 0] != EOS
        if not goes_on.all():
            rows, tokens, cache = rows[goes_on], tokens[goes_on], policy.kept(cache, goes_on)
        if not len(rows):
            break
    return responses[:, : place + 1]
