# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the clip of a run: causes in a fixed order, and the same words for every command.

:func:`conclude` asks one rule after the other. The first that holds is the conclusion, the others come below it.
Light to import, as a process that trains uses it: no scipy, no pandas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import NormalDist
from typing import TYPE_CHECKING

from fspo_verl.analysis.evidence import Evidence
from fspo_verl.findings import ERROR, FIX, KEEP, NOTE, RECORD, TAKE, WARNING, Finding
from fspo_verl.observe.noise import EPS_IN_SIGMA, HELP, SHARE, rounded_up
from fspo_verl.observe.quotients import Counted
from fspo_verl.output import percent

if TYPE_CHECKING:
    from fspo_verl.analysis.length_effect import LengthEffect
    from fspo_verl.band import Band

CAUSES = NOT_FINITE, CUT_OFF, NOISE, MISMATCH, LEVEL, LENGTH, SIDE = (
    "not finite",
    "cut off",
    "noise",
    "mismatch",
    "level",
    "length",
    "side",
)
"""In the order in which they are asked for. What comes first explains what comes later."""
HEALTH = (NOT_FINITE, CUT_OFF, NOISE, MISMATCH)
"""Those that make advice on the clip worthless while they hold."""
EVEN, UNKNOWN = "even", "unknown"
"""EVEN: the test of lengths ran and found nothing. UNKNOWN: it could not run."""

SHARE_NOT_FINITE = 0.001
"""Share of the responses with NaN or inf from which it is a cause. Fewer are a note."""
SHARE_CUT_OFF = 0.25
"""Share of the responses that fill what they were allowed from which it is a cause."""
SHARE_OF_SPREAD = 0.5
"""Share of the variance of the log-ratios from which noise, or the mismatch in bypass mode, is a cause."""
SHARE_REJECTED = 0.25
"""Share of the responses that a rejection takes from which it is a cause."""
MOST, HARDLY_ANY = 0.5, 0.001
"""Clip rates above and below which the level is a cause."""
TIMES = 2.0
"""Ratio of two clip rates from which it is a cause where it was not tested."""

STEPS = 10
"""Training steps below which nothing is said of the clip of a run: steps differ, and fewer do not show how much."""

SMALLER_MINI_BATCHES = "lower actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size"
_NOTABLE = 0.2  # a value at this part of its threshold is a note
_ENGINES = 0.05  # share of the way from engine to policy, from which the mismatch is a note
_CLOSE = 2.0  # a factor between lengths up to which they are called alike
_LARGEST_FACTOR = 100.0  # beyond which naming it helps nobody
_NAMED = 3  # metrics
_ENOUGH_INSIDE = 400  # responses, whose number is then known to a twentieth: one standard deviation of a count
_TESTS = "`fspo-verl report` tests it, and `fspo-verl calibrate` tries other widths."
_THIRDS = ("the shortest third", "the middle", "the longest")
_TENTHS = ("the shortest tenth", "those in between", "the longest tenth")


def conclude(evidence: Evidence) -> list[Finding]:
    """All that is to be said, the conclusion first: causes in their order, whether lengths are alike, then notes.

    Below a cause of :data:`HEALTH` nothing is advised on the clip.
    """
    found = [one for rule in _BEFORE if (one := rule(evidence)) is not None]
    found += [one for rule in (_lengths, _side) if (one := rule(evidence)) is not None]
    if not found or found[0].id == SIDE:
        found.insert(0, _unknown(evidence))
    if found[0].id in HEALTH:
        found[1:] = [one if one.id in HEALTH else one.without_advice() for one in found[1:]]
    return [*found, *_notes(evidence)]


def narrower(band: Band | None, sigma: float | None, outside: float | None = None, unmoved: int = 0) -> Finding | None:
    """The finding where a band is narrower than the numerical noise; None where it is not, or not known.

    That is, where more than :data:`SHARE` of the responses that no update has moved lie outside the band.

    Args:
        band: on S.
        sigma: spread of a token's log-ratio that noise alone makes, nats.
        outside: share of ``unmoved`` responses outside the band. It has to exceed SHARE by two standard deviations of
            a Poisson count. None where it was not counted; a normal law with independent tokens then says it, of a
            width of sqrt(length).
    """
    if band is None or not sigma:
        return None
    eps, counted = min(band.low, band.high), ""
    times = EPS_IN_SIGMA * sigma / eps if band.length_power == 0.5 else math.inf
    if outside is None:
        if band.length_power != 0.5 or eps >= EPS_IN_SIGMA * sigma:
            return None
        outside = 2 * (1 - NormalDist().cdf(eps / sigma))
    else:
        count = outside * unmoved
        if not count - 2 * math.sqrt(count) > SHARE * unmoved:
            return None
        counted = f" This was counted on {unmoved:,} responses that no update had moved."
        if (1 - outside) * unmoved >= _ENOUGH_INSIDE:  # the quantile below rests on them
            # By a normal law: the quantile of what may lie outside over that of what does.
            times = EPS_IN_SIGMA / NormalDist().inv_cdf(1 - outside / 2)
    wide = f"{rounded_up(times):g} times as wide, or wider" if times <= _LARGEST_FACTOR else "much wider"
    return Finding(
        NOISE,
        WARNING,
        f"The clip is narrower than the numerical noise: rounding alone puts {percent(outside)} of the responses "
        f"outside it, and {percent(SHARE)} at most should be there.{counted}",
        f"Make the clip {wide}, or remove the noise: {HELP}.",
        outside,
        FIX,
    )


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


def _cut_off(evidence: Evidence) -> Finding | None:
    if (share := evidence.cut_off or 0.0) < SHARE_CUT_OFF:
        return None
    if evidence.cut_off_before is not None and evidence.cut_off_before < _NOTABLE * SHARE_CUT_OFF:
        since = "" if evidence.cut_off_since is None else f", from step {evidence.cut_off_since} on"
        said = (
            f"{percent(share)} of the responses are cut off, and {percent(evidence.cut_off_before)} were at the start "
            f"of the run: the policy has broken{since}."
        )
        advice = "First look at the learning rate. Reward, entropy and gradient norm show where it began."
        return Finding(CUT_OFF, WARNING, said, advice, share, FIX)
    advice = "First raise data.max_response_length, or the model's length: the longest lengths are a limit here."
    if evidence.cut_off_before is None:
        advice += " If few were cut off before, the policy has broken: look at the learning rate instead."
    return Finding(CUT_OFF, WARNING, _of_cut_off(evidence), advice, share, FIX)


def _noise(evidence: Evidence) -> Finding | None:
    clips, sigma, share = _clips(evidence), evidence.noise_sigma, evidence.noise_share or 0.0
    if clips and evidence.one_step and sigma:  # first, as a wider clip would be idle
        said = (
            f"Every clip is numerical noise: {percent(evidence.clip_rate or 0)} of the responses are clipped, and no "
            "update has moved them. Each rollout gets one optimiser step."
        )
        advice = f"If the clip is to act, {SMALLER_MINI_BATCHES}, and remove the noise: {HELP}."
        return Finding(NOISE, WARNING, said, advice, evidence.clip_rate, FIX)
    if found := narrower(evidence.band, sigma, evidence.noise_outside, evidence.unmoved):
        return found
    if clips and share >= SHARE_OF_SPREAD:
        return Finding(NOISE, WARNING, _of_noise(share), f"Remove the noise: {HELP}.", share, FIX)
    return None


def _mismatch(evidence: Evidence) -> Finding | None:
    share, rejected = evidence.mismatch_share or 0.0, evidence.rejected or 0.0
    if evidence.bypass and _clips(evidence) and share >= SHARE_OF_SPREAD:
        advice = (
            "Set algorithm.rollout_correction.bypass_mode=False. The clip then sees what updates do, and not this. It "
            "costs a forward pass of each rollout; see docs/noise.md."
        )
        return Finding(MISMATCH, WARNING, _of_mismatch(evidence), advice, share, FIX)
    if rejected >= SHARE_REJECTED:
        said = f"The rollout correction takes {percent(rejected)} of the responses out of the loss."
        advice = (
            "Bring trainer and rollout engine closer together, or widen the range of the rejection; see docs/noise.md."
        )
        return Finding(MISMATCH, WARNING, said, advice, rejected, FIX)
    return None


def _level(evidence: Evidence) -> Finding | None:
    rate, calibrate = evidence.clip_rate, "`fspo-verl calibrate` finds the eps of a clip rate."
    if rate is not None and rate > MOST:
        said = f"More than half is clipped: {percent(rate)} {_of_what(evidence)}."
        return Finding(LEVEL, WARNING, said, f"Widen the clip: {calibrate}", rate, TAKE)
    lower = f"{_sentence(SMALLER_MINI_BATCHES)}, if the clip is to act."
    if evidence.moved is False:
        said, advice = "Nothing moved, so no clip can act", "Look at the learning rate. A warm-up starts at 0."
        if evidence.one_step:
            said, advice = f"{said}: with one optimiser step per rollout every ratio is 1", lower
        return Finding(LEVEL, WARNING, f"{said}.", advice, rate, FIX)
    if rate is None or _clips(evidence):
        return None
    none = f"{'No response is' if rate == 0 else f'{_sentence(percent(rate))} are'} clipped"
    if evidence.one_step:
        said = f"{none}: with one optimiser step per rollout no update moves a response before it is judged."
        return Finding(LEVEL, WARNING, said, lower, rate, FIX)
    advice = f"Lower eps if a clip is wanted: {calibrate}"
    return Finding(LEVEL, WARNING, f"{none}: the clip is idle.", advice, rate, TAKE)


_BEFORE: tuple[Callable[[Evidence], Finding | None], ...] = (_not_finite, _cut_off, _noise, _mismatch, _level)


def _clips(evidence: Evidence) -> bool:
    return evidence.clip_rate is not None and evidence.clip_rate >= HARDLY_ANY


# --- lengths and sides -----------------------------------------------------------------------------------------------


def _lengths(evidence: Evidence) -> Finding | None:
    """Whether long and short responses are clipped alike, as far as that was tested or is plain to see."""
    effect, rate = evidence.length, evidence.clip_rate
    if effect is None:
        who = _plain_to_see(evidence.thirds)
        if who is None or not _clips(evidence):
            return None
        steps = "this step" if evidence.steps == 1 else f"these {evidence.steps} steps"
        said = f"In {steps} {who} responses are clipped more: {_rates(evidence.thirds)}."
        return Finding(LENGTH, WARNING, said, _TESTS, rate, TAKE)
    every = f"In all {percent(rate or 0)} {_of_what(evidence)} are clipped."
    where = "" if effect.is_of_run else f"in {_tested_steps(evidence)} "
    if not effect.depends:
        factor = f"a factor up to {effect.factor:.2g} between two lengths is compatible with this"
        if not effect.factor <= _LARGEST_FACTOR:
            factor = "any difference is compatible with this"
        alike = "long and short responses are clipped alike" if effect.factor <= _CLOSE else "no dependence is shown"
        said = f"{_sentence(where + alike)}: {_rates(evidence.thirds)}. {_sentence(factor)}. {every}"
        if evidence.thirds and _ratio(evidence.thirds) > effect.factor:
            said += " Mini-batches that clip more hold other lengths: within them there is no such difference."
        if not effect.is_of_run:
            return Finding(EVEN, NOTE, said, _more_steps(evidence), rate, RECORD)
        more = "" if effect.factor <= _CLOSE else " Record more steps to see smaller differences."
        return Finding(EVEN, NOTE, said, f"Keep the width.{more}", rate, KEEP)
    who = f"{_sentence(where + _WHO[str(effect.who)])} ({_p(effect.p)})"
    if effect.who == "by side":
        better, worse = map(_rates, evidence.thirds_of_sides)
        rates = f"of the better {better}; of the worse {worse}"
    else:
        curved = effect.who in ("both ends", "the middle") and len(evidence.tails) == 3
        rates = _rates(evidence.tails, _TENTHS) if curved else _rates(evidence.thirds)
    said = " ".join(filter(None, [f"{who}: {rates}.", _line(effect), every]))
    if not effect.is_of_run:
        return Finding(LENGTH, WARNING, said, _more_steps(evidence), rate, RECORD)
    return Finding(LENGTH, WARNING, said, "`fspo-verl calibrate` tries other widths.", rate, TAKE)


_WHO = {
    "shorter": "shorter responses are clipped more",
    "longer": "longer responses are clipped more",
    "both ends": "the shortest and the longest responses are clipped more than those in between",
    "the middle": "responses of middle length are clipped more than the shortest and the longest",
    "by side": "length matters in another way for responses better than their group than for worse ones",
}


def _ratio(thirds: tuple[Counted, ...]) -> float:
    """Of the clip rates of the long and the short, at least 1."""
    low, high = sorted((thirds[0].rate, thirds[-1].rate))
    return high / low if low > 0 else math.inf if high > 0 else 1.0


def _plain_to_see(thirds: tuple[Counted, ...]) -> str | None:
    """Which responses are clipped :data:`TIMES` as often as the others, by two standard deviations of counts."""
    if len(thirds) < 2:
        return None
    for more, less, who in ((thirds[0], thirds[-1], "shorter"), (thirds[-1], thirds[0], "longer")):
        spread = math.sqrt(more.clipped / more.responses**2 + less.clipped / less.responses**2)
        if more.rate >= TIMES * less.rate and more.rate - less.rate > 2 * spread:
            return who
    return None


def _tested_steps(evidence: Evidence) -> str:
    tested, recorded = evidence.length.steps if evidence.length else 0, evidence.steps
    if recorded > tested:
        return f"the {tested} of {recorded} steps that have clips to compare"
    return "this one step" if tested == 1 else f"these {tested} steps"


def _more_steps(evidence: Evidence) -> str:
    if evidence.steps >= STEPS:
        tested = evidence.length.steps if evidence.length else 0
        return f"Record more: {tested} of the {evidence.steps} steps have clips to compare, and {STEPS} have to."
    few = "one is" if evidence.steps == 1 else f"{evidence.steps} are"
    return f"Record {STEPS} steps or more: {few} too few to speak of the run."


def _p(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.1g}"


def _line(effect: LengthEffect) -> str:
    """The power of the length that the clip rate follows, where it does."""
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
    if evidence.sides is None or not evidence.sides_differ or evidence.band is None:  # some losses clip one side only
        return None
    better, worse = evidence.sides
    if max(better, worse) < TIMES * min(better, worse):
        return None
    said = (
        f"{percent(better)} of the responses that are better than their group are clipped, and {percent(worse)} of "
        "those that are worse."
    )
    advice = "Set eps_low and eps_high apart: `fspo-verl calibrate` finds both for one clip rate."
    return Finding(SIDE, WARNING, said, advice, max(better, worse) - min(better, worse), TAKE)


def _unknown(evidence: Evidence) -> Finding:
    """The answer on lengths where there was no test."""
    rate = evidence.clip_rate
    if evidence.responses == 0:
        said = "Too few to say: no response has an advantage."
        return Finding(UNKNOWN, NOTE, said, "Record more: train until rewards within a group differ.", rate, RECORD)
    if rate is None:
        said = "Nothing to say: there are no records, and the metrics hold no clip rates."
        return Finding(UNKNOWN, NOTE, said, "Record more.", rate, RECORD)
    start = f"{_sentence(percent(rate))} {_of_what(evidence)} are clipped"
    if evidence.too_few is None:
        said = f"{start}. These are rates only, no test: there are no records."
        return Finding(UNKNOWN, NOTE, said, "Record more.", rate, RECORD)
    if evidence.one_length:
        return Finding(EVEN, NOTE, f"{start}: {evidence.too_few}.", "Keep the width.", rate, KEEP)
    return Finding(UNKNOWN, NOTE, f"{start}: {evidence.too_few}.", "Record more steps.", rate, RECORD)


# --- notes -----------------------------------------------------------------------------------------------------------


def _notes(evidence: Evidence) -> Iterable[Finding]:
    """Values that are notable and below their thresholds."""
    share = evidence.not_finite or 0.0
    if 0 < share < SHARE_NOT_FINITE:
        said = f"{percent(share)} of the responses hold NaN or inf and are left out of the loss."
        yield Finding(NOT_FINITE, NOTE, said, "", share)
    share = evidence.cut_off or 0.0
    if _NOTABLE * SHARE_CUT_OFF <= share < SHARE_CUT_OFF:
        yield Finding(CUT_OFF, NOTE, _of_cut_off(evidence), "", share)
    share = evidence.noise_share or 0.0
    if _noise(evidence) is None and share >= _NOTABLE * SHARE_OF_SPREAD:
        yield Finding(NOISE, NOTE, _of_noise(share), "", share)
    share = evidence.mismatch_share or 0.0
    least = _NOTABLE * SHARE_OF_SPREAD if evidence.bypass else _ENGINES
    if _mismatch(evidence) is None and share >= least:
        yield Finding(MISMATCH, NOTE, _of_mismatch(evidence), "", share)


# --- words -----------------------------------------------------------------------------------------------------------


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _of_what(evidence: Evidence) -> str:
    """What a rate is a share of."""
    if evidence.by_token:
        return "of the tokens (mean share of a response)"
    if evidence.responses is None:
        return "of the responses with an advantage"
    return f"of {evidence.responses:,} responses"


def _rates(thirds: tuple[Counted, ...], names: tuple[str, ...] = _THIRDS) -> str:
    """Clip rates of parts by length, each a count."""
    if len(thirds) < 2:
        return "all have one length"
    named = names if len(thirds) == 3 else ("the shorter", "the longer ones")
    said = []
    for place, (part, name) in enumerate(zip(thirds, named, strict=True)):
        tokens = f" ({_tokens(part)})" if place in (0, len(thirds) - 1) else ""
        said.append(f"{percent(part.rate)} of {name}{tokens}")
    return ", ".join(said)


def _tokens(part: Counted) -> str:
    if math.isnan(part.longest):
        return f"{part.shortest:,.0f} tokens and more"
    return f"{part.shortest:,.0f}-{part.longest:,.0f} tokens"


def _of_cut_off(evidence: Evidence) -> str:
    return f"{percent(evidence.cut_off or 0)} of the responses are cut off: they fill what they were allowed."


def _of_noise(share: float) -> str:
    return (
        f"About {min(share, 1):.0%} of the variance of the log-ratios is numerical noise, not learning: so much is "
        "there before any update (docs/noise.md)."
    )


def _of_mismatch(evidence: Evidence) -> str:
    share = f"{min(evidence.mismatch_share or 0, 1):.0%}"
    by = f"{evidence.mismatch_sigma:.2g} nats per token"
    if evidence.bypass:
        return (
            f"About {share} of the variance of the log-ratios is the mismatch of trainer and rollout engine, not "
            f"learning: {by} are there before any update. In bypass mode the clip acts on it."
        )
    return (
        f"Trainer and rollout engine disagree by {by}. That is {share} of the way from the policy that sampled to the "
        "one that trains. The clip does not see it; rejections and importance weights do."
    )
