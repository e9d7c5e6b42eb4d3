# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints what records.parquet says: the scouted learning rates, then the arms.

python scripts/studies/through_verl/analyse.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "compare")]
from cells import Cells  # noqa: E402
from measures import MIN_SEEDS, adjusted_p, sign_flip_interval  # noqa: E402

from fspo_verl.output import markdown_table  # noqa: E402

KEY, SCOUT = ["arm", "learning_rate", "seed"], 1000  # seeds from this one on scout
ASKED = {"L": 0.3, "√L": 0.3, "fixed": 0.3, "L at 10%": 0.1, "none": 0.0}
WITHIN = 0.01  # of the clip rate that was asked for; else an arm is not compared
CONTRASTS = (("L", "fixed", 8), ("L", "fixed", 256), ("L at 10%", "L", "mean"), ("none", "L", "mean"))


def accuracies(records: pd.DataFrame) -> pd.DataFrame:
    """Mean over the validations after the first, in points: a column per task and their mean, a row per run."""
    table = 100 * records[records.step > 0].pivot_table("accuracy", KEY, "length")
    return table.assign(mean=table.mean(axis=1))


def clip_rates(records: pd.DataFrame) -> pd.Series:
    """By arm and learning rate, of all tasks and seeds."""
    sums = records.groupby(KEY[:2])[["clipped", "live"]].sum()
    return sums.clipped / sums.live


def lines(records: pd.DataFrame) -> Iterator[str]:
    scouts = records[(records.seed >= SCOUT) & records.arm.isin(["none", "√L"])]  # the others are pilots
    scouted = accuracies(scouts)["mean"].groupby("learning_rate").mean()
    yield f"Scouted, mean accuracy by learning rate:\n{scouted.round(1).to_string()}\n"
    records = records[records.seed < SCOUT]
    table, rates = accuracies(records), clip_rates(records)
    for learning_rate in sorted(set(records.learning_rate)):
        own, rate = table.xs(learning_rate, level="learning_rate"), rates.xs(learning_rate, level="learning_rate")
        rows = [[arm, f"{rate[arm]:.1%}", *(f"{x:.1f}" for x in part.mean())] for arm, part in own.groupby("arm")]
        yield f"Learning rate {learning_rate:g}\n\n" + markdown_table(["arm", "clipped", *map(str, own)], rows)
        pairs = {}
        for one, other, task in CONTRASTS:
            if all(arm in rate and abs(rate[arm] - ASKED[arm]) <= WITHIN for arm in (one, other)):
                pairs[f"{one} − {other}, {task}"] = own.loc[one, task] - own.loc[other, task]
        pairs = pd.DataFrame(pairs).dropna()
        if len(pairs) >= MIN_SEEDS:
            for (name, pair), p in zip(pairs.items(), adjusted_p(pairs.to_numpy()), strict=True):
                low, high = sign_flip_interval(pair.to_numpy())
                yield f"{name}: {pair.mean():+.1f} [{low:+.1f}, {high:+.1f}], p = {p:.3f}, {len(pair)} seeds"


if __name__ == "__main__":
    print("\n".join(lines(Cells(HERE / "records.parquet", KEY).table().to_pandas())))
