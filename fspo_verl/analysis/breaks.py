# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds where a policy breaks, in the metrics that verl logs of a run.

One sign alone is no proof: a curriculum takes reward, learning takes entropy, reasoning makes responses longer. A
policy has broken where its reward is gone and does not come back, and length, entropy or gradient norm has changed by
a large factor since it was well; or, where no reward is logged, where length and one of the others change at once. The
thresholds are chosen here; ``tests/truth_table.py`` has how often they are wrong.
"""

import math

import numpy as np
import pandas as pd
from scipy.special import ndtri

from fspo_verl.analysis.evidence import Break
from fspo_verl.observe.metrics import NAMES

MIN_STEPS = 10
"""Steps that have to be logged: a few at the start of a run show no level that could be lost."""
_WELL, _GONE = 0.75, 0.25  # shares of what the reward had gained that are left, at least and at most
_NOISE = 6.0  # standard deviations of a step's reward by which it has to fall
_FACTOR = 4.0  # by which one of the other signs changes
_REWARD = (NAMES["reward"], "critic/rewards/mean")
_SIGNS = {
    "length": NAMES["response_length"],
    "entropy": "actor/entropy",
    "gradient norm": NAMES["grad_norm"],
}


def find_break(metrics: pd.DataFrame) -> Break | None:
    """The break of a policy that lasts to the end of a run; None where there is none, or it cannot be told.

    Args:
        metrics: of :class:`fspo_verl.analysis.logs.Log`.
    """
    series = {name: _logged(metrics, metric) for name, metric in _SIGNS.items()}
    rewards = [values for name in _REWARD if len(values := _logged(metrics, name)) >= MIN_STEPS and values.any()]
    fall = _fall(rewards[0]) if rewards else _jump(series["length"])
    if fall is None:
        return None
    levels = {name: found for name, values in series.items() if (found := _levels(values, fall[0]))}
    signs = [(name, *found) for name, found in levels.items() if 0 <= _FACTOR * min(found) <= max(found) != 0]
    if len(signs) < (1 if rewards else 2):
        return None
    if rewards and (of_reward := _levels(rewards[0], fall[0])):
        signs.insert(0, ("reward", *of_reward))
    return Break(fall[1], tuple(signs))


def _logged(metrics: pd.DataFrame, name: str) -> pd.Series:
    """The finite values of a metric, by step."""
    values = metrics[name] if name in metrics else pd.Series(dtype=float)
    return values[np.isfinite(values)]


def _window(steps: int) -> int:
    """Steps of a level: a tenth of the run, and 3 at least."""
    return max(3, steps // 10)


def _levels(values: pd.Series, well: int) -> tuple[float, float] | None:
    """Medians of the last steps up to one, and of the last of the run; None where few are logged."""
    window = _window(len(values))
    before = values[values.index <= well].iloc[-2 * window :]
    if len(values) < MIN_STEPS or len(before) < 3:
        return None
    return float(before.median()), float(values.iloc[-window:].median())


def _fall(reward: pd.Series) -> tuple[int, int] | None:
    """The last step at which the reward was well, and the first from which it is gone to the end of the run."""
    window = _window(len(reward))
    level = reward.rolling(window).median().dropna()
    floor, best, last = min(0.0, float(level.iloc[0])), float(level.max()), float(level.iloc[-1])
    # A quantile of the changes, not their median, which is 0 where most rewards are.
    noise = float(np.quantile(np.abs(np.diff(reward)), 0.9) / ndtri(0.95)) / np.sqrt(2)
    if best - last <= _NOISE * noise:
        return None
    left = (reward.rolling(3, min_periods=1).median() - floor) / (best - floor)
    well, alive = (np.flatnonzero(left > share) for share in (_WELL, _GONE))
    if last - floor > _GONE * (best - floor) or not len(well):
        return None
    first = int(alive[-1]) + 1
    return (int(reward.index[well[-1]]), int(reward.index[first])) if window <= first < len(reward) else None


def _jump(length: pd.Series) -> tuple[int, int] | None:
    """The last step before the length of responses changes at once by the factor, for good, and the first after."""
    if len(length) < MIN_STEPS:
        return None
    window = _window(len(length))
    log = np.log(length.clip(lower=1e-9))
    last = float(log.iloc[-window:].median())
    first = int(np.flatnonzero(np.abs(log - last) >= math.log(_FACTOR) / 2).max(initial=-1)) + 1
    if not window <= first < len(log):
        return None
    before = float(log.iloc[max(first - 2 * window, 0) : first].median())
    steps = int(length.index[first - 1]), int(length.index[first])
    return steps if abs(before - last) >= math.log(_FACTOR) else None
