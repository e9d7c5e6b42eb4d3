# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints what records.parquet says, and draws rates.png.

python scripts/studies/learning_rates/analyse.py
"""

import io
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(SCRIPTS), str(SCRIPTS / "compare")]
from cells import Cells  # noqa: E402
from measures import adjusted_p, sign_flip_interval  # noqa: E402
from pictures import small_png  # noqa: E402

from fspo_verl.output import markdown_table, write_whole  # noqa: E402
from fspo_verl.report.figures import AMBER, BLACK, BROWN, GREY  # noqa: E402

KEY = ["regime", "arm", "rate", "learning_rate", "seed"]
RECORDED, END = 10, 5  # the first rollouts, and the last ones, whose mean is the end
CHOOSING = 100  # seeds from this one on choose learning rates
WITHIN = 0.01  # of the clip rate that was asked for; else an arm is not compared
MEAN, SHORT, LONG = "mean", 8, 512
LOWEST = 2e-4  # learning rate of `fresh`
NAMES = {"none": "no clip", "linear": "L", "sqrt": "√L", "fixed": "fixed", "fitted": "fitted power"}
STYLES = dict(zip(NAMES, ((BLACK, ":"), (AMBER, "-"), (BROWN, "-"), (GREY, "-"), (GREY, "--")), strict=True))


@cache
def records() -> pd.DataFrame:
    """A row per cell and task, in points of success."""
    table = Cells(HERE / "records.parquet", KEY).table().to_pandas()
    curves = 100 * np.stack(table.success)
    ends = {"area": curves.mean(1), "later": curves[:, RECORDED:].mean(1), "end": curves[:, -END:].mean(1)}
    return table.assign(**ends)


@cache
def by_task(endpoint: str = "area") -> pd.DataFrame:
    """Columns 8, 64, 512 and their mean, a row per cell."""
    table = records().pivot(index=KEY, columns="length", values=endpoint)
    return table.assign(**{MEAN: table.mean(axis=1)})


@cache
def clip_rates() -> pd.DataFrame:
    """By arm and learning rate: of each task and of all, and whether the arm is compared."""
    keys = KEY[:4]
    sums = records().groupby([*keys, "length"])[["clipped", "live"]].sum()
    table = (sums.clipped / sums.live).unstack()
    total = sums.groupby(keys).sum()
    table["all"] = total.clipped / total.live
    asked = table.index.get_level_values("rate")
    acts = table.index.get_level_values("arm").str.contains(",")
    table["compared"] = acts | ((table["all"] - asked).abs() <= WITHIN)
    return table


class Arm(NamedTuple):
    regime: str
    name: str
    rate: float

    def present(self) -> list[float]:
        """The learning rates at which there are records."""
        key = tuple(self)
        return list(clip_rates().loc[key].index) if key in clip_rates().index.droplevel(3) else []

    def rates(self) -> list[float]:
        """Those at which it is compared."""
        own = clip_rates().compared.loc[tuple(self)]
        return list(own.index[own])

    def best(self) -> float:
        """The learning rate that other seeds choose."""
        own = by_task()[MEAN].loc[tuple(self)].unstack()
        own = own.loc[self.rates(), [seed for seed in own if seed >= CHOOSING]]
        return float(own.mean(axis=1).idxmax())

    def at(self, learning_rate: float, endpoint: str = "area") -> pd.DataFrame:
        """``[seeds, tasks]`` of the seeds that are compared."""
        own = by_task(endpoint).loc[(*self, learning_rate)]
        return own[own.index < CHOOSING]


class Difference(NamedTuple):
    mean: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.lower:+.1f}, {self.upper:+.1f}]"


def difference(pairs: pd.Series) -> Difference:
    """Mean and interval of paired differences."""
    return Difference(float(pairs.mean()), *sign_flip_interval(pairs.to_numpy()))


def at_best(regime: str, rate: float, name: str, base: str = "sqrt", endpoint: str = "area") -> pd.DataFrame:
    """Paired differences of two arms ``[seeds, tasks]``, each at its own best learning rate."""
    one, other = (Arm(regime, arm, rate if arm != "none" else 0.0) for arm in (name, base))
    return one.at(one.best(), endpoint) - other.at(other.best(), endpoint)


def told(pairs: pd.DataFrame) -> list[str]:
    return [str(difference(pairs[task])) for task in (MEAN, SHORT, 64, LONG)]


def spans(regime: str, rate: float, learning_rate: float | None) -> float:
    """How far L, √L and fixed are apart on the mean of the tasks; at the best rate of each without a learning rate."""
    arms = [Arm(regime, name, rate) for name in ("linear", "sqrt", "fixed")]
    return float(np.ptp([arm.at(learning_rate or arm.best())[MEAN].mean() for arm in arms]))


@cache
def confirmatory() -> pd.DataFrame:
    """The six contrasts that were set before: differences to √L, intervals and adjusted p."""
    pairs = {
        (name, task): at_best("fresh", 0.3, name)[task] for name in ("linear", "fixed") for task in (MEAN, SHORT, LONG)
    }
    found = {key: difference(pair) for key, pair in pairs.items()}
    table = pd.DataFrame(found.values(), index=pd.MultiIndex.from_tuples(found), columns=Difference._fields)
    return table.assign(p=adjusted_p(pd.DataFrame(pairs).to_numpy()))


# --- acting -----------------------------------------------------------------------------------------------------------

ACTS = {"shape": ("fitted", 0.3), "rate": ("linear", 0.1), "both": ("fitted", 0.1), "no clip": ("none", 0.0)}


def acting_arm(what: str) -> Arm:
    name, rate = ACTS[what]
    return Arm("fresh", f"linear, then {name}", rate)


def acted(what: str, learning_rate: float) -> pd.Series:
    """Mean of the tasks after the first rollouts, against the run under L at 30% that goes on as it was."""
    later = acting_arm(what).at(learning_rate, "later")[MEAN]
    return later - Arm("fresh", "linear", 0.3).at(learning_rate, "later")[MEAN]


def slope_within(learning_rate: float) -> Difference:
    """Of later success (0 to 1) on the clip rate of the first rollouts, over the tasks of one run under L."""
    own = records()
    chosen = (own.regime == "fresh") & (own.arm == "linear") & (own.rate == 0.3) & (own.learning_rate == learning_rate)
    own = own[chosen & (own.seed < CHOOSING)].assign(early=lambda table: table.early_clipped / table.early_live)
    slopes = [np.polyfit(run.early, run.later / 100, 1)[0] for _, run in own.groupby("seed")]
    return difference(pd.Series(slopes))


# --- tables -----------------------------------------------------------------------------------------------------------


def lines() -> Iterator[str]:
    table = clip_rates()
    arms = list(dict.fromkeys(Arm(*key[:3]) for key in table.index))
    rows = []
    for arm in arms:
        root = Arm(arm.regime, "sqrt", arm.rate or 0.3)
        for learning_rate, clips in table.loc[tuple(arm)].iterrows():
            area, end = (arm.at(learning_rate, name).mean() for name in ("area", "end"))
            row = [*arm[:2], f"{arm.rate:.0%}", f"{learning_rate:g}"]
            row += [f"{clips[name]:.1%}" for name in ("all", SHORT, 64, LONG)]
            row += [f"{area[task]:.1f}" for task in (MEAN, SHORT, 64, LONG)] + [f"{end[MEAN]:.1f}"]
            both = arm != root and root in arms and all(learning_rate in one.rates() for one in (arm, root))
            missed = ["" if clips.compared else "missed"]
            row += told(arm.at(learning_rate) - root.at(learning_rate)) if both else missed
            rows.append(row + [""] * (17 - len(row)))
    tasks = ["mean", "8", "64", "512"]
    yield "Clip rates; success over the run (area) and at the end; area less that of √L at the same learning rate\n"
    heads = ["regime", "arm", "rate", "learning rate", "clipped", *tasks[1:], *tasks, "end", *tasks]
    yield markdown_table(heads, rows)
    yield "\nEach arm at the best learning rate that other seeds chose, less √L\n"
    rows = []
    for arm in arms:
        if Arm(arm.regime, "sqrt", arm.rate or 0.3) in arms and "," not in arm.name and len(arm.rates()) > 1:
            end = at_best(arm.regime, arm.rate or 0.3, arm.name, endpoint="end")[MEAN]
            pairs = told(at_best(arm.regime, arm.rate or 0.3, arm.name))
            rows.append([*arm[:2], f"{arm.rate:.0%}", f"{arm.best():g}", *pairs, str(difference(end))])
    yield markdown_table(["regime", "arm", "rate", "best", *tasks, "end, mean"], rows)
    yield "\nfresh, 30%, set before:\n" + confirmatory().round(4).to_string()
    lowest = spans("fresh", 0.3, LOWEST), spans("fresh", 0.3, None)
    told_of = "span {:.1f} points at the lowest rate, and {:.1f} at the best ones".format(*lowest)
    yield f"\nThe means of L, √L and fixed {told_of}."
    yield "\nActing after ten rollouts under L at 30%: gain over going on; slope of success on clip rate in one run\n"
    rows = []
    for learning_rate in Arm("fresh", "linear", 0.3).rates():
        done = [what for what in ACTS if learning_rate in acting_arm(what).present()]
        pairs = {what: acted(what, learning_rate) for what in done}
        told_of = [str(difference(pairs[what])) if what in pairs else "" for what in ACTS]
        rows.append([f"{learning_rate:g}", str(slope_within(learning_rate)), *told_of])
    yield markdown_table(["learning rate", "slope", *ACTS], rows)


def draw() -> Figure:
    """Success over the run against the learning rate, `fresh` at 30%: the mean of the tasks, and the shortest one."""
    figure = Figure(figsize=(7, 2.9), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, task, title in zip(panels, (MEAN, SHORT), ("mean of three tasks", "task of 8 tokens"), strict=True):
        for name, (colour, dashes) in STYLES.items():
            arm = Arm("fresh", name, 0.3 if name != "none" else 0.0)
            if not arm.present():
                continue
            means = [arm.at(one)[task].mean() for one in arm.present()]
            axes.plot(arm.present(), means, color=colour, linestyle=dashes, marker="o", markersize=3, label=NAMES[name])
        axes.set(xscale="log", xlabel="learning rate", title=title)
        axes.set_xticks(rates := Arm("fresh", "none", 0.0).present(), [f"{rate:g}" for rate in rates], rotation=30)
        axes.minorticks_off()
    panels[0].set_ylabel("success over the run (%)")
    panels[0].legend()
    return figure


def main() -> None:
    print("\n".join(lines()))
    picture = io.BytesIO()
    draw().savefig(picture, dpi=130, metadata={"Software": None})
    write_whole([(HERE / "rates.png", small_png(picture.getvalue()))])


if __name__ == "__main__":
    main()
