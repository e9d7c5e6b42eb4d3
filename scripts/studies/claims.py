# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints the figures of docs/results.md that the commands of single studies do not print.

python scripts/studies/claims.py
"""

import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

HERE = Path(__file__).resolve().parent
DRAWS = 100_000


def permuted_within_seeds(values: np.ndarray) -> tuple[float, float]:
    """p that all losses are equal, and the range of their means by chance, for ``[seeds, losses]``.

    Losses are exchanged within each seed, at random; the statistic is the sum of squares of their means.
    """
    centred = values - values.mean(1, keepdims=True)
    rng = np.random.default_rng(0)
    drawn = rng.permuted(np.broadcast_to(centred, (DRAWS, *centred.shape)), axis=2).mean(1)
    beyond = np.square(drawn).sum(1) >= np.square(centred.mean(0)).sum() - 1e-12
    return float((beyond.sum() + 1) / (DRAWS + 1)), float(np.ptp(drawn, axis=1).mean())


def expected_range(count: int, draws: int = DRAWS) -> float:
    """Of so many standard normal numbers."""
    return float(np.ptp(np.random.default_rng(0).standard_normal((draws, count)), axis=1).mean())


def losses() -> None:
    """Whether the losses of a comparison differ at all, by the test that was set before, and by an omnibus."""
    for name, steps in (("comparison", 4), ("comparison_16_steps", 16)):
        found = json.loads((HERE / name / f"{name}.json").read_text())
        values = pd.DataFrame(found["values"])
        set_before = pd.DataFrame(found["differences"]).set_index(["metric", "loss"])
        print(f"\n{steps} steps per rollout:")
        for metric, label in (("accuracy_area", "accuracy over the run"), ("accuracy", "accuracy at the end")):
            table = values.pivot(index="seed", columns="loss", values=metric)
            p, _ = permuted_within_seeds(table.to_numpy())
            clipped, _ = permuted_within_seeds(table.drop(columns="no_clip").to_numpy())
            spread = math.sqrt(table.var().mean())
            chance = spread / math.sqrt(len(table)) * expected_range(table.shape[1])
            adjusted = set_before.p[metric, "no_clip"]
            print(
                f"  {label}: six means span {np.ptp(table.mean()):.3f}, and {chance:.3f} by chance where losses are "
                f"the same and seeds independent. Permuted within seeds: p = {p:.5f} for six losses, {clipped:.4f} for "
                f"the five that clip. Set before: no_clip against fspo, adjusted p = {adjusted:.2f}."
            )


def no_clip_by_other_statistics() -> None:
    """The same comparison, no_clip against fspo with sixteen steps, had another statistic been set before."""
    sys.path.insert(0, str(HERE.parent / "compare"))
    from measures import adjusted_p

    found = json.loads((HERE / "comparison_16_steps/comparison_16_steps.json").read_text())
    values = pd.DataFrame(found["values"])
    table = values.pivot(index="seed", columns="loss", values="accuracy_area")
    pairs = table.drop(columns="fspo").rsub(table.fspo, axis=0)
    place = list(pairs).index("no_clip")
    signs = np.array(list(itertools.product([1, -1], repeat=len(pairs))))
    means = np.abs(signs @ pairs.to_numpy()) / len(pairs)
    alone = np.mean(means[:, place] >= means[0, place] - 1e-12)
    largest = np.mean(means.max(1) >= means[0, place] - 1e-12)
    print(
        f"  no_clip against fspo, accuracy over the run: p = {alone:.3f} by sign flips of this pair alone, "
        f"{largest:.3f} by the largest mean difference of five, {adjusted_p(pairs.to_numpy())[place]:.3f} by the "
        "standardised one (set before)."
    )


def law() -> None:
    """How many responses the law to 2,047 tokens rests on."""
    records = pd.read_parquet(HERE / "law/long/records/log_ratios.parquet")
    chosen = {"temperature": 1.0, "direction": "grpo", "mini_batch": 4, "kind": "text"}
    records = records[(records[list(chosen)] == pd.Series(chosen)).all(axis=1)]
    long = records[(records.length >= 2047) & (records.distinct >= 0.8)]
    print(f"\nThe law of text to 2,047 tokens: {len(long)} responses to {long.prompt.nunique()} prompts.")


def even_until() -> None:
    """Clip rates of a width √L, where S of independent tokens has the mean −σ²L/2."""
    eps, sigma = 0.03, 0.02
    bound = (2 * eps / sigma**2) ** 2
    print(f"\nWidth √L, eps {eps}, σ {sigma}: the drift reaches the lower edge at L = (2 eps/σ²)² = {bound:,.0f}.")
    for share in (0.0001, 0.001, 0.01, 0.1, 1.0):
        length = share * bound
        mean, spread, edge = -(sigma**2) * length / 2, sigma * math.sqrt(length), eps * math.sqrt(length)
        below, above = stats.norm.cdf(-edge, mean, spread), stats.norm.sf(edge, mean, spread)
        print(f"  L = {length:9,.0f} ({share:g} of it): below the band {below:.1%}, above it {above:.1%}")


if __name__ == "__main__":
    for part in (losses, no_clip_by_other_statistics, law, even_until):
        part()
