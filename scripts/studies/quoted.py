# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints every figure that pages quote from the records of the studies, as it stands there.

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
sys.path[:0] = [str(HERE / name) for name in ("law", "gradients", "learning_rates", "stability", "through_verl")]
import analyse  # noqa: E402
import gradients  # noqa: E402
import law  # noqa: E402
import learning_rates  # noqa: E402
import stability  # noqa: E402
from learning_rates import acted, at, at_best, contrasts  # noqa: E402

from fspo_verl.output import percent  # noqa: E402

README, RESULTS, HEALTHY = "README.md", "docs/results.md", "docs/healthy.md"


def told(pairs: pd.DataFrame, form: str = "+.1f") -> list[str]:
    """The mean of each column of paired differences, with its interval."""
    rows = contrasts(pairs)[["mean", "lower", "upper"]].to_numpy()
    return [f"{mean:{form}} [{lower:{form}}, {upper:{form}}]".replace("-", "−") for mean, lower, upper in rows]


def comparisons() -> Iterator[tuple[str, str]]:
    """Six losses on the quickstart's task."""
    four, sixteen, solvable = (
        {name: pd.DataFrame(rows) for name, rows in json.loads(file.read_text()).items() if isinstance(rows, list)}
        for file in (HERE / f"comparison/{name}.json" for name in ("4_steps", "16_steps", "solvable"))
    )

    def at_the_ends(loss: str, kind: str) -> list[str]:
        """Clip rates of the shortest and of the longest responses."""
        rates = four["clip_rates"].set_index(["loss", "kind"]).loc[(loss, kind)].sort_values("low").rate
        return [f"{rate:.0%}" for rate in rates.iloc[[0, -1]]]

    def even(found: dict) -> str:
        """abs(k) in clip rate ~ L^k, each clip at 10%: FSPO, GSPO, a fixed range."""
        k = found["values"].groupby("loss").length_bias_matched.apply(lambda k: k.abs().mean())
        return ", ".join(f"{k[loss]:.2f}" for loss in ("fspo", "gspo", "fixed_band"))

    ends = [rate for loss in ("gspo", "fixed_band", "fspo") for rate in at_the_ends(loss, "matched")]
    yield README, "GSPO's range {} to {}, a fixed range {} to {}, FSPO's {} to {}".format(*ends)
    yield RESULTS, f"FSPO, GSPO and a fixed range have abs(k) {even(four)} on the quickstart's task"
    yield RESULTS, f"On solvable problems they have {even(solvable)}"
    planned = sixteen["differences"].set_index(["metric", "loss"]).loc[("accuracy_area", "no_clip")]
    lower = f"{planned.difference:.2f} [{planned.lower:.2f}, {planned.upper:.2f}]; adjusted p = {planned.p:.2f}"
    yield RESULTS, f"Without a clip accuracy over the run is lower by {lower}"
    accuracy = four["values"].pivot(index="seed", columns="loss", values="accuracy")
    spread = np.ptp(accuracy.mean())
    of_normal = np.ptp(np.random.default_rng(0).standard_normal((100_000, accuracy.shape[1])), axis=1).mean()
    chance = math.sqrt(accuracy.var().mean() / len(accuracy)) * of_normal
    yield RESULTS, f"spread of means {spread:.3f}"
    yield RESULTS, f"Six means lie within {spread:.3f}. Chance gives {chance:.3f}"
    for loss, rate in four["values"].groupby("loss").clip_rate.mean()[["grpo", "fspo", "gspo"]].items():
        yield HEALTHY, f"| {loss}{' (tokens)' * (loss == 'grpo')} | {percent(rate)} |"
    shortest, longest = at_the_ends("gspo", "clipped")
    yield HEALTHY, f"gspo took {shortest} of the shortest responses and {longest} of the longest"


def law_of_s() -> Iterator[tuple[str, str]]:
    """SmolLM2-135M at temperature 1."""
    cpu, gpu = law.read("cpu"), law.read("h200")

    for kind, claim in {"text": "| L^{:.2f} | holds |", "chat": "| chat answers | L^{:.2f} |"}.items():
        yield RESULTS, claim.format(law.exponent_within(cpu[cpu.kind == kind], 511))
    long = gpu[(gpu.kind == "text") & (gpu.length >= 2047)]
    value, lower, upper = law.exponent_within(long, 2047)
    rests = f"from {len(long)} responses to {long.prompt.nunique()} prompts"
    yield RESULTS, f"To 2,047 tokens it is L^{value:.2f} [{lower:.3f}, {upper:.2f}], {rests}"
    even, rates = law.dependence(cpu, "a fitted power").value, law.rate_of_kinds(cpu, "a fitted power")
    yield RESULTS, f"A power fitted over all kinds is even in length (k = {even:.2f})"
    yield RESULTS, f"It clips solutions {rates['steps'] / rates['text']:.1f} times as often as texts"
    root = law.rate_of_kinds(cpu, "√L")
    yield README, f"√L takes {root['text']:.0%} of plain texts and {root['chat']:.0%} of chat answers"


def rates_of_learning() -> Iterator[tuple[str, str]]:
    """Laboratory: three tasks, 30% clipped, six learning rates."""
    linear, fixed, none = (at_best("fresh", 0.3, name) for name in ("linear", "fixed", "none"))
    yield RESULTS, f"best learning rate](../scripts/studies/learning_rates/README.md) | {told(-linear)[3]} points |"
    missed = learning_rates.clip_rates().loc[("fresh", "fixed", 0.3, 0.0032), "all"]
    yield RESULTS, f"took {missed:.1%} at its best rate"
    yield RESULTS, f"compares it at half of it: {told(fixed)[3]};"
    yield RESULTS, f"On the mean of the tasks L is {told(linear)[3]}, no clip {told(none)[3]}"
    lowest = learning_rates.LOWEST["fresh"]
    low = {name: at("fresh", name, 0.3, lowest)[8] for name in ("linear", "fixed", "sqrt")}
    slow = told(pd.DataFrame(low).sub(low["sqrt"], axis=0))
    yield RESULTS, f"costs L {told(linear)[0]}. At a sixteenth of it L is {slow[0]}, a fixed range {slow[1]}"
    many = {name: at_best("many", 0.3, name)["mean"] for name in ("fitted", "fixed", "none")}
    fitted, fixed, none = told(pd.DataFrame(many))
    yield RESULTS, f"A fitted power is {fitted}, a fixed range {fixed}"
    yield RESULTS, f"A cost of no clip was predicted; it is {none}"
    gains = told(acted(lowest)[["shape", "rate", "no clip"]])
    yield RESULTS, "a fitted power gains {}, 10% clipped in place of 30% {}, no clip {}".format(*gains)


def stability_of_training() -> Iterator[tuple[str, str]]:
    """Small transformers, four learning rates: runs that end below half their best."""
    key, stale = (128, "one rate", 0), (128, "published", 2)
    fails = {arm: f"{stability.share(*key, arm)[0]:.0%}" for arm in ("none", "L", "√L", "fixed")}
    old = {arm: f"{stability.share(*stale, arm)[0]:.0%}" for arm in ("L", "√L")}
    planned = stability.less_root(*key)
    none, linear = told(100 * planned[["none", "L"]], "+.0f")
    (root,) = told(-100 * stability.less_root(*stale)[["L"]], "+.0f")
    p = contrasts(planned).p
    yield RESULTS, f"less √L](../scripts/studies/stability/README.md) | {none} points |"
    yield RESULTS, f"| L less √L | {linear} points |"
    yield RESULTS, f"rollouts two steps old | {root} points |"
    yield RESULTS, f"FSPO's 0.03 fails in {old['√L']} and GSPO's range in {old['L']}"
    yield RESULTS, f"A fixed range was to fail least. It fails in {fails['fixed']}"
    yield RESULTS, f"{fails['none']} of 32 runs fail, under √L {fails['√L']}, p = {p['none']:.3f}"
    yield README, f"Without a clip {fails['none']} of small runs break down, under √L {fails['√L']}"
    yield README, f"FSPO at 0.03 breaks down in {old['√L']}, GSPO in {old['L']}"


def gradient_check() -> Iterator[tuple[str, str]]:
    """LRE and the cosine of clipped and true gradient."""
    found = gradients.answer(0.3)
    yield RESULTS, "correlation {:+.2f} [{:+.2f}, {:+.2f}]".format(*found.correlation)
    yield RESULTS, f"met in {found.held:.0%} of the cases"


def through_verl() -> Iterator[tuple[str, str]]:
    """Walks of three lengths with verl's own trainer."""
    records = pd.read_parquet(HERE / "through_verl/records.parquet").query("learning_rate == 1e-4")
    said = dict(zip(pairs := analyse.pairs(records[records.seed < analyse.SCOUT]), told(pairs), strict=True))
    of_root, of_l = (f"{-pairs[f'{arm} − fixed, 8'].mean():.0f}" for arm in ("√L", "L"))
    row = "√L less a fixed range on 8 tokens](../scripts/studies/through_verl/README.md)"
    yield RESULTS, f"{row} | {said['√L − fixed, 8']} points |"
    yield RESULTS, f"On 8 tokens L is {said['L − fixed, 8']} points against a fixed range"
    yield RESULTS, f"√L is {said['√L − L, 8']} against L. L shows no difference on 256 tokens: {said['L − fixed, 256']}"
    yield RESULTS, f"10% clipped in place of 30% gains L {said['L at 10% − L, mean']} on the tasks' mean"
    yield README, f"√L costs the shortest of three tasks {of_root} points against a fixed range; L costs {of_l}"


PARTS = (rates_of_learning, stability_of_training, gradient_check, comparisons, law_of_s, through_verl)


def main() -> None:
    for part in PARTS:
        print(f"\n{part.__doc__}")
        for page, sentence in part():
            print(f"  {page}: {sentence}")


if __name__ == "__main__":
    main()
