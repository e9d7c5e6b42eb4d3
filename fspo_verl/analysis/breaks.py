# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Finds where a policy breaks, in the metrics that verl logs of a run.

One sign alone is no proof: a curriculum takes reward, learning takes entropy, reasoning makes responses longer. A
policy has broken where its reward is gone and does not come back, and length, entropy or gradient norm has changed by
a large factor since; or, where no reward is logged, where length and one of the others change at once. The thresholds
are chosen here; ``tests/truth_table.py`` has how often they are wrong.
"""

import numpy as np
import pandas as pd

from fspo_verl.analysis.evidence import Break
from fspo_verl.observe.metrics import NAMES

MIN_STEPS = 10
"""Steps that have to be logged: a few at the start of a run show no level that could be lost."""
_GONE = 0.25  # of what the reward had gained, or less, is left
_NOISE = 6.0  # standard deviations between two steps by which the reward has to fall
_FACTOR = 3.0  # by which one of the other signs changes
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
    rewards = [reward for name in _REWARD if len(reward := _logged(metrics, name)) >= MIN_STEPS and reward.any()]
    if rewards:
        reward = rewards[0]
        since = _reward_gone(reward)
        enough = 1
    else:
        since, reward = _length_jump(series["length"]), None
        enough = 2
    if since is None:
        return None
    signs = [sign for name, values in series.items() if (sign := _changed(name, values, since))]
    if len(signs) < enough:
        return None
    if reward is not None:
        signs.insert(0, ("reward", *_levels(reward, since)))
    return Break(since, tuple(signs))


def _logged(metrics: pd.DataFrame, name: str) -> pd.Series:
    """The finite values of a metric, by step."""
    values = metrics[name] if name in metrics else pd.Series(dtype=float)
    return values[np.isfinite(values)]


def _window(steps: int) -> int:
    """Steps of a level: a tenth of the run, and 3 at least."""
    return max(3, steps // 10)


def _levels(values: pd.Series, since: int) -> tuple[float, float]:
    """Medians of the last steps before a step, and of the last steps of the run."""
    window = _window(len(values))
    return float(values[values.index < since].iloc[-2 * window :].median()), float(values.iloc[-window:].median())


def _reward_gone(reward: pd.Series) -> int | None:
    """The first of the steps to the end of the run in which the reward is gone."""
    window = _window(len(reward))
    level = reward.rolling(window).median().dropna()
    start, best = float(level.iloc[0]), float(level.max())
    floor = min(0.0, start)
    limit = floor + _GONE * (best - floor)
    noise = float(np.median(np.abs(np.diff(reward)))) / 0.6745 / np.sqrt(2)
    last = float(level.iloc[-1])
    if last > limit or best - last <= _NOISE * noise:
        return None
    alive = np.flatnonzero(reward.rolling(3, min_periods=1).median().to_numpy() > limit)
    first = int(alive[-1]) + 1 if len(alive) else 0
    return int(reward.index[first]) if window <= first < len(reward) else None


def _length_jump(length: pd.Series) -> int | None:
    """The step at which the length of responses changes at once by the factor, to the end of the run."""
    if len(length) < MIN_STEPS:
        return None
    window = _window(len(length))
    log = np.log(length.clip(lower=1e-9))
    last = float(log.iloc[-window:].median())
    first = len(log) - 1
    while first > 0 and abs(float(log.iloc[first]) - last) < np.log(_FACTOR) / 2:
        first -= 1
    first += 1
    if first < window or first >= len(log):
        return None
    before = float(log.iloc[max(first - 2 * window, 0) : first].median())
    return int(length.index[first]) if abs(before - last) >= np.log(_FACTOR) else None


def _changed(name: str, values: pd.Series, since: int) -> tuple[str, float, float] | None:
    """A sign with its level before the break and at the end, if that is another one by the factor."""
    if len(values) < MIN_STEPS or (values.index < since).sum() < 3:
        return None
    before, after = _levels(values, since)
    if min(before, after) < 0 or max(before, after) <= 0:
        return None
    return (name, before, after) if max(before, after) >= _FACTOR * min(before, after) else None
