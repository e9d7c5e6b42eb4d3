# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Does a clip depend on response length? The one test behind every statement about it.

Only responses with an advantage count. They are compared within strata: one mini-batch of one training step and one
sign of the advantage. Steps, mini-batches and sides that clip more, and lengths that drift over training, then say
nothing about length. Within a stratum the clip rate is taken to go like length^k, given the stratum's total
(conditional Poisson regression). k = 0 means that lengths are clipped alike.

- A score test of k = k0. Its variance is cluster-robust, for prompts and, from 10 steps on, for training steps at once
  (two-way: Cameron, Gelbach and Miller 2011, doi:10.1198/jbes.2010.07136), with Student's t of the smaller number of
  clusters less one. A prompt that comes back in a later epoch is the same cluster.
- The interval of k holds what this test does not reject, so that p-value and interval always agree.
- Clip rates of the thirds by length are adjusted for the same strata by indirect standardisation (overall rate x
  observed / expected clips), the companion of a Mantel-Haenszel test. Pooled rates can contradict the test.

A loss that clips tokens enters with the share of each response's tokens. k compares two clips at one clip rate only.
How often the test errs, and what it can see: ``scripts/studies/levels``.
"""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.stats import t as student

from fspo_verl.analysis.clip_rates import CONFIDENCE, prompts_of

MIN_PROMPTS = 20
"""Prompts with a clip, below which the test says nothing."""
MIN_STEPS = 10
"""Training steps from which they count as clusters; fewer give no variance between steps."""
RARE = 1 - CONFIDENCE
"""p-value below which a dependence is called one."""

_LARGEST = 8.0  # abs(k) beyond which an end of the interval counts as unbounded
_PACE = 0.1  # of k, in the search for an end of the interval


class Third(NamedTuple):
    """A third of the responses by length."""

    shortest: int  # tokens
    longest: int
    median: float
    rate: float  # adjusted clip rate


class LengthEffect(NamedTuple):
    """What :func:`length_effect` finds."""

    exponent: float
    """k in clip rate ~ length^k; below 0 shorter responses are clipped more."""

    lower: float
    """End of the 95% interval of k; -inf where it has none."""

    upper: float
    p: float
    """Of k = 0."""

    thirds: tuple[Third, ...]
    """From the shortest; fewer than three where many responses have one length."""

    @property
    def depends(self) -> bool:
        """Whether a dependence on length is shown."""
        return self.p < RARE


def length_effect(records: pd.DataFrame, clipped: np.ndarray | None = None) -> LengthEffect | None:
    """Test whether a clip depends on length, and estimate how.

    Args:
        records: of :mod:`fspo_verl.observe.records`. The column ``prompt_text_hash`` is the cluster; records without it
            are clustered by ``prompt``.
        clipped: ``[rows]`` bool, or shares of tokens between 0 and 1; that of the records by default.

    Returns:
        None where the records cannot tell: clips in fewer than 20 prompts, or no two lengths to compare in one stratum
        where one response is clipped and another is not.
    """
    data = _Strata.of(records, records["clipped"].to_numpy() if clipped is None else clipped)
    if data is None:
        return None
    exponent, lower, upper = data.interval()
    p = float(2 * student.sf(abs(data.statistic(0.0)), data.clusters - 1))
    return LengthEffect(exponent, lower, upper, p, _thirds(data))


def length_score(records: pd.DataFrame, clipped: np.ndarray) -> float:
    """The statistic of the test of k = 0: above 0 where longer responses are clipped more; NaN where there is none."""
    data = _Strata.of(records, clipped)
    return math.nan if data is None else data.statistic(0.0)


class _Strata(NamedTuple):
    """The responses of all strata that say something; arrays are ``[rows]`` unless stated."""

    rate: float  # clip rate of all responses with an advantage
    log_length: np.ndarray  # centred
    length: np.ndarray
    clipped: np.ndarray
    stratum: np.ndarray
    total: np.ndarray  # clips ``[strata]``
    weight: np.ndarray  # sqrt(P / (P − 1)) for the P prompts of the stratum
    prompt: np.ndarray
    step: np.ndarray
    prompt_in_step: np.ndarray

    @classmethod
    def of(cls, records: pd.DataFrame, clipped: np.ndarray) -> "_Strata | None":
        """None where the records cannot tell."""
        counted = ((records["length"] > 0) & (records["advantage"] != 0)).to_numpy()
        records, clipped = records[counted], np.asarray(clipped)[counted].astype(np.float64)
        if not len(records):
            return None
        rate = float(clipped.mean())
        keys = [records["step"], records["mini_batch"], records["advantage"] > 0]
        stratum = pd.MultiIndex.from_arrays(keys).factorize()[0]
        prompt, length = prompts_of(records), records["length"].to_numpy(np.float64)
        by_stratum = pd.DataFrame({"prompt": prompt, "length": length, "clipped": clipped}).groupby(stratum)
        varies = by_stratum[["length", "clipped"]].nunique() > 1
        prompts = by_stratum["prompt"].nunique().to_numpy()
        use = (varies.all(axis=1).to_numpy() & (prompts > 1))[stratum]
        if np.unique(prompt[use & (clipped > 0)]).size < MIN_PROMPTS:
            return None
        stratum, kept = pd.factorize(stratum[use])
        prompt, step = pd.factorize(prompt[use])[0], pd.factorize(records["step"].to_numpy()[use])[0]
        x, clipped = np.log(length[use]), clipped[use]
        return cls(
            rate,
            x - x.mean(),
            length[use],
            clipped,
            stratum,
            np.bincount(stratum, clipped),
            np.sqrt(prompts[kept] / (prompts[kept] - 1))[stratum],
            prompt,
            step,
            pd.factorize(step * np.int64(prompt.max() + 1) + prompt)[0],
        )

    @property
    def by_step(self) -> bool:
        return self.step.max() + 1 >= MIN_STEPS

    @property
    def clusters(self) -> int:
        """The smaller number of clusters."""
        prompts, steps = int(self.prompt.max()) + 1, int(self.step.max()) + 1
        return min(prompts, steps) if self.by_step else prompts

    def scores(self, exponent: float) -> np.ndarray:
        """Derivative ``[rows]`` of the conditional log-likelihood; its sum falls with the exponent."""
        odds = np.exp(exponent * self.log_length)
        share = odds / np.bincount(self.stratum, odds)[self.stratum]
        center = np.bincount(self.stratum, share * self.log_length)[self.stratum]
        return (self.log_length - center) * (self.clipped - self.total[self.stratum] * share)

    def statistic(self, exponent: float) -> float:
        """Student's t of the score; 0 where it does not vary.

        The squares that make the variance are not centred, and so hold the effect itself. For the sum s of G values
        over the root of their squares, Student's t is s·sqrt((G − 1) / (G − s²)).
        """
        scores = self.scores(exponent)
        weighted = scores * self.weight
        variance = _squares(self.prompt, weighted)
        if self.by_step:
            two_way = variance + _squares(self.step, scores) - _squares(self.prompt_in_step, weighted)
            variance = max(two_way, variance)
        if variance <= 0:
            return 0.0
        ratio, count = scores.sum() / math.sqrt(variance), self.clusters
        return float(ratio * math.sqrt((count - 1) / max(count - ratio**2, 1e-9)))

    def interval(self) -> tuple[float, float, float]:
        """The estimate and both ends of its interval."""
        total = lambda exponent: self.scores(exponent).sum()  # noqa: E731
        if total(-_LARGEST) <= 0:
            estimate = -_LARGEST
        elif total(_LARGEST) >= 0:
            estimate = _LARGEST
        else:
            estimate = brentq(total, -_LARGEST, _LARGEST, xtol=1e-6)
        quantile = student.ppf((1 + CONFIDENCE) / 2, self.clusters - 1)
        return estimate, self._end(estimate, -_PACE, quantile), self._end(estimate, _PACE, quantile)

    def _end(self, estimate: float, pace: float, quantile: float) -> float:
        """Where, going outwards from the estimate, the test first rejects."""
        excess = lambda exponent: abs(self.statistic(exponent)) - quantile  # noqa: E731
        if abs(estimate) >= _LARGEST:  # clips and lengths are as good as separated
            return math.copysign(math.inf, pace) if estimate * pace > 0 else estimate
        inside = estimate
        while abs(inside) <= _LARGEST:
            outside = inside + pace
            if excess(outside) > 0:
                return brentq(excess, inside, outside, xtol=1e-6)
            inside = outside
        return math.copysign(math.inf, pace)


def _squares(cluster: np.ndarray, scores: np.ndarray) -> float:
    return float(np.square(np.bincount(cluster, scores)).sum())


def _thirds(data: _Strata) -> tuple[Third, ...]:
    expected = (data.total / np.bincount(data.stratum))[data.stratum]
    third = np.digitize(data.length, np.quantile(data.length, [1 / 3, 2 / 3]))
    found = []
    for part in (third == number for number in range(3)):
        if part.any():
            length, rate = data.length[part], data.rate * data.clipped[part].sum() / expected[part].sum()
            found.append(Third(int(length.min()), int(length.max()), float(np.median(length)), float(rate)))
    return tuple(found)
