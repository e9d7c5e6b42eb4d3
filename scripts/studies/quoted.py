# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints every figure that README and docs/results.md quote, as it stands there, from the records of the studies.

python scripts/studies/quoted.py            half a minute; tests/test_quoted.py holds the pages to it
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / name) for name in ("law",)]
import law  # noqa: E402

README, RESULTS = "README.md", "docs/results.md"
DRAWS = 100_000


def permuted_within_seeds(values: np.ndarray) -> float:
    """p that all losses are equal, for ``[seeds, losses]``: they are exchanged within each seed, at random.

    The statistic is the sum of squares of their means.
    """
    centred = values - values.mean(1, keepdims=True)
    rng = np.random.default_rng(0)
    drawn = rng.permuted(np.broadcast_to(centred, (DRAWS, *centred.shape)), axis=2).mean(1)
    beyond = np.square(drawn).sum(1) >= np.square(centred.mean(0)).sum() - 1e-12
    return float((beyond.sum() + 1) / (DRAWS + 1))


def expected_range(count: int) -> float:
    """Of so many standard normal numbers."""
    return float(np.ptp(np.random.default_rng(0).standard_normal((DRAWS, count)), axis=1).mean())


def comparisons() -> Iterator[tuple[str, str]]:
    """Six losses on the quickstart's task."""

    def values(name: str, metric: str) -> tuple[pd.DataFrame, dict]:
        found = json.loads((HERE / name / f"{name}.json").read_text())
        return pd.DataFrame(found["values"]).pivot(index="seed", columns="loss", values=metric), found

    table, found = values("comparison_16_steps", "accuracy_area")
    five = permuted_within_seeds(table.drop(columns="no_clip").to_numpy())
    planned = pd.DataFrame(found["differences"]).set_index(["metric", "loss"]).loc[("accuracy_area", "no_clip")]
    if permuted_within_seeds(table.to_numpy()) < 0.0001:
        yield README, "(p < .0001)"
        yield RESULTS, f"p < .0001 for all six, {five:.3f} for the five that clip"
    yield README, f"p = {planned.p:.2f}"
    yield RESULTS, f"lower in each of six seeds, by {planned.difference:.2f} on average"
    yield RESULTS, f"adjusted for five losses p = {planned.p:.2f}, no verdict"
    yield RESULTS, "fixed_band reaches {fixed_band:.2f}, gspo {gspo:.2f}, fspo {fspo:.2f}".format(**table.mean())
    four, _ = values("comparison", "accuracy")
    chance = math.sqrt(four.var().mean() / len(four)) * expected_range(four.shape[1])
    yield RESULTS, f"Six means end within {np.ptp(four.mean()):.3f} of each other"
    yield RESULTS, f"equal losses would spread by {chance:.3f}"


def law_of_s() -> Iterator[tuple[str, str]]:
    """SmolLM2-135M at temperature 1."""
    cpu, gpu = law.read("cpu.parquet"), law.read("h200.parquet")

    def within(records: pd.DataFrame, kind: str, last: int) -> law.Estimate:
        return law.exponent_within(records[records.kind == kind], last)

    on_cpu, on_gpu, long = within(cpu, "text", 511), within(gpu, "text", 511), within(gpu, "text", 2047)
    yield RESULTS, f"like L^{on_cpu.value:.2f} on the CPU (95% interval {on_cpu.lower:.2f} to {on_cpu.upper:.2f})"
    yield RESULTS, f"L^{on_gpu.value:.2f} on the GPU ({on_gpu.lower:.2f} to {on_gpu.upper:.2f})"
    yield RESULTS, f"to 2,047 like L^{long.value:.2f} ({long.lower:.2f} to {long.upper:.2f})"
    chat = [within(records, "chat", 511).value for records in (cpu, gpu)]
    yield RESULTS, "Within chat answers it is L^{:.2f} and L^{:.2f} to 511 tokens".format(*chat)
    rests = gpu[(gpu.kind == "text") & (gpu.length >= 2047)]
    yield RESULTS, f"The last rests on {len(rests)} responses to {rests.prompt.nunique()} prompts."
    k = {kind: law.dependence(cpu[cpu.kind == kind], "√L").value for kind in ("text", "chat")}
    yield RESULTS, f"long texts more (k = {k['text']:.2f})"
    yield RESULTS, f"short chat answers more (k = {k['chat']:.2f})"
    even, rates = law.dependence(cpu, "a fitted power").value, law.rate_of_kinds(cpu, "a fitted power")
    times = rates["steps"] / rates["text"]
    yield RESULTS, f"even in length (k = {even:.2f}), and clips solutions {times:.1f} times as often as texts"


PARTS = (comparisons, law_of_s)


def main() -> None:
    for part in PARTS:
        print(f"\n{part.__doc__}")
        for page, sentence in part():
            print(f"  {page}: {sentence}")


if __name__ == "__main__":
    main()
