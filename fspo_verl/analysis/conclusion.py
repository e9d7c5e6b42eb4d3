# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the clip of a run: causes in a fixed order, and the same words for every command.

:class:`Evidence` holds the numbers, of records, live metrics or a log; what is not known is None, and nothing is said
of it. :func:`conclude` asks one rule after the other. The first that holds is the conclusion, the others are worth a
line below it. Light to import, as a process that trains can use it: no scipy, no pandas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from fspo_verl.observe import noise
from fspo_verl.observe.metrics import LENGTH_BIN, PREFIX

if TYPE_CHECKING:
    from fspo_verl.analysis.length_effect import LengthEffect, Part
    from fspo_verl.band import Band
    from fspo_verl.observe.settings import RunSettings

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
"""The causes where no rule holds: a test found nothing, or there was none."""
TRAINED = ("actor/", "critic/", "rollout_corr/")
"""Metrics of which NaN or inf means that training is broken."""

TAKE, KEEP, COULD_NOT, RECORD, MEND = ("take", "keep", "could not", "record", "mend")
"""What to do: take another clip, keep this one, keep it as no other could be tried, record more first, or fix
something other than the clip first."""

SHARE_NOT_FINITE = 0.001
"""Share of the responses that hold NaN or inf from which it is the conclusion. Fewer are a line."""
SHARE_CUT_OFF = 0.25
"""Share of the responses that fill what they were allowed from which it is the conclusion; a fifth of it is a line."""
SHARE_OF_SPREAD = 0.5
"""Share of the variance of the log-ratios from which noise, or the mismatch in bypass mode, is the conclusion; from a
fifth of it a line."""
SHARE_REJECTED = 0.25
"""Share of the responses that a rollout correction takes out of the loss from which it is the conclusion."""
MOST, HARDLY_ANY = 0.5, 0.001
"""Clip rates above and below which the level is the conclusion."""
TIMES = 2.0
"""Ratio of the clip rates of both sides from which it is the conclusion."""

SMALLER_MINI_BATCHES = "lower actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size"
NOTHING_MOVED = "nothing moved, so no clip can act"
_LARGE_FACTOR = 100.0  # beyond which naming it helps nobody
_NAMED = 3  # metrics
_SMALL_PART = 0.05  # of the clips, below which it is not named
_LINE = 0.2  # of a share that is a conclusion, from which it is worth a line


class Counted(NamedTuple):
    """Responses of some lengths, and how many of them are clipped."""

    shortest: float  # tokens
    longest: float  # NaN where it is not known
    responses: float
    clipped: float

    @property
    def rate(self) -> float:
        return self.clipped / self.responses


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The numbers of a run, or of some of its steps; shares between 0 and 1. None: not known."""

    responses: int | None = None
    """With an advantage."""

    steps: int | None = None
    """Recorded ones; those with clips to compare are :attr:`LengthEffect.steps` of :attr:`length`."""

    clip_rate: float | None = None
    """Share of :attr:`responses`; of a loss that clips tokens the mean share of a response's tokens."""

    by_token: bool = False
    length: LengthEffect | None = None
    too_few: str | None = None
    """Why there is no :attr:`length`, in a subordinate clause."""

    one_length: bool = False

    thirds: tuple[Counted, ...] = ()
    """Of about as many responses each, from the shortest, where there was no test; see :func:`thirds`."""

    moved: float | None = None
    """Share of the responses whose log-ratios are not all 0."""

    not_finite: float | None = None
    broken: tuple[str, ...] = ()
    """Metrics, of :data:`TRAINED`, that are NaN or inf."""

    cut_off: float | None = None
    """Share of the responses that fill what they were allowed."""

    longest: tuple[float, float] | None = None
    """Clip rate of the longest third, with and without the responses that are cut off; NaN where none is left."""

    noise_sigma: float | None = None
    """Spread of a token's log-ratio where no update has moved it, nats."""

    noise_share: float | None = None
    """Of the variance of a token's log-ratio after updates."""

    one_step: bool | None = None
    """Whether each rollout gets one optimiser step: no update has moved any response then."""

    noise_found: noise.Noise | None = None
    """Noise against :attr:`band`, of records; of metrics where they count what lies outside."""

    band: Band | None = None
    """On S, that trained."""

    mismatch_sigma: float | None = None
    """Spread of a token's log-ratio between trainer and rollout engine, nats."""

    mismatch_share: float | None = None
    """In bypass mode: of the variance of a token's log-ratio. Otherwise the clip does not see the mismatch."""

    rejected: float | None = None
    """Share of the responses that a rollout correction takes out of the loss."""

    sides: tuple[float, float] | None = None
    """Clip rates of the responses better and worse than their group."""

    sides_differ: bool | None = None
    """By more than noise."""

    @staticmethod
    def of_live(series: Mapping[str, float], settings: RunSettings | None = None, steps: int = 1) -> Evidence:
        """Of the metrics of a step, or of their means over steps, by the names that loggers have.

        The raw sums ``actor/fspo/*`` are asked first, as their quotient is that of all the steps.

        Args:
            settings: what trains.
            steps: over how many the means are taken.
        """
        known = {name: value for name, value in series.items() if math.isfinite(value)}
        broken = (name for name in series if name not in known and name.startswith(TRAINED))
        raw = {name.removeprefix(PREFIX): value for name, value in known.items() if name.startswith(PREFIX)}
        bins, found = _bins(known, steps), noise.of_means(known, steps)
        rows, rejected = raw.get("sequence_fraction"), raw.get("rollout_rejected_fraction")
        mismatch = _quotient(raw.get("rollout_quadratic_variation"), raw.get("rollout_length"))
        bypass = settings is not None and settings.old_log_probs_from_rollout
        return Evidence(
            clip_rate=rate_of(bins) if bins else known.get("fspo/clip_rate/all"),
            thirds=thirds(bins),
            moved=0.0 if found and raw.get("sigma_squared") == 0 else None,
            not_finite=raw.get("nonfinite_fraction"),
            broken=tuple(broken),
            cut_off=_quotient(raw.get("truncated_fraction"), rows, known.get("fspo/truncated")),
            noise_sigma=found.sigma if found else known.get("fspo/noise_sigma"),
            noise_share=_noise_share(raw, found),
            one_step=rows == raw.get("on_policy_fraction") if found else None,
            noise_found=found,
            band=_in_force(settings.trained_band if settings else None, raw),
            mismatch_sigma=known.get("fspo/mismatch_sigma") if mismatch is None else math.sqrt(mismatch),
            mismatch_share=_quotient(mismatch, _quotient(raw.get("sigma_squared"), rows)) if bypass else None,
            rejected=None if rejected is None else _quotient(rejected, (rows or 0) + rejected),
        )


def _in_force(band: Band | None, raw: Mapping[str, float]) -> Band | None:
    """The band, with the eps that the metrics of one that follows a clip rate have."""
    low, high = raw.get("eps_low"), raw.get("eps_high")
    if band is None or low is None or high is None:
        return band
    return replace(band, eps=None, eps_low=low, eps_high=high)


def _quotient(numerator: float | None, denominator: float | None, otherwise: float | None = None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else otherwise


def _noise_share(raw: Mapping[str, float], found: noise.Noise | None) -> float | None:
    """The share of noise in a token's variance, over the mini-batches that updates have moved."""
    names = ("sequence_fraction", "on_policy_fraction", "sigma_squared", "on_policy_sigma_squared")
    if found is None or not set(names) <= set(raw):
        return None
    rows, first, every, noisy = map(raw.__getitem__, names)
    moved = (every - noisy) / (rows - first) if rows - first > 1e-9 else 0.0
    return found.sigma**2 / moved if moved > 0 else None


def rate_of(parts: Iterable[Counted]) -> float:
    """The clip rate of some parts together; at least one of them has a response."""
    parts = list(parts)
    return sum(part.clipped for part in parts) / sum(part.responses for part in parts)


def _bins(known: Mapping[str, float], steps: int) -> list[Counted]:
    """The length bins of the metrics that have responses, from the shortest; as numbers of responses."""
    found = []
    for name, share in known.items():
        if (match := LENGTH_BIN.fullmatch(name)) and match[3] == "responses" and share > 0:
            rows = known.get(f"{PREFIX}step_rows", 1.0) * steps
            clipped = known.get(f"{name.removesuffix('responses')}clipped", 0.0)
            found.append(Counted(int(match[1]), float(match[2] or "nan"), share * rows, clipped * rows))
    return sorted(found)


def thirds(bins: Iterable[Counted]) -> tuple[Counted, ...]:
    """Short, middle, long: bins joined from either end until they hold a third of the responses; empty if one has all.

    Args:
        bins: from the shortest.
    """
    bins = list(bins)
    every = sum(one.responses for one in bins)
    below = above = 0.0
    first = last = 0
    while first < len(bins) and below < every / 3 - 1e-9:
        below, first = below + bins[first].responses, first + 1
    while last < len(bins) - first and above < every / 3 - 1e-9:
        above, last = above + bins[-1 - last].responses, last + 1
    stop = len(bins) - last
    parts = [part for part in (bins[:first], bins[first:stop], bins[stop:]) if part]
    if len(parts) < 2:
        return ()
    return tuple(
        Counted(part[0].shortest, part[-1].longest, sum(b.responses for b in part), sum(b.clipped for b in part))
        for part in parts
    )


@dataclass(frozen=True)
class Conclusion:
    """One finding; texts are sentences in plain text without line breaks."""

    cause: str
    """One of :data:`CAUSES`, or :data:`EVEN` or :data:`UNKNOWN`."""

    sentence: str
    advice: str
    action: str
    """One of :data:`TAKE`, :data:`KEEP`, :data:`COULD_NOT`, :data:`RECORD` and :data:`MEND`."""


def conclude(evidence: Evidence) -> list[Conclusion]:
    """All causes that hold, in the order of :data:`CAUSES`; if none does, that lengths are even or not known."""
    found = [one for rule in _RULES if (one := rule(evidence)) is not None]
    return found or [_nothing(evidence)]


def lines(evidence: Evidence) -> list[str]:
    """Facts too small for a conclusion, a line each."""
    said = []
    if evidence.not_finite and _not_finite(evidence) is None:
        said.append(f"{percent(evidence.not_finite)} of the responses hold NaN or inf and are left out of the loss.")
    if evidence.cut_off is not None and _LINE * SHARE_CUT_OFF <= evidence.cut_off < SHARE_CUT_OFF:
        said.append(_cut_off_sentence(evidence))
    if _noise(evidence) is None and (evidence.noise_share or 0) >= _LINE * SHARE_OF_SPREAD:
        said.append(_noise_of_spread(evidence))
    if _mismatch(evidence) is None and (evidence.mismatch_share or 0) >= _LINE * SHARE_OF_SPREAD:
        said.append(_mismatch_of_spread(evidence))
    return said


def brief(evidence: Evidence, parts: Mapping[str, float] | None = None) -> str:
    """The numbers in one line, for whoever looks at a run while it trains; empty where none is known.

    Args:
        parts: shares of the clips, of :func:`fspo_verl.analysis.attribution.attribution`.
    """
    said = []
    if evidence.clip_rate is not None:
        of = " of the tokens" if evidence.by_token else ""
        named = [f"{percent(share)} of it {part}" for part, share in (parts or {}).items() if share >= _SMALL_PART]
        said.append(", ".join([f"{percent(evidence.clip_rate)}{of} clipped", *(named if evidence.clip_rate else ())]))
    if len(evidence.thirds) > 1 and evidence.clip_rate:
        shortest, longest = evidence.thirds[0].rate, evidence.thirds[-1].rate
        said.append(f"shortest third {percent(shortest)}, longest {percent(longest)}")
    if evidence.sides and evidence.clip_rate:
        better, worse = map(percent, evidence.sides)
        said.append(f"better than their group {better}, worse {worse}")
    for share, what in (
        (evidence.cut_off, "cut off"),
        (evidence.rejected, "rejected"),
        (evidence.not_finite, "not finite"),
    ):
        if share:
            said.append(f"{what} {percent(share)}")
    if evidence.broken:
        said.append(_broken(evidence))
    return "; ".join(said)


# --- the rules, in their order ---------------------------------------------------------------------------------------


def _not_finite(evidence: Evidence) -> Conclusion | None:
    share = evidence.not_finite
    if share is not None and share >= SHARE_NOT_FINITE:
        said = f"{percent(share)} of the responses hold NaN or inf in their log-probs; the loss leaves them out."
        where = "the model, its precision, or the log-probs of the rollout"
    elif evidence.broken:
        said = f"{_broken(evidence)}."
        where = "the learning rate, the model, its precision, or the rewards"
    else:
        return None
    return Conclusion(NOT_FINITE, said, f"Find where they come from before anything else: {where}.", MEND)


def _cut_off(evidence: Evidence) -> Conclusion | None:
    if evidence.cut_off is None or evidence.cut_off < SHARE_CUT_OFF:
        return None
    return Conclusion(
        CUT_OFF,
        _cut_off_sentence(evidence),
        "Raise data.max_response_length, or the model's length, first: the longest lengths are a limit here, and what "
        "the clip does to them says little of responses that end by themselves. If few were cut off before, the policy "
        "has broken: look at the learning rate instead.",
        MEND,
    )


def _noise(evidence: Evidence) -> Conclusion | None:
    found, band, sigma = evidence.noise_found, evidence.band, evidence.noise_sigma
    remove = f"remove the noise: {noise.HELP}."
    clips = evidence.clip_rate is not None and evidence.clip_rate >= HARDLY_ANY
    if clips and evidence.one_step and sigma:  # first, as a wider clip would be idle
        return Conclusion(
            NOISE,
            f"Every clip is numerical noise: {percent(evidence.clip_rate or 0)} of the responses are clipped, and no "
            "update has moved them. Each rollout gets one optimiser step.",
            f"If the clip is to act, {SMALLER_MINI_BATCHES}, and {remove}",
            MEND,
        )
    if found and band and (said := noise.finding(found, band)):
        return Conclusion(NOISE, f"{sentence(said)}.", f"{noise.remedy(found)}.", MEND)
    if found is None and sigma and band is not None and band.length_power == 0.5:
        eps, floor = min(band.low, band.high), noise.EPS_IN_SIGMA * sigma
        if eps < floor:
            return Conclusion(
                NOISE,
                f"The clip is narrower than the numerical noise: eps is {eps:g}, and with this noise an eps below "
                f"{noise.rounded_up(floor):g} clips what rounding does.",
                f"Set eps to {noise.rounded_up(floor):g} or more, or {remove}",
                MEND,
            )
    if clips and (evidence.noise_share or 0) >= SHARE_OF_SPREAD:
        return Conclusion(NOISE, _noise_of_spread(evidence), sentence(remove), MEND)
    return None


def _mismatch(evidence: Evidence) -> Conclusion | None:
    clips = evidence.clip_rate is not None and evidence.clip_rate >= HARDLY_ANY
    if clips and evidence.mismatch_share is not None and evidence.mismatch_share >= SHARE_OF_SPREAD:
        return Conclusion(
            MISMATCH,
            _mismatch_of_spread(evidence),
            "Set algorithm.rollout_correction.bypass_mode=False: the clip then sees what updates do, and not this. "
            "It costs a forward pass of each rollout; see docs/noise.md.",
            MEND,
        )
    if evidence.rejected is not None and evidence.rejected >= SHARE_REJECTED:
        return Conclusion(
            MISMATCH,
            f"The rollout correction takes {percent(evidence.rejected)} of the responses out of the loss.",
            "Bring trainer and rollout engine closer together, or widen the range of the rejection; see docs/noise.md.",
            MEND,
        )
    return None


def _level(evidence: Evidence) -> Conclusion | None:
    rate = evidence.clip_rate
    if rate is not None and rate > MOST:
        effect, kept = evidence.length, ""
        if effect is not None and len(effect.thirds) == 3:
            kept = f": kept are {_of_thirds(effect.thirds, [1 - part.rate for part in effect.thirds])}"
        return Conclusion(
            LEVEL,
            f"Clips {percent(rate)} {_of_what(evidence)}, more than it keeps{kept}.",
            "Widen the clip; `fspo-verl calibrate` finds the eps of a clip rate.",
            TAKE,
        )
    if evidence.moved == 0:
        why, advice = ": with one optimiser step per rollout the ratio stays 1", f"{sentence(SMALLER_MINI_BATCHES)}."
        if not evidence.one_step:
            why = ", though rollouts got several optimiser steps each"
            advice = "Look at the learning rate: is it 0, as in the first step of a warm-up?"
        return Conclusion(LEVEL, f"{sentence(NOTHING_MOVED)}{why}.", advice, MEND)
    if rate is None or rate >= HARDLY_ANY:
        return None
    none = f"Clips {'none' if rate == 0 else percent(rate)} {_of_what(evidence)}"
    if evidence.one_step:
        return Conclusion(
            LEVEL,
            f"{none}: with one optimiser step per rollout no update has moved them before they are judged.",
            f"{sentence(SMALLER_MINI_BATCHES)} if the clip is to act.",
            MEND,
        )
    return Conclusion(
        LEVEL,
        f"{none}: the clip is idle.",
        "Lower eps if a clip is wanted; `fspo-verl calibrate` finds the eps of a clip rate.",
        TAKE,
    )


def _length(evidence: Evidence) -> Conclusion | None:
    if evidence.length is None and (said := _by_thirds(evidence.thirds)):
        return Conclusion(
            LENGTH, said, "`fspo-verl report` tests it, and `fspo-verl calibrate` tries other widths.", RECORD
        )
    if evidence.length is None or not evidence.length.depends:
        return None
    return Conclusion(LENGTH, of_length(evidence), "`fspo-verl calibrate` tries other widths.", RECORD)


def _side(evidence: Evidence) -> Conclusion | None:
    if evidence.sides is None or not evidence.sides_differ or evidence.band is None:  # some losses clip one side only
        return None
    better, worse = evidence.sides
    if max(better, worse) < TIMES * min(better, worse):
        return None
    return Conclusion(
        SIDE,
        f"Clips {percent(better)} of the responses that are better than their group and {percent(worse)} of those that "
        "are worse.",
        "Set eps_low and eps_high apart; `fspo-verl calibrate` finds both for one clip rate.",
        TAKE,
    )


_RULES: tuple[Callable[[Evidence], Conclusion | None], ...] = (
    _not_finite,
    _cut_off,
    _noise,
    _mismatch,
    _level,
    _length,
    _side,
)


def _nothing(evidence: Evidence) -> Conclusion:
    if evidence.length is not None:
        return Conclusion(EVEN, of_length(evidence), "Keep the clip.", KEEP)
    if evidence.responses == 0:
        more = "Record more: train until some rewards within a group of responses differ."
        return Conclusion(UNKNOWN, "Too few to say: no response has an advantage.", more, RECORD)
    if evidence.clip_rate is None:
        said = "Nothing to say: there are no records, and the metrics hold no clip rates."
        return Conclusion(UNKNOWN, said, "Record more.", RECORD)
    start = f"Clips {percent(evidence.clip_rate)} {_of_what(evidence)}"
    if evidence.too_few is None:
        said = f"{start}. These are rates only, no test: there are no records."
        return Conclusion(UNKNOWN, said, "Record more.", RECORD)
    if evidence.one_length:
        return Conclusion(EVEN, f"{start}: {evidence.too_few}.", "Keep the clip.", KEEP)
    return Conclusion(UNKNOWN, f"{start}: {evidence.too_few}.", "Record more steps.", RECORD)


def _broken(evidence: Evidence) -> str:
    others = " and others" * (len(evidence.broken) > _NAMED)
    return f"NaN or inf in {', '.join(evidence.broken[:_NAMED])}{others}"


def _by_thirds(parts: tuple[Counted, ...]) -> str | None:
    """A sentence, if one of the shortest and the longest part is clipped :data:`TIMES` as often as the other, and the
    difference is above two standard deviations of independent counts.
    """
    for one, other, who in ((parts[:1], parts[-1:], "shorter"), (parts[-1:], parts[:1], "longer")):
        if len(parts) < 2:
            break
        more, less = one[0], other[0]
        spread = math.sqrt(more.clipped / more.responses**2 + less.clipped / less.responses**2)
        if more.rate >= TIMES * less.rate and more.rate - less.rate > 2 * spread:
            return (
                f"{who.capitalize()} responses are clipped more: {percent(parts[0].rate)} of the shortest third "
                f"({_tokens(parts[0])}), {percent(parts[-1].rate)} of the longest ({_tokens(parts[-1])})."
            )
    return None


def _tokens(part: Counted) -> str:
    if math.isnan(part.longest):
        return f"{part.shortest:,.0f} tokens and more"
    return f"{part.shortest:,.0f}-{part.longest:,.0f} tokens"


# --- their words -----------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """A share in per cent, with two digits below 10%."""
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}" if share >= 0.001 else f"{share:.2%}"


def sentence(text: str) -> str:
    """The text with a capital."""
    return text[0].upper() + text[1:]


def of_length(evidence: Evidence) -> str:
    """The clip rates by length, and what the test of :mod:`fspo_verl.analysis.length_effect` says of them."""
    effect, rate = evidence.length, evidence.clip_rate
    assert effect is not None and rate is not None, "only where there was a test"
    curved = effect.depends and not effect.is_line and len(effect.tails) == 3
    parts = effect.tails if curved else effect.thirds
    start = f"Clips {percent(rate)} {_of_what(evidence)}"
    rates = [part.rate for part in parts]
    if curved:
        start += ": " + _of_parts(parts, rates, ("the shortest tenth", "those in between", "the longest tenth")) + "."
    elif len(parts) == 3:
        start += f": {_of_thirds(parts, rates)}."
    elif len(parts) == 2:
        start += ": " + _of_parts(parts, rates, ("the shorter", "the longer ones")) + "."
    else:
        start += "."
    return f"{start} {_dependence(evidence, effect)}"


def _dependence(evidence: Evidence, effect: LengthEffect) -> str:
    steps = "this one step" if effect.steps == 1 else f"these {effect.steps} steps"
    if partly := (evidence.steps or 0) > effect.steps:
        steps = f"the {effect.steps} of {evidence.steps} steps that have clips to compare"
    where = "" if effect.is_of_run else f"in {steps} "
    if not effect.depends:
        factor = f"a factor up to {effect.factor:.2g} between lengths is compatible"
        if not effect.factor <= _LARGE_FACTOR:
            factor = "any difference is compatible"
        count = "" if where and partly else f"{evidence.responses:,} responses; "  # that is of all steps
        return f"No significant dependence on length {where}({count}{factor})."
    who = {
        "shorter": "shorter responses are clipped more",
        "longer": "longer responses are clipped more",
        "both ends": "the shortest and the longest responses are clipped more than those in between",
        "the middle": "responses of middle length are clipped more than the shortest and the longest",
    }[str(effect.who)]
    how = f"p = {effect.p:.1g}; the clip rate is no power of the length"
    if effect.is_line:
        ends = f"95% interval {effect.lower:.2f} to {effect.upper:.2f}"
        if math.isinf(effect.lower):
            ends = f"at most {effect.upper:.2f}"
        elif math.isinf(effect.upper):
            ends = f"at least {effect.lower:.2f}"
        how = f"{'rate of what is kept' if effect.of_kept else 'clip rate'} ~ length^{effect.exponent:.2f}, {ends}"
    return sentence(f"{where}{who} ({how}).")


def _of_what(evidence: Evidence) -> str:
    """What a rate is a share of."""
    if evidence.by_token:
        return "of the tokens (mean share of a response)"
    return (
        "of the responses with an advantage" if evidence.responses is None else f"of {evidence.responses:,} responses"
    )


def _of_parts(parts: tuple[Part, ...], rates: list[float], names: tuple[str, ...]) -> str:
    said = []
    for place, (part, rate, name) in enumerate(zip(parts, rates, names, strict=True)):
        tokens = f" ({part.shortest:,}-{part.longest:,} tokens)" if place in (0, len(parts) - 1) else ""
        said.append(f"{percent(rate)} of {name}{tokens}")
    return ", ".join(said)


def _of_thirds(parts: tuple[Part, ...], rates: list[float]) -> str:
    return _of_parts(parts, rates, ("the shortest third", "the middle", "the longest"))


def _cut_off_sentence(evidence: Evidence) -> str:
    said = f"{percent(evidence.cut_off or 0)} of the responses are cut off: they fill what they were allowed"
    if evidence.longest is None or math.isnan(evidence.longest[0]):
        return f"{said}."
    every, ended = evidence.longest
    without = "none of its responses ended by itself" if math.isnan(ended) else f"{percent(ended)} without them"
    return f"{said}. Of the longest third {percent(every)} are clipped; {without}."


def _noise_of_spread(evidence: Evidence) -> str:
    return (
        f"About {min(evidence.noise_share or 0, 1):.0%} of the variance of the log-ratios is numerical noise, not "
        "learning: so much is there before any update (docs/noise.md)."
    )


def _mismatch_of_spread(evidence: Evidence) -> str:
    by = f", {evidence.mismatch_sigma:.2g} nats per token" if evidence.mismatch_sigma else ""
    return (
        f"About {min(evidence.mismatch_share or 0, 1):.0%} of the variance of the log-ratios is the mismatch of "
        f"trainer and rollout engine, not learning: so much is there before any update{by}. In bypass mode the clip "
        "acts on it."
    )
