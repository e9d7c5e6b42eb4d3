# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The test whether a clip depends on response length; all statements about length rest on it.

Only responses with an advantage count. They are compared within strata: one mini-batch of one training step and one
sign of the advantage. Steps, mini-batches and sides that clip more, and lengths that drift over training, then say
nothing about length. Within a stratum the log of the clip rate is taken to be a line or a parabola in x = log length,
given the stratum's total (conditional Poisson regression). Above half clipped it is the rate of what is kept.

- A score test of no dependence with two degrees of freedom, x and x², which sees curves. Its variance is
  cluster-robust, for prompts and, from 10 steps on, for training steps at once (two-way: Cameron, Gelbach and Miller
  2011, doi:10.1198/jbes.2010.07136), with Hotelling's law of the smaller number of clusters. A prompt that comes back
  in a later epoch is the same cluster. Below 10 steps it speaks of these steps alone: how steps differ is not known.
- Steps whose slopes differ, with mean 0, clip both ends more on average, as exp is convex. It is the mean of the log
  rate that is tested: what such slopes add to the scores of a step, to second order, is taken out (derived here).
- A length may matter unlike for responses better and worse than their group, and even the opposite way: a score test of
  x·sign(A). Both tests share the level, 0.045 and 0.005 (Bonferroni, weighted), and the p-value is of both.
- Where the first finds a dependence, a score test of x² asks whether a line is enough, clip rate ~ length^k. The
  interval of k holds what the same test of one degree of freedom does not reject. It may hold 0 where the p-value is
  small, as that sees curves and sides. Where a line is not enough the parabola says who is clipped more: both ends, or
  the middle, where its slopes at the shortest and the longest tenth point opposite ways
  (Lind and Mehlum 2010, doi:10.1111/j.1468-0084.2009.00569.x).
- Counted clip rates can contradict the test: they hold the differences between strata, which it leaves out.

A loss that clips tokens enters with the share of each response's tokens. k compares two clips at one clip rate only.
How often the test errs, and what it can see: ``tests/truth_table.py``.
"""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import fdtrc, fdtri, stdtr, stdtrit

from fspo_verl.analysis.clip_rates import CONFIDENCE, prompts_of, strata_of, t_quantile

MIN_PROMPTS = 20
"""Prompts with a clip (above half clipped: with a response that is kept), below which the test says nothing."""
MIN_STEPS = 10
"""Training steps from which they count as clusters; fewer give no variance between steps, and no verdict on a run."""
RARE = 1 - CONFIDENCE
"""p-value below which a dependence is called one."""
WHO = SHORTER, LONGER, ENDS, MIDDLE, BY_SIDE = ("shorter", "longer", "both ends", "the middle", "by side")
"""Which responses a clip can take more of; BY_SIDE: length matters unlike for either sign of the advantage."""

_OF_SIDES = 0.1  # part of the level that the test of the sides takes
_LARGEST = 8.0  # abs(k) beyond which an end of the interval counts as unbounded
_PACE = 0.1  # of k, in the search for an end of the interval
_ROUNDS = 30  # of Newton's method, which takes five where lengths do not decide alone
_OPPOSITE = {SHORTER: LONGER, LONGER: SHORTER, ENDS: MIDDLE, MIDDLE: ENDS}


class LengthEffect(NamedTuple):
    """What :func:`length_effect` finds.

    Attributes:
        exponent: k in clip rate ~ length^k, or of the rate of what is kept. Misleading without ``is_line``.
        lower, upper: the 95% interval of k; infinite where it has no end.
        p: of no dependence, whatever its form.
        who: which responses the clip takes more of, one of :data:`WHO`; None where no dependence is shown.
        is_line: a dependence is shown, and k describes it.
        factor: ratio of the clip rates of two lengths between the shortest and the longest tenth, up to which a
            dependence is compatible with the responses; NaN where one is shown.
        of_kept: more than half is clipped: k and factor are those of the rate of what is kept.
        steps: training steps that were compared.
    """

    exponent: float
    lower: float
    upper: float
    p: float
    who: str | None = None
    is_line: bool = False
    factor: float = math.nan
    of_kept: bool = False
    steps: int = 0

    @property
    def depends(self) -> bool:
        """Whether a dependence on length is shown."""
        return self.p < RARE

    @property
    def is_of_run(self) -> bool:
        """Whether the result holds for the run, and not for the recorded steps alone."""
        return self.steps >= MIN_STEPS


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
    of_all, of_sides = data.p_value() / (1 - _OF_SIDES), data.p_value_of_sides() / _OF_SIDES
    p, who, is_line, factor = min(of_all, of_sides, 1.0), None, False, math.nan
    if p >= RARE:
        factor = data.compatible_factor()
    elif of_sides < of_all:
        who = BY_SIDE
    else:
        is_line = not lower <= 0 <= upper and data.p_value_of_line(exponent) >= RARE
        more = (LONGER if exponent > 0 else SHORTER) if is_line else data.name_of_curve()
        who = _OPPOSITE[more] if data.of_kept else more
    return LengthEffect(exponent, lower, upper, p, who, is_line, factor, data.of_kept, data.steps)


class _Fit(NamedTuple):
    """What a line or a parabola expects, given the totals of the strata."""

    expected: np.ndarray  # outcome ``[rows]``
    excess: np.ndarray  # of the outcome over it
    directions: np.ndarray  # ``[2, rows]``: x and x² less their means in the stratum, weighted by what is expected

    @property
    def information(self) -> np.ndarray:
        """On slope and bend ``[2, 2]``."""
        return (self.directions * self.expected) @ self.directions.T


class _Strata(NamedTuple):
    """The responses of all informative strata; arrays are ``[rows]`` unless stated.

    The outcome is the clip, or above half clipped its absence: the rarer of the two.
    """

    of_kept: bool
    powers: np.ndarray  # ``[2, rows]``: x, the log length less its mean, and x²
    side: np.ndarray  # sign of the advantage
    outcome: np.ndarray
    stratum: np.ndarray
    total: np.ndarray  # of the outcome ``[strata]``
    weight: np.ndarray  # sqrt(P / (P − 1)) for the P prompts of the stratum
    prompt: np.ndarray
    step: np.ndarray
    prompt_in_step: np.ndarray

    @classmethod
    def of(cls, records: pd.DataFrame, clipped: np.ndarray) -> "_Strata | None":
        """None where the records cannot tell."""
        counted = ((records["length"] > 0) & (records["advantage"] != 0)).to_numpy()
        records, outcome = records[counted], np.asarray(clipped)[counted].astype(np.float64)
        if not len(records):
            return None
        of_kept = bool(outcome.mean() > 0.5)
        outcome = 1 - outcome if of_kept else outcome
        stratum, prompt, length = strata_of(records), prompts_of(records), records["length"].to_numpy(np.float64)
        by_stratum = pd.DataFrame({"prompt": prompt, "length": length, "outcome": outcome}).groupby(stratum)
        kinds = by_stratum.nunique()
        use = (kinds > 1).all(axis=1).to_numpy()[stratum]
        if np.unique(prompt[use & (outcome > 0)]).size < MIN_PROMPTS:
            return None
        stratum, kept = pd.factorize(stratum[use])
        prompts, outcome, x = kinds["prompt"].to_numpy()[kept], outcome[use], np.log(length[use])
        x = x - x.mean()
        prompt, step = (pd.factorize(code[use])[0] for code in (prompt, records["step"].to_numpy()))
        return cls(
            of_kept,
            np.stack([x, np.square(x)]),
            np.sign(records["advantage"].to_numpy(np.float64)[use]),
            outcome,
            stratum,
            np.bincount(stratum, outcome),
            np.sqrt(prompts / (prompts - 1))[stratum],
            prompt,
            step,
            pd.factorize(step * np.int64(prompt.max() + 1) + prompt)[0],
        )

    @property
    def steps(self) -> int:
        return int(self.step.max()) + 1

    @property
    def by_step(self) -> bool:
        return self.steps >= MIN_STEPS

    @property
    def clusters(self) -> int:
        """The smaller number of clusters."""
        prompts = int(self.prompt.max()) + 1
        return min(prompts, self.steps) if self.by_step else prompts

    # --- scores: derivatives of the log-likelihood along directions, given the totals of the strata ------------------

    def at(self, slope: float, bend: float = 0.0) -> _Fit:
        """The fit where log rate = slope · x + bend · x² + that of the stratum."""
        line = slope * self.powers[0] + bend * self.powers[1]
        odds = np.exp(line - line.max())
        share = odds / np.bincount(self.stratum, odds)[self.stratum]
        means = np.stack([np.bincount(self.stratum, share * power)[self.stratum] for power in self.powers])
        expected = self.total[self.stratum] * share
        return _Fit(expected, self.outcome - expected, self.powers - means)

    def sums(self, fit: _Fit, directions: np.ndarray, corrected: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Sum ``[k]`` of the scores along directions ``[k, rows]``, less their surplus where it is ``corrected``.

        Also its variance ``[k, k]``, at least that with prompts as clusters.
        """
        scores = directions * fit.excess
        surplus = self.surplus(fit, directions) if corrected and self.by_step else np.zeros((len(scores), self.steps))
        weighted = scores * self.weight
        variance = _squares(self.prompt, weighted)
        if self.by_step:
            by_step = _sums(self.step, scores) - surplus
            values, vectors = np.linalg.eigh(by_step @ by_step.T - _squares(self.prompt_in_step, weighted))
            variance = variance + (vectors * np.maximum(values, 0)) @ vectors.T
        return scores.sum(1) - surplus.sum(1), variance

    def surplus(self, fit: _Fit, directions: np.ndarray) -> np.ndarray:
        """What slopes that differ from step to step, with mean 0, add to the score sums of a step ``[k, steps]``.

        To second order it is half the variance of the slopes times the derivative of the slope's information along each
        direction ``[k, rows]``. The variance is that of the slope's score over the squared information, less what
        sampling explains of it, which makes it unbiased.
        """
        x = fit.directions[0]
        score, information = x * fit.excess, fit.expected * np.square(x)
        step_of_pair = np.zeros(int(self.prompt_in_step.max()) + 1, np.int64)
        step_of_pair[self.prompt_in_step] = self.step
        by_pair = np.square(np.bincount(self.prompt_in_step, score * self.weight))
        sampling = np.bincount(step_of_pair, by_pair, self.steps)
        squares = np.square(np.bincount(self.step, score))
        variance = (squares - sampling) / np.square(np.bincount(self.step, information))
        return _sums(self.step, directions * information) * variance / 2

    # --- tests -------------------------------------------------------------------------------------------------------

    def p_value(self) -> float:
        """p of the score test of no dependence.

        The squares that make the variance are not centred, and so hold the effect itself. For q = s'V⁻¹s of the sums s
        of G vectors, Hotelling's T² is q · (G − 1) / (G − q).
        """
        fit, count = self.at(0.0), self.clusters
        total, variance = self.sums(fit, fit.directions)
        q = min(float(total @ np.linalg.pinv(variance, rcond=1e-10, hermitian=True) @ total), count)
        squared = q * (count - 1) / max(count - q, 1e-9)
        return float(fdtrc(2, count - 2, squared * (count - 2) / (2 * (count - 1))))

    def p_value_of_sides(self) -> float:
        """p of the score test that the slope is the same for both signs of the advantage; 1 where one has no clips."""
        if (self.side == self.side[0]).all():
            return 1.0
        fit = self.at(0.0)
        return self._p_of(fit, self.side * fit.directions[:1])

    def p_value_of_line(self, exponent: float) -> float:
        """p of the score test of a line: the score of the bend at this slope, less what the slope explains of it."""
        if abs(exponent) >= _LARGEST:
            return 1.0
        fit = self.at(exponent)
        information = fit.information
        return self._p_of(fit, np.array([[-information[0, 1] / information[0, 0], 1.0]]) @ fit.directions)

    def _p_of(self, fit: _Fit, direction: np.ndarray) -> float:
        """p of the score test along one direction ``[1, rows]``."""
        return float(2 * stdtr(self.clusters - 1, -abs(self._t_of(*self.sums(fit, direction)))))

    def _t_of(self, total: np.ndarray, variance: np.ndarray) -> float:
        """Student's t of one sum with this variance, as T² in :meth:`p_value`; 0 without variance."""
        if variance.item() <= 0:
            return 0.0
        ratio, count = total.item() / math.sqrt(variance.item()), self.clusters
        return float(ratio * math.sqrt((count - 1) / max(count - ratio**2, 1e-9)))

    # --- the parabola ------------------------------------------------------------------------------------------------

    def name_of_curve(self) -> str:
        """Which lengths have the outcome more often, by the slopes of the parabola at both ends."""
        estimate, covariance = self.parabola()
        ends = np.quantile(self.powers[0], [0.1, 0.9])
        gradient = np.stack([np.ones(2), 2 * ends])  # of both slopes
        slope, spread = estimate @ gradient, _spread(gradient, covariance)
        low, high = slope / spread
        enough = stdtrit(self.clusters - 1, CONFIDENCE)
        if low < -enough and high > enough:
            return ENDS
        if low > enough and high < -enough:
            return MIDDLE
        return LONGER if slope.sum() > 0 else SHORTER  # the chord of a parabola has the mean of both slopes

    def parabola(self) -> tuple[np.ndarray, np.ndarray]:
        """Slope and bend, by Newton's method, and their covariance ``[2, 2]``."""
        estimate, reach = np.zeros(2), np.abs(self.powers).max(1)
        for _ in range(_ROUNDS):
            fit = self.at(*estimate)
            change = np.linalg.lstsq(fit.information, (fit.directions * fit.excess).sum(1), rcond=None)[0]
            change /= max(np.abs(change) @ reach / 2, 1.0)
            estimate = estimate + change
            if np.abs(change) @ reach < 1e-6:
                break
        return self._one_step(estimate)

    def _one_step(self, estimate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One step of Newton's method without the surplus, and the covariance of slope and bend."""
        fit = self.at(*estimate)
        total, variance = self.sums(fit, fit.directions)
        inverse = np.linalg.pinv(fit.information, hermitian=True)
        return estimate + inverse @ total, inverse @ variance @ inverse

    def compatible_factor(self) -> float:
        """The largest ratio of the rates of two lengths that is compatible with the responses."""
        (estimate, covariance), count = self._one_step(np.zeros(2)), self.clusters
        # The log ratio of the rates at two of the nine tenth points of x is linear in slope and bend.
        tenths = np.quantile(self.powers[0], np.arange(1, 10) / 10)
        first, second = np.triu_indices(len(tenths), 1)
        pairs = np.stack([tenths[second] - tenths[first], np.square(tenths[second]) - np.square(tenths[first])])
        # Scheffé: intervals this wide hold for all pairs at once, as slope and bend have one joint confidence region.
        wide = math.sqrt(2 * (count - 1) / (count - 2) * fdtri(2, count - 2, CONFIDENCE))
        largest = float((np.abs(estimate @ pairs) + wide * _spread(pairs, covariance)).max())
        return math.exp(largest) if largest < 50 else math.inf

    # --- the exponent of a line --------------------------------------------------------------------------------------

    def score(self, exponent: float) -> tuple[np.ndarray, np.ndarray]:
        """The score of a line, which falls with the exponent, and its variance; the surplus stays in it."""
        fit = self.at(exponent)
        return self.sums(fit, fit.directions[:1], corrected=False)

    def interval(self) -> tuple[float, float, float]:
        """The estimate and both ends of its interval."""
        score = lambda exponent: self.score(exponent)[0].item()  # noqa: E731
        for bound in (-_LARGEST, _LARGEST):
            if score(bound) * bound >= 0:  # clips and lengths are as good as separated
                lower, upper = sorted((bound, math.copysign(math.inf, bound)))
                return bound, lower, upper
        estimate = brentq(score, -_LARGEST, _LARGEST, xtol=1e-6)
        return estimate, self._end(estimate, -_PACE), self._end(estimate, _PACE)

    def _end(self, estimate: float, pace: float) -> float:
        """The first value outwards from the estimate that the test rejects: there may be others beyond it."""
        quantile = t_quantile(self.clusters - 1)
        excess = lambda exponent: abs(self._t_of(*self.score(exponent))) - quantile  # noqa: E731
        inside = estimate
        while abs(inside) <= _LARGEST:
            outside = inside + pace
            if excess(outside) > 0:
                return brentq(excess, inside, outside, xtol=1e-6)
            inside = outside
        return math.copysign(math.inf, pace)


def _spread(contrasts: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Standard errors of ``[2, k]`` contrasts of slope and bend."""
    return np.sqrt(np.einsum("ij,ik,kj->j", contrasts, covariance, contrasts))


def _sums(code: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sums ``[k, codes]`` of values ``[k, rows]`` over the rows of each code."""
    return np.stack([np.bincount(code, one) for one in values])


def _squares(cluster: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Sum over the clusters of the products of their ``[k, rows]`` scores, ``[k, k]``."""
    sums = _sums(cluster, scores)
    return sums @ sums.T
