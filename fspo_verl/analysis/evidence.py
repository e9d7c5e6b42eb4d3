# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers of a run from which causes are told, made in one way of records, a running trainer and a log.

:func:`evidence_of` takes the series that verl logs, or those of records (:func:`fspo_verl.analysis.judgement.series`).
Tests on responses add to it. Light to import, as a process that trains uses it: no scipy, no pandas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fspo_verl.analysis.live import bins_of_log, of_log
from fspo_verl.observe.metrics import NAMES, SERIES
from fspo_verl.observe.quotients import Counted, parts

if TYPE_CHECKING:
    from fspo_verl.analysis.length_effect import LengthEffect
    from fspo_verl.band import Band
    from fspo_verl.observe.settings import RunSettings

TRAINED = ("actor/", "critic/", "rollout_corr/")
"""Metrics of which NaN or inf means that training is broken."""

CORRECTION = "rollout_corr/rollout_"
"""The beginning of the names of verl's metrics of its rollout correction."""

TYPICAL = (CORRECTION, f"{SERIES}ess")
"""Metrics whose median over steps is told, as a single response may move them far."""


@dataclass(frozen=True)
class Break:
    """A policy that has broken, as :mod:`fspo_verl.analysis.breaks` finds it."""

    step: int  # the first step
    signs: tuple[tuple[str, float, float], ...]  # what has changed, its level before that step, and at the end


@dataclass(frozen=True, kw_only=True)
class Unmoved:
    """Log-ratios where no update has moved them: numerical noise."""

    sigma: float | None = None  # spread of a token's, nats
    share: float | None = None  # of the variance of a token's log-ratio after updates
    responses: int = 0  # that no update had moved
    outside: float | None = None  # share of these outside the range


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Log-probs of the trainer against those of the rollout engine, and what a rollout correction does about them."""

    sigma: float | None = None  # spread of a token's difference, nats
    share: float | None = None  # of the way from engine to policy; in bypass mode of the variance of the log-ratios
    bypass: bool = False  # the old log-probs are the engine's, and the clip sees the difference
    rejected: float | None = None  # share of the responses that the correction takes out of the loss
    effective: float | None = None  # effective sample size by its weights, as a share of the responses
    weight: float | None = None  # the mean of these weights


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tests and counts of single responses, which their sums do not hold."""

    effect: LengthEffect | None = None
    too_few: str | None = None  # why there is no test of lengths, in a clause
    one_length: bool = False
    tails: tuple[Counted, ...] = ()  # the shortest tenth, those in between, and the longest tenth
    of_sides: tuple[tuple[Counted, ...], ...] = ()  # thirds of the better and of the worse responses
    of_halves: tuple[tuple[Counted, ...], ...] = ()  # thirds in the earlier and in the later half of the steps
    between: str | None = None  # why thirds differ where lengths do not: "side", "mini-batch", or "both"
    sides_differ: bool | None = None  # by more than noise
    by_token: bool = False  # the loss clips tokens


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The numbers of a run, or of some of its steps; shares between 0 and 1. None: not known."""

    responses: int | None = None  # with an advantage
    steps: int = 1
    clip_rate: float | None = None  # of these responses; of a loss that clips tokens the mean share of a response's
    sides: tuple[float, float] | None = None  # clip rates of the responses better and worse than their group
    thirds: tuple[Counted, ...] = ()  # of about as many responses each, from the shortest
    longest: float | None = None  # tokens of the longest response

    band: Band | None = None  # the range of S that trained
    weighs: bool = False  # the loss weighs a response by e^S
    effective: float | None = None  # effective sample size of a step by these weights, of what the clip leaves
    moved: bool | None = None  # any log-ratio is not 0
    one_step: bool | None = None  # each rollout gets one optimiser step: no update has moved any response then

    not_finite: float | None = None  # share of the responses with NaN or inf
    broken: tuple[str, ...] = ()  # metrics of TRAINED that are NaN or inf; with the first such step where it is known
    policy: Break | None = None  # where the policy has broken
    cut_off: float | None = None  # share of the responses that fill what they were allowed
    cut_off_before: float | None = None  # the same at the start of the run
    cut_off_since: int | None = None  # the first step in which so many were that it is a cause

    noise: Unmoved = Unmoved()
    engines: Engines = Engines()
    lengths: Lengths = Lengths()


def evidence_of(metrics: Mapping[str, float], settings: RunSettings | None = None, steps: int = 1) -> Evidence:
    """The evidence in the metrics of a step, or in those of :func:`fspo_verl.analysis.live.over_steps`.

    Args:
        metrics: by the names that loggers have.
        settings: what trains.
        steps: how many they are of.
    """
    rate = of_log(metrics)
    bins = bins_of_log(rate)
    noise, mismatch, moved = (rate.get(f"{name}_sigma") for name in ("noise", "mismatch", "moved"))
    spreads = [spread for spread in (noise, moved) if spread is not None]
    bypass = bool(settings and settings.old_log_probs_from_rollout)
    from_engine = None if mismatch is None or moved is None else math.hypot(mismatch, moved)  # to the policy
    band = settings.trained_band if settings else None
    if band and {"eps_low", "eps_high"} <= rate.keys():  # those in force of a band that follows a clip rate
        band = replace(band, eps=None, eps_low=rate["eps_low"], eps_high=rate["eps_high"])
    weighs = settings is not None and settings.loss == "fspo"
    sides = rate.get("clip_rate/better"), rate.get("clip_rate/worse")
    return Evidence(
        responses=round(sum(one.responses for one in bins)) if bins else None,
        steps=steps,
        clip_rate=rate.get("clip_rate/all"),
        sides=None if None in sides else sides,  # type: ignore[arg-type]
        thirds=parts(bins),
        longest=_finite(metrics, NAMES["longest"]) or _longest(bins),
        band=band,
        weighs=weighs,
        effective=rate.get("ess") if weighs else None,
        moved=any(spread > 0 for spread in spreads) if spreads else None,
        one_step=moved is None if noise is not None else None,
        not_finite=rate.get("not_finite"),
        broken=tuple(name for name, value in metrics.items() if name.startswith(TRAINED) and not math.isfinite(value)),
        cut_off=rate.get("truncated"),
        noise=Unmoved(
            sigma=noise,
            share=_share(noise, moved),
            responses=round(rate.get("step_responses/unmoved", 0)),
            outside=rate.get("noise_outside"),
        ),
        engines=Engines(
            sigma=mismatch,
            share=_share(mismatch, moved if bypass else from_engine),
            bypass=bypass,
            rejected=rate.get("rejected", _rejected(metrics)),
            effective=_finite(metrics, f"{CORRECTION}is_eff_sample_size"),
            weight=_finite(metrics, f"{CORRECTION}is_mean"),
        ),
    )


def _rejected(metrics: Mapping[str, float]) -> float | None:
    """The share of the responses that verl counts as rejected.

    It counts those that lose a token, so that rules on tokens do not say it.
    """
    of_tokens = any(name.startswith(f"{CORRECTION}rs_token_") for name in metrics)
    return None if of_tokens else _finite(metrics, f"{CORRECTION}rs_seq_masked_fraction")


def _finite(metrics: Mapping[str, float], name: str) -> float | None:
    return value if math.isfinite(value := metrics.get(name, math.nan)) else None


def _longest(bins: list[Counted]) -> float | None:
    """The upper edge of the longest bin that has responses; where it has none, the lower."""
    return (bins[-1].shortest if math.isnan(bins[-1].longest) else bins[-1].longest) if bins else None


def _share(part: float | None, whole: float | None) -> float | None:
    """Return a share of a variance, from two spreads."""
    return part**2 / whole**2 if part is not None and whole else None
