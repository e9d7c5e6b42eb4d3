# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints what records.parquet says, or trains the cells that it lacks, so that it can be stopped at any time.

python scripts/studies/stability/stability.py                       tables
python scripts/studies/stability/stability.py --compute             the least set first, then all
python scripts/studies/stability/stability.py --compute √L 0.001    some cells; --records FILE for another file

A cell takes minutes of a core, or seconds of a GPU, which is taken if there is one and draws other numbers.
"""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "lab"), str(HERE.parents[1] / "compare")]
from cells import command  # noqa: E402
from measures import contrasts  # noqa: E402
from training import Arm, Regime, curves_by_task, train  # noqa: E402

GROUP = ["longest", "ranges", "stale"]
RUN = [*GROUP, "arm", "learning_rate", "seed"]
SMOOTH = 3  # rollouts whose mean is the success at a rollout
ROOT = "√L"
LOWEST, FACTORS, SEEDS = 5e-4, (1, 2, 4, 8), range(8)
ARMS = {
    "one rate": {
        "none": Arm(),
        "L": Arm(1.0, 0.3),
        "√L": Arm(0.5, 0.3),
        "fixed": Arm(0.0, 0.3),
        "GRPO's tokens": Arm(loss="vanilla", rate=0.3),
    },
    "published": {
        "L": Arm(loss="gspo", aggregation="seq-mean-token-mean", ranges=(3e-4, 4e-4)),
        "√L": Arm(0.5, ranges=(0.03, 0.03)),
        "fixed": Arm(0.0, ranges=(-math.log(0.8), math.log(1.2))),
        "GRPO's tokens": Arm(loss="vanilla", aggregation="token-mean", ranges=(0.2, 0.2)),
    },
}


def cells() -> Iterator[dict]:
    """The names of the cells, in the order in which they are computed: the least set first."""
    least = ("none", "L", "√L", "fixed")
    groups = [(128, "one rate", 0, arm) for arm in least]
    groups += [(128, ranges, stale, arm) for ranges, arms in ARMS.items() for stale in (0, 2) for arm in arms]
    groups += [(longest, "one rate", 0, arm) for longest in (512, 4096) for arm in least]
    for (longest, ranges, stale, arm), factor in itertools.product(dict.fromkeys(groups), FACTORS):
        rate = LOWEST * factor
        yield {"longest": longest, "ranges": ranges, "stale": stale, "arm": arm, "learning_rate": rate}


def compute(longest: int, ranges: str, stale: int, arm: str, learning_rate: float) -> pd.DataFrame:
    """A row per seed and task; success, clip rate, median and largest norm of the gradient by rollout."""
    regime = Regime((8, longest), 2, 8, rollouts=20, transformer=True, stale=stale, tries=False)
    torch.set_num_threads(1)
    table = train(regime, ARMS[ranges][arm], learning_rate, SEEDS)
    table = table.assign(clip_rate=table.clipped / table.live.clip(lower=1))
    return curves_by_task(table, ("success", "clip_rate", "norm_median", "norm_largest"), ("live", "clipped"))


# --- what the records say ---------------------------------------------------------------------------------------------


def smoothed(curves: Iterable[np.ndarray]) -> np.ndarray:
    """Success of each task ``[tasks, rollouts − 2]``, the mean over three rollouts."""
    return np.stack([np.convolve(curve, np.ones(SMOOTH) / SMOOTH, "valid") for curve in curves])


def fails(tasks: np.ndarray) -> bool:
    """Whether a task ends below half its best."""
    return bool((tasks[:, -1] < tasks.max(1) / 2).any())


@cache
def by_run() -> pd.DataFrame:
    """A row per run: whether it fails, how far it falls, gradient norms, success (over the run, last), clip rate."""
    rows = []
    for key, run in pd.read_parquet(HERE / "records.parquet").groupby(RUN):
        tasks = smoothed(run.success)
        mean, median = tasks.mean(0), np.median(run.norm_median.iloc[0])
        found = {
            "fails": fails(tasks),
            "success": 100 * np.stack(run.success).mean(),
            "fall": float((np.maximum.accumulate(mean) - mean).max()),
            "norms": float(run.norm_largest.iloc[0].max() / median) if median else np.inf,
            "end": mean[-1],
            "clipped": run.clipped.sum() / run.live.sum(),
        }
        rows.append(dict(zip(RUN, key, strict=True)) | found)
    return pd.DataFrame(rows)


def less_root(longest: int, ranges: str, stale: int) -> pd.DataFrame:
    """Share of learning rates at which a seed fails, less that under √L ``[seeds, arms]``."""
    own = by_run().set_index(GROUP).loc[(longest, ranges, stale)]
    shares = own.pivot_table(index="seed", columns="arm", values="fails", aggfunc="mean")
    return shares.drop(columns=ROOT).sub(shares[ROOT], axis=0)


def root_less(longest: int, ranges: str, stale: int) -> pd.DataFrame:
    """Success of √L less that of each arm ``[seeds, arms]``, each at the rate that the other seeds would choose."""
    own, found = by_run().set_index(GROUP).loc[(longest, ranges, stale)], {}
    for arm, runs in own.groupby("arm"):
        rates = runs.pivot(index="seed", columns="learning_rate", values="success")
        found[arm] = {seed: row[rates.drop(seed).mean().idxmax()] for seed, row in rates.iterrows()}
    table = pd.DataFrame(found)
    return table.drop(columns=ROOT).rsub(table[ROOT], axis=0)


def show() -> None:
    for group, own in by_run().groupby(GROUP):
        print("\n\n8 and {} tokens, {}, stale by {}\n".format(*group))
        arms = own.groupby("arm").agg(fails=("fails", "mean"), clipped=("clipped", "mean"))
        at = own.pivot_table(index="arm", columns="learning_rate", values="fails", aggfunc="sum")
        print(arms.round(3).to_string())
        medians = own.groupby(["arm", "learning_rate"])[["fall", "norms", "end"]].median()
        print(medians.assign(failed=at.stack()).round(2).to_string())
        if ROOT in arms.index and len(arms) > 1:
            print(f"fails, less √L:\n{contrasts(less_root(*group)).round(4).to_string()}")
            if not (pairs := root_less(*group)).isna().any(axis=None):
                print(f"success at the best rate, √L less:\n{contrasts(pairs).round(2).to_string()}")


if __name__ == "__main__":
    command(__doc__, HERE / "records.parquet", [*cells()], compute, show)
