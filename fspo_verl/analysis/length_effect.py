# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The test whether a clip depends on response length; all statements about length rest on it.

Only responses with an advantage count. They are compared within strata: one mini-batch of one training step and one
sign of the advantage. Steps, mini-batches and sides that clip more, and lengths that drift over training, then say
nothing about length. Within a stratum the log of the clip rate is taken to be a line or a parabola in x = log length,
given the stratum's total (conditional Poisson regression). Above half clipped it is the rate of what is kept.

- Score tests of a slope and of a bend, x² less what the slope explains of it, see lines and curves. Their variance is
  cluster-robust, for prompts and, from 10 steps on, for training steps at once (two-way: Cameron, Gelbach and Miller
  2011, doi:10.1198/jbes.2010.07136), with Student's t of the smaller number of clusters. A prompt that comes back in a
  later epoch is the same cluster. Below 10 steps they speak of these steps alone: how steps differ is not known.
- Steps whose slopes differ, with mean 0, clip both ends more on average, as exp is convex. It is the mean of the log
  rate that is tested: what such slopes add to the scores of a step, to second order, is taken out (derived here). Of
  what exp adds, a clip of normal S adds a third, one of heavy tails all: p is the largest with none, half or all of it
  taken out.
- A length may matter unlike for responses better and worse than their group, and even the opposite way: score tests of
  x and x² times sign(A). The four share the level: 0.02 for slope and bend each, 0.005 for each of the sides' two
  (Bonferroni, weighted), and the p-value is of all.
- The slope of a step may resemble that of the step before. Where the autocorrelation of the scores of steps along a
  direction is above 0 (by Bartlett's standard error, one-sided at 0.4 for the slope, at 0.05 for the others), that
  direction also has to pass by Student's t with the variance of three cosines over the steps, the slope at 0.02, the
  others at 0.05 (equal-weighted cosine test: Müller 2004; Lazarus et al. 2018, doi:10.1080/07350015.2018.1506926). So
  the test pays for persistence only where it is seen. ``scripts/bench/persistence.py`` has its size and power beside
  those of others.
- A slope that rises or falls over the run is a finding of its own: a score test of the trend of the step's slope, of
  level 0.01.
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
from scipy.special import fdtri, ndtri, stdtr, stdtrit

from fspo_verl.analysis.clip_rates import CONFIDENCE, prompts_of, strata_of, t_quantile

MIN_PROMPTS = 20
"""Prompts with a clip (above half clipped: with a response that is kept), below which the test says nothing."""
MIN_STEPS = 10
"""Training steps from which they count as clusters; fewer give no variance between steps, and no verdict on a run."""
RARE = 1 - CONFIDENCE
"""p-value below which a dependence is called one."""
WHO = SHORTER, LONGER, ENDS, MIDDLE, BY_SIDE = ("shorter", "longer", "both ends", "the middle", "by side")
"""Responses of which a clip can clip more; BY_SIDE: length matters unlike for either sign of the advantage."""

_OF_LINE, _OF_SIDE = 0.4, 0.1  # parts of the level: of line and bend each, and the same of the sides
_RARE_CHANGE = 0.01  # p-value below which the slope is said to change over the run
_PERSISTS = float(ndtri(0.6))  # standard deviations of an autocorrelation of slopes from which it counts
_SURELY = float(ndtri(0.95))  # of one of bends, or of what differs between the sides
_COSINES = 3  # of the variance where slopes persist
_SURPLUS = (0.0, 0.5, 1.0)  # shares of the surplus that may have to be taken out
_LARGEST = 8.0  # abs(k) beyond which an end of the interval counts as unbounded
_PACE = 0.1  # of k, in the search for an end of the interval
_ROUNDS = 30  # of Newton's method, which takes five where lengths do not decide alone
_OPPOSITE = {SHORTER: LONGER, LONGER: SHORTER, ENDS: MIDDLE, MIDDLE: ENDS}


class LengthEffect(NamedTuple):
    """The result of :func:`length_effect`.

    Attributes:
        exponent: k in clip rate ~ length^k, or of the rate of what is kept. Misleading without ``is_line``.
        lower, upper: the 95% interval of k; infinite where it has no end.
        p: of no dependence, whatever its form.
        who: which responses are clipped more, one of :data:`WHO`; None where no dependence is shown.
        is_line: a dependence is shown, and k describes it.
        factor: ratio of the clip rates of two lengths between the shortest and the longest tenth, up to which a
            dependence is compatible with the responses; NaN where one is shown.
        factor_of_side: the same for the better or for the worse responses alone, whichever is larger.
        of_kept: more than half is clipped: k and factors are those of the rate of what is kept.
        steps: training steps that were compared.
        p_if_independent: p, were steps independent.
        p_of_change: of a slope that is the same all over the run; 1 below :data:`MIN_STEPS`.
        early, late: k in the earlier and in the later half of the steps.
    """

    exponent: float
    lower: float
    upper: float
    p: float
    who: str | None = None
    is_line: bool = False
    factor: float = math.nan
    factor_of_side: float = math.nan
    of_kept: bool = False
    steps: int = 0
    p_if_independent: float = 1.0
    p_of_change: float = 1.0
    early: float = math.nan
    late: float = math.nan

    @property
    def depends(self) -> bool:
        """Whether a dependence on length is shown."""
        return self.p < RARE

    @property
    def is_unsettled(self) -> bool:
        """Whether there are too few steps to tell a dependence of the run from slopes that persist."""
        return not self.depends and self.p_if_independent < RARE

    @property
    def changes(self) -> bool:
        """Whether the dependence changes over the run, by more than noise."""
        return self.p_of_change < _RARE_CHANGE

    @property
    def turns(self) -> bool:
        """Whether it changes so that no one direction holds for the run."""
        return self.changes and (not self.depends or self.early * self.late < 0)

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
    of_all, of_sides = data.p_values(exponent)
    p, p_if_independent = np.minimum(of_all, of_sides).tolist()
    who, is_line, factors = None, False, (math.nan, math.nan)
    if p >= RARE:
        factors = data.compatible_factors()
    elif of_sides[0] < of_all[0]:
        who = BY_SIDE
    else:
        # Without an end of the interval there is nothing to hold a bend against.
        is_line = not lower <= 0 <= upper and bool(abs(exponent) >= _LARGEST or data.p_of_bend(exponent)[0] >= RARE)
        more = (LONGER if exponent > 0 else SHORTER) if is_line else data.name_of_curve()
        who = _OPPOSITE[more] if data.of_kept else more
    return LengthEffect(
        exponent,
        lower,
        upper,
        p,
        who,
        is_line,
        *factors,
        of_kept=data.of_kept,
        steps=data.steps,
        p_if_independent=p_if_independent,
        **data.change(exponent),
    )


def slopes_of_steps(records: pd.DataFrame) -> pd.DataFrame:
    """Clip rate and slope k by step: columns rate, slope, lower and upper (95%, prompts as clusters).

    Index ``step``. The slope of a step is one step of Newton's method from that of all; NaN where its interval is wider
    than all values of k that are looked at.
    """
    counted = records[(records["length"] > 0) & (records["advantage"] != 0)]
    table = counted.groupby("step")["clipped"].mean().rename("rate").to_frame()
    table[["slope", "lower", "upper"]] = math.nan
    data = _Strata.of(records, records["clipped"].to_numpy())
    if data is None:
        return table
    exponent = data.interval()[0]
    fit = data.at(exponent)
    scores, information = data.of_steps(fit, fit.directions[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (1 - 2 * data.of_kept) * (exponent + scores / information)
        half = 2 * np.sqrt(data.sampling(fit)) / information
    of_step = pd.DataFrame({"slope": slope, "lower": slope - half, "upper": slope + half}, index=data.numbers)
    return table.drop(columns=of_step.columns).join(of_step[half < _LARGEST])


class _Fit(NamedTuple):
    """The expectation of a line or a parabola, given the totals of the strata."""

    expected: np.ndarray  # outcome ``[rows]``
    excess: np.ndarray  # of the outcome over it
    directions: np.ndarray  # ``[2, rows]``: x and x² less their means in the stratum, weighted by what is expected

    @property
    def information(self) -> np.ndarray:
        """The information on slope and bend ``[2, 2]``."""
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
    numbers: np.ndarray  # of the steps, as the records have them ``[steps]``

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
        prompt = pd.factorize(prompt[use])[0]
        step, numbers = pd.factorize(records["step"].to_numpy()[use], sort=True)
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
            numbers,
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

    def sums(
        self, fit: _Fit, directions: np.ndarray, surplus: np.ndarray | float = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sum ``[k]`` of the scores along directions ``[k, rows]``, less their surplus in the steps ``[k, steps]``.

        Also its variance ``[k, k]``, at least that with prompts as clusters.
        """
        scores = directions * fit.excess
        weighted = scores * self.weight
        variance = _squares(self.prompt, weighted)
        if not self.by_step:
            return scores.sum(1), variance
        by_step = _sums(self.step, scores) - surplus
        values, vectors = np.linalg.eigh(by_step @ by_step.T - _squares(self.prompt_in_step, weighted))
        return by_step.sum(1), variance + (vectors * np.maximum(values, 0)) @ vectors.T

    def surplus(self, fit: _Fit, directions: np.ndarray) -> np.ndarray:
        """Return what slopes that differ between steps, with mean 0, add to the score sums of a step ``[k, steps]``.

        To second order it is half the variance of the slopes times the derivative of the slope's information along each
        direction ``[k, rows]``. The variance is that of the slope's score over the squared information, less what
        sampling explains of it, which makes it unbiased.
        """
        information = fit.expected * np.square(fit.directions[0])
        squares = np.square(np.bincount(self.step, fit.directions[0] * fit.excess))
        variance = (squares - self.sampling(fit)) / np.square(np.bincount(self.step, information))
        return _sums(self.step, directions * information) * variance / 2

    def sampling(self, fit: _Fit) -> np.ndarray:
        """The part of the squared score of the slope of each step ``[steps]`` that sampling explains."""
        step_of_pair = np.zeros(int(self.prompt_in_step.max()) + 1, np.int64)
        step_of_pair[self.prompt_in_step] = self.step
        score = fit.directions[0] * fit.excess * self.weight
        return np.bincount(step_of_pair, np.square(np.bincount(self.prompt_in_step, score)), self.steps)

    # --- tests -------------------------------------------------------------------------------------------------------

    def p_values(self, exponent: float) -> tuple[np.ndarray, np.ndarray]:
        """p of no dependence, and of none that differs between the signs of the advantage, over their levels.

        Each is ``[2]``: p, and p if steps were independent.
        """
        slope, line = self.at(0.0), self.at(exponent)
        of_slope = self._p_of(slope, slope.directions[0], _OF_LINE, _OF_LINE, _PERSISTS)
        of_all = np.minimum(of_slope, self.p_of_bend(exponent, _OF_LINE))
        if (self.side == self.side[0]).all():
            return of_all, np.ones(2)
        return of_all, np.minimum(*(self._p_of(line, one, _OF_SIDE) for one in self.side * line.directions))

    def p_of_bend(self, exponent: float, part: float = 1.0) -> np.ndarray:
        """p ``[2]`` along the score of the bend at a slope, less what the slope explains of it."""
        fit = self.at(exponent)
        information = fit.information
        bend = fit.directions[1] - information[0, 1] / information[0, 0] * fit.directions[0]
        return self._p_of(fit, bend, part)

    def _p_of(
        self, fit: _Fit, direction: np.ndarray, part: float, part_of_cosines: float = 1.0, persists: float = _SURELY
    ) -> np.ndarray:
        """p ``[2]`` of the score test along one direction ``[rows]``, over its part of the level.

        The second takes steps for independent. The first is that of the test by cosines, if that is larger and the
        scores of steps persist.
        """
        surplus = self.surplus(fit, direction[None]) if self.by_step else 0.0
        t = min(abs(self._t_of(*self.sums(fit, direction[None], share * surplus))) for share in _SURPLUS)
        p = independent = _two_sided(t, self.clusters - 1) / part
        if self._persists(fit, direction, persists):
            p = max(p, _two_sided(self._t_of_cosines(fit, direction), _COSINES) / part_of_cosines)
        return np.minimum([p, independent], 1.0)

    # --- steps whose slopes persist, or change ------------------------------------------------------------------------

    def of_steps(self, fit: _Fit, direction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores and information ``[steps]`` along one direction ``[rows]``."""
        scores = np.bincount(self.step, direction * fit.excess)
        return scores, np.bincount(self.step, np.square(direction) * fit.expected)

    def _rest(self, fit: _Fit, direction: np.ndarray) -> tuple[np.ndarray, float]:
        """Scores of steps along one direction ``[rows]`` less what their mean slope gives each, and the sum of all."""
        scores, information = self.of_steps(fit, direction)
        return scores - scores.sum() / max(information.sum(), 1e-300) * information, float(scores.sum())

    def _autocorrelation(self, fit: _Fit, direction: np.ndarray) -> float:
        """Return the autocorrelation of the scores of steps, without the bias −1/n of a mean that is estimated."""
        rest, _ = self._rest(fit, direction)
        squares = float(rest @ rest)
        return float(rest[1:] @ rest[:-1]) / squares + 1 / self.steps if squares > 0 else 0.0

    def _persists(self, fit: _Fit, direction: np.ndarray, deviations: float = _PERSISTS) -> bool:
        """Whether the scores of steps along a direction ``[rows]`` resemble those of the step before."""
        enough = deviations / math.sqrt(self.steps)
        return self.by_step and self._autocorrelation(fit, direction) > enough

    def _t_of_cosines(self, fit: _Fit, direction: np.ndarray) -> float:
        """Student's t of the sum of the scores along one direction ``[rows]``, by the variance of slow cosines."""
        rest, total = self._rest(fit, direction)
        order, time = np.arange(1, _COSINES + 1)[:, None], (np.arange(self.steps) + 0.5) / self.steps
        variance = 2 * float(np.square(np.cos(np.pi * order * time) @ rest).mean())
        return total / math.sqrt(variance) if variance > 0 else 0.0

    def change(self, exponent: float) -> dict[str, float]:
        """p of a slope that neither rises nor falls over the steps, and the slope in both halves of them, by name."""
        if not self.by_step:
            return {}
        fit = self.at(exponent)
        scores, information = self.of_steps(fit, fit.directions[0])
        time = np.arange(self.steps, dtype=np.float64)
        time -= information @ time / information.sum()
        trend = time * scores
        t = self._t_of(trend.sum(), np.square(trend).sum())
        later = time >= np.median(time)
        early, late = (exponent + scores[part].sum() / max(information[part].sum(), 1e-300) for part in (~later, later))
        return {"p_of_change": _two_sided(t, self.steps - 2), "early": early, "late": late}

    def _t_of(self, total: np.ndarray, variance: np.ndarray) -> float:
        """Student's t of one sum with this variance, 0 without variance.

        The squares that make the variance are not centred, and so hold the effect itself: of a ratio r from G vectors,
        t² is r² · (G − 1) / (G − r²), as in Hotelling's T².
        """
        if np.sum(variance) <= 0:
            return 0.0
        ratio, count = float(np.sum(total)) / math.sqrt(float(np.sum(variance))), self.clusters
        return float(ratio * math.sqrt((count - 1) / max(count - ratio**2, 1e-9)))

    # --- the parabola ------------------------------------------------------------------------------------------------

    def name_of_curve(self) -> str:
        """Return the lengths that have the outcome more often, by the slopes of the parabola at both ends."""
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

    def _one_step(self, estimate: np.ndarray, of: np.ndarray | float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """One step of Newton's method without the surplus, and the covariance of slope and bend.

        Args:
            of: 1 for the responses ``[rows]`` that take part, 0 for the others; whole strata.
        """
        fit = self.at(*estimate)
        total, variance = self.sums(fit, fit.directions * of)
        inverse = np.linalg.pinv((fit.directions * fit.expected * of) @ fit.directions.T, hermitian=True)
        return estimate + inverse @ total, inverse @ variance @ inverse

    def compatible_factors(self) -> tuple[float, float]:
        """The largest ratio of the rates of two lengths that is compatible with the responses, of all and of one side.

        Where slopes persist, intervals are wider by as much as the cosines make that of the slope.
        """
        fit, wider = self.at(0.0), 1.0
        if self._persists(fit, fit.directions[0]):
            t = self._t_of_cosines(fit, fit.directions[0])
            independent = self._t_of(*self.sums(fit, fit.directions[:1]))
            wider = max(1.0, abs(independent / t) * t_quantile(_COSINES) / t_quantile(self.clusters - 1)) if t else 1.0
        of_sides = [self.side == sign for sign in np.unique(self.side)]
        of_all = self._factor(wider, 1.0, CONFIDENCE)
        return of_all, max(self._factor(wider, of, (1 + CONFIDENCE) / 2) for of in of_sides)

    def _factor(self, wider: float, of: np.ndarray | float, confidence: float) -> float:
        (estimate, covariance), count = self._one_step(np.zeros(2), of), self.clusters
        # The log ratio of the rates at two of the nine tenth points of x is linear in slope and bend.
        tenths = np.quantile(self.powers[0], np.arange(1, 10) / 10)
        first, second = np.triu_indices(len(tenths), 1)
        pairs = np.stack([tenths[second] - tenths[first], np.square(tenths[second]) - np.square(tenths[first])])
        # Scheffé: intervals this wide hold for all pairs at once, as slope and bend have one joint confidence region.
        wide = wider * math.sqrt(2 * (count - 1) / (count - 2) * fdtri(2, count - 2, confidence))
        largest = float((np.abs(estimate @ pairs) + wide * _spread(pairs, covariance)).max())
        return math.exp(largest) if largest < 50 else math.inf

    # --- the exponent of a line --------------------------------------------------------------------------------------

    def score(self, exponent: float) -> tuple[np.ndarray, np.ndarray]:
        """The score of a line, which falls with the exponent, and its variance; the surplus stays in it."""
        fit = self.at(exponent)
        return self.sums(fit, fit.directions[:1])

    def interval(self) -> tuple[float, float, float]:
        """The estimate and both ends of its interval."""
        score = lambda exponent: self.score(exponent)[0].item()  # noqa: E731
        for bound in (-_LARGEST, _LARGEST):
            if score(bound) * bound >= 0:  # clips and lengths are as good as separated
                lower, upper = sorted((bound, math.copysign(math.inf, bound)))
                return bound, lower, upper
        estimate = brentq(score, -_LARGEST, _LARGEST, xtol=1e-6)
        fit = self.at(estimate)
        persists = self._persists(fit, fit.directions[0])
        return estimate, self._end(estimate, -_PACE, persists), self._end(estimate, _PACE, persists)

    def _end(self, estimate: float, pace: float, persists: bool) -> float:
        """The first value outwards from the estimate that the test rejects: there may be others beyond it."""

        def excess(exponent: float) -> float:
            beyond = abs(self._t_of(*self.score(exponent))) - t_quantile(self.clusters - 1)
            if persists:
                fit = self.at(exponent)
                t = self._t_of_cosines(fit, fit.directions[0])
                beyond = min(beyond, abs(t) - t_quantile(_COSINES))
            return beyond

        inside = estimate
        while abs(inside) <= _LARGEST:
            outside = inside + pace
            if excess(outside) > 0:
                return brentq(excess, inside, outside, xtol=1e-6)
            inside = outside
        return math.copysign(math.inf, pace)


def _two_sided(t: float, freedom: float) -> float:
    """p of Student's t."""
    return float(2 * stdtr(freedom, -abs(t)))


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
