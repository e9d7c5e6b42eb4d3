# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The regimes of the study: what all arms of an experiment have in common."""

from typing import NamedTuple

RECORDED = 10  # rollouts whose records the meter reads, and a width is measured on


class Tasks(NamedTuple):
    """What a policy is to learn."""

    lengths: tuple[int, ...] = (8, 64, 512)
    """Tokens of a response to each task."""

    shared: bool = False
    """Whether the tasks share weights."""

    speeds: tuple[float, ...] | None = None
    """By how much a change of a task's weights moves its logits, relative to a task of speed 1; null is 1 for all."""

    transformer: bool = False
    """Whether a small transformer learns them, which shares its weights between them."""


class Regime(NamedTuple):
    """What all arms of an experiment have in common."""

    name: str
    rate: float | None  # clip rate that every arm is held at; None leaves each at its published range
    learning_rate: float
    mini_batches: int = 48
    epochs: int = 1
    tasks: Tasks = Tasks()
    rollouts: int = 30
    start: tuple[float, float] = (0.3, 0.3)
    """Where a control starts, below and above, in nats at 64 tokens."""

    by_response: bool = False
    """Whether what a control has missed counts by responses, of which later rollouts have fewer, or by rollouts."""

    @property
    def file(self) -> str:
        """Where its records are kept: those of all transformers in one file."""
        return "transformers.parquet" if self.tasks.transformer else f"{self.name}.parquet"

    @property
    def updates(self) -> int:
        """To a rollout."""
        return self.mini_batches * self.epochs


SEEDS = range(12)
REGIMES = {
    regime.name: regime
    for regime in (
        Regime("many-30", 0.3, 2e-4),
        Regime("reuse-30", 0.3, 5e-4, mini_batches=2, epochs=24, start=(1.6, 0.7), by_response=True),
        Regime("few-30", 0.3, 1e-3, mini_batches=8),
        Regime("published", None, 2e-4),
        Regime("many-10", 0.1, 2e-4, start=(0.8, 0.8)),
        Regime("shared-30", 0.3, 2e-4, tasks=Tasks(shared=True)),
        Regime("by-task", 0.3, 1e-3, mini_batches=8, tasks=Tasks((8, 64, 64, 512), speeds=(1.0, 1.0, 3.5, 1.0))),
        Regime("few-10", 0.1, 1e-3, mini_batches=8, start=(0.8, 0.8)),
        Regime("hot-30", 0.3, 4e-3, mini_batches=8),
        Regime("reuse-10", 0.1, 5e-4, mini_batches=2, epochs=24, start=(3.0, 1.5), by_response=True),
        Regime("shared-few-30", 0.3, 1e-3, mini_batches=8, tasks=Tasks(shared=True)),
        Regime("transformer-many", 0.3, 3e-5, tasks=Tasks(transformer=True)),
        Regime(
            "transformer-reuse",
            0.3,
            2e-4,
            mini_batches=2,
            epochs=24,
            tasks=Tasks(transformer=True),
            start=(1.6, 0.7),
            by_response=True,
        ),
        Regime("transformer-long", 0.3, 2e-4, 16, tasks=Tasks((8, 512, 4096), transformer=True), rollouts=24),
    )
}
PRIMARY = tuple(REGIMES)[:6]
TRANSFORMERS = tuple(name for name, regime in REGIMES.items() if regime.tasks.transformer)
