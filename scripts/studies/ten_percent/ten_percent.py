# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints what records.parquet says, or trains the cells that it lacks, so that it can be stopped at any time.

python scripts/studies/ten_percent/ten_percent.py                       tables
python scripts/studies/ten_percent/ten_percent.py --compute             all, in the order of PREDICTIONS.md
python scripts/studies/ten_percent/ten_percent.py --compute "8 to 23"   the half of these seeds; the other is "24 to 39"

A cell is 16 seeds, some 80 seconds of a core, after two minutes for their start. A GPU draws other numbers.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "records.parquet"
sys.path[:0] = [str(HERE.parent), *(str(HERE.parent / name) for name in ("lab", "stability"))]
from cells import command  # noqa: E402
from chosen import at_best  # noqa: E402
from stability import fails, smoothed  # noqa: E402
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
RUN = ["rollouts", "arm", "learning_rate"]


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


# --- what the records say ---------------------------------------------------------------------------------------------

MEASURES = {
    "worst": "success over the run of the worst task",
    "mean": "success over the run of both tasks",
    "lowest": "mean of the lowest task of each rollout",
    "fails": "runs in 100 that fail",
}


@cache
def by_run() -> pd.DataFrame:
    """A row per run: the measures in points, whether it fails, and the shares that its clip and its dual clip take."""
    rows = []
    for key, run in pd.read_parquet(RECORDS).groupby([*RUN, "seed"]):
        curves, live = 100 * np.stack(run.success), run.live.sum()
        found = {"worst": curves.mean(1).min(), "mean": curves.mean(), "lowest": curves.min(0).mean()}
        found |= {"fails": 100 * fails(smoothed(curves)), "clipped": run.clipped.sum() / live}
        rows.append(dict(zip([*RUN, "seed"], key, strict=True)) | found | {"dual": run.dual_clipped.sum() / live})
    return pd.DataFrame(rows).set_index([*RUN, "seed"])


def compared(
    rollouts: str, measure: str = "worst", baseline: str = THREE, rates: Sequence[float] = FIRST + THEN
) -> pd.DataFrame:
    """:func:`chosen.at_best`, among ``rates``, of the baseline's kind of arms that have run at the first three."""
    own, arms = by_run().loc[rollouts], HELD if baseline in HELD else PUBLISHED
    own = own[own.index.get_level_values("learning_rate").isin(rates)]
    own = own[own.groupby(["arm", "learning_rate"]).worst.transform("size") == sum(map(len, HALVES.values()))]
    values, worst = (own[name].unstack("learning_rate") for name in (measure, "worst"))
    ready = worst.reindex(columns=FIRST).notna().all(axis=1).groupby("arm").all()
    ready = [arm for arm in arms if ready.get(arm)]
    if baseline not in ready:
        return pd.DataFrame()
    values, worst = values.loc[ready], worst.loc[ready]
    chooses = worst.index.get_level_values("seed").isin(CHOOSING)
    return at_best(values[~chooses], worst[chooses], baseline)


def show() -> None:
    kinds = ((THREE, FIRST + THEN), ("GSPO", FIRST + THEN), ("GSPO", FIRST), ("FSPO", FIRST))
    for rollouts, (baseline, rates), measure in itertools.product(STALE, kinds, MEASURES):
        if rollouts in by_run().index and len(table := compared(rollouts, measure, baseline, rates)):
            print(f"\n{rollouts}, {MEASURES[measure]}, best of {rates}; less {baseline}\n{table.round(5).to_string()}")
    sums = by_run().groupby(RUN)
    print(f"\nMeans of all seeds\n{sums.mean().assign(seeds=sums.size()).round(4).to_string()}")


if __name__ == "__main__":
    command(__doc__, RECORDS, [*cells()], compute, show)
