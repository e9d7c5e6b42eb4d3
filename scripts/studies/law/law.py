# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Prints what the records of a real language model say of S.

python scripts/studies/law/law.py
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import brentq

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from fitted import fitted_power  # noqa: E402

from fspo_verl.analysis.clip_rates import Estimate, prompts_of, t_quantile  # noqa: E402
from fspo_verl.analysis.length_effect import length_effect  # noqa: E402
from fspo_verl.band import Band  # noqa: E402
from fspo_verl.clips import MATCHED_RATE, BandClip  # noqa: E402

FIRST, LARGEST = 3, 4.0  # the shortest prefix has 2^3 − 1 tokens; the largest exponent
WIDTHS = {"√L": 0.5, "a fitted power": None, "fixed": 0.0, "L": 1.0}


def read(machine: str) -> pd.DataFrame:
    """Responses at temperature 1 after four steps of GRPO; s and q are of blocks of 1, 2, 4, ... tokens."""
    records = pd.read_parquet(HERE / "records.parquet", filters=[("machine", "==", machine)])
    sums = {"log_ratio": records.s.map(np.sum), "quadratic_variation": records.q.map(np.sum)}
    return records.assign(step=1, mini_batch=4, **sums)


def interval(value: float, influence: np.ndarray, cluster: np.ndarray) -> Estimate:
    """An estimate with its 95% interval, from the influence ``[rows]`` of each row: what the row adds to the error.

    The variance is Σψ² · G / (G − 1), ψ the sums over the G clusters. Student's t has the degrees of freedom of this
    variance, 2 (Σψ²)² / (Σψ⁴ − (Σψ²)²/G): about G where the ψ are Gaussian, fewer where few clusters decide.
    """
    total = np.bincount(cluster, influence)
    count, squares = len(total), np.square(total).sum()
    freedom = 2 / max(np.power(total, 4).sum() / squares**2 - 1 / count, 1 / count**2)
    half = t_quantile(np.clip(freedom, 1, count - 1)) * math.sqrt(squares * count / (count - 1))
    return Estimate(value, float(value - half), float(value + half))


def exponent(s: np.ndarray, length: np.ndarray, cluster: np.ndarray) -> Estimate:
    """p in std(S | L) ~ L^p: the maximum of the Gaussian likelihood, without bins of length; clusters are prompts.

    S is taken about the drift per token, ΣS / ΣL.
    """
    squares, x = np.square(s - length * s.sum() / length.sum()), np.log(length)
    x = x - x.mean()

    def relative(power: float) -> np.ndarray:
        """S² over its expectation, mean 1."""
        weight = squares * np.exp(-2 * power * x)
        return weight / weight.mean()

    power = brentq(lambda power: float(relative(power) @ x), -LARGEST, LARGEST)
    found = relative(power)
    return interval(power, (found - 1) * x / (2 * (found * x) @ x), cluster)


def exponent_within(records: pd.DataFrame, last: int) -> Estimate:
    """p over the prefixes of 7, 15, ..., ``last`` tokens of the responses with so many: content cannot explain it."""
    long = records[records.length >= last]
    blocks = last.bit_length()
    parts = [np.array([values[block] for values in long.s], np.float64) for block in range(blocks)]
    sums = np.cumsum(parts, axis=0)[FIRST - 1 :]
    tokens = 2.0 ** np.arange(FIRST, blocks + 1) - 1
    return exponent(sums.ravel(), np.repeat(tokens, len(long)), np.tile(prompts_of(long), len(tokens)))


def clipped(records: pd.DataFrame, width: str) -> np.ndarray:
    """Return what a width clips, 0 or 1 ``[rows]``, at one rate on each half; a power is that of the other half."""
    first, found = prompts_of(records) % 2 == 0, np.zeros(len(records))
    for half in (first, ~first):
        power = WIDTHS[width]
        power = fitted_power(records[~half], MATCHED_RATE) if power is None else power
        band = Band(0.03, eps_dual=3 * 0.03, length_power=power)  # both are scaled to the rate
        found[half] = BandClip("", "", band).matched(records[half], MATCHED_RATE).clipped(records[half])
    return found


def dependence(records: pd.DataFrame, width: str) -> Estimate:
    """k in clip rate ~ L^k, and its interval."""
    return Estimate(*length_effect(records, clipped(records, width))[:3])


def rate_of_kinds(records: pd.DataFrame, width: str) -> pd.Series:
    counted = (records.advantage != 0).to_numpy()
    return pd.Series(clipped(records, width)[counted]).groupby(records.kind[counted].to_numpy()).mean()


def lines() -> Iterator[str]:
    for machine, lasts in {"cpu": (511,), "h200": (511, 2047)}.items():
        records = read(machine)
        yield f"\n{machine}: p in std(S | L) ~ L^p within responses; k in clip rate ~ L^k of widths that clip 10%"
        for kind, own in records.groupby("kind"):
            for last in lasts:
                yield f"  {kind} to {last} tokens: p {exponent_within(own, last):.3f}"
            for width in ("√L", "fixed", "L") if kind != "steps" else ():  # too few with an advantage for a test
                yield f"  {kind}: k of {width} {dependence(own, width):.3f}"
        for width in WIDTHS:
            rates = ", ".join(f"{kind} {rate:.1%}" for kind, rate in rate_of_kinds(records, width).items())
            yield f"  all kinds, {width}: k {dependence(records, width):.3f}; clipped {rates}"


def main() -> None:
    print("\n".join(lines()))


if __name__ == "__main__":
    main()
