# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints what records.parquet says, or trains the cells that it lacks, so that it can be stopped at any time.

python scripts/studies/ten_percent/ten_percent.py                       tables
python scripts/studies/ten_percent/ten_percent.py --compute             all, in the order of PREDICTIONS.md
python scripts/studies/ten_percent/ten_percent.py --compute "8 to 23"   the same of half the seeds; two halves fill two cores

A cell is 16 seeds, some 80 seconds of a core, after two minutes for their start. A GPU draws other numbers.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "lab")]
from cells import command  # noqa: E402
from training import Arm, Regime, curves_by_task, train  # noqa: E402

RATE = 0.1
EDGE, THREE, OFF = "√L, dual on the edge", "√L", "√L, no dual"
GSPO = Arm(loss="gspo", aggregation="seq-mean-token-mean", ranges=(3e-4, 4e-4))
FSPO = Arm(0.5, ranges=(0.03, 0.03), dual=3.0)
HELD = {
    EDGE: Arm(0.5, RATE, dual=1.0),
    THREE: Arm(0.5, RATE, dual=3.0),
    OFF: Arm(0.5, RATE, dual=math.inf),
    "L": Arm(1.0, RATE, dual=3.0),
    "fixed": Arm(0.0, RATE, dual=3.0),
    "none": Arm(),
}
PUBLISHED = {
    "GSPO": GSPO,
    "FSPO": FSPO,
    "GSPO, summed": GSPO._replace(aggregation=FSPO.aggregation),
    "FSPO, averaged": FSPO._replace(aggregation=GSPO.aggregation),
}
ARMS = HELD | PUBLISHED
FIRST, THEN = (5e-4, 1e-3, 2e-3), (2.5e-4, 3e-3)
HALVES = {"8 to 23": range(8, 24), "24 to 39": range(24, 40)}
CHOOSING = range(8, 16)  # seeds that choose learning rates; the others are compared
STALE = {"fresh": 0, "stale": 2}


def cells() -> Iterator[dict]:
    """The names of the cells, in the order in which they are computed."""
    for arms, rates in ((HELD, FIRST), (HELD, THEN), (PUBLISHED, FIRST + THEN)):
        for rollouts, arm, rate, seeds in itertools.product(STALE, arms, rates, HALVES):
            yield {"rollouts": rollouts, "arm": arm, "learning_rate": rate, "seeds": seeds}


def compute(rollouts: str, arm: str, learning_rate: float, seeds: str) -> pd.DataFrame:
    """A row per seed and task: success and clip rate by rollout; live, clipped and dual-clipped responses of all."""
    regime = Regime((8, 128), 2, 8, rollouts=20, transformer=True, stale=STALE[rollouts], tries=False)
    torch.set_num_threads(1)
    table = train(regime, ARMS[arm], learning_rate, HALVES[seeds])
    table = table.assign(clip_rate=table.clipped / table.live.clip(lower=1))
    return curves_by_task(table, ("success", "clip_rate"), ("live", "clipped", "dual_clipped"))


def show() -> None:
    print(pd.read_parquet(HERE / "records.parquet").groupby(["rollouts", "arm", "learning_rate"]).size())


if __name__ == "__main__":
    command(__doc__, HERE / "records.parquet", [*cells()], compute, show)
