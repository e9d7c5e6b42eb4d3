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
sys.path[:0] = [str(HERE.parent), *(str(HERE / name) for name in ("law", "gradients"))]
import gradients  # noqa: E402
import law  # noqa: E402
from studies.learning_rates import analyse as learning_rates  # noqa: E402
from studies.stability import analyse as stability  # noqa: E402

README, RESULTS = "README.md", "docs/results.md"
DRAWS = 100_000
INTERVAL = ("mean", "lower", "upper")


def expected_range(count: int) -> float:
    """Of so many standard normal numbers."""
    return float(np.ptp(np.random.default_rng(0).standard_normal((DRAWS, count)), axis=1).mean())


def values(name: str, metric: str) -> pd.DataFrame:
    """Of a comparison, ``[seeds, losses]``."""
    found = json.loads((HERE / name / f"{name}.json").read_text())
    return pd.DataFrame(found["values"]).pivot(index="seed", columns="loss", values=metric)


def even_in_length(name: str) -> str:
    """abs(k) in clip rate ~ L^k, each clip at 10%: FSPO, GSPO, a fixed range."""
    k = values(name, "length_bias_matched").abs().mean()
    return ", ".join(f"{k[loss]:.2f}" for loss in ("fspo", "gspo", "fixed_band"))


def comparisons() -> Iterator[tuple[str, str]]:
    """Six losses on the quickstart's task."""
    rates = pd.DataFrame(json.loads((HERE / "comparison/comparison.json").read_text())["clip_rates"])
    rates = rates[rates.kind == "matched"].sort_values("low").groupby("loss").rate
    ends = {loss: f"{own.iloc[0]:.0%} and {own.iloc[-1]:.0%}" for loss, own in rates}
    yield README, f"takes {ends['fspo']} of the shortest and the longest responses, GSPO's {ends['gspo']}"
    yield RESULTS, f"abs(k) of FSPO, GSPO and a fixed range is {even_in_length('comparison')} on"
    yield RESULTS, f"and {even_in_length('solvable')} on"
    found = json.loads((HERE / "comparison_16_steps/comparison_16_steps.json").read_text())
    planned = pd.DataFrame(found["differences"]).set_index(["metric", "loss"]).loc[("accuracy_area", "no_clip")]
    yield RESULTS, f"lower by {planned.difference:.2f} [{planned.lower:.2f}, {planned.upper:.2f}]"
    yield RESULTS, f"adjusted for five losses p = {planned.p:.2f}, no verdict"
    four = values("comparison", "accuracy")
    yield RESULTS, f"spread of means {np.ptp(four.mean()):.3f}"
    chance = math.sqrt(four.var().mean() / len(four)) * expected_range(four.shape[1])
    yield RESULTS, f"Six means end within {np.ptp(four.mean()):.3f} of each other; equal losses would by {chance:.3f}"


def law_of_s() -> Iterator[tuple[str, str]]:
    """SmolLM2-135M at temperature 1."""
    cpu, gpu = law.read("cpu.parquet"), law.read("h200.parquet")

    def within(records: pd.DataFrame, kind: str, last: int, digits: int = 2) -> str:
        found = law.exponent_within(records[records.kind == kind], last)
        return f"L^{found.value:.2f} [{found.lower:.{digits}f}, {found.upper:.2f}]"

    yield RESULTS, f"plain text, spread of S | {within(cpu, 'text', 511)} |"
    yield RESULTS, f"chat answers | {within(cpu, 'chat', 511)} |"
    yield RESULTS, f"To 511 tokens it is {within(cpu, 'text', 511)}"
    yield RESULTS, f"To 2,047 tokens it is {within(gpu, 'text', 2047, 3)}"
    yield RESULTS, f"with {within(cpu, 'chat', 511)}"
    rests = gpu[(gpu.kind == "text") & (gpu.length >= 2047)]
    yield RESULTS, f"rests on {len(rests)} responses to {rests.prompt.nunique()} prompts"
    even, rates = law.dependence(cpu, "a fitted power").value, law.rate_of_kinds(cpu, "a fitted power")
    yield RESULTS, f"A power fitted over all kinds is even in length (k = {even:.2f})"
    yield RESULTS, f"It clips solutions {rates['steps'] / rates['text']:.1f} times as often as texts"
    root = law.rate_of_kinds(cpu, "√L")
    yield README, f"√L takes {root['text']:.0%} of plain texts and {root['chat']:.0%} of chat answers"


def flipped(found: pd.Series) -> pd.Series:
    """A difference the other way round, with its interval."""
    return pd.Series({"mean": -found["mean"], "lower": -found.upper, "upper": -found.lower})


def rates_of_learning() -> Iterator[tuple[str, str]]:
    """Laboratory: three tasks, 30% clipped, six learning rates."""
    points = lambda mean, lower, upper: f"{mean:+.1f} [{lower:+.1f}, {upper:+.1f}]".replace("-", "−")  # noqa: E731
    planned = learning_rates.confirmatory()[list(INTERVAL)]
    yield RESULTS, "| {} points {} |".format(*points(*flipped(planned.loc[("linear", "mean")])).split(" ", 1))
    for name, what in (("linear", "L"), ("fixed", "the fixed range")):
        yield RESULTS, f"{what} is {points(*planned.loc[(name, 'mean')])}"
    yield RESULTS, f"costs L {points(*planned.loc[('linear', 8)])}"
    none = learning_rates.at_best("fresh", 0.3, "none")["mean"]
    yield RESULTS, f"no clip {points(*learning_rates.difference(none))}"
    missed = learning_rates.clip_rates().loc[("fresh", "fixed", 0.3, 0.0032), "all"]
    yield RESULTS, f"took {missed:.1%} at its best rate"
    low = {
        name: learning_rates.Arm("fresh", name, 0.3).at(learning_rates.LOWEST)[8]
        for name in ("linear", "sqrt", "fixed")
    }
    pairs = [learning_rates.difference(low[name] - low["sqrt"]) for name in ("linear", "fixed")]
    yield RESULTS, "it is {} under L and {} under a fixed range".format(*(points(*pair) for pair in pairs))
    of_many = [learning_rates.at_best("many", 0.3, name)["mean"] for name in ("fitted", "fixed", "none")]
    fitted, fixed, none = (points(*learning_rates.difference(pairs)) for pairs in of_many)
    yield RESULTS, f"A fitted power is {fitted}, a fixed range {fixed}"
    yield RESULTS, f"A cost of no clip was predicted; it is {none}"
    gains = [learning_rates.acted(what, learning_rates.LOWEST) for what in ("shape", "rate", "no clip")]
    gains = [points(*learning_rates.difference(gain)) for gain in gains]
    yield RESULTS, "a fitted power gains {}, 10% clipped in place of 30% {}, no clip {}".format(*gains)


def stability_of_training() -> Iterator[tuple[str, str]]:
    """Small transformers, four learning rates: runs that end below half their best."""
    points = lambda found: "{:+.0f} points [{:+.0f}, {:+.0f}]".format(*(100 * found[list(INTERVAL)]))  # noqa: E731
    share = lambda *key: f"{stability.share(*key)[0]:.0%}"  # noqa: E731
    planned = stability.against_root()
    yield RESULTS, f"no clip less √L, runs that fail | {points(planned.loc['none'])} |"
    yield RESULTS, f"L less √L, the same | {points(planned.loc['L'])} |"
    key = 128, "one rate", 0
    yield RESULTS, f"{share(*key, 'none')} of 32 runs fail, under √L {share(*key, '√L')}, p = {planned.p['none']:.3f}"
    yield RESULTS, f"L fails in {share(*key, 'L')}, p = {planned.p['L']:.2f}"
    yield RESULTS, f"A fixed range was to fail least. It fails in {share(*key, 'fixed')}"
    long = [share(512, "one rate", 0, arm) for arm in ("none", "L", "√L", "fixed")]
    yield (
        RESULTS,
        "With 512 tokens in place of 128, no clip fails in {}, L in {}, √L in {}, a fixed range in {}".format(*long),
    )
    stale = 128, "published", 2
    yield RESULTS, f"FSPO's 0.03 fails in {share(*stale, '√L')} and GSPO's range in {share(*stale, 'L')}"
    yield RESULTS, f"rollouts two steps old | {points(flipped(stability.against_root(*stale).loc['L']))} |"
    yield README, f"Without a clip {share(*key, 'none')} of small runs break down, under √L {share(*key, '√L')}"
    yield README, f"FSPO at 0.03 breaks down in {share(*stale, '√L')}, GSPO in {share(*stale, 'L')}"


def gradient_check() -> Iterator[tuple[str, str]]:
    """LRE and the cosine of clipped and true gradient."""
    found = gradients.answer(gradients.recorded(), 0.3)
    yield RESULTS, "correlation of LRE and cosine {:+.2f} [{:+.2f}, {:+.2f}]".format(*found.correlation)
    yield RESULTS, f"met in {found.held:.0%} of the cases"
    linear = found.means.loc["linear"]
    yield RESULTS, f"L has the largest LRE, {linear.lre:.2f}, and the largest cosine, {linear.cosine:.2f}"


PARTS = (rates_of_learning, stability_of_training, gradient_check, comparisons, law_of_s)


def main() -> None:
    for part in PARTS:
        print(f"\n{part.__doc__}")
        for page, sentence in part():
            print(f"  {page}: {sentence}")


if __name__ == "__main__":
    main()
