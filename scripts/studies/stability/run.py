# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the arms of the study; what records.parquet holds is left out, so that it can be stopped at any time.

python scripts/studies/stability/run.py                  the least set first, then all
python scripts/studies/stability/run.py --least          that alone
python scripts/studies/stability/run.py --only √L 1      some cells; --records FILE for another file

A cell takes minutes of a core, or seconds of a GPU, which is taken if there is one and draws other numbers.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "lab")]
from cells import compute_cells  # noqa: E402
from training import Arm, Regime, train  # noqa: E402

SHORT, LONGEST = 8, (128, 512, 4096)  # tokens of the two tasks
LOWEST, FACTORS, SEEDS = 5e-4, (1, 2, 4, 8), range(8)
KEY = ("longest", "ranges", "stale", "arm", "learning_rate", "seed")
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


def cells() -> Iterator[tuple[int, str, int, str, int]]:
    """The long task, ranges, staleness, arm and factor of the learning rate, in the order of computing."""
    least = ("none", "L", "√L", "fixed")
    for ranges, stale, arms in (
        ("one rate", 0, least),
        ("one rate", 2, least),
        ("published", 0, tuple(ARMS["published"])),
        ("one rate", 0, ("GRPO's tokens",)),
        ("published", 2, tuple(ARMS["published"])),
        ("one rate", 2, ("GRPO's tokens",)),
    ):
        yield from ((128, ranges, stale, arm, factor) for arm in arms for factor in FACTORS)
    for longest in LONGEST[1:]:
        yield from ((longest, "one rate", 0, arm, factor) for arm in least for factor in FACTORS)


LEAST = 4 * len(FACTORS)  # cells


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row per seed and task; success, clip rate, median and largest norm of the gradient by rollout."""
    table = table.assign(clip_rate=table.clipped / table.live.clip(lower=1)).sort_values("rollout")
    names = ("success", "clip_rate", "norm_median", "norm_largest")
    of = {name: (name, lambda values: values.to_numpy(np.float32)) for name in names}
    return table.groupby(["seed", "length"]).agg(**of, live=("live", "sum"), clipped=("clipped", "sum")).reset_index()


def compute(longest: int, ranges: str, stale: int, arm: str, learning_rate: float) -> pd.DataFrame:
    regime = Regime((SHORT, longest), 2, 8, rollouts=20, transformer=True, stale=stale, tries=False)
    return summary(train(regime, ARMS[ranges][arm], learning_rate, SEEDS))


def main() -> None:
    def named(longest, ranges, stale, arm, factor):
        return {"longest": longest, "ranges": ranges, "stale": stale, "arm": arm, "learning_rate": LOWEST * factor}

    torch.set_num_threads(1)
    words = "long task, ranges, staleness, arm or factor"
    compute_cells(__doc__, words, HERE / "records.parquet", KEY, [*cells()], LEAST, named, compute)


if __name__ == "__main__":
    main()
