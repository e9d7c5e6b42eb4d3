# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A power of the length that clips short and long responses alike, from records."""

import numpy as np
import pandas as pd


def fitted_power(records: pd.DataFrame, rate: float) -> float:
    """p from 0 to 1, in two digits, at which a clip range ∝ L^p is not correlated with log L.

    Each side of the range clips ``rate`` of its responses, of those that have moved and have an advantage.

    Args:
        records: with ``length``, ``log_ratio``, ``quadratic_variation`` and ``advantage``.
    """
    used = records[(records["quadratic_variation"] > 0) & (records["advantage"] != 0)]
    sign, log_length = np.sign(used["advantage"].to_numpy()), np.log(used["length"].to_numpy(float))
    towards, sides = sign * used["log_ratio"].to_numpy(float), (sign > 0, sign < 0)

    def longer_is_clipped(power: float) -> bool:
        score, found = towards / np.exp(power * log_length), 0.0
        for side in sides:
            clipped = score[side] > np.quantile(score[side], 1 - rate)
            found += np.sum(clipped * (log_length[side] - log_length[side].mean()))
        return found > 0

    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if longer_is_clipped(middle) else (low, middle)
    return round((low + high) / 2, 2)
