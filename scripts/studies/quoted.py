# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints every figure that pages quote from the records of the studies, as it stands there.

python scripts/studies/quoted.py            half a minute; tests/test_quoted.py holds the pages to it
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import optimize, stats

HERE = Path(__file__).resolve().parent
STUDIES = ("comparison", "law", "gradients", "learning_rates", "stability", "ten_percent", "through_verl")
sys.path[:0] = [str(HERE / name) for name in STUDIES]
import analyse  # noqa: E402
import draw  # noqa: E402
import gradients  # noqa: E402
import law  # noqa: E402
import learning_rates  # noqa: E402
import stability  # noqa: E402
import ten_percent  # noqa: E402
from learning_rates import MEAN, at, chosen_again, contrasts  # noqa: E402

from fspo_verl.output import percent  # noqa: E402

README, RESULTS, HEALTHY = "README.md", "docs/results.md", "docs/healthy.md"
LEARNING_RATES = "scripts/studies/learning_rates/README.md"
Quotes = Iterator[tuple[str, str]]  # a page, and what stands there


def said(values: Sequence[float], form: str = "+.1f") -> str:
    """A mean with its interval."""
    return f"{values[0]:{form}} [{values[1]:{form}}, {values[2]:{form}}]".replace("-", "−")


def told(pairs: pd.DataFrame, form: str = "+.1f") -> list[str]:
    """The mean of each column of paired differences, with its interval."""
    return [said(values, form) for values in contrasts(pairs)[["mean", "lower", "upper"]].to_numpy()]


def row(*cells: str) -> str:
    return f"|{'|'.join(cells)}|"


def pictures() -> Quotes:
    """The README's picture."""
    names = {"gspo": "GSPO's range", "fspo": "FSPO's", "fixed_band": "a fixed one"}
    for what, rates in {"Small models": draw.small_models(), "SmolLM2-135M": draw.language_model()}.items():
        curves = {name: ", ".join(f"{rate:.0%}" for rate in rates.loc[clip, "mean"]) for clip, name in names.items()}
        yield README, f"{what}: {'; '.join(f'{name} {curve}' for name, curve in curves.items())}"


def k_within(trial: dict, clip: str, half: int) -> float:
    """k in clip rate ~ L^k at 10% over the run, within the steps of a half of it, as in measures.length_exponent."""
    clipped, responses = np.array(trial["clips"]["matched"][clip], float), np.array(trial["clips"]["responses"], float)
    x, steps = np.array(trial["clips"]["mean_log"]), np.array_split(np.arange(len(clipped)), 2)[half]

    def excess(k: float) -> float:
        weight = responses[steps] * np.exp(k * x)
        of_step = clipped[steps].sum(1) / weight.sum(1).clip(min=1e-9)
        return of_step @ (weight @ x) - (clipped[steps] @ x).sum()

    return float(optimize.brentq(excess, -9, 9))


def comparisons() -> Quotes:
    """Six losses on the quickstart's task."""
    four, sixteen = (json.loads((HERE / f"comparison/{name}.json").read_text()) for name in ("4_steps", "16_steps"))
    for label, found in {"quickstart, 4 steps": four, "quickstart, 16": sixteen}.items():
        trials = [trial for trial in found["trials"] if trial["loss"] == "no_clip"]
        halves = [
            " → ".join(f"{np.mean([k_within(trial, clip, half) for trial in trials]):+.2f}" for half in (0, 1))
            for clip in ("fspo", "gspo", "fixed_band")
        ]
        yield RESULTS, row(label, *halves).replace("-", "−")
    planned = pd.DataFrame(sixteen["differences"]).set_index(["metric", "loss"]).loc[("accuracy_area", "no_clip")]
    lower = f"{planned.difference:.2f} [{planned.lower:.2f}, {planned.upper:.2f}], p = {planned.p:.2f}"
    yield RESULTS, f"without a clip accuracy over the run is lower by {lower}"
    values = pd.DataFrame(four["values"])
    accuracy = values.pivot(index="seed", columns="loss", values="accuracy")
    p = stats.friedmanchisquare(*accuracy.to_numpy().T).pvalue
    yield RESULTS, f"means lie within {np.ptp(accuracy.mean()):.3f} (Friedman's test: p = {p:.1f})"
    for loss, rate in values.groupby("loss").clip_rate.mean()[["grpo", "fspo", "gspo"]].items():
        yield HEALTHY, f"| {loss}{' (tokens)' * (loss == 'grpo')} | {percent(rate)} |"
    rates = pd.DataFrame(four["clip_rates"]).query("loss == 'gspo' and kind == 'clipped'").sort_values("low").rate
    yield HEALTHY, "gspo took {:.0%} of the shortest responses and {:.0%} of the longest".format(*rates.iloc[[0, -1]])


def law_of_s() -> Quotes:
    """SmolLM2-135M at temperature 1."""
    cpu, gpu = law.read("cpu"), law.read("h200")
    parts = {"plain text": cpu[cpu.kind == "text"], "chat answers": cpu[cpu.kind == "chat"], "all kinds": cpu}
    for label, part in parts.items():
        k = {width: law.dependence(part, width) for width in ("√L", "L", "fixed")}
        yield RESULTS, row(f"SmolLM2, {label}", *(said(each, "+.2f") for each in k.values()))
    text, long = (law.exponent_within(part[part.kind == "text"], last) for part, last in ((cpu, 511), (gpu, 2047)))
    chat = law.exponent_within(parts["chat answers"], 511)
    longer = f"L^{long:.2f} to 2,047 tokens, and L^{chat:.2f} within chat"
    yield RESULTS, f"S spreads like L^{text:.2f} within plain texts, {longer}"
    root, linear, fixed, fitted = (law.rate_of_kinds(cpu, width) for width in ("√L", "L", "fixed", "a fitted power"))
    takes = [f"{rates['text']:.0%} and {rates['chat']:.0%}" for rates in (root, linear, fixed)]
    yield RESULTS, "√L clips {} of texts and chat answers, L {}, a fixed range {}".format(*takes)
    times = fitted["steps"] / fitted["text"]
    yield RESULTS, f"one fitted to be even in length clips solutions {times:.1f} times as often as texts"


def rates_of_learning() -> Quotes:
    """Laboratory: three tasks, six learning rates."""

    def less_others(*key) -> tuple[pd.DataFrame, list[str]]:
        less = -chosen_again(*key)[["mean", "upper", "lower"]]
        return less, [said(less.loc[arm].to_numpy()) for arm in ("linear", "fixed", "none")]

    for task, label in {MEAN: "laboratory, 30%", 8: "its 8 tokens", 512: "its 512 tokens"}.items():
        less, (linear, fixed, none) = less_others("fresh", 0.3, task)
        yield RESULTS, row(label, f"**{linear}**", f"**{fixed}**", none)
        if task == MEAN:
            largest = less["mean"].loc[["linear", "fixed"]].abs().max()
    for rate in (0.3, 0.1):
        yield LEARNING_RATES, "{}, {} and {}".format(*less_others("many", rate, MEAN)[1])
    clipped = learning_rates.clip_rates()["all"]["fresh", "fixed", 0.3, 0.0032]
    yield RESULTS, f"Fixed clips {clipped:.1%} at its best rate and is compared at half"
    lowest = learning_rates.LOWEST["fresh"]
    best, slow, fast = (at("fresh", "sqrt", 0.3, factor * lowest)[MEAN].mean() for factor in (16, 4, 32))
    cost = f"one four times too low costs √L {best - slow:.0f} points, one twice too high {best - fast:.0f}"
    yield README, f"{cost}. Shapes differ by less than {np.ceil(largest):.0f} there"
    yield RESULTS, f"{cost}; its shapes differ by less than {np.ceil(largest):.0f}"


def stability_of_training() -> Quotes:
    """Small transformers, four learning rates: success, and runs that end below half their best."""
    groups = {"8 and 128 tokens": (128, "one rate", 0), "two steps old": (128, "one rate", 2)}
    groups |= {"8 and 512 tokens": (512, "one rate", 0), "published": (128, "published", 0)}
    for label, group in (groups | {"published, two steps old": (128, "published", 2)}).items():
        pairs, shares = stability.root_less(*group), stability.by_run().set_index(stability.GROUP).loc[group]
        shares = shares.groupby("arm").fails.mean().map("{:.0%}".format)
        cells = dict(zip(pairs, told(pairs), strict=True))
        if group[1] == "one rate":
            yield RESULTS, row(label, *(cells.get(arm, "") for arm in ("L", "fixed", "none")))
        if group[0] == 128:
            yield RESULTS, row(label, *(shares.get(arm, "") for arm in ("none", "L", "√L", "fixed")))
    planned = stability.less_root(128, "one rate", 0)
    texts = dict(zip(planned, told(100 * planned, "+.0f"), strict=True))
    yield RESULTS, f"less √L: none {texts['none']}, L {texts['L']}, fixed {texts['fixed']}"
    p = contrasts(planned).p
    yield RESULTS, f"p = {p['none']:.3f} and {p['L']:.3f}"
    runs = stability.by_run().set_index(stability.GROUP).loc[(128, "one rate", 0)]
    means = runs.groupby(["arm", "learning_rate"])[["success", "fails"]].mean()
    at_best = [8 * means.loc[arm].loc[means.loc[arm].success.idxmax()].fails for arm in ("none", "L", "√L", "fixed")]
    yield RESULTS, "At its best rate each fails in {:.0f}, {:.0f}, {:.0f} and {:.0f} of 8".format(*at_best)
    none, root = (runs.groupby("arm").fails.mean()[arm] for arm in ("none", "√L"))
    for page in (README, RESULTS):
        yield page, f"Without one {none:.0%} of small runs break down, under √L {root:.0%}"


def at_ten_percent() -> Quotes:
    """Small transformers at 10%, the worse task of each run."""
    texts: dict[str, list[str]] = {}
    for rollouts, label in {"fresh": "8 and 128 tokens, 10%", "stale": "that, two steps old"}.items():
        table = ten_percent.compared(rollouts)
        less = -table[["mean", "upper", "lower"]]
        yield RESULTS, row(label, *(f"**{said(less.loc[arm].to_numpy())}**" for arm in ("L", "fixed", "none")))
        published = ten_percent.compared(rollouts, baseline="GSPO", rates=ten_percent.FIRST)
        for what, values in {
            "on the upper edge less at three times it:": table.loc[ten_percent.EDGE],
            "FSPO less GSPO": published.loc["FSPO"],
            "GSPO summed over tokens less GSPO": published.loc["GSPO, summed"],
        }.items():
            texts.setdefault(what, []).append(said(values[["mean", "lower", "upper"]].to_numpy()))
    for what, (fresh, stale) in texts.items():
        yield RESULTS, f"{what} {fresh}, two steps old {stale}"


def gradient_check() -> Quotes:
    """LRE and the cosine of clipped and true gradient."""
    found = gradients.answer(0.3)
    yield RESULTS, "correlate by {:+.2f} [{:+.2f}, {:+.2f}]".format(*found.correlation)
    yield RESULTS, f"the guarantee is met in {found.held:.0%} of the cases"


def through_verl() -> Quotes:
    """Walks of three lengths with verl's own trainer."""
    records = pd.read_parquet(HERE / "through_verl/records.parquet").query("learning_rate == 1e-4")
    own = records[records.seed < analyse.SCOUT]
    texts = dict(zip(pairs := analyse.pairs(own), told(pairs), strict=True))
    for label, task in {"through verl, 30%": "mean", "the 8 tokens there": 8}.items():
        table = analyse.accuracies(own)[task].droplevel("learning_rate").unstack("arm")
        cells = told(table[["L", "fixed", "none"]].rsub(table["√L"], axis=0))
        yield RESULTS, row(label, *([f"**{cell}**" for cell in cells[:2]] + cells[2:] if task == 8 else cells))
    yield RESULTS, f"L − fixed {texts['L − fixed, 8']} on 8 tokens, {texts['L − fixed, 256']} on 256"
    yield RESULTS, f"none − L {texts['none − L, mean']}"
    for page in (README, RESULTS):
        yield page, f"gains L {texts['L at 10% − L, mean']} points"
    short = {arm: -pairs[f"{arm} − fixed, 8"].mean() for arm in ("L", "√L")}
    yield README, f"{short['L']:.1f} points of success under GSPO's shape, {short['√L']:.1f} under FSPO's"
    early = analyse.clip_rates(own[own.step <= analyse.EARLY])["all"]
    yield RESULTS, f"a fixed range clips {early['fixed']:.0%} there, √L {early['√L']:.0%}, L {early['L']:.0%}"
    course = 100 * own[own.length == 8].pivot_table("accuracy", "seed", ["arm", "step"])
    first, *_, last = told(course["√L"].drop(columns=0) - course["fixed"].drop(columns=0))
    yield RESULTS, f"√L − fixed on 8 tokens is {first} at step 5 and {last} at step 30"
    steps = analyse.until_all(own).groupby("arm").mean()
    order = ", ".join(f"{arm} {steps[arm]:.1f}" for arm in ("fixed", "L at 10%", "√L", "none", "L"))
    yield RESULTS, f"Every task is above 0.8 after {order} steps"


LABORATORY = (rates_of_learning, stability_of_training, at_ten_percent, gradient_check)
PARTS = (pictures, *LABORATORY, comparisons, law_of_s, through_verl)


def main() -> None:
    for part in PARTS:
        print(f"\n{part.__doc__}")
        for page, sentence in part():
            print(f"  {page}: {sentence}")


if __name__ == "__main__":
    main()
