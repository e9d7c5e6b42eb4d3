# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which width clips lengths alike on responses that it has not seen?

Each run is split at random into two halves of its prompts. The shape of a width is fitted on one half; on the other it
is scaled to clip 10% on each side, and tested for a dependence on length. Both halves take turns, in five splits.
Prints the table of the README.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import bisect

from fspo_verl.analysis.fit import Unreachable, measured_shape
from fspo_verl.analysis.length_effect import length_effect, length_score
from fspo_verl.band import Band
from fspo_verl.clips import standardized, upper_quantile
from fspo_verl.observe.records import read_records
from fspo_verl.output import markdown_table

RECORDS = Path(__file__).resolve().parent / "records"
TARGET, SPLITS, BINS = 0.1, 5, 5
FEW = 1000  # responses; a run of fewer is passed over


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folder with records (default: the study's)")
    return parser.parse_args(argv)


# --- widths: (S - c) / s of the records to judge, fitted on others ---------------------------------------------------


def root(fitted_on: pd.DataFrame, records: pd.DataFrame) -> np.ndarray:
    return standardized(records, Band())


def power(fitted_on: pd.DataFrame, records: pd.DataFrame) -> np.ndarray:
    """L^p with the p at which the test's statistic is 0."""

    def score(p: float) -> float:
        return length_score(fitted_on, clipped(fitted_on, standardized(fitted_on, Band(length_power=p))))

    low, high = score(0.0), score(1.0)
    p = 0.0 if low <= 0 else 1.0 if high >= 0 else bisect(score, 0.0, 1.0, xtol=5e-3)
    return standardized(records, Band(length_power=p))


def limited(fitted_on: pd.DataFrame, records: pd.DataFrame) -> np.ndarray:
    """sqrt(Q) up to the 95% quantile of sqrt(Q/L) times sqrt(L), centre -Q/2."""
    moved = fitted_on[fitted_on["quadratic_variation"] > 0]
    limit = upper_quantile(np.sqrt((moved["quadratic_variation"] / moved["length"]).to_numpy(np.float64)), 0.05)
    length, q, s = (records[name].to_numpy(np.float64) for name in ("length", "quadratic_variation", "log_ratio"))
    q = np.minimum(q, limit**2 * length)
    return np.where(q > 0, s + q / 2, 0.0) / np.where(q > 0, np.sqrt(q), 1.0)


def measured(fitted_on: pd.DataFrame, records: pd.DataFrame) -> np.ndarray:
    return standardized(records, Band(shape=measured_shape(fitted_on, TARGET)))


WIDTHS = {"sqrt(L)": root, "fitted power": power, "sqrt(Q), limited": limited, "measured": measured}


# --- judging ---------------------------------------------------------------------------------------------------------


def clipped(records: pd.DataFrame, score: np.ndarray) -> np.ndarray:
    """0 or 1 ``[rows]``: beyond the number that the target share of each side lies beyond."""
    advantage, found = records["advantage"].to_numpy(), np.zeros(len(records))
    for sign in (1, -1):
        side = np.sign(advantage) == sign
        found[side] = sign * score[side] > upper_quantile(sign * score[side], TARGET)
    return found


def judged(records: pd.DataFrame, score: np.ndarray) -> tuple[float, float, bool]:
    """LRE over five bins of equally many responses, abs(k) of clip rate ~ L^k, and whether a dependence is called."""
    clips, counted = clipped(records, score), (records["advantage"] != 0).to_numpy()
    accepted = 1 - clips[counted]
    by_length = pd.Series(accepted).groupby(pd.qcut(records["length"][counted].to_numpy(), BINS), observed=True).mean()
    effect = length_effect(records, clips)
    k, depends = (math.nan, False) if effect is None else (abs(effect.exponent), effect.depends)
    return float(np.abs(by_length / accepted.mean() - 1).max()), k, depends


def halves(records: pd.DataFrame, rng: np.random.Generator):
    """Two halves of the prompts, either of which comes first."""
    prompts = rng.permutation(records["prompt"].unique())
    first = records["prompt"].isin(prompts[: len(prompts) // 2]).to_numpy()
    yield records[first], records[~first]
    yield records[~first], records[first]


def simulated(power: float, drift: float = 0.0, steps: int = 25) -> pd.DataFrame:
    """A run of 16 prompts x 8 responses a step in 4 mini-batches, S ~ N(-drift Q/2, Q), Q = (.02 L^power)^2 k in the
    k-th mini-batch, in steps of which each moves further or less (sd 0.3 of the logarithm)."""
    rng = np.random.default_rng(0)
    prompt = np.repeat(np.arange(steps * 16), 8)
    step, mini_batch = prompt // 16, prompt % 16 // 4
    center = rng.uniform(math.log(10), math.log(400), steps * 16)[prompt]
    length = np.exp(center + 0.3 * rng.standard_normal(len(prompt))).astype(int).clip(1)
    q = np.square(0.02 * np.exp(0.3 * rng.standard_normal(steps))[step] * length**power) * mini_batch
    s = np.sqrt(q) * rng.standard_normal(len(q)) - drift * q / 2
    columns = {"step": step, "mini_batch": mini_batch, "prompt": prompt, "length": length, "quadratic_variation": q}
    return pd.DataFrame(columns | {"log_ratio": s, "advantage": rng.choice([-1.0, 1.0], len(q))})


def main() -> None:
    args = parse_args()
    runs = {folder.name: read_records(folder) for folder in args.runs or sorted(RECORDS.glob("*/"))}
    runs = {name: records for name, records in runs.items() if len(records) >= FEW}
    for p in (0.5, 0.3, 0.8):
        runs[f"simulated, S ~ L^{p}"] = simulated(p)
    rows = []
    for name, records in runs.items():
        for split in range(SPLITS):
            for fitted_on, unseen in halves(records, np.random.default_rng(split)):
                for width, score in WIDTHS.items():
                    try:
                        rows.append((name, width, *judged(unseen, score(fitted_on, unseen))))
                    except Unreachable as error:
                        print(f"{name}, {width}: {error}")
    found = pd.DataFrame(rows, columns=["run", "width", "lre", "k", "depends"])
    mean = found.groupby(["run", "width"], sort=False)[["lre", "k", "depends"]].mean()
    cells = [f"{row.lre:.3f}, {row.k:.2f}, {row.depends:.0%}" for row in mean.itertuples()]
    table = pd.Series(cells, mean.index).unstack("width")[list(WIDTHS)].loc[list(runs)]
    lines = [[name, *row] for name, row in zip(table.index, table.to_numpy(), strict=True)]
    print(markdown_table(["LRE, abs(k), dependence called", *WIDTHS], lines))


if __name__ == "__main__":
    main()
