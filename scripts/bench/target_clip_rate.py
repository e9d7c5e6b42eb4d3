# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The number of batches after which eps has found the clip rate that was asked for.

    python scripts/bench/target_clip_rate.py    # some seconds

Each side of the band has this many responses a step, whose S/sqrt(L) is normal, and starts with twice the eps that it
needs. Of 200 steps the later hundred count; 20 seeds of each.
"""

import logging
from statistics import NormalDist

import numpy as np
import pandas as pd

from fspo_verl.adaptive import AdaptiveBand, Controller

SIGMA, STEPS, SEEDS = 0.02, 200, 20


def rates(target: float, responses: int, seed: int) -> np.ndarray:
    """The clip rate of each step, ``[STEPS]``."""
    rng, needed = np.random.default_rng(seed), SIGMA * NormalDist().inv_cdf(1 - target)
    follows, found = Controller(AdaptiveBand(eps=2 * needed, target_clip_rate=target)), []
    for _ in range(STEPS):
        s = SIGMA * rng.standard_normal((2, responses))
        clipped = (s > np.array([*follows.eps.values()])[:, None]).sum(1)
        follows.move(np.array([[count, responses] for count in clipped]))
        found.append(clipped.sum() / (2 * responses))
    return np.array(found)


def cell(target: float, responses: int) -> str:
    """Mean over the seeds, least and most."""
    means = np.array([100 * rates(target, responses, seed)[STEPS // 2 :].mean() for seed in range(SEEDS)])
    digits = 2 if target < 0.05 else 1
    return f"{means.mean():.{digits}f}% [{means.min():.{digits}f}, {means.max():.{digits}f}]"


def table() -> pd.DataFrame:
    """A row per batch, a column per target."""
    logging.getLogger("fspo_verl").setLevel(logging.ERROR)  # the warning that an eps is slow to follow
    targets, responses = (0.001, 0.01, 0.1, 0.25), (2, 4, 16, 64, 512)
    cells = {
        f"{target:.1%} asked".replace(".0%", "%"): [cell(target, count) for count in responses] for target in targets
    }
    return pd.DataFrame(cells, pd.Index(map(str, responses), name="responses of a side, a step"))


def main() -> None:
    print(table().to_string())


if __name__ == "__main__":
    main()
