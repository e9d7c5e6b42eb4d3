# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Live series of a run: what TensorBoard, W&B and the metrics file show of the clip, without a division by the reader.

verl averages metrics, and a rate is no average (:mod:`fspo_verl.observe.metrics`): numerators and denominators reach
the driver apart, as ``actor/fspo/*``. They are divided where a trainer hands the metrics of a step to its loggers, by
the table that reports use (:mod:`fspo_verl.observe.quotients`), so that a rate is that of the step's responses, however
these were cut into ranks and micro-batches. All trainers of verl log through ``Tracking.log``, around which
:mod:`fspo_verl.verl_patches` adds them.
"""

import math
from collections.abc import Mapping

import numpy as np

from fspo_verl.observe.metrics import PREFIX as RAW
from fspo_verl.observe.quotients import MIN_COUNT, length_bins, length_reweighting_error, quotients, sums_of
from fspo_verl.output import Once

_once = Once()

PREFIX = "fspo/"


def series(metrics: Mapping[str, float], min_count: int = MIN_COUNT) -> dict[str, float]:
    """The live series of one step, ``fspo/*``; a number that the step does not give is left out.

    Args:
        metrics: what verl has made of the metrics of :mod:`fspo_verl.observe.metrics`, among any others; without them
            there are no series.
        min_count: responses that a length bin needs to take part in the LRE of the step.

    Returns:
        Each rate of :data:`fspo_verl.observe.quotients.QUOTIENTS`; ``clip_rate/len_LOW_HIGH``, the clip rate of a
        length bin; ``lre``, the length reweighting error of these bins; ``ess``, (Σw)² / (n Σw²) of the
        importance-sampling ratios w of the n responses with a token; ``eps_low`` and ``eps_high``, the eps in force of
        a band that follows a clip rate (:mod:`fspo_verl.adaptive`).
    """
    sums = sums_of(metrics)
    bins = length_bins(sums)
    values = quotients(sums) | {one.series: one.rate for one in bins}
    if "step_rows" in sums and bins:
        n = np.array([round(one.responses * sums["step_rows"]) for one in bins])
        values["lre"] = length_reweighting_error(n, np.array([one.rate for one in bins]), n >= min_count)
    if sums.get("ratio_squared") and sums.get("sequence_fraction") and "ratio" in sums:
        values["ess"] = sums["ratio"] ** 2 / (sums["ratio_squared"] * sums["sequence_fraction"])
    values |= {name: sums[name] for name in ("eps_low", "eps_high") if name in sums}
    return {f"{PREFIX}{name}": value for name, value in values.items() if not math.isnan(value)}


def series_or_warning(data: Mapping) -> dict[str, float]:
    """:func:`series`; none, with a warning, where that fails: logging must not stop training."""
    try:
        return series(data)
    except Exception as error:
        _once.lost(error, f"no live series {PREFIX}* for a step, only their raw sums {RAW}*")
        return {}
