# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the arms of the study; what records.parquet holds is left out, so that it can be stopped at any time.

python scripts/studies/learning_rates/run.py                          the least set first, then all
python scripts/studies/learning_rates/run.py --least                  that alone: 20 minutes of a core
python scripts/studies/learning_rates/run.py --only fresh sqrt --records /tmp/again.parquet       some cells again
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "lab")]
from cells import compute_cells  # noqa: E402
from training import RECORDED, Arm, Regime, train  # noqa: E402

LENGTHS, ROLLOUTS = (8, 64, 512), 20
REGIMES = {"fresh": Regime(LENGTHS, 48, rollouts=ROLLOUTS), "many": Regime(LENGTHS, 2, 24, rollouts=ROLLOUTS)}
LOWEST = {"fresh": 2e-4, "many": 2.5e-4}
FACTORS = (1, 2, 4, 8, 16, 32)
SEEDS = (*range(12), *range(100, 104))  # those from 100 on choose learning rates
POWERS = {"linear": 1.0, "sqrt": 0.5, "fixed": 0.0, "fitted": "fitted"}
KEY = ("regime", "arm", "rate", "learning_rate", "seed")


def arm_of(name: str, rate: float) -> Arm:
    first, _, then = name.rpartition(", then ")
    before = Arm(POWERS[first], 0.3) if first else None
    return Arm(POWERS[then], rate, first=before) if rate else Arm(first=before)


def cells() -> Iterator[tuple[str, str, float, int]]:
    """Regime, arm, clip rate and factor of the learning rate, in the order in which they are computed."""
    least = [("none", 0.0), ("linear", 0.3), ("sqrt", 0.3), ("fixed", 0.3)]
    more = [("fitted", 0.3), ("linear, then linear", 0.1), ("linear, then fitted", 0.3)]
    more += [("linear, then fitted", 0.1), ("linear, then none", 0.0), *((name, 0.1) for name in POWERS)]
    rest = [("fitted", 0.3), *((name, 0.1) for name in POWERS)]
    for regime, arms in (("fresh", least), ("many", least)):
        yield from ((regime, *arm, factor) for arm in arms for factor in FACTORS)
    for regime, arms in (("fresh", more), ("many", rest)):  # the lowest rate and the best ones first
        yield from (
            (regime, *arm, factor) for factor in sorted(FACTORS, key=(1, 16, 8, 4, 2, 32).index) for arm in arms
        )


LEAST = 4 * len(FACTORS)  # cells


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row per seed and task: success by rollout, live and clipped responses of all rollouts and of the first."""
    early = table.where(table.rollout < RECORDED)
    table = table.assign(early_live=early.live, early_clipped=early.clipped).sort_values("rollout")
    found = table.groupby(["seed", "length"]).agg(
        success=("success", lambda values: np.round(values.to_numpy(np.float32), 4)),
        **{name: (name, "sum") for name in ("live", "clipped", "early_live", "early_clipped")},
    )
    return found.astype(dict.fromkeys(("live", "clipped", "early_live", "early_clipped"), "int32")).reset_index()


def compute(regime: str, arm: str, rate: float, learning_rate: float) -> pd.DataFrame:
    return summary(train(REGIMES[regime], arm_of(arm, rate), learning_rate, SEEDS))


def main() -> None:
    def named(regime, arm, rate, factor):
        return {"regime": regime, "arm": arm, "rate": rate, "learning_rate": LOWEST[regime] * factor}

    torch.set_num_threads(1)
    words = "regime, arm, clip rate or factor"
    compute_cells(__doc__, words, HERE / "records.parquet", KEY, [*cells()], LEAST, named, compute)


if __name__ == "__main__":
    main()
