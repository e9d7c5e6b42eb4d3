# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How far the parts of the clips that `fspo-verl watch` names are off, on simulated runs whose truth is known.

  python tests/simulated_parts.py [--runs 40]

Prints the mean error by part. The truth of a run is Shapley's value of the clips themselves, with each set of parts put
through the clip of the run.
"""

import argparse
import math
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from fspo_verl.analysis.attribution import AGE, MISMATCH, MOVEMENT, NOISE, attribution, shapley
from fspo_verl.band import Band
from fspo_verl.clips import BandClip
from fspo_verl.observe.settings import RunSettings
from fspo_verl.output import markdown_table

_SIGMA = 0.02  # nats per root token, of a part of size 1


@dataclass(frozen=True)
class Cell:
    """Runs of one truth: the sizes of the parts, in units of :data:`_SIGMA`, and other arguments of simulate."""

    noise: float = 0.0
    mismatch: float = 0.0
    age: float = 0.0
    movement: float = 0.0
    others: dict = field(default_factory=dict)


CELLS = {
    "noise only": Cell(noise=1),
    "movement only": Cell(movement=1),
    "mismatch only": Cell(mismatch=1),
    "stale only": Cell(age=1),
    "noise and as much movement": Cell(noise=1, movement=1),
    "noise and half as much movement": Cell(noise=1, movement=0.5),
    "noise and twice as much movement": Cell(noise=0.5, movement=1),
    "mismatch and age": Cell(mismatch=1, age=1),
    "mismatch and movement": Cell(mismatch=1, movement=1),
    "age and movement": Cell(age=1, movement=1),
    "mismatch, age and movement": Cell(mismatch=1, age=1, movement=1),
    "mismatch, age and movement, tokens": Cell(mismatch=1, age=1, movement=1, others={"tokens": True}),
    "noise that few tokens carry, and movement": Cell(noise=1, movement=1, others={"noise_freedom": 4}),
    "noise that is alike within a response, and movement": Cell(noise=1, movement=1, others={"noise_power": 1.0}),
    "noise and movement that grows like the length": Cell(noise=1, movement=1, others={"power": 1.0}),
    "noise and movement along the advantage": Cell(noise=1, movement=1, others={"pull": 1.0}),
} | {
    f"noise and movement, {name}": Cell(noise=1, movement=1, others=others)
    for name, others in {
        "40% clipped": {"rate": 0.4},
        "2% clipped": {"rate": 0.02},
        "heavy tails": {"freedom": 4},
        "16 mini-batches": {"mini_batches": 16},
        "2 mini-batches": {"mini_batches": 2},
        "steps that differ": {"by_step": 0.5},
        "640 responses": {"prompts": 8},
        "a loss that clips tokens": {"tokens": True},
    }.items()
}


def simulate(
    rng: np.random.Generator,
    cell: Cell,
    steps: int = 10,
    prompts: int = 32,
    group: int = 8,
    mini_batches: int = 4,
    rate: float = 0.1,
    freedom: float = 1e9,
    power: float = 0.5,
    noise_freedom: float = 1e9,
    noise_power: float = 0.5,
    pull: float = 0.0,
    by_step: float = 0.0,
    tokens: bool = False,
) -> tuple[pd.DataFrame, dict[str, float]]:
    """Records, and the true share of the clips by part.

    Args:
        rate: overall clip rate, of a band of width √L.
        freedom: of Student's t that movement and age follow.
        power: S of the movement spreads like L^power; noise_freedom, noise_power: the same of the noise.
        pull: mean of the movement along its advantage, in units of its spread.
        by_step: of the log of the movement's spread, between steps.
        tokens: the clip takes tokens, of which each part moves a share.
    """
    rows = steps * prompts * group
    step = np.repeat(np.arange(steps), prompts * group)
    slot = np.tile(np.repeat(np.arange(prompts), group), steps)
    mini_batch = slot * mini_batches // prompts
    length = np.exp(5 + 0.8 * rng.standard_normal(rows)).round().clip(2)
    advantage, staleness = rng.choice([-1.0, 1.0], rows), rng.integers(0, 3, rows)
    moves = np.sqrt(mini_batch * 2 / mini_batches) * np.exp(by_step * rng.standard_normal(steps))[step]
    spreads = {
        NOISE: cell.noise * np.exp(5 * (0.5 - noise_power)) * length**noise_power,
        MISMATCH: cell.mismatch * np.sqrt(length),
        AGE: cell.age * np.sqrt(staleness * length),
        MOVEMENT: cell.movement * moves * np.exp(5 * (0.5 - power)) * length**power,
    }
    spreads = {part: _SIGMA * spread for part, spread in spreads.items() if getattr(cell, part) > 0}
    tails = {NOISE: noise_freedom, MISMATCH: noise_freedom, AGE: freedom, MOVEMENT: freedom}
    draws = {part: rng.standard_t(tails[part], rows) for part in spreads}
    if MOVEMENT in draws:
        draws[MOVEMENT] += pull * advantage
    signed = {part: spread * draws[part] for part, spread in spreads.items()}
    records = pd.DataFrame(
        {
            "step": step,
            "mini_batch": mini_batch,
            "length": length.astype(int),
            "log_ratio": sum(signed.values()),
            "quadratic_variation": sum(np.square(spread) for spread in spreads.values()),
            "advantage": advantage,
            "staleness": staleness.astype(float) if cell.age else np.zeros(rows),
        }
    )
    if tokens:
        edge = np.quantile(np.sqrt(records["quadratic_variation"] / length), 0.7)

        def clipped(parts):
            variance = sum(np.square(spreads[part]) for part in parts) / length
            with np.errstate(divide="ignore"):
                tail = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in edge / np.sqrt(variance)])
            return rng.binomial(length.astype(int), tail) / length
    else:
        clip = BandClip("own", "own", Band()).matched(records, rate)

        def clipped(parts):
            return clip.clipped(records.assign(log_ratio=sum(signed[part] for part in parts)))

    records["clipped"] = clipped(frozenset(spreads))
    found = shapley(list(spreads), lambda parts: float(clipped(parts).sum()))
    every = sum(found.values())
    bypass = bool(cell.mismatch or cell.age)
    records.attrs["settings"] = RunSettings("fspo", Band(), old_log_probs_from_rollout=bypass)
    return records, {part: clips / every for part, clips in found.items()}


def errors(name: str, runs: int) -> pd.DataFrame:
    """Of each run (rows) of a cell, and part: what is named less what is true; a part that is not named is named 0."""
    found = []
    for run in range(runs):
        records, truth = simulate(np.random.default_rng([run, *name.encode()]), CELLS[name], **CELLS[name].others)
        named = attribution(records, records.attrs["settings"])
        if named is not None:
            found.append({part: named.get(part, 0.0) - truth.get(part, 0.0) for part in {*named, *truth}})
    return pd.DataFrame(found).fillna(0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="of each cell (default: %(default)s)")
    args, parts, rows = parser.parse_args(), (NOISE, MISMATCH, AGE, MOVEMENT), []
    for name in CELLS:
        found = errors(name, args.runs)
        shown = [f"{found[part].abs().mean():.3f}" if part in found else "" for part in parts]
        rows.append([name, *shown, f"{len(found)}"])
    print(markdown_table(["simulated", *parts, "runs"], rows))


if __name__ == "__main__":
    main()
