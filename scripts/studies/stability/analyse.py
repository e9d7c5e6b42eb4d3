# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints what records.parquet says.

python scripts/studies/stability/analyse.py
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "compare")]
from cells import Cells  # noqa: E402
from measures import adjusted_p, sign_flip_interval  # noqa: E402

from fspo_verl.output import markdown_table  # noqa: E402

RUN = ["longest", "ranges", "stale", "arm", "learning_rate", "seed"]
SMOOTH, FAILING = 3, 1  # rollouts whose mean is the success at a rollout; seeds that may fail at a learning rate
ROOT = "√L"


def smooth(curve: np.ndarray) -> np.ndarray:
    return np.convolve(curve, np.ones(SMOOTH) / SMOOTH, "valid")


@cache
def by_run() -> pd.DataFrame:
    """A row per run: whether it fails, how far it falls, and its gradient norms."""
    records = Cells(HERE / "records.parquet", RUN).table().to_pandas()
    rows = []
    for key, run in records.groupby(RUN):
        tasks = np.stack([smooth(curve) for curve in run.success])
        mean = tasks.mean(0)
        row = dict(zip(RUN, key, strict=True))
        row["fails"] = bool((tasks[:, -1] < tasks.max(1) / 2).any())
        row["fall"] = float((np.maximum.accumulate(mean) - mean).max())
        median = np.median(run.norm_median.iloc[0])
        row["norms"] = float(run.norm_largest.iloc[0].max() / median) if median else np.inf
        row |= {"end": mean[-1], "clipped": run.clipped.sum() / run.live.sum()}
        rows.append(row)
    return pd.DataFrame(rows)


def share(longest: int, ranges: str, stale: int, arm: str) -> tuple[float, float, float]:
    """Of all runs of an arm the share that fails, and its 95% interval (Clopper and Pearson)."""
    own = by_run().set_index(RUN[:4]).loc[(longest, ranges, stale, arm)]
    found = stats.binomtest(int(own.fails.sum()), len(own)).proportion_ci()
    return float(own.fails.mean()), float(found.low), float(found.high)


def largest_rate(longest: int, ranges: str, stale: int, arm: str) -> float:
    """Up to which at most one seed fails at each learning rate; 0 where more fail at the smallest."""
    own = by_run().set_index(RUN[:4]).loc[(longest, ranges, stale, arm)].groupby("learning_rate").fails.sum()
    good = own.index[(own <= FAILING).cummin()]
    return float(good[-1]) if len(good) else 0.0


def against_root(longest: int = 128, ranges: str = "one rate", stale: int = 0) -> pd.DataFrame:
    """Per arm: share of learning rates at which a seed fails, less that under √L; interval and adjusted p."""
    own = by_run().set_index(RUN[:3]).loc[(longest, ranges, stale)]
    shares = own.pivot_table(index="seed", columns="arm", values="fails", aggfunc="mean")
    pairs = shares.drop(columns=ROOT).sub(shares[ROOT], axis=0)
    rows = [(pair.mean(), *sign_flip_interval(pair.to_numpy())) for _, pair in pairs.items()]
    table = pd.DataFrame(rows, index=pairs.columns, columns=["mean", "lower", "upper"])
    return table.assign(p=adjusted_p(pairs.to_numpy()))


def lines() -> Iterator[str]:
    for (longest, ranges, stale), own in by_run().groupby(RUN[:3]):
        yield f"\n8 and {longest} tokens, {ranges}, stale by {stale}"
        yield "by learning rate: runs that fail, median fall, ratio of norms, success\n"
        rows = []
        for arm, runs in own.groupby("arm"):
            row = [arm, "{:.0%} [{:.0%}, {:.0%}]".format(*share(longest, ranges, stale, arm))]
            row += [f"{largest_rate(longest, ranges, stale, arm):g}", f"{runs.clipped.mean():.0%}"]
            for _, at in runs.groupby("learning_rate"):
                medians = f"{at.fall.median():.2f}, {at.norms.median():.3g}"
                row.append(f"{at.fails.sum()} of {len(at)}, {medians}, {at.end.mean():.2f}")
            rows.append(row)
        heads = [f"{rate:g}" for rate in sorted(own.learning_rate.unique())]
        yield markdown_table(["arm", "fails", "largest rate", "clipped", *heads], rows)
        if ROOT in set(own.arm) and own.arm.nunique() > 1:
            yield f"\nless √L:\n{against_root(longest, ranges, stale).round(4).to_string()}"


if __name__ == "__main__":
    print("\n".join(lines()))
