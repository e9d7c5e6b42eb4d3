# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of a run and its range: causes in a fixed order, and the same words for every command.

:func:`conclude` asks one rule after the other. The first that holds is the conclusion, the others come below it.
Light to import, as a process that trains uses it: no scipy, no pandas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from fspo_verl.analysis.evidence import Evidence
from fspo_verl.findings import ERROR, FIX, KEEP, NOTE, RECORD, TAKE, WARNING, Finding
from fspo_verl.observe.noise import EPS_IN_SIGMA, SHARE, Noise, rounded_up
from fspo_verl.observe.quotients import Counted
from fspo_verl.output import percent, see

if TYPE_CHECKING:
    from fspo_verl.analysis.length_effect import LengthEffect

NOT_FINITE, BROKEN, CUT_OFF, NOISE, MISMATCH = HEALTH = ("not finite", "broken", "cut off", "noise", "mismatch")
"""Causes that make advice on the range worthless while they hold."""
LEVEL, LENGTH, SIDE, WEIGHTS = ("level", "length", "side", "weights")
CAUSES = (*HEALTH, LEVEL, LENGTH, SIDE, WEIGHTS)
"""Causes in the order in which they are asked for. What comes first explains what comes later."""
CHANGE, EVEN, UNKNOWN = "change", "even", "unknown"
"""Other answers on lengths. CHANGE: the dependence changes over the run. EVEN: the test ran and found nothing. UNKNOWN:
it could not run, or there are too few steps to tell a dependence from slopes that persist."""

# From here on a value is a cause.
SHARE_NOT_FINITE = 0.001  # of the responses that hold NaN or inf; fewer are a note
SHARE_CUT_OFF = 0.25  # of the responses that fill what they were allowed
SHARE_OF_SPREAD = 0.5  # of the variance of the log-ratios that is noise, or in bypass mode mismatch
SHARE_REJECTED = 0.25  # of the responses that a rejection takes
EFFECTIVE = 0.25  # effective sample size, as a share: below it the gradient's standard error more than doubles
MOST, HARDLY_ANY = 0.5, 0.001  # clip rate: more, or less, is a cause
TIMES = 2.0  # ratio of two clip rates where it was not tested
STEPS = 10  # training steps: steps differ, and fewer do not show how much, so that nothing is said of the run
_NOTABLE = 0.2  # the part of a threshold from which there is a note
NOTABLE_PART = _NOTABLE * SHARE_OF_SPREAD  # of the variance of the log-ratios, from which it is named
_ENGINES = 0.05  # share of the way from engine to policy from which the mismatch is a note

_CLOSE = 2.0  # a factor between lengths up to which they are called alike
_LARGEST_FACTOR = 100.0  # beyond which naming it helps nobody
_NAMED = 3  # metrics
_ENOUGH_INSIDE = 400  # responses, whose number is then known to a twentieth: one standard deviation of a count

SMALLER_MINI_BATCHES = "lower actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size"
_CALIBRATE = "`fspo-verl calibrate` finds the eps of a clip rate."
_THIRDS = ("the shortest third", "the middle", "the longest")
_TENTHS = ("the shortest tenth", "those in between", "the longest tenth")
_WHO = {
    "shorter": "shorter responses are clipped more",
    "longer": "longer responses are clipped more",
    "both ends": "the shortest and the longest responses are clipped more than those in between",
    "the middle": "responses of middle length are clipped more than the shortest and the longest",
    "by side": "length matters in another way for responses better than their group than for worse ones",
}


def conclude(evidence: Evidence) -> list[Finding]:
    """Return all findings, the conclusion first: causes in their order, whether lengths are alike, then notes.

    Below a cause of :data:`HEALTH` nothing is advised on the range.
    """
    found = [one for rule in _RULES if (one := rule(evidence)) is not None]
    if not found or found[0].id in (SIDE, WEIGHTS):
        found.insert(0, _untested(evidence))
    if found[0].id in HEALTH:
        found[1:] = [one if one.id in HEALTH else one.without_advice() for one in found[1:]]
    return [*found, *_notes(evidence, {one.id for one in found})]


def narrower(evidence: Evidence) -> Finding | None:
    """The finding that the range is narrower than the numerical noise; None if it is not, or that is not known.

    More than :data:`SHARE` of the responses that no update has moved lie outside it then, by two standard deviations of
    a Poisson count.
    """
    band, sigma, outside, unmoved = (
        evidence.band,
        evidence.noise.sigma,
        evidence.noise.outside,
        evidence.noise.responses,
    )
    if band is None or not sigma or outside is None:
        return None
    count, times = outside * unmoved, math.inf
    if count - 2 * math.sqrt(count) <= SHARE * unmoved:
        return None
    if unmoved - count >= _ENOUGH_INSIDE:
        # By a normal law: the quantile of what may lie outside over that of what does.
        times = EPS_IN_SIGMA / NormalDist().inv_cdf(1 - outside / 2)
    elif band.length_power == 0.5:
        times = EPS_IN_SIGMA * sigma / min(band.low, band.high)
    by = f"{rounded_up(times):g} times as wide, or wider," if times <= _LARGEST_FACTOR else "that is much wider"
    said = (
        f"The range is narrower than the numerical noise: rounding alone puts {percent(outside)} of the responses "
        f"outside it, and {percent(SHARE)} at most should be there. This was counted on {unmoved:,} responses that no "
        "update had moved."
    )
    return Finding(NOISE, WARNING, said, _noise_of(evidence).remedy(wider=f"A range {by}"), outside, FIX)


def _noise_of(evidence: Evidence) -> Noise:
    return Noise(evidence.noise.sigma, evidence.longest, evidence.weighs)


# --- before lengths --------------------------------------------------------------------------------------------------


def _not_finite(evidence: Evidence) -> Finding | None:
    share = evidence.not_finite or 0.0
    if share >= SHARE_NOT_FINITE:
        said = f"{percent(share)} of the responses hold NaN or inf in their log-probs. The loss leaves them out."
        where = "the model, its precision, or the log-probs of the rollout"
    elif evidence.broken:
        others = " and others" * (len(evidence.broken) > _NAMED)
        said = f"NaN or inf in {', '.join(evidence.broken[:_NAMED])}{others}."
        where = "the learning rate, the model, its precision, or the rewards"
    else:
        return None
    return Finding(NOT_FINITE, ERROR, said, f"First find where they come from: {where}.", share or None, FIX)


def _policy(evidence: Evidence) -> Finding | None:
    if (found := evidence.policy) is None:
        return None
    signs = ", ".join(f"{name} {short(before)} -> {short(after)}" for name, before, after in found.signs)
    said = f"The policy has broken, from step {found.step:,} on: {signs}."
    advice = f"First look at the learning rate and at the steps before {found.step:,}. No clip repairs what follows."
    return Finding(BROKEN, WARNING, said, advice, float(found.step), FIX)


def short(value: float) -> str:
    """A number in two digits, or without decimals."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"


def _cut_off(evidence: Evidence) -> Finding | None:
    share, before = evidence.cut_off or 0.0, evidence.cut_off_before
    if share < SHARE_CUT_OFF:
        return None
    if before is not None and before < _NOTABLE * SHARE_CUT_OFF:
        since = "" if evidence.cut_off_since is None else f", from step {evidence.cut_off_since} on"
        said = (
            f"{percent(share)} of the responses are cut off, and {percent(before)} were at the start of the run: the "
            f"policy has broken{since}."
        )
        advice = "First look at the learning rate. Reward, entropy and gradient norm show where it began."
        return Finding(CUT_OFF, WARNING, said, advice, share, FIX)
    advice = "First raise data.max_response_length, or the model's length: the longest lengths are a limit here."
    if before is None:
        advice += " If few were cut off before, the policy has broken: look at the learning rate instead."
    return Finding(CUT_OFF, WARNING, _of_cut_off(evidence), advice, share, FIX)


def _noise(evidence: Evidence) -> Finding | None:
    clips, sigma, share = _clips(evidence), evidence.noise.sigma, evidence.noise.share or 0.0
    if clips and evidence.one_step and sigma:  # first, as a wider range would clip nothing
        said = (
            f"Every clip is numerical noise: {percent(evidence.clip_rate or 0)} of the responses are clipped, and no "
            "update has moved them. Each rollout gets one optimiser step."
        )
        advice = f"{_noise_of(evidence).remedy()} If updates are to be clipped, {SMALLER_MINI_BATCHES}."
        return Finding(NOISE, WARNING, said, advice, evidence.clip_rate, FIX)
    if found := narrower(evidence):
        return found
    if clips and share >= SHARE_OF_SPREAD:
        return Finding(NOISE, WARNING, _of_noise(evidence), _noise_of(evidence).remedy(), share, FIX)
    return None


def _mismatch(evidence: Evidence) -> Finding | None:
    share, rejected = evidence.engines.share or 0.0, evidence.engines.rejected or 0.0
    if evidence.engines.bypass and _clips(evidence) and share >= SHARE_OF_SPREAD:
        advice = (
            "Set algorithm.rollout_correction.bypass_mode=False. Then only what updates move is clipped. It "
            f"costs a forward pass of each rollout{see('noise.md')}."
        )
        return Finding(MISMATCH, WARNING, _of_mismatch(evidence), advice, share, FIX)
    said, effective = [], evidence.engines.effective
    if rejected >= SHARE_REJECTED:
        said.append(f"The rollout correction takes {percent(rejected)} of the responses out of the loss.")
    if effective is not None and effective < EFFECTIVE:
        weight = "" if evidence.engines.weight is None else f", with a mean weight of {evidence.engines.weight:.2g}"
        said.append(
            "A few responses carry the gradient: by the weights of the rollout correction all count for "
            f"{percent(effective)} of their number{weight}."
        )
    if not said:
        return None
    advice = (
        "Bring trainer and rollout engine closer together, or let tokens weigh by their own ratios: "
        "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_rs=null."
    )
    value = rejected if rejected >= SHARE_REJECTED else effective
    return Finding(MISMATCH, WARNING, " ".join(said), advice, value, FIX)


def _level(evidence: Evidence) -> Finding | None:
    rate, smaller = evidence.clip_rate, f"{_sentence(SMALLER_MINI_BATCHES)}, if updates are to be clipped."
    if rate is not None and rate > MOST:
        said = f"More than half is clipped: {percent(rate)} {_of_what(evidence)}."
        return Finding(LEVEL, WARNING, said, f"Widen the range: {_CALIBRATE}", rate, TAKE, command="calibrate")
    if evidence.moved is False:
        said, advice = "Nothing moved, so nothing can be clipped", "Look at the learning rate. A warm-up starts at 0."
        if evidence.one_step:
            said, advice = f"{said}: with one optimiser step per rollout every ratio is 1", smaller
        return Finding(LEVEL, WARNING, f"{said}.", advice, rate, FIX)
    if rate is None or _clips(evidence):
        return None
    none = f"{'No response is' if rate == 0 else f'{_sentence(percent(rate))} are'} clipped"
    if evidence.one_step:
        said = f"{none}: with one optimiser step per rollout no update moves a response before it is judged."
        return Finding(LEVEL, WARNING, said, smaller, rate, FIX)
    advice = f"Lower eps if some are to be clipped: {_CALIBRATE}"
    return Finding(LEVEL, WARNING, f"{none}: the range is too wide to clip.", advice, rate, TAKE, command="calibrate")


def _clips(evidence: Evidence) -> bool:
    return evidence.clip_rate is not None and evidence.clip_rate >= HARDLY_ANY


# --- lengths and sides -----------------------------------------------------------------------------------------------


def _lengths(evidence: Evidence) -> Finding | None:
    """Say whether long and short responses are clipped alike, as far as that was tested or is plain to see."""
    if (effect := evidence.lengths.effect) is None:
        return _plain_to_see(evidence) if _clips(evidence) else None
    if effect.turns:
        return _changes(evidence, effect)
    if effect.depends:
        found = _unlike(evidence, effect)
    else:
        found = _unsettled(evidence, effect) if effect.is_unsettled else _alike(evidence, effect)
    return found if effect.is_of_run else replace(found, advice=_more_steps(evidence, effect), action=RECORD)


def _changed(evidence: Evidence) -> Finding | None:
    """Note a dependence that holds for the run, and grows or shrinks."""
    effect = evidence.lengths.effect
    if effect is None or not effect.changes or effect.turns:
        return None
    return replace(_changes(evidence, effect), severity=NOTE, advice="", action="")


def _changes(evidence: Evidence, effect: LengthEffect) -> Finding:
    halves = [_rates(part) for part in evidence.lengths.of_halves]
    said = (
        f"How the clip rate depends on length changes over the run ({_p(effect.p_of_change)}): in the first half of "
        f"the steps {halves[0]}; in the second {halves[1]}. {_in_all(evidence)}"
    )
    advice = "Keep the range: what is even in one half is not in the other. Judge the next steps by themselves."
    return Finding(CHANGE, WARNING, said, advice, evidence.clip_rate, KEEP)


def _unsettled(evidence: Evidence, effect: LengthEffect) -> Finding:
    said = (
        f"Too few steps to say: the counts differ, {_rates(evidence.thirds)}, but the slope of a step resembles that "
        f"of the step before, and {effect.steps} steps do not tell that from a dependence of the run. "
        f"{_in_all(evidence)}"
    )
    return Finding(UNKNOWN, NOTE, said, "Record more steps.", evidence.clip_rate, RECORD)


def _plain_to_see(evidence: Evidence) -> Finding | None:
    """Compare without a test: some are clipped :data:`TIMES` as often as others, by two standard deviations."""
    if len(evidence.thirds) < 2:
        return None
    shortest, *_, longest = evidence.thirds
    for more, less, who in ((shortest, longest, "shorter"), (longest, shortest, "longer")):
        spread = math.sqrt(more.clipped / more.responses**2 + less.clipped / less.responses**2)
        if more.rate >= TIMES * less.rate and more.rate - less.rate > 2 * spread:
            steps = "this step" if evidence.steps == 1 else f"these {evidence.steps} steps"
            said = (
                f"In {steps} {_WHO[who]}: {_rates(evidence.thirds)}. Whether that is the length, or the sides or "
                "mini-batches that clip more, these rates do not tell."
            )
            advice = "`fspo-verl report` of records tests it."
            return Finding(LENGTH, WARNING, said, advice, evidence.clip_rate, RECORD)
    return None


def _unlike(evidence: Evidence, effect: LengthEffect) -> Finding:
    if effect.who == "by side":
        better, worse = map(_rates, evidence.lengths.of_sides)
        rates = f"of the better {better}; of the worse {worse}"
    elif effect.who in ("both ends", "the middle") and len(evidence.lengths.tails) == 3:
        rates = _rates(evidence.lengths.tails, _TENTHS)
    else:
        rates = _rates(evidence.thirds)
    who = _sentence(_where(evidence, effect) + _WHO[str(effect.who)])
    said = " ".join(filter(None, [f"{who} ({_p(effect.p)}): {rates}.", _line(effect), _in_all(evidence)]))
    advice = "`fspo-verl calibrate` tries other ranges."
    return Finding(LENGTH, WARNING, said, advice, evidence.clip_rate, TAKE, command="calibrate")


def _p(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.1g}"


def _alike(evidence: Evidence, effect: LengthEffect) -> Finding:
    is_close = effect.factor <= _CLOSE
    alike = "long and short responses are clipped alike" if is_close else "no dependence is shown"
    said = (
        f"{_sentence(_where(evidence, effect) + alike)}: {_rates(evidence.thirds)}. {_compatible(effect)} "
        f"{_in_all(evidence)}"
    )
    low, high = sorted((evidence.thirds[0].rate, evidence.thirds[-1].rate)) if evidence.thirds else (0.0, 0.0)
    if math.isfinite(effect.factor) and high > effect.factor * low and evidence.lengths.between:
        said += f" {_why_counts_differ(evidence)}"
    more = "" if is_close else " Record more steps to see smaller differences."
    return Finding(EVEN, NOTE, said, f"Keep the range.{more}", evidence.clip_rate, KEEP)


def _compatible(effect: LengthEffect) -> str:
    """Say how large a dependence may be that was not seen."""
    if effect.factor > _LARGEST_FACTOR:
        return "Any difference is compatible with this."
    of_side = ""
    if effect.factor_of_side <= _LARGEST_FACTOR:
        of_side = f", up to {effect.factor_of_side:.2g} among the better or the worse responses alone,"
    return f"A factor up to {effect.factor:.2g} between two lengths{of_side} is compatible with this."


def _why_counts_differ(evidence: Evidence) -> str:
    """Say why counted rates differ over lengths where the test within mini-batch and side finds no such difference."""
    mini_batches = "mini-batches that clip more hold other lengths"
    if evidence.lengths.between == "mini-batch" or evidence.sides is None:
        return f"{_sentence(mini_batches)}: within them there is no such difference."
    better, worse = evidence.sides
    side = "Better" if better > worse else "Worse"
    sides = (
        f"{side} responses are clipped more ({percent(max(better, worse))} against {percent(min(better, worse))}) and "
        "have other lengths"
    )
    if evidence.lengths.between == "side":
        return f"{sides}: within one side there is no such difference."
    return f"{sides}, and {mini_batches}: within them there is no such difference."


def _in_all(evidence: Evidence) -> str:
    return f"In all {percent(evidence.clip_rate or 0)} {_of_what(evidence)} are clipped."


def _where(evidence: Evidence, effect: LengthEffect) -> str:
    """Name the steps that a test speaks of, where it does not of the run."""
    if effect.is_of_run:
        return ""
    if evidence.steps > effect.steps:
        return f"in the {effect.steps} of {evidence.steps} steps that have clips to compare "
    return "in this one step " if effect.steps == 1 else f"in these {effect.steps} steps "


def _more_steps(evidence: Evidence, effect: LengthEffect) -> str:
    if evidence.steps >= STEPS:
        return f"Record more: {effect.steps} of the {evidence.steps} steps have clips to compare, and {STEPS} have to."
    few = "one is" if evidence.steps == 1 else f"{evidence.steps} are"
    return f"Record {STEPS} steps or more: {few} too few to speak of the run."


def _line(effect: LengthEffect) -> str:
    """Name the power of the length that the clip rate follows, if it does."""
    if not effect.is_line:
        return "" if effect.who == "by side" else "No power of the length describes this."
    ends = f"{effect.lower:.2f} to {effect.upper:.2f}"
    if math.isinf(effect.lower):
        ends = f"at most {effect.upper:.2f}"
    elif math.isinf(effect.upper):
        ends = f"at least {effect.lower:.2f}"
    what = "The rate of what is kept" if effect.of_kept else "The clip rate"
    return f"{what} goes like length^{effect.exponent:.2f} (95% interval {ends})."


def _side(evidence: Evidence) -> Finding | None:
    if (
        evidence.sides is None or not evidence.lengths.sides_differ or evidence.band is None
    ):  # some losses clip one side only
        return None
    better, worse = evidence.sides
    if max(better, worse) < TIMES * min(better, worse):
        return None
    said = (
        f"{percent(better)} of the responses that are better than their group are clipped, and {percent(worse)} of "
        "those that are worse."
    )
    advice = "If both sides are to give up the same share, `fspo-verl calibrate` finds eps_low and eps_high."
    return Finding(SIDE, WARNING, said, advice, abs(better - worse), TAKE, command="calibrate")


def _weights(evidence: Evidence) -> Finding | None:
    """Say that few of the responses that are not clipped carry the gradient, by their weights e^S."""
    if (share := evidence.effective) is None or not share < EFFECTIVE:
        return None
    said = (
        "A few responses carry the gradient: by their weights e^S those that are not clipped count for "
        f"{percent(share)} of their number in a typical step."
    )
    advice = "Lower the learning rate, or train fewer optimiser steps per rollout: the policy moves too far in one."
    if (evidence.noise.share or 0) >= SHARE_OF_SPREAD:
        advice = _noise_of(evidence).remedy()
    return Finding(WEIGHTS, WARNING, said, advice, share, FIX)


def _untested(evidence: Evidence) -> Finding:
    """Answer on lengths where there was no test."""
    rate = evidence.clip_rate
    start = f"{_sentence(percent(rate or 0))} {_of_what(evidence)} are clipped"
    said, advice = f"{start}: {evidence.lengths.too_few}.", "Record more steps."
    if evidence.responses == 0:
        said = "Too few to say: no response has an advantage."
        advice = "Record more: train until rewards within a group differ."
    elif rate is None:
        said, advice = "Nothing to say: there are no records, and the metrics hold no clip rates.", "Record more."
    elif evidence.lengths.too_few is None:
        said, advice = f"{start}. These are rates only, no test: there are no records.", "Record more."
    elif evidence.lengths.one_length:
        return Finding(EVEN, NOTE, said, "Keep the range.", rate, KEEP)
    return Finding(UNKNOWN, NOTE, said, advice, rate, RECORD)


_RULES: tuple[Callable[[Evidence], Finding | None], ...]
_RULES = (_not_finite, _policy, _cut_off, _noise, _mismatch, _level, _lengths, _changed, _side, _weights)


# --- notes, and words that they share with causes --------------------------------------------------------------------


def _notes(evidence: Evidence, named: Collection[str]) -> Iterator[Finding]:
    """Name the values that are notable, and no cause."""
    for cause, share, least, words in (
        (NOT_FINITE, evidence.not_finite, 0.0, _of_not_finite),
        (CUT_OFF, evidence.cut_off, _NOTABLE * SHARE_CUT_OFF, _of_cut_off),
        (NOISE, evidence.noise.share, NOTABLE_PART, _of_noise),
        (MISMATCH, evidence.engines.share, NOTABLE_PART if evidence.engines.bypass else _ENGINES, _of_mismatch),
    ):
        if share and share >= least and cause not in named:
            yield Finding(cause, NOTE, words(evidence), "", share)


def _of_not_finite(evidence: Evidence) -> str:
    return f"{percent(evidence.not_finite or 0)} of the responses hold NaN or inf and are left out of the loss."


def _of_cut_off(evidence: Evidence) -> str:
    return f"{percent(evidence.cut_off or 0)} of the responses are cut off: they fill what they were allowed."


def _of_noise(evidence: Evidence) -> str:
    return (
        f"About {min(evidence.noise.share or 0, 1):.0%} of the variance of the log-ratios is numerical noise, not "
        "learning: so much is there before any update."
    )


def _of_mismatch(evidence: Evidence) -> str:
    share = f"{min(evidence.engines.share or 0, 1):.0%}"
    by = f"{evidence.engines.sigma:.2g} nats per token"
    if evidence.engines.bypass:
        return (
            f"About {share} of the variance of the log-ratios is the mismatch of trainer and rollout engine, not "
            f"learning: {by} are there before any update. In bypass mode it is clipped as if it were learning."
        )
    return (
        f"Trainer and rollout engine disagree by {by}. That is {share} of the way from the policy that sampled to the "
        "one that trains. It is not clipped; rejections and importance weights act on it."
    )


# --- words -----------------------------------------------------------------------------------------------------------


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _of_what(evidence: Evidence) -> str:
    """Name what a rate is a share of."""
    if evidence.lengths.by_token:
        return "of the tokens (mean share of a response)"
    if evidence.responses is None:
        return "of the responses with an advantage"
    return f"of {evidence.responses:,} responses"


def _rates(thirds: tuple[Counted, ...], names: tuple[str, ...] = _THIRDS) -> str:
    """Name the clip rates of parts by length, each a count."""
    if len(thirds) < 2:
        return "all have one length"
    named = names if len(thirds) == 3 else ("the shorter", "the longer ones")
    said = [f"{percent(part.rate)} of {name}" for part, name in zip(thirds, named, strict=True)]
    for place in (0, -1):
        part = thirds[place]
        to = " tokens and more" if math.isnan(part.longest) else f"-{part.longest:,.0f} tokens"
        said[place] += f" ({part.shortest:,.0f}{to})"
    return ", ".join(said)
