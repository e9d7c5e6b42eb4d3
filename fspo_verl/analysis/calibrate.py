# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""From the records of a run to the band that clips a target share of the responses and treats lengths alike.

:mod:`fspo_verl.report.calibration` says what counts, and prints it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from fspo_verl.analysis import band_fit, clip_rates, resampling
from fspo_verl.analysis.band_fit import ACTOR, Fit
from fspo_verl.analysis.verdict import Verdict, percent, verdict
from fspo_verl.band import DUAL, Band
from fspo_verl.clips import CLIPS, BandClip, Clip
from fspo_verl.observe import noise
from fspo_verl.observe.noise import Noise

NOTHING_MOVED = (
    "no recorded response has moved (Q = 0 in all of them): with one optimiser step per rollout the ratio stays 1 and "
    "no clip can act; lower actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size"
)
_FEW_CLIPPED = 50


@dataclass(frozen=True)
class Rule:
    """Another clip of the catalogue at the target rate."""

    name: str  # for readers
    range: str  # what would have to be set, or why that is not known
    overrides: dict[str, float | str | None]  # empty where verl has no such loss, or the range is not known


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` finds."""

    target: float
    verdict: Verdict  # on the clip that trained
    trained: Band | None  # the band that trained; None for a loss without one
    rerun_by: str  # what varies in a re-run: steps or prompts
    fits: tuple[Fit, ...]  # of each shape, that to take first
    rules: tuple[Rule, ...]
    warnings: tuple[str, ...]
    noise: Noise | None  # against the band to take; None where no response is known not to have moved

    @property
    def chosen(self) -> Fit:
        """The one to take."""
        return self.fits[0]


def calibrate(records: pd.DataFrame, target: float) -> Calibration:
    """Fit the band of each shape to a target clip rate per side, and choose one.

    Args:
        records: of a run, with on-policy responses.
        target: share between 0 and 1.

    Raises:
        ValueError: nothing has moved, a sign of the advantage is missing, or no shape reaches the target.
    """
    _check(records)
    settings, fits = records.attrs.get("settings"), band_fit.fits(records, target)
    return Calibration(
        target,
        verdict(records, target),
        settings and settings.trained_band,
        band_fit.resampled(records)[0],
        fits,
        tuple(rule(clip, records, target) for clip in CLIPS.values() if clip.name != "fspo"),
        tuple(_warnings(records, target, fits[0])),
        noise.of_records(records, settings, fits[0].band),
    )


def _check(records: pd.DataFrame) -> None:
    """ValueError if nothing in the records can be clipped."""
    side = clip_rates.sides(records)
    for name, sign in (("upper", ">"), ("lower", "<")):
        if not side[name].any():
            raise ValueError(
                f"no recorded response has an advantage {sign} 0, so there is nothing to clip on that side"
            )
    if not (records["quadratic_variation"].to_numpy()[side["all"]] > 0).any():
        raise ValueError(NOTHING_MOVED)
    if resampling.clusters(records).max() == 0:
        raise ValueError("all records are of one prompt in one step, and no other says what holds beyond it")


def rule(clip: Clip, records: pd.DataFrame, target: float) -> Rule:
    """What a clip of the catalogue needs to take the target share on each side (one that rejects: of all)."""
    if not isinstance(clip, BandClip):
        share = clip.clipped(records)[clip_rates.sides(records)["all"]].mean()
        return Rule(clip.label, f"{percent(share)} of tokens at {clip.range}; records hold this range only", {})
    try:
        if clip.rejects:
            band = clip.matched(records, target).band
        else:
            band = band_fit.with_eps(records, clip.band, target)
    except ValueError as error:
        return Rule(clip.label, str(error), {})
    low, high = band_fit.digits(-math.expm1(-band.low)), band_fit.digits(math.expm1(band.high))
    mean = "the ratio to the power 1/length" if band.length_power == 1 else "the ratio"
    if clip.rejects:
        return Rule(clip.label, f"{mean} from {1 - low:g} to {1 + high:g}", {})
    if clip.name == "gspo":
        ends = {f"{ACTOR}clip_ratio_low": low, f"{ACTOR}clip_ratio_high": high}
        loss = {"+algorithm.policy_loss": "gspo"}
        return Rule(clip.label, f"{mean} from {1 - low:g} to {1 + high:g}", {**loss, **ends})
    band = band_fit.rounded(band)
    return Rule(clip.label, band.describe(), band_fit.overrides(band, records.attrs.get("settings")))


def _warnings(records: pd.DataFrame, target: float, chosen: Fit) -> Iterator[str]:
    """The more important ones first."""
    for name, side in (("eps_high", "upper"), ("eps_low", "lower")):
        clipped = target * clip_rates.sides(records)[side].sum()
        if clipped < _FEW_CLIPPED:
            yield f"{name} rests on {clipped:.0f} clipped responses: record more steps, or take a higher target"
    if not chosen.is_fair:
        yield "no band that was tried treats lengths alike; this one comes nearest"
    if band_fit.resampled(records)[0] == "prompts":
        yield "all records are of one step: eps and clip rate hold for its update, and another may move further or less"
    if chosen.band is not None and chosen.band.dual > 1.01 * DUAL * chosen.band.high:
        yield (
            "responses with A < 0 move far upwards here; eps_dual is more than three times eps_high, so that the dual "
            "clip takes at most a tenth of the target"
        )
