# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The numerical noise of a run, from its records or its live metrics; see :mod:`fspo_verl.observe.noise`."""

import math

import numpy as np
import pandas as pd

from fspo_verl.band import Band
from fspo_verl.clips import standardized, upper_quantile
from fspo_verl.observe.noise import MEANS, ROWS, SHARE, Noise, of_means, on_policy
from fspo_verl.observe.settings import RunSettings


def of_records(records: pd.DataFrame, settings: RunSettings | None, band: Band | None) -> Noise | None:
    """The noise of a run's records, against a band; None if none shows it."""
    rows = records[on_policy(records["mini_batch"], settings)]
    rows = rows[np.isfinite(rows[["log_ratio", "quadratic_variation"]]).all(axis=1) & (rows["length"] > 0)]
    if not len(rows):
        return None
    length, q = (rows[name].to_numpy(np.float64) for name in ("length", "quadratic_variation"))
    noise = Noise(len(rows), math.sqrt((q / length).mean()))
    if band is None:
        return noise
    score = standardized(rows, band)
    distance = np.abs(score) / np.where(score > 0, band.high, band.low)  # from the centre, in half-widths
    return noise._replace(outside=float((distance > 1).mean()), widen=upper_quantile(distance, SHARE))


def of_metrics(metrics: pd.DataFrame) -> Noise | None:
    """The noise of a run's live metrics (a table of :class:`fspo_verl.analysis.runs.Run`); None if it logs none."""
    if not set(MEANS[:2]) <= set(metrics):
        return None
    on_policy_steps = metrics[metrics[MEANS[0]] > 0]  # alone say how many rows there are
    means = {name: float(value) for name, value in metrics.reindex(columns=MEANS).mean().items()}
    return of_means(means | {ROWS: float(on_policy_steps[ROWS].mean())}, len(on_policy_steps))
