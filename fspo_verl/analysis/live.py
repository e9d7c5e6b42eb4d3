# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Live series of a run: what TensorBoard, W&B and the metrics file show of the clip, without a division by the reader.

Numerators and denominators reach the driver apart, as ``actor/fspo/*`` (:mod:`fspo_verl.observe.metrics`). They are
divided where a trainer hands the metrics of a step to its loggers, by the table of
:mod:`fspo_verl.observe.quotients`, so that a rate is that of the step's responses, however these were cut into ranks
and micro-batches. All trainers of verl log through ``Tracking.log``, around which :mod:`fspo_verl.verl_patches` puts
:func:`logged`: a run logs the series, and no raw sum. Counts among them turn the rates of steps into those of a run
(:func:`over_steps`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from fspo_verl.observe.metrics import NAMES, STEP_ROWS
from fspo_verl.observe.metrics import PREFIX as RAW
from fspo_verl.observe.metrics import SERIES as PREFIX
from fspo_verl.observe.quotients import (
    MIN_COUNT,
    Counted,
    effective_sample_size,
    length_bins,
    length_reweighting_error,
    quotients,
    sums_of,
)
from fspo_verl.output import ONCE

_BIN = re.compile(r"step_responses/len_(\d+)_(\d+|up)")
COUNT = "step_responses/"
"""Counts are of the responses of a step, each as often as it was trained on."""


def series(metrics: Mapping[str, float], min_count: int = MIN_COUNT) -> dict[str, float]:
    """The live series of one step, ``fspo/*``; a number that the step does not give is left out.

    Args:
        metrics: what verl has made of the metrics of :mod:`fspo_verl.observe.metrics`, among any others; without them
            there are no series.
        min_count: responses that a length bin needs to take part in the LRE of the step.

    Returns:
        Each rate of :data:`fspo_verl.observe.quotients.QUOTIENTS`; ``clip_rate/len_LOW_HIGH``, the clip rate of a
        length bin; ``lre``, the length reweighting error of these bins; ``ess``, the effective sample size of the
        ratios that the clip leaves; ``step_responses/*``, how many responses of the step have an advantage by length
        bin, and A > 0 (``better``), and how many no update had moved (``unmoved``).
    """
    sums = sums_of(metrics)
    bins = length_bins(sums)
    values = quotients(sums) | {f"clip_rate/{one.name}": one.rate for one in bins}
    if STEP_ROWS in sums and bins:
        rows = sums[STEP_ROWS]
        counts = {one.name: one.responses for one in bins}
        counts |= {"better": sums.get("better/responses", 0.0), "unmoved": sums.get("on_policy_fraction", 0.0)}
        values |= {COUNT + name: round(share * rows) for name, share in counts.items()}
        n = np.array([values[COUNT + one.name] for one in bins])
        values["lre"] = length_reweighting_error(n, np.array([one.rate for one in bins]), n >= min_count)
    if (share := effective_sample_size(sums)) is not None:
        values["ess"] = share
    return {f"{PREFIX}{name}": value for name, value in values.items() if not math.isnan(value)}


def logged(data: Mapping) -> Mapping:
    """Return what a run logs of a step: :func:`series` in place of the raw sums; ``data`` itself where there are none.

    They are logged as they came, with a warning, where that fails: logging must not stop training.
    """
    try:
        found = series(data)
    except Exception as error:
        ONCE.lost(error, f"no live series {PREFIX}* for a step, only their raw sums {RAW}*")
        return data
    if not found:
        return data
    return {name: value for name, value in data.items() if not name.startswith(RAW)} | found


def of_log(metrics: Mapping[str, float]) -> dict[str, float]:
    """The series among the metrics of a step, by their names without the prefix; finite ones only."""
    found = {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def over_steps(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The series of several steps as if they were one: counts are added, and each rate is weighted by what it is of.

    Where that is no count of the log a step has the weight 1, or its response length if the rate is over tokens.

    Args:
        steps: the metrics of each, as they were logged; NaN where one was not.
    """
    counts, weighted, weights = (defaultdict[str, float](float) for _ in range(3))
    for metrics in steps:
        found = of_log(metrics)
        for name, value in found.items():
            if name.startswith(COUNT):
                counts[name] += value
                continue
            weight = _weight(name, found, metrics)
            weighted[name] += weight * value ** _power(name)
            weights[name] += weight
    rates = {name: (weighted[name] / weights[name]) ** (1 / _power(name)) for name in weights if weights[name] > 0}
    return {PREFIX + name: float(value) for name, value in (rates | counts).items()}


def _power(name: str) -> int:
    """Return the mean of spreads: the root of their mean square."""
    return 2 if name.endswith("_sigma") else 1


def _weight(name: str, found: Mapping[str, float], metrics: Mapping[str, float]) -> float:
    """The count that a rate of a step is of, or what stands for it."""
    counts = {key.removeprefix(COUNT): value for key, value in found.items() if key.startswith(COUNT)}
    group = name.removeprefix("clip_rate/")
    if group in counts:
        return counts[group]
    if name.startswith("noise_"):
        return counts.get("unmoved", 1.0)
    if group in ("all", "worse"):
        responses = sum(value for key, value in counts.items() if key.startswith("len_"))
        return max(responses - (counts.get("better", 0.0) if group == "worse" else 0.0), 0.0) if counts else 1.0
    if name == "mismatch_sigma":
        length = metrics.get(NAMES["response_length"], 1.0)
        return length if math.isfinite(length) else 1.0
    return 1.0


def bins_of_log(series: Mapping[str, float]) -> list[Counted]:
    """The length bins of :func:`of_log`, from the shortest, with counts of responses."""
    found = []
    for name, count in series.items():
        match = _BIN.fullmatch(name)
        rate = series.get(f"clip_rate/{name.removeprefix(COUNT)}") if match else None
        if match and rate is not None and count > 0:
            longest = math.nan if match[2] == "up" else float(match[2])
            found.append(Counted(float(match[1]), longest, count, rate * count))
    return sorted(found)
