# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Arms at their best learning rates, compared with one of them; the choice of the rates is in the interval."""

import numpy as np
import pandas as pd

from fspo_verl.analysis.clip_rates import CONFIDENCE

RESAMPLINGS = 10_000


def at_best(values: pd.DataFrame, choosing: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """A row per arm: its best learning rate, the mean there, and the mean less that of the baseline with its interval.

    Seeds that choose and seeds that are compared are drawn anew, with replacement and alike for all arms. Each time an
    arm takes the rate at which the drawn choosing seeds have the highest mean. The interval is of percentiles, 95%.

    Args:
        values: of seeds that are compared, a row per arm and seed, a column per learning rate.
        choosing: of other seeds that choose, alike; NaN at a rate that the arm may not take.
    """
    rng, arms = np.random.default_rng(0), list(values.index.unique(0))
    compared, chooses = ({arm: table.loc[arm].to_numpy() for arm in arms} for table in (values, choosing))
    draws = [
        np.vstack([np.arange(len(part)), rng.integers(0, len(part), (RESAMPLINGS, len(part)))])  # first as they are
        for part in (compared[baseline], chooses[baseline])
    ]
    best = {arm: np.nan_to_num(chooses[arm][draws[1]].mean(1), nan=-np.inf).argmax(1)[:, None] for arm in arms}
    means = {arm: np.take_along_axis(compared[arm][draws[0]].mean(1), best[arm], 1)[:, 0] for arm in arms}
    rows = {}
    for arm in arms:
        less = means[arm] - means[baseline]
        ends = np.quantile(less[1:], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        rows[arm] = (values.columns[best[arm][0, 0]], means[arm][0], less[0], *ends)
    return pd.DataFrame.from_dict(rows, "index", columns=["rate", "value", "mean", "lower", "upper"])
