# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""From which batch on an eps finds the clip rate that was asked for: the table of docs/install.md.

    python scripts/bench/target_clip_rate.py    # a minute

Each side of the band has this many responses a step, whose S/sqrt(L) is normal, and starts with twice the eps that it
needs. Of 200 steps the later hundred count; 20 seeds of each.
"""

import itertools
import math
from statistics import NormalDist

import numpy as np

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


def main() -> None:
    for target, responses in itertools.product((0.001, 0.01, 0.1, 0.25), (2, 4, 16, 64, 512)):
        runs = np.array([rates(target, responses, seed)[STEPS // 2 :] for seed in range(SEEDS)])
        means = runs.mean(1)
        steady = runs[runs.std(1) > 0]
        swing = np.mean([np.corrcoef(run[:-1], run[1:])[0, 1] for run in steady]) if len(steady) else math.nan
        print(f"{target:.2%} asked, {responses} responses a side and step: {means.mean():.2%}", end=" ")
        print(f"[{means.min():.2%}, {means.max():.2%}], correlation of successive steps {swing:.2f}", flush=True)


if __name__ == "__main__":
    main()
