# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Size and power of tests of a mean slope whose steps may persist, in per cent of 4,000 simulated runs.

    python scripts/bench/persistence.py    # half a minute

A step's slope k is the mean, a deviation between steps (standard deviation 0, 0.3 or 0.6, of which 0.3 and 0.6 stand
for 0.15 and 0.3 of the power of the length; independent, or an autoregression of 0.8), and noise of 0.27, as 32 x 8
responses a step have. Every test has the level of 2% that slope and bend have in a report.

- ``t``: Student's t, steps independent.
- ``IM``: t over groups of consecutive steps (Ibragimov and Müller 2010).
- ``EWC``: variance by so many cosines (Müller 2004; Lazarus et al. 2018).
- ``AR(1)``: variance and freedom of an autoregression.
- ``Bartlett``: Newey and West's variance over all lags, with fixed-b critical values (Kiefer and Vogelsang 2005),
  simulated here.
- ``t, EWC 3``: the latter only where the autocorrelation is above 0, one-sided at 0.2, 0.3 or 0.4. A report has 0.4.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import ndtri, stdtr

RUNS, LEVEL, NOISE = 4000, 0.02, 0.27
P = Callable[[np.ndarray], np.ndarray]


def simulate(rng: np.random.Generator, steps: int, mean: float, spread: float, autocorrelation: float) -> np.ndarray:
    """Slopes ``[runs, steps]``."""
    deviation = rng.standard_normal((RUNS, steps))
    for step in range(1, steps):
        fresh = np.sqrt(1 - autocorrelation**2) * deviation[:, step]
        deviation[:, step] = autocorrelation * deviation[:, step - 1] + fresh
    return mean + spread * deviation + NOISE * rng.standard_normal((RUNS, steps))


def student(k: np.ndarray) -> np.ndarray:
    steps = k.shape[1]
    return 2 * stdtr(steps - 1, -np.abs(k.mean(1) / (k.std(1, ddof=1) / np.sqrt(steps))))


def groups(count: int) -> P:
    return lambda k: student(np.stack([part.mean(1) for part in np.array_split(k, count, axis=1)], 1))


def cosines(count: int) -> P:
    def p(k: np.ndarray) -> np.ndarray:
        steps = k.shape[1]
        waves = np.sqrt(2 / steps) * np.cos(np.pi * np.arange(1, count + 1)[:, None] * (np.arange(steps) + 0.5) / steps)
        variance = np.square(k @ waves.T).mean(1)
        return 2 * stdtr(count, -np.abs(np.sqrt(steps) * k.mean(1) / np.sqrt(variance)))

    return p


def autocorrelation(k: np.ndarray) -> np.ndarray:
    """Return the autocorrelation of lag 1, without the bias of a mean that is estimated."""
    rest = k - k.mean(1, keepdims=True)
    return (rest[:, 1:] * rest[:, :-1]).sum(1) / np.square(rest).sum(1) + 1 / k.shape[1]


def autoregression(k: np.ndarray) -> np.ndarray:
    steps, r = k.shape[1], np.clip(autocorrelation(k), 0, 0.97)
    lags = np.arange(1, steps)
    inflation = 1 + 2 * ((1 - lags / steps) * r[:, None] ** lags).sum(1)
    t = k.mean(1) / np.sqrt(k.var(1, ddof=1) * inflation / steps)
    return 2 * stdtr(np.maximum(steps / inflation - 1, 1), -np.abs(t))


def _of_bartlett(k: np.ndarray) -> np.ndarray:
    steps = k.shape[1]
    sums = (k - k.mean(1, keepdims=True)).cumsum(1)
    return np.abs(k.mean(1)) * steps / np.sqrt(2 * np.square(sums).sum(1) / steps)


def bartlett(k: np.ndarray) -> np.ndarray:
    null = np.sort(_of_bartlett(np.random.default_rng(1).standard_normal((20_000, k.shape[1]))))
    return 1 - np.searchsorted(null, _of_bartlett(k)) / len(null)


def two_stages(level: float) -> P:
    def p(k: np.ndarray) -> np.ndarray:
        persists = autocorrelation(k) > ndtri(1 - level) / np.sqrt(k.shape[1])
        return np.where(persists, np.maximum(student(k), cosines(3)(k)), student(k))

    return p


TESTS: dict[str, P] = {
    "t": student,
    **{f"IM {count}": groups(count) for count in (2, 3, 4)},
    **{f"EWC {count}": cosines(count) for count in (2, 3, 6)},
    "AR(1)": autoregression,
    "Bartlett": bartlett,
    **{f"t, EWC 3 at {level}": two_stages(level) for level in (0.2, 0.3, 0.4)},
}
TRUTHS = [(0.0, 0.0), (0.6, 0.0), (0.3, 0.8), (0.6, 0.8)]
"""Spread between steps and its autocorrelation."""


def main() -> None:
    for steps in (15, 30, 100):
        rng = np.random.default_rng(steps)
        middling = [3.25 / np.sqrt(steps) * np.hypot(NOISE, spread) for spread, _ in TRUTHS]
        means = [(0.0, truth) for truth in TRUTHS] + list(zip(middling, TRUTHS, strict=True))
        runs = [simulate(rng, steps, mean, *truth) for mean, truth in means]
        heads = [f"{'k = 0' if not mean else f'k = {mean:.2f}'}, {sd:g}, {r:g}" for mean, (sd, r) in means]
        print(f"\n| {steps} steps | {' | '.join(heads)} |\n| --- {'| --- ' * len(heads)}|")
        for name, test in TESTS.items():
            print(f"| {name} | {' | '.join(f'{100 * (test(k) < LEVEL).mean():.1f}' for k in runs)} |", flush=True)


if __name__ == "__main__":
    main()
