# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the clip of a run does, in one sentence, and what to do next: the same for every command.

The order of the causes and their words are those of :mod:`fspo_verl.analysis.conclusion`. Here its evidence is taken
from records or metrics, and advice on a width from those that were tried (:mod:`fspo_verl.analysis.widths`).
"""

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy.special import stdtr

from fspo_verl.analysis import conclusion, fit, mismatch, numerical_noise, widths
from fspo_verl.analysis.clip_rates import prompts_of
from fspo_verl.analysis.conclusion import Conclusion, Evidence, conclude, percent, sentence
from fspo_verl.analysis.length_effect import ENDS, MIDDLE, MIN_PROMPTS, MIN_STEPS, LengthEffect, length_effect
from fspo_verl.analysis.logs import NOT_FINITE
from fspo_verl.analysis.metric_facts import LEARN_MORE, Fact, facts
from fspo_verl.analysis.overrides import band_overrides, to_know
from fspo_verl.analysis.runs import Run
from fspo_verl.analysis.widths import Comparison, Width
from fspo_verl.band import Band
from fspo_verl.clips import MATCHED_RATE
from fspo_verl.keys import RECORDS_DIR
from fspo_verl.observe import noise
from fspo_verl.observe.metrics import PREFIX
from fspo_verl.observe.settings import RunSettings

_SMALL_FACTOR = 2.0  # between the rates of two lengths: a difference that a user may leave alone
_RARE_SIDE = 0.01  # p-value of two sides; with RARE of the lengths a weighted Bonferroni split of 6%
_ASKS_FOR_A_WIDTH = (conclusion.LENGTH, conclusion.EVEN, conclusion.LEVEL, conclusion.SIDE)


@dataclass(frozen=True)
class Verdict:
    """What :func:`verdict` says. Sentences are plain text without line breaks."""

    sentence: str
    """The conclusion: what is wrong, who is clipped more, and how sure that is."""

    advice: str
    """What to do: keep the clip, take another, record more, or fix something else first."""

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

    cause: str = conclusion.UNKNOWN
    """See :class:`fspo_verl.analysis.conclusion.Conclusion`, as for :attr:`action`."""

    action: str = conclusion.RECORD
    comparison: Comparison | None = None
    """The widths that were tried; None where the advice is not about them."""


def verdict(records: pd.DataFrame, target: float | None = None) -> Verdict:
    """Say what the clip of a run does; too little data is an answer, not an error.

    Args:
        records: of :mod:`fspo_verl.observe.records`, all responses, moved or not.
        target: clip rate of a band to take; as widths are compared if None.

    Raises:
        Unreachable: a band that is better than the run's does not reach the target.
    """
    evidence = of_records(records)
    first, *others = conclude(evidence)
    advice = _Advice(first.action, first.advice)
    if first.cause in _ASKS_FOR_A_WIDTH and first.action != conclusion.MEND and not evidence.one_length:
        advice = _advised(records, evidence, first, target)
    settings, text, overrides = records.attrs["settings"], advice.text, {}
    if advice.band is not None:
        overrides = band_overrides(advice.band, settings)
        text = " ".join(filter(None, [text, to_know(advice.band, settings)]))
    below = [one.sentence for one in others]
    if first.cause not in (conclusion.LENGTH, conclusion.EVEN) and evidence.length and not evidence.length.depends:
        below.append(conclusion.of_length(evidence))
    said = [*below, *conclusion.lines(evidence), mismatch.note(records), *_incomplete(records)]
    return Verdict(
        first.sentence,
        text,
        math.nan if evidence.clip_rate is None else evidence.clip_rate,
        evidence.responses or 0,
        evidence.length,
        tuple(filter(None, said)),
        overrides,
        first.cause,
        advice.action,
        advice.compared,
    )


def verdict_of(run: Run) -> Verdict:
    """:func:`verdict` of a run's records; from its metrics rates only, without a test."""
    if len(run.records):
        return verdict(run.records)
    settings, evidence = run.settings, of_metrics(run.metrics, run.settings)
    if evidence.clip_rate is None and (said := facts(run)):
        return _of_log(said)
    first, *others = conclude(evidence)
    how = f"Record more: train with {RECORDS_DIR}=DIR"
    if settings is None or settings.loss != "fspo":
        how += " and algorithm.policy_loss=observed (algorithm.policy_loss=gspo and grpo include it)"
    advice = f"{how}." if first.action == conclusion.RECORD else f"{first.advice} {how}."
    notes = [one.sentence for one in others] + conclusion.lines(evidence)
    if evidence.noise_found is not None and first.cause != conclusion.NOISE:
        notes.append(
            f"{evidence.noise_found.responses:,} responses of first mini-batches, which no update has moved, show "
            f"numerical noise: a token's log-ratio spreads by {evidence.noise_found.sigma:.2g} nats."
        )
    if first.cause != conclusion.UNKNOWN:
        notes.append("These are rates only, no test: there are no records.")
    rate = math.nan if evidence.clip_rate is None else evidence.clip_rate
    return Verdict(first.sentence, advice, rate, 0, None, tuple(notes), {}, first.cause, first.action)


def _of_log(said: list[Fact]) -> Verdict:
    """What a run tells that was not observed: never why a clip acts. The launch that would tell comes last."""
    by_name = {fact.about: fact for fact in said}
    not_finite = 1.0 if conclusion.NOT_FINITE in by_name else None
    cut_off = by_name[conclusion.CUT_OFF].values.get("last") if conclusion.CUT_OFF in by_name else None
    cause = conclude(Evidence(not_finite=not_finite, cut_off=cut_off))[0]
    first = by_name.get(cause.cause) or by_name.get("clipped") or said[0]
    nothing = by_name.get("no advantage")
    if cause.cause == conclusion.UNKNOWN and nothing and nothing.values["count"] == nothing.values["steps"]:
        first = nothing
    more = f"To see why the clip acts and on which lengths: {LEARN_MORE}."
    advice = f"{cause.advice} {more}" if cause.action == conclusion.MEND else more
    notes = tuple(fact.sentence for fact in said if fact is not first)
    return Verdict(first.sentence, advice, math.nan, 0, None, notes, {}, cause.cause, cause.action)


# --- evidence --------------------------------------------------------------------------------------------------------


def of_records(records: pd.DataFrame, tested: bool = True) -> Evidence:
    """The evidence that records give for each cause; for lengths only the rates of thirds, if they are not tested."""
    counted = records[(records["advantage"] != 0) & (records["length"] > 0)]
    evidence = Evidence(responses=len(counted), steps=int(records["step"].nunique()))
    if len(records):
        evidence = dataclasses.replace(
            evidence,
            not_finite=float((records["decision"] == "nonfinite").mean()),
            **_of_cut_off(counted, records),
        )
    if counted.empty:
        return evidence
    settings, clipped = records.attrs["settings"], counted["clipped"].to_numpy(np.float64)
    effect, band = length_effect(records) if tested else None, settings.trained_band if settings else None
    measured, engines = numerical_noise.of_records(records, settings, band), mismatch.of_bypass(records)
    return dataclasses.replace(
        evidence,
        clip_rate=float(clipped.mean()),
        by_token=bool(((clipped > 0) & (clipped < 1)).any()),
        length=effect,
        too_few=_too_few(counted) if tested and not effect else None,
        one_length=counted["length"].nunique() == 1,
        thirds=() if tested else _thirds(counted),
        moved=float((records["quadratic_variation"] > 0).mean()),
        noise_sigma=measured and measured.sigma,
        noise_share=_noise_share(records, measured),
        one_step=bool((records["mini_batch"] == 0).all()),
        noise_found=measured,
        band=band,
        mismatch_sigma=engines and engines.sigma,
        mismatch_share=engines and engines.share,
        **_of_sides(counted),
    )


def of_metrics(metrics: pd.DataFrame, settings: RunSettings | None = None) -> Evidence:
    """The evidence that the metrics of a run give for each cause, over all steps."""
    observed = [name for name in metrics if name.startswith(("fspo/", PREFIX))]
    steps = metrics[observed].dropna(how="all")
    broken = tuple(name for name in metrics.attrs.get(NOT_FINITE, {}) if name.startswith(conclusion.TRAINED))
    means = {str(name): float(value) for name, value in steps.mean().items()}
    return dataclasses.replace(
        Evidence.of_live(means, settings, len(steps)), broken=broken, noise_found=numerical_noise.of_metrics(metrics)
    )


def _too_few(counted: pd.DataFrame) -> str:
    """The reason why there is no test."""
    if counted["length"].nunique() == 1:
        return "all have one length, so there is nothing to compare"
    clipped = (counted["clipped"] > 0).to_numpy()
    prompts = np.unique(prompts_of(counted)[clipped]).size
    why = "too few mini-batches hold several prompts and lengths of one sign of the advantage"
    if prompts < MIN_PROMPTS:
        why = f"clips fell on {prompts} prompts, and a test needs {MIN_PROMPTS}"
    return f"too few to say whether length matters ({why})"


def _thirds(counted: pd.DataFrame) -> tuple[conclusion.Counted, ...]:
    each = counted.groupby("length")["clipped"].agg(["size", "sum"]).itertuples()
    return conclusion.thirds(conclusion.Counted(length, length, size, clips) for length, size, clips in each)


def _noise_share(records: pd.DataFrame, found: noise.Noise | None) -> float | None:
    """The share of noise in a token's variance after updates."""
    if found is None:
        return None
    moved = records[~noise.on_policy(records["mini_batch"], records.attrs["settings"])]
    variance = float((moved["quadratic_variation"] / moved["length"]).mean()) if len(moved) else 0.0
    return found.sigma**2 / variance if variance > 0 else None


def _of_cut_off(counted: pd.DataFrame, records: pd.DataFrame) -> dict:
    if "truncated" not in records or records["truncated"].isna().all():
        return {}
    cut = counted["truncated"].to_numpy() > 0
    longest = (counted["length"] >= counted["length"].quantile(2 / 3)).to_numpy()
    clipped = counted["clipped"].to_numpy(np.float64)
    rates = [float(clipped[part].mean()) if part.any() else math.nan for part in (longest, longest & ~cut)]
    return {"cut_off": float(records["truncated"].mean()), "longest": (rates[0], rates[1])}


def _of_sides(counted: pd.DataFrame) -> dict:
    """Clip rates of both signs of the advantage, and whether they differ: Student's t over the clusters, linearised."""
    better = (counted["advantage"] > 0).to_numpy()
    if better.all() or not better.any():
        return {}
    clipped = counted["clipped"].to_numpy(np.float64)
    rates = [float(clipped[part].mean()) for part in (better, ~better)]
    if counted["step"].nunique() >= MIN_STEPS:
        cluster = pd.factorize(counted["step"])[0]
    else:
        cluster = prompts_of(counted)
    part = np.where(better, (clipped - rates[0]) / better.sum(), (rates[1] - clipped) / (~better).sum())
    sums, count = np.bincount(cluster, part), int(cluster.max()) + 1
    if count < 3 or not sums.any():
        return {"sides": (rates[0], rates[1]), "sides_differ": False}
    ratio = (rates[0] - rates[1]) / math.sqrt(np.square(sums).sum() * count / (count - 1))
    return {"sides": (rates[0], rates[1]), "sides_differ": bool(2 * stdtr(count - 1, -abs(ratio)) < _RARE_SIDE)}


# --- advice ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Advice:
    action: str
    text: str
    band: Band | None = None  # to take
    compared: Comparison | None = None


def _advised(records: pd.DataFrame, evidence: Evidence, first: Conclusion, target: float | None) -> _Advice:
    """Advice on the clip that was tried on these records."""
    effect = evidence.length
    if first.cause in (conclusion.LENGTH, conclusion.EVEN):
        assert effect is not None, "these are what a test says"
        tried = widths.compare(records, effect.depends)
        advice = _of_widths(effect, evidence.steps or effect.steps, tried, target or tried.rate)
        if target and advice.band:
            advice = dataclasses.replace(advice, band=fit.with_eps(records, advice.band, target))
        return advice
    compared, best, rate = None, None, target or MATCHED_RATE
    how = "Widen the clip" if first.cause == conclusion.LEVEL else "Set both sides apart"
    if (evidence.clip_rate or 0) < conclusion.HARDLY_ANY:
        how = "Narrow the clip, if one is wanted"
    elif effect is not None and effect.is_of_run:
        compared = widths.compare(records, effect.depends)
        best, rate = compared.best if effect.depends else None, target or compared.rate
        compared = dataclasses.replace(compared, best=best)  # what calibrate takes
    try:
        band = fit.with_eps(records, (best and best.band) or evidence.band or Band(), rate)
    except fit.Unreachable as error:
        return _Advice(first.action, f"{first.advice} {sentence(str(error))}.", None, compared)
    text = f"{how}: {_a_band(band)} clips {percent(rate)} of these responses, of either sign of the advantage."
    if best and compared and compared.own:
        text += f" {sentence(_more_even(best, compared.own))}"
    return _Advice(first.action, text, band, compared)


def _of_widths(effect: LengthEffect, steps: int, compared: Comparison, taken: float) -> _Advice:
    """What to do where the length is the question.

    Args:
        steps: that were recorded.
        taken: clip rate of the band to take.
    """
    best, own, rate = compared.best, compared.own, percent(compared.rate)
    untried = "; ".join(f"{name} ({why})" for name, why in compared.untried.items())
    untried = f" Could not be tried: {untried}." if untried else ""
    if not effect.is_of_run:
        few = "one is" if steps == 1 else f"{steps} are"
        text = f"Record {MIN_STEPS} steps or more: {few} too few to speak of the run."
        if steps >= MIN_STEPS:
            text = f"Record more: {effect.steps} of the {steps} steps have clips to compare, and {MIN_STEPS} have to."
        if best and own:
            text += f" Here {_a_band(best.band)} is more even: {_more_even(best, own)}"
        return _Advice(conclusion.RECORD, text, None, compared)
    if own is None or not compared.others:
        text = f"Keep the clip: there is no other to compare it with.{untried}"
        return _Advice(conclusion.COULD_NOT, text, None, compared)
    tried = ", ".join(f"{percent(one.spread)} with {one.name}" for one in compared.others)
    spreads = (
        f"Over tenths of the length the clip rate varies by {percent(own.spread)} of its mean with {own.name}, as in "
        f"the run, by {tried}.{untried}"
    )
    if effect.who in (ENDS, MIDDLE):
        text = f"Keep the width: no width on offer is even here, as a power of the length cannot bend. {spreads}"
        return _Advice(conclusion.KEEP, text, None, compared)
    if best is not None and effect.depends:
        text = (
            f"Take {_a_band(best.band)}; it clips {percent(taken)} of these responses, of either sign of the advantage."
        )
        return _Advice(conclusion.TAKE, f"{text} {sentence(_more_even(best, own))}{untried}", best.band, compared)
    if best is not None:
        text = f"{_a_band(best.band)} looks more even: {_more_even(best, own)}"
        text = f"Record more steps: no dependence is shown, but {text}{untried}"
        return _Advice(conclusion.RECORD, text, None, compared)
    kept = "Keep the width" if effect.depends else "Keep the clip"
    text = f"{kept}: of those tried at {rate} none is more even by more than noise. {spreads}"
    if not effect.depends and not effect.factor <= _SMALL_FACTOR:
        text += " Record more steps to see smaller differences."
    return _Advice(conclusion.KEEP, text, None, compared)


def _more_even(best: Width, own: Width) -> str:
    return (
        f"over tenths of the length its clip rate varies by {percent(best.spread)} of the mean, that of the run's clip "
        f"by {percent(own.spread)}, both on responses that neither was fitted to."
    )


def _a_band(band: Band | None) -> str:
    name = fit.name_of(band) if band else ""
    return "a band of fixed width" if name == fit.FIXED else f"a band whose width follows {name}"


# --- notes -----------------------------------------------------------------------------------------------------------


def _incomplete(records: pd.DataFrame) -> list[str]:
    said = []
    if steps := records.attrs["lost"]:
        said.append(f"Steps with missing records: {steps:,}. Their files are damaged, gone or were not written.")
    if (last := records.attrs.get("limited_after")) is not None:
        said.append(f"After step {last:,} not every rank has recorded, as records_limit_mb was reached.")
    if (rows := records.attrs["rows"]) > len(records):
        said.append(f"A random {len(records):,} of its {rows:,} records are used (--max-rows).")
    return said
