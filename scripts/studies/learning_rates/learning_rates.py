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
from training import RECORDED, Arm, Regime, curves_by_task, train  # noqa: E402

from fspo_verl.report.figures import AMBER, BLACK, BROWN, GREY  # noqa: E402

ARM = ["regime", "arm", "rate"]
CELL = [*ARM, "learning_rate"]
END = 5  # the last rollouts, whose mean is the end
CHOOSING = 100  # seeds from this one on choose learning rates; the others are compared
WITHIN = 0.01  # of the clip rate that was asked for; else an arm is not compared
MEAN, SHORT, LONG = "mean", 8, 512
NAMES = {"none": "no clip", "linear": "L", "sqrt": "√L", "fixed": "fixed", "fitted": "fitted power"}
STYLES = dict(zip(NAMES, ((BLACK, ":"), (AMBER, "-"), (BROWN, "-"), (GREY, "-"), (GREY, "--")), strict=True))
LENGTHS, ROLLOUTS = (8, 64, 512), 20
REGIMES = {"fresh": Regime(LENGTHS, 48, rollouts=ROLLOUTS), "many": Regime(LENGTHS, 2, 24, rollouts=ROLLOUTS)}
LOWEST = {"fresh": 2e-4, "many": 2.5e-4}
FACTORS = (1, 2, 4, 8, 16, 32)
SEEDS = (*range(12), *range(CHOOSING, CHOOSING + 4))
POWERS = {"linear": 1.0, "sqrt": 0.5, "fixed": 0.0, "fitted": "fitted"}


def arm_of(name: str, rate: float) -> Arm:
    first, _, then = name.rpartition(", then ")
    before = Arm(POWERS[first], 0.3) if first else None
    return Arm(POWERS[then], rate, first=before) if rate else Arm(first=before)


def cells() -> Iterator[dict]:
    """The names of the cells, in the order in which they are computed."""
    least = [("none", 0.0), ("linear", 0.3), ("sqrt", 0.3), ("fixed", 0.3)]
    rest = [("fitted", 0.3), *((name, 0.1) for name in POWERS)]
    acting = [("linear", 0.1), ("fitted", 0.3), ("fitted", 0.1), ("none", 0.0)]
    acting = [(f"linear, then {name}", rate) for name, rate in acting]
    for regime, arms in (("fresh", least), ("many", least), ("fresh", [*rest, *acting]), ("many", rest)):
        for (arm, rate), factor in itertools.product(arms, FACTORS):
            yield {"regime": regime, "arm": arm, "rate": rate, "learning_rate": LOWEST[regime] * factor}


def compute(regime: str, arm: str, rate: float, learning_rate: float) -> pd.DataFrame:
    """A row per seed and task: success by rollout, live and clipped responses of all rollouts and of the first."""
    torch.set_num_threads(1)
    table = train(REGIMES[regime], arm_of(arm, rate), learning_rate, SEEDS)
    early = table.where(table.rollout < RECORDED)
    table = table.assign(success=table.success.astype("float32").round(4))
    table = table.assign(early_live=early.live, early_clipped=early.clipped)
    counts = ("live", "clipped", "early_live", "early_clipped")
    return curves_by_task(table, ["success"], counts).astype(dict.fromkeys(counts, "int32"))


# --- what the records say ---------------------------------------------------------------------------------------------


@cache
def records() -> pd.DataFrame:
    """A row per cell, seed and task, in points of success."""
    table = pd.read_parquet(HERE / "records.parquet")
    curves = 100 * np.stack(table.success)
    return table.assign(area=curves.mean(1), later=curves[:, RECORDED:].mean(1), end=curves[:, -END:].mean(1))


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
    acts = table.index.get_level_values("arm").str.contains(",")
    return table.assign(compared=acts | ((table["all"] - table.index.get_level_values("rate")).abs() <= WITHIN))


def best(regime: str, arm: str, rate: float) -> float:
    """The learning rate that other seeds choose, of those at which the arm is compared."""
    compared = clip_rates().compared.loc[(regime, arm, rate)]
    chosen = by_task()[MEAN].loc[(regime, arm, rate)].unstack().loc[compared, CHOOSING:]
    return float(chosen.mean(axis=1).idxmax())


def at(regime: str, arm: str, rate: float, learning_rate: float, endpoint: str = "area") -> pd.DataFrame:
    """``[seeds, tasks]`` of the seeds that are compared."""
    return by_task(endpoint).loc[(regime, arm, rate, learning_rate)].loc[: CHOOSING - 1]


def at_best(regime: str, rate: float, name: str, endpoint: str = "area") -> pd.DataFrame:
    """Differences of an arm to √L, paired by seed ``[seeds, tasks]``, each at its own best learning rate."""
    one, root = (regime, name, rate if name != "none" else 0.0), (regime, "sqrt", rate)
    return at(*one, best(*one), endpoint) - at(*root, best(*root), endpoint)


def chosen_again(regime: str, rate: float, task: str | int) -> pd.DataFrame:
    """:func:`chosen.at_best` on a task, less √L; the mean of the tasks chooses."""
    arms = {name: (regime, name, rate if name != "none" else 0.0) for name in NAMES}
    wide = {
        of: pd.concat({name: by_task()[of].loc[arm].unstack(0) for name, arm in arms.items()}) for of in {MEAN, task}
    }
    allowed = pd.DataFrame({name: clip_rates().compared.loc[arm] for name, arm in arms.items()}).T
    chooses = wide[MEAN].index.get_level_values("seed") >= CHOOSING
    choosing = wide[MEAN].where(allowed.reindex(wide[MEAN].index, level=0))[chooses]
    return chosen.at_best(wide[task][~chooses], choosing, "sqrt")


def confirmatory() -> pd.DataFrame:
    """The six contrasts that were set before: differences to √L, intervals and adjusted p."""
    both = {name: at_best("fresh", 0.3, name)[[MEAN, SHORT, LONG]] for name in ("linear", "fixed")}
    return contrasts(pd.concat(both, axis=1))


# --- acting -----------------------------------------------------------------------------------------------------------

ACTS = {"shape": ("fitted", 0.3), "rate": ("linear", 0.1), "both": ("fitted", 0.1), "no clip": ("none", 0.0)}


def acted(learning_rate: float) -> pd.DataFrame:
    """Mean of the tasks after the first rollouts, against the run under L at 30% that goes on as it was.

    ``[seeds, acts]`` of those acts that there are at the learning rate.
    """
    later = by_task("later")[MEAN].unstack()
    cells = {what: ("fresh", f"linear, then {name}", rate, learning_rate) for what, (name, rate) in ACTS.items()}
    found = {what: later.loc[cell] for what, cell in cells.items() if cell in later.index}
    return pd.DataFrame(found).sub(later.loc[("fresh", "linear", 0.3, learning_rate)], axis=0).loc[: CHOOSING - 1]


def slope_within(learning_rate: float) -> pd.Series:
    """Of later success (0 to 1) on the clip rate of the first rollouts, over the tasks of a run under L ``[seeds]``."""
    own = records().set_index(CELL).sort_index().loc[("fresh", "linear", 0.3, learning_rate)]
    own = own[own.seed < CHOOSING].assign(early=lambda table: table.early_clipped / table.early_live)
    return pd.Series({seed: np.polyfit(run.early, run.later / 100, 1)[0] for seed, run in own.groupby("seed")})


def show() -> None:
    print(f"Clip rates\n{clip_rates().round(3).to_string()}")
    for endpoint, what in (("area", "over the run"), ("end", "at the end")):
        table = by_task(endpoint).query("seed < @CHOOSING").groupby(CELL).mean()
        print(f"\nSuccess {what}\n{table.round(1).to_string()}")
    print("\nEach arm at the best learning rate that other seeds chose, less √L; the choice is in the intervals")
    for regime, rate, task in itertools.product(REGIMES, (0.3, 0.1), (MEAN, *LENGTHS)):
        print(f"{regime}, {rate:.0%}, {task}", chosen_again(regime, rate, task).round(4).to_string(), sep="\n")
    print(f"\nfresh, 30%, set before:\n{confirmatory().round(4).to_string()}")
    print("\nActing after ten rollouts under L at 30%: gain over going on; slope of success on clip rate in one run")
    for learning_rate in clip_rates().loc[("fresh", "linear", 0.3)].query("compared").index:
        pairs = acted(learning_rate).assign(slope=slope_within(learning_rate))
        print(f"learning rate {learning_rate:g}\n{contrasts(pairs).round(2).to_string()}")
    save(draw(), HERE / "rates.png")


def draw() -> Figure:
    """Success over the run against the learning rate, `fresh` at 30%: the mean of the tasks, and the shortest one."""
    figure = Figure(figsize=(7, 2.9), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    means = by_task().unstack().loc["fresh"]
    for axes, task, title in zip(panels, (MEAN, SHORT), ("mean of three tasks", "task of 8 tokens"), strict=True):
        for name, (colour, dashes) in STYLES.items():
            own = means[task].loc[(name, 0.3 if name != "none" else 0.0)].loc[:, : CHOOSING - 1].mean(axis=1)
            axes.plot(own, color=colour, linestyle=dashes, marker="o", markersize=3, label=NAMES[name])
        axes.set(xscale="log", xlabel="learning rate", title=title)
        axes.set_xticks(own.index, [f"{rate:g}" for rate in own.index], rotation=30)
        axes.minorticks_off()
    panels[0].set_ylabel("success over the run (%)")
    panels[0].legend()
    return figure


if __name__ == "__main__":
    command(__doc__, HERE / "records.parquet", [*cells()], compute, show)
