# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the clip of a run does to lengths, in one sentence, and what to do next: the same for every command."""

import math
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from fspo_verl.analysis import fit, mismatch
from fspo_verl.analysis.clip_rates import prompts_of
from fspo_verl.analysis.length_effect import MIN_PROMPTS, LengthEffect, length_effect
from fspo_verl.analysis.runs import RECORDS_DIR, Run, live_clip_rates
from fspo_verl.band import Band
from fspo_verl.clips import MATCHED_RATE
from fspo_verl.observe import noise
from fspo_verl.observe.noise import Noise

_SMALL_FACTOR = 2.0  # between the lengths of a run: a difference that a user may leave alone
_LARGE_FACTOR = 100.0  # beyond which naming it helps nobody
_NOISY = 0.1  # share of noise in the spread of the log-ratios from which it is named


@dataclass(frozen=True)
class Verdict:
    """What :func:`verdict` says. Sentences are plain text without line breaks."""

    sentence: str
    """Who is clipped more, and how sure that is."""

    advice: str
    """What to do: keep the clip, take another, or record more."""

    rate: float
    """Clip rate of the responses with an advantage; NaN without any."""

    responses: int
    """With an advantage."""

    effect: LengthEffect | None = None
    """None where there are too few clips to say."""

    notes: tuple[str, ...] = ()
    """What else a reader has to know, a sentence or two each."""

    overrides: dict[str, float | str | None] = field(default_factory=dict)
    """Hydra overrides of the clip to take, by key; None stands for null. Empty where there is none."""


def verdict(records: pd.DataFrame) -> Verdict:
    """Say what the clip of a run does to lengths; too little data is an answer, not an error.

    Args:
        records: of :mod:`fspo_verl.observe.records`, all responses, moved or not.
    """
    counted = records[(records["advantage"] != 0) & (records["length"] > 0)]
    if counted.empty:
        return Verdict(
            "Too few to say: no response has an advantage.",
            "Record more: train until some rewards within a group of responses differ.",
            math.nan,
            0,
            notes=_notes(records),
        )
    rate, effect = float(counted["clipped"].to_numpy(np.float64).mean()), length_effect(records)
    overrides: dict[str, float | str | None] = {}
    if effect is None:
        sentence, advice = _too_few(counted, rate)
    else:
        sentence = f"{_rates(counted, rate, effect)} {_dependence(len(counted), effect)}"
        if effect.depends:
            advice, overrides = _fairer(records, MATCHED_RATE if _by_token(counted) else rate)
        elif _hidden_factor(effect) > _SMALL_FACTOR:
            advice = "Keep the clip; record more steps to see smaller differences."
        else:
            advice = "Keep the clip."
    return Verdict(sentence, advice, rate, len(counted), effect, _notes(records), overrides)


def verdict_of(run: Run) -> Verdict:
    """:func:`verdict` of a run's records; from its metrics rates only, without a test."""
    if len(run.records):
        return verdict(run.records)
    live = live_clip_rates(run.metrics)
    sentence, rate = "Nothing to say: there are no records, and the metrics hold no clip rates.", math.nan
    if len(live):
        rate = live.clipped.sum() / live.responses.sum()
        share = f"{percent(rate)} of the responses with an advantage"
        sentence = f"Clips {share}. These are rates only, no test: there are no records."
    settings, notes = run.settings, []
    how = f"Record more: train with {RECORDS_DIR}=DIR"
    if settings is None or settings.loss != "fspo":
        how += " and +algorithm.policy_loss=observed (algorithm.policy_loss=gspo and grpo include it)"
    if (found := noise.of_metrics(run.metrics)) is not None:
        notes.append(
            f"{found.responses:,} responses of first mini-batches, which no update has moved, show numerical noise: a "
            f"token's log-ratio spreads by {found.sigma:.2g} nats."
        )
        notes += _too_narrow(found, settings.trained_band if settings else None)
    return Verdict(sentence, f"{how}.", rate, 0, notes=tuple(notes))


def percent(share: float) -> str:
    """A share in per cent, with two digits below 10%."""
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}" if share >= 0.001 else f"{share:.2%}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _by_token(counted: pd.DataFrame) -> bool:
    return bool(((counted["clipped"] > 0) & (counted["clipped"] < 1)).any())


def _what(counted: pd.DataFrame) -> str:
    """What a rate is a share of."""
    return "of the tokens (mean share of a response)" if _by_token(counted) else f"of {len(counted):,} responses"


def _too_few(counted: pd.DataFrame, rate: float) -> tuple[str, str]:
    """Sentence and advice where there is no test."""
    start = f"Clips {percent(rate)} {_what(counted)}"
    if rate == 0:
        return (
            f"Clips none of {len(counted):,} responses: too few to say whether length matters.",
            "Lower eps if a clip is wanted; `fspo-verl calibrate` finds the eps of a clip rate.",
        )
    if rate == 1:
        return f"{start}: nothing is left to compare.", "Raise eps; `fspo-verl calibrate` finds the eps of a clip rate."
    if counted["length"].nunique() == 1:
        return f"{start}. All have one length, so there is nothing to compare.", "Keep the clip."
    prompts = np.unique(prompts_of(counted)[(counted["clipped"] > 0).to_numpy()]).size
    if prompts < MIN_PROMPTS:
        why = f"clips fell on {prompts} prompts, and a test needs {MIN_PROMPTS}"
    else:
        why = "too few mini-batches hold several prompts and lengths of one sign of the advantage"
    return f"{start}: too few to say whether length matters ({why}).", "Record more steps."


def _rates(counted: pd.DataFrame, rate: float, effect: LengthEffect) -> str:
    shares = [percent(third.rate) for third in effect.thirds]
    first, last = effect.thirds[0], effect.thirds[-1]
    tokens = f"({first.shortest:,}-{first.longest:,} tokens)"
    start = f"Clips {percent(rate)} {_what(counted)}"
    if len(effect.thirds) == 3:
        of_thirds = f"{shares[0]} of the shortest third {tokens}, {shares[1]} of the middle, {shares[2]} of the longest"
        return f"{start}: {of_thirds} ({last.shortest:,}-{last.longest:,} tokens)."
    return f"{start}: {shares[0]} of the shorter {tokens}, {shares[-1]} of the longer ones." if shares[1:] else start


def _dependence(responses: int, effect: LengthEffect) -> str:
    if effect.depends:
        who = "Shorter" if effect.exponent < 0 else "Longer"
        ends = f"95% interval {effect.lower:.2f} to {effect.upper:.2f}"
        if math.isinf(effect.lower):
            ends = f"at most {effect.upper:.2f}"
        elif math.isinf(effect.upper):
            ends = f"at least {effect.lower:.2f}"
        return f"{who} responses are clipped more (clip rate ~ length^{effect.exponent:.2f}, {ends})."
    short, long = effect.thirds[0].median, effect.thirds[-1].median
    between = f"between {short:,.0f} and {long:,.0f} tokens"
    factor = _hidden_factor(effect)
    bound = f"a factor of {factor:.2g} {between} cannot be excluded"
    if factor > _LARGE_FACTOR:
        bound = f"any difference {between} remains possible"
    return f"No difference between lengths that these {responses:,} responses can show ({bound})."


def _hidden_factor(effect: LengthEffect) -> float:
    """Ratio of the clip rates of short and long responses that the interval leaves open."""
    span = math.log(effect.thirds[-1].median / effect.thirds[0].median)
    exponent = max(abs(effect.lower), abs(effect.upper))
    return math.inf if math.isinf(exponent) or exponent * span > 50 else math.exp(exponent * span)


def _fairer(records: pd.DataFrame, target: float) -> tuple[str, dict[str, float | str | None]]:
    """Advice where the clip depends on length, and the overrides of the band to take, with this rate on each side."""
    settings = records.attrs["settings"]
    try:
        best = fit.fits(records, target)[0]
    except fit.Unreachable as error:
        return f"No fairer band was found: {error}.", {}
    trained = settings and settings.trained_band
    if trained is not None and trained.form == best.band.form:
        shape = f"Keep the shape: no other width that was tried is more even than {best.width}."
        return f"{shape} For fewer or more clips `fspo-verl calibrate` finds eps.", {}
    take = f"Take a band whose width follows {best.width}; it clips {percent(target)} of these responses on each side."
    return " ".join(filter(None, [take, fit.ends_following(settings)])), fit.overrides(best.band, settings)


def _notes(records: pd.DataFrame) -> tuple[str, ...]:
    return tuple(filter(None, (_movement(records), *_of_noise(records), mismatch.note(records), *_incomplete(records))))


def _movement(records: pd.DataFrame) -> str | None:
    if len(records) and not (records["quadratic_variation"] > 0).any():
        return _sentence(fit.NOTHING_MOVED)
    if len(records) and noise.on_policy(records["mini_batch"], records.attrs["settings"]).all():
        return (
            "Nothing moved but for numerical noise: with one optimiser step per rollout, every clip is noise. "
            f"{_sentence(fit.SMALLER_MINI_BATCHES)}"
        )
    return None


def _of_noise(records: pd.DataFrame) -> list[str]:
    settings = records.attrs["settings"]
    band = settings and settings.trained_band
    found = noise.of_records(records, settings, band) if len(records) else None
    if found is None:
        return []
    said = []
    moved = records[~noise.on_policy(records["mini_batch"], settings)]
    if (variance := (moved["quadratic_variation"] / moved["length"]).mean()) > 0:
        share = found.sigma**2 / variance
        if share >= _NOISY:
            said.append(
                f"About {min(share, 1):.0%} of how far responses move is numerical noise: responses that no update "
                "has moved show as much (docs/noise.md)."
            )
    return said + _too_narrow(found, band)


def _too_narrow(found: Noise, band: Band | None) -> list[str]:
    warned = noise.warning(found, band) if band is not None else None
    return [_sentence(warned)] if warned else []


def _incomplete(records: pd.DataFrame) -> list[str]:
    said, (steps, responses) = [], records.attrs["lost"]
    if responses:
        said.append(f"The records of {responses:,} responses in {steps:,} steps were lost while it trained.")
    if (rows := records.attrs["rows"]) > len(records):
        said.append(f"A random {len(records):,} of its {rows:,} records are used (--max-rows).")
    return said
