# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints what records.parquet says, and draws rates.png; or trains the cells that it lacks, and may be stopped.

python scripts/studies/learning_rates/learning_rates.py              tables and picture
python scripts/studies/learning_rates/learning_rates.py --compute    the least set first, 20 minutes of a core
python scripts/studies/learning_rates/learning_rates.py --compute fresh sqrt --records /tmp/again.parquet
"""

import itertools
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "lab"), str(SCRIPTS), str(SCRIPTS / "compare")]
import chosen  # noqa: E402
from cells import command  # noqa: E402
from measures import contrasts  # noqa: E402
from pictures import save  # noqa: E402
from training import Arm, Regime, curves_by_task, train  # noqa: E402

from fspo_verl.report.figures import BLACK, STYLES  # noqa: E402

CELL = ["regime", "arm", "rate", "learning_rate"]
END = 5  # the last rollouts, whose mean is the end
CHOOSING = 100  # seeds from this one on choose learning rates; the others are compared
WITHIN = 0.01  # of the clip rate that was asked for; else an arm is not compared
MEAN, SHORT, LONG = "mean", 8, 512
NAMES = {"none": "no clip", "linear": "L", "sqrt": "√L", "fixed": "fixed", "fitted": "fitted power"}
COLOURS = {"none": "no_clip", "linear": "gspo", "sqrt": "fspo", "fixed": "fixed_band"}  # those of the losses
LENGTHS, ROLLOUTS = (8, 64, 512), 20
REGIMES = {"fresh": Regime(LENGTHS, 48, rollouts=ROLLOUTS), "many": Regime(LENGTHS, 2, 24, rollouts=ROLLOUTS)}
LOWEST = {"fresh": 2e-4, "many": 2.5e-4}
FACTORS = (1, 2, 4, 8, 16, 32)
SEEDS = (*range(12), *range(CHOOSING, CHOOSING + 4))
POWERS = {"linear": 1.0, "sqrt": 0.5, "fixed": 0.0, "fitted": "fitted"}


def cells() -> Iterator[dict]:
    """The names of the cells, in the order in which they are computed."""
    least = [("none", 0.0), ("linear", 0.3), ("sqrt", 0.3), ("fixed", 0.3)]
    rest = [("fitted", 0.3), *((name, 0.1) for name in POWERS)]
    for regime, arms in itertools.product(("fresh", "many"), (least, rest)):
        for (arm, rate), factor in itertools.product(arms, FACTORS):
            yield {"regime": regime, "arm": arm, "rate": rate, "learning_rate": LOWEST[regime] * factor}


def compute(regime: str, arm: str, rate: float, learning_rate: float) -> pd.DataFrame:
    """A row per seed and task: success by rollout, live and clipped responses of all rollouts."""
    torch.set_num_threads(1)
    table = train(REGIMES[regime], Arm(POWERS[arm], rate) if rate else Arm(), learning_rate, SEEDS)
    table = table.assign(success=table.success.astype("float32").round(4))
    counts = ("live", "clipped")
    return curves_by_task(table, ["success"], counts).astype(dict.fromkeys(counts, "int32"))


# --- what the records say ---------------------------------------------------------------------------------------------


@cache
def records() -> pd.DataFrame:
    """A row per cell, seed and task, in points of success."""
    table = pd.read_parquet(HERE / "records.parquet")
    table = table[~table.arm.str.contains(",")]  # arms that acted after some rollouts, see README.md
    curves = 100 * np.stack(table.success)
    return table.assign(area=curves.mean(1), end=curves[:, -END:].mean(1))


@cache
def by_task(endpoint: str = "area") -> pd.DataFrame:
    """Columns 8, 64, 512 and their mean, a row per cell and seed."""
    table = records().pivot(index=[*CELL, "seed"], columns="length", values=endpoint)
    return table.assign(**{MEAN: table.mean(axis=1)})


@cache
def clip_rates() -> pd.DataFrame:
    """A row per cell: of each task and of all, and whether the cell is compared."""
    sums = records().groupby([*CELL, "length"])[["clipped", "live"]].sum()
    total = sums.groupby(CELL).sum()
    table = (sums.clipped / sums.live).unstack().assign(all=total.clipped / total.live)
    return table.assign(compared=(table["all"] - table.index.get_level_values("rate")).abs() <= WITHIN)


def at(regime: str, arm: str, rate: float, learning_rate: float) -> pd.DataFrame:
    """``[seeds, tasks]`` of the seeds that are compared."""
    return by_task().loc[(regime, arm, rate, learning_rate)].loc[: CHOOSING - 1]


def chosen_again(regime: str, rate: float, task: str | int) -> pd.DataFrame:
    """:func:`chosen.at_best` on a task, less √L; the mean of the tasks chooses."""
    arms = {name: (regime, name, rate if name != "none" else 0.0) for name in NAMES}
    values, means = (pd.concat({arm: by_task().loc[arms[arm]][of].unstack(0) for arm in arms}) for of in (task, MEAN))
    allowed = pd.DataFrame({name: clip_rates().compared.loc[arm] for name, arm in arms.items()}).T
    chooses = means.index.get_level_values("seed") >= CHOOSING
    means = means.where(allowed.reindex(means.index, level=0))
    return chosen.at_best(values[~chooses], means[chooses], "sqrt")


def confirmatory() -> pd.DataFrame:
    """The six contrasts that were set before: differences to √L, intervals and adjusted p."""
    rates = chosen_again("fresh", 0.3, MEAN).rate
    root, *others = (at("fresh", arm, 0.3, rates[arm])[[MEAN, SHORT, LONG]] for arm in ("sqrt", "linear", "fixed"))
    return contrasts(pd.concat({"linear": others[0] - root, "fixed": others[1] - root}, axis=1))


def show() -> None:
    print(f"Clip rates\n{clip_rates().round(3).to_string()}")
    for endpoint, what in (("area", "over the run"), ("end", "at the end")):
        table = by_task(endpoint).query("seed < @CHOOSING").groupby(CELL).mean()
        print(f"\nSuccess {what}\n{table.round(1).to_string()}")
    print("\nEach arm at the best learning rate that other seeds chose, less √L; the choice is in the intervals")
    for regime, rate, task in itertools.product(REGIMES, (0.3, 0.1), (MEAN, *LENGTHS)):
        print(f"{regime}, {rate:.0%}, {task}", chosen_again(regime, rate, task).round(4).to_string(), sep="\n")
    print(f"\nfresh, 30%, set before:\n{confirmatory().round(4).to_string()}")
    save(draw(), HERE / "rates.png")


def draw() -> Figure:
    """Success over the run against the learning rate, `fresh` at 30%: the mean of the tasks, and the shortest one."""
    figure = Figure(figsize=(7, 2.9), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    means = by_task().unstack().loc["fresh"]
    for axes, task, title in zip(panels, (MEAN, SHORT), ("mean of three tasks", "task of 8 tokens"), strict=True):
        for name, label in NAMES.items():
            own = means[task].loc[(name, 0.3 if name != "none" else 0.0)].loc[:, : CHOOSING - 1].mean(axis=1)
            color = STYLES[COLOURS[name]].color if name in COLOURS else BLACK
            axes.plot(own, color=color, linestyle=":" if name == "none" else "-", marker="o", markersize=3, label=label)
        axes.set(xscale="log", xlabel="learning rate", title=title)
        axes.set_xticks(own.index, [f"{rate:g}" for rate in own.index], rotation=30)
        axes.minorticks_off()
    panels[0].set_ylabel("success over the run (%)")
    panels[0].legend()
    return figure


if __name__ == "__main__":
    command(__doc__, HERE / "records.parquet", [*cells()], compute, show)
