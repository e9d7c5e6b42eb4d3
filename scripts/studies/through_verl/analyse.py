# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints what records.parquet says, the scouted learning rates and then the arms; and gspo.parquet, once there is one.

python scripts/studies/through_verl/analyse.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "compare")]
from measures import MIN_SEEDS, contrasts  # noqa: E402

DONE, EARLY = 0.8, 10  # an accuracy; the first steps, whose clip rates are shown by themselves
KEY, SCOUT = ["arm", "learning_rate", "seed"], 1000  # seeds from this one on scout
ASKED = {"L": 0.3, "√L": 0.3, "fixed": 0.3, "L at 10%": 0.1, "none": 0.0}
WITHIN = 0.01  # of the clip rate that was asked for; else an arm is not compared
CHOOSING, COMPARED = (100, 101), range(8, 16)  # seeds of the runs against GSPO
CONTRASTS = (("L", "fixed", 8), ("L", "fixed", 256), ("L at 10%", "L", "mean"), ("none", "L", "mean"))
CONTRASTS += (("√L", "L", 8), ("√L", "fixed", 8))


def accuracies(records: pd.DataFrame) -> pd.DataFrame:
    """Mean over the validations after the first, in points: a column per task and their mean, a row per run."""
    table = 100 * records[records.step > 0].pivot_table("accuracy", KEY, "length")
    return table.assign(mean=table.mean(axis=1))


def stability(own: pd.DataFrame) -> pd.DataFrame:
    """Count by arm: seeds in which a task ends below half its best; median of largest over median gradient norm."""
    curves = own.groupby(["arm", "seed", "length"]).accuracy
    fails = (curves.last() < curves.max() / 2).groupby(["arm", "seed"]).any().groupby("arm").sum()
    norms = own.groupby(["arm", "seed"]).norm.agg(lambda norm: norm.max() / norm.median()).groupby("arm").median()
    return pd.DataFrame({"fails": fails, "norms": norms})


def clip_rates(own: pd.DataFrame) -> pd.DataFrame:
    """Return the means of all seeds: a column per task and for all of them, a row per arm."""
    sums = own.groupby(["arm", "length"])[["clipped", "live"]].sum().unstack()
    return (sums.clipped / sums.live).assign(all=sums.clipped.sum(axis=1) / sums.live.sum(axis=1))


def pairs(own: pd.DataFrame) -> pd.DataFrame:
    """Differences in points ``[seeds, contrasts]``, of the arms that clip what was asked for."""
    table, rates = accuracies(own).droplevel("learning_rate"), clip_rates(own)["all"]
    compared = [arm for arm, rate in rates.items() if abs(rate - ASKED[arm]) <= WITHIN]
    differences = {
        f"{one} − {other}, {name}": table.loc[one, name] - table.loc[other, name]
        for one, other, name in CONTRASTS
        if one in compared and other in compared
    }
    return pd.DataFrame(differences).dropna(axis=1)


def until_all(own: pd.DataFrame) -> pd.Series:
    """Steps until every task is validated above DONE, of each arm and seed; never counts as one validation more."""
    lowest = own.dropna(subset="accuracy").groupby(["arm", "seed", "step"]).accuracy.min().unstack()
    done, never = lowest >= DONE, 2 * lowest.columns[-1] - lowest.columns[-2]
    return done.idxmax(axis=1).where(done.any(axis=1), never)


# --- FSPO and verl's own GSPO -----------------------------------------------------------------------------------------


def best_rate(records: pd.DataFrame, arm: str) -> float:
    """Return the learning rate at which the choosing seeds are done first; of equal ones the most accurate."""
    own = records[(records.arm == arm) & records.seed.isin(CHOOSING)].assign(arm=records.learning_rate)
    table = pd.DataFrame({"steps": until_all(own), "accuracy": -own.groupby(["arm", "seed"]).accuracy.mean()})
    return float(table.groupby("arm").mean().sort_values(["steps", "accuracy"]).index[0])


def against_gspo(records: pd.DataFrame) -> Iterator[str]:
    """Return the results in gspo.parquet: arms at their best learning rates, and FSPO less each of the others."""
    own = records[records.seed.isin(COMPARED)]
    if "FSPO" not in set(own.arm):
        yield f"\nAgainst GSPO: FSPO has not run yet in seeds {COMPARED[0]} to {COMPARED[-1]}, which are compared"
        return
    tens = own.assign(arm=own.arm + ", steps from " + (own.step.sub(1).clip(lower=0) // 10 * 10 + 1).astype(str))
    yield f"Clip rates\n{pd.concat([clip_rates(own), clip_rates(tens)]).round(3).to_string()}"
    worst = 100 * own.groupby(["arm", "seed", "length"]).accuracy.mean().groupby(["arm", "seed"]).min()
    for what, values in {f"Steps until all are above {DONE}": until_all(own), "Worst task": worst}.items():
        table = values.unstack("arm")
        yield f"{what}\n{table.mean().round(1).to_string()}"
        pairs = table.drop(columns="FSPO").rsub(table["FSPO"], axis=0).dropna()
        if len(pairs) >= MIN_SEEDS:
            yield f"FSPO less\n{contrasts(pairs).round(3).to_string()}"


def lines(records: pd.DataFrame) -> Iterator[str]:
    scouts = records[(records.seed >= SCOUT) & records.arm.isin(["none", "√L"])]  # the others are pilots
    scouted = accuracies(scouts)["mean"].groupby("learning_rate").mean()
    yield f"Scouted, mean accuracy by learning rate:\n{scouted.round(1).to_string()}"
    for learning_rate, own in records[records.seed < SCOUT].groupby("learning_rate"):
        means, rates = accuracies(own).groupby("arm").mean().join(stability(own)), clip_rates(own).round(3)
        yield f"\nLearning rate {learning_rate:g}\n{means.round(1).to_string()}\nClip rate\n{rates.to_string()}"
        early = clip_rates(own[own.step <= EARLY])["all"]
        yield f"In the first {EARLY} steps\n{early.round(3).to_string()}"
        yield f"Steps until all are above {DONE}\n{until_all(own).groupby('arm').mean().round(1).to_string()}"
        if len(differences := pairs(own)) >= MIN_SEEDS:
            yield f"{len(differences)} seeds\n{contrasts(differences).round(3).to_string()}"


if __name__ == "__main__":
    print("\n".join(lines(pd.read_parquet(HERE / "records.parquet"))))
    if (HERE / "gspo.parquet").exists():
        print("\n".join(against_gspo(pd.read_parquet(HERE / "gspo.parquet"))))
