# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""From the records of a run to the band that clips a target share of the responses and treats lengths alike.

:mod:`fspo_verl.report.calibration` says what counts, and prints it.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fspo_verl.analysis import band_fit, clip_rates, resampling
from fspo_verl.analysis.band_fit import SIDES, Fit, Judgement
from fspo_verl.analysis.clip_rates import MIN_COUNT
from fspo_verl.analysis.law import LawOfS, law_of_s
from fspo_verl.analysis.resampling import Estimate, number
from fspo_verl.observe import noise
from fspo_verl.observe.noise import Noise

NOTHING_MOVED = (
    "no recorded response has moved (Q = 0 in all of them): with one optimiser step per rollout the ratio stays 1 and "
    "no clip can act; lower actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size"
)
_FEW_CLIPPED = 50
_RARE = 0.05  # p-value below which chance does not explain a correlation
_SIGNS = {"upper": "A > 0", "lower": "A < 0"}
# What the choice of a shape costs.
_COSTS = {
    "sqrt(L)": "it limits the move; its rate follows the spread of S, so that the last mini-batches of a rollout, and "
    "steps that move further, are clipped more",
    "sqrt(L), -Q/2": "its centre follows the drift of each response",
    "L^p": "the power is one more number that depends on model, task and stage of training: calibrate again when these "
    "change",
    "sqrt(Q) limited, -Q/2": "eps counts standard deviations, so that large and small moves, and all mini-batches, are "
    "clipped about alike; how far a response moves counts only beyond the limit",
    "sqrt(Q), -Q/2": "it is no trust region, as it widens with the move",
}
_COSTS["L^p, -Q/2"] = f"{_COSTS['L^p']}; {_COSTS['sqrt(L), -Q/2']}"


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` finds."""

    target: float
    responses: int  # with an advantage
    moved: float  # share of them that have moved
    prompts: int
    steps: int
    shortest: int
    longest: int
    clip_rate: float  # of the loss that trained
    rerun_by: str  # what varies in a re-run: steps or prompts
    law: LawOfS
    spread: dict  # low, high, value, lower, upper: sigma·sqrt(L) in the longest bin with enough responses
    power: dict[str, Estimate]  # of L at the edge of a band with centre 0: both sides, upper, lower, earlier, later
    fits: tuple[Fit, ...]  # of each shape
    gspo: dict[str, float] | None  # the range with which GSPO clips as much, where it can: a baseline
    earlier: tuple[Fit, ...]  # the same from the earlier half of the steps
    judged: tuple[Judgement | None, ...]  # what those do in the later half
    halves: tuple[str, str]  # what they are
    recommended: int  # index into fits
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    noise: Noise | None  # against the recommended band; None where no response is known not to have moved

    @property
    def chosen(self) -> Fit:
        """The recommended one."""
        return self.fits[self.recommended]


def calibrate(
    records: pd.DataFrame,
    target: float,
    rng: np.random.Generator,
    bins: int = 8,
    min_count: int = MIN_COUNT,
    draws: int = 400,
) -> Calibration:
    """Fit the band of each shape to a target clip rate per side, judge them on later steps, and recommend one.

    Args:
        records: of a run, with on-policy responses.
        target: share between 0 and 1.
        rng: source of all draws.
        bins, min_count, draws: as in :mod:`fspo_verl.analysis.clip_rates`.

    Raises:
        ValueError: nothing has moved, a sign of the advantage is missing, or no shape reaches the target.
    """
    counts = _counts(records)
    fits = tuple(band_fit.fit(records, shape, target) for shape in band_fit.SHAPES)
    if not any(found.band and found.shape.bounded for found in fits):
        reasons = "; ".join(dict.fromkeys(found.refused for found in fits if found.refused))
        raise ValueError(f"no band clips {target:g} of the responses on each side: {reasons}")
    law = law_of_s(records, clip_rates.length_edges(records["length"], bins), rng, draws, min_count)
    usable = law.variation_by_length[law.variation_by_length["lower"].notna()]
    halves = band_fit.halves(records)
    earlier = tuple(band_fit.fit(halves[0], shape, target) for shape in band_fit.SHAPES)
    edges = band_fit.judging_edges(halves[1], bins, min_count)
    judged = tuple(band_fit.judge(halves[1], found, target, edges, rng, draws, min_count) for found in earlier)
    parts = {"both": (records, SIDES), "upper": (records, ["upper"]), "lower": (records, ["lower"])}
    parts |= {"earlier": (halves[0], SIDES), "later": (halves[1], SIDES)}
    recommended, reasons = recommend(fits, judged)
    try:
        gspo = band_fit.gspo_range(records, target)
    except band_fit.Unreachable:
        gspo = None
    result = Calibration(
        **counts,
        target=target,
        law=law,
        spread={} if usable.empty else usable.iloc[-1].to_dict(),
        power={name: band_fit.power_of_log_ratio(part, "plain", target, of) for name, (part, of) in parts.items()},
        fits=fits,
        gspo=gspo,
        earlier=earlier,
        judged=judged,
        halves=tuple(map(_named, halves)),
        recommended=recommended,
        reasons=tuple(reasons),
        warnings=(),
        noise=noise.of_records(records, records.attrs.get("settings"), fits[recommended].band),
    )
    return dataclasses.replace(result, warnings=tuple(_warnings(result, records, min_count)))


def _counts(records: pd.DataFrame) -> dict:
    """What the records hold, as fields of :class:`Calibration`; ValueError if nothing in them can be clipped."""
    side = clip_rates.sides(records)
    for name, sign in (("upper", ">"), ("lower", "<")):
        if not side[name].any():
            raise ValueError(
                f"no recorded response has an advantage {sign} 0, so there is nothing to clip on that side"
            )
    moved = records["quadratic_variation"].to_numpy()[side["all"]] > 0
    if not moved.any():
        raise ValueError(NOTHING_MOVED)
    prompts, steps = int(resampling.clusters(records).max()) + 1, int(records["step"].nunique())
    if prompts == steps == 1:
        raise ValueError("all records are of one prompt in one step, and no other says what holds beyond it")
    return {
        "responses": len(moved),
        "moved": float(moved.mean()),
        "prompts": prompts,
        "steps": steps,
        "shortest": int(records["length"].min()),
        "longest": int(records["length"].max()),
        "clip_rate": clip_rates.clip_rate(records),
        "rerun_by": band_fit.resampled(records)[0],
    }


def _named(half: pd.DataFrame) -> str:
    steps = half["step"]
    if steps.nunique() > 1:
        return f"steps {steps.min()} to {steps.max()}"
    return f"{resampling.clusters(half).max() + 1} prompts"


def recommend(fits: tuple[Fit, ...], judged: tuple[Judgement | None, ...]) -> tuple[int, list[str]]:
    """Index of the shape to take, and the reasons.

    Of the shapes that limit the move, which are in the order of their simplicity, it is the first that treats lengths
    alike on both sides: chance explains its LRE on the records it was judged on, where that can be told, and on all
    records being clipped is not correlated with the logarithm of the length. Where there is none, it is the one whose
    LRE is the smallest multiple of what chance gives, or, where no LRE can be judged, with the weakest correlation.
    """
    bounded = [index for index, found in enumerate(fits) if found.band and found.shape.bounded]
    # Where others can be judged, one that cannot is not taken for fair.
    unjudged = math.inf if any(judged[index] for index in bounded) else math.nan
    excess = {index: judged[index].excess if judged[index] else unjudged for index in bounded}
    flat = [index for index in bounded if not excess[index] > 1 and fits[index].trend >= _RARE]
    if flat:
        choice = flat[0]
        verdict = "treats lengths alike, as far as these records tell"
    else:
        choice = min(bounded, key=lambda index: (np.fmin(excess[index], math.inf), -fits[index].trend))
        verdict = "comes nearest to treating lengths alike, and no band does"
    reasons = [f"{fits[choice].name} {verdict}: {_evidence(fits[choice], judged[choice])}"]
    for index in bounded:
        if index < choice and index not in flat:
            found = "not fair" if judged[index] else "not judged"
            reasons.append(f"{fits[index].name} is simpler, but {found}: {_evidence(fits[index], judged[index])}")
    reasons.append(f"what it costs: {_COSTS[fits[choice].shape.name]}")
    alike = [fits[index].name for index in flat if index != choice]
    if alike:
        reasons.append(f"not told from it by these records: {', '.join(alike)}")
    return choice, reasons


def _evidence(found: Fit, judgement: Judgement | None) -> str:
    lre = "too few responses in the judged half for an LRE"
    if judgement is None:
        lre = "no such band has the target rate in both halves"
    elif not math.isnan(judgement.excess):
        lre = "LRE " + " and ".join(
            f"{number(judgement.lre[side]['lre'], '.2f')} with {sign} (by chance up to "
            f"{number(judgement.lre[side]['floor_upper'], '.2f')})"
            for side, sign in _SIGNS.items()
        )
    tested = {side: p for side, p in found.trends.items() if not math.isnan(p)}
    if not tested:
        return f"{lre}; too few lengths, steps or prompts for a test of clips by length"
    side = min(tested, key=tested.get)
    if found.trend < _RARE:
        return f"{lre}; clips depend on log length with {_SIGNS[side]} (p = {tested[side]:.2g})"
    return f"{lre}; no dependence of clips on log length can be told (p = {found.trend:.2g})"


def _warnings(result: Calibration, records: pd.DataFrame, min_count: int) -> Iterator[str]:
    recorded = records.attrs.get("rows", len(records))
    if recorded > len(records):
        yield f"{len(records):,} of {recorded:,} records are used, a random choice; --max-rows uses more"
    for name, side in (("eps_high", "upper"), ("eps_low", "lower")):
        clipped = result.target * clip_rates.sides(records)[side].sum()
        if clipped < _FEW_CLIPPED:
            yield f"{name} rests on {clipped:.0f} clipped responses: record more steps, or take a higher target"
    if result.chosen.dual_widened:
        yield (
            "responses with A < 0 move far upwards here; eps_dual is more than three times eps_high, so that the dual "
            "clip takes at most a tenth of the target"
        )
    if result.rerun_by == "prompts":
        yield "all records are of one step: eps and clip rate hold for its update, and another may move further or less"
    table = result.law.variation_by_length
    usable = np.flatnonzero(table["lower"].notna())
    long = table.iloc[usable[-1] + 1 if len(usable) else 0 :]
    if long["n"].sum():
        yield (
            f"{long['n'].sum()} responses that moved have {long['low'].iloc[0]} tokens or more: too few for a bin (of "
            f"{min_count} responses and 10 prompts), so the band is not checked at these lengths"
        )
    upper, lower = result.power["upper"], result.power["lower"]
    if upper.upper < lower.lower or lower.upper < upper.lower:
        yield (
            f"the two sides ask for different powers of L, {upper:.2f} with A > 0 and {lower:.2f} with A < 0; a band "
            f"has one, here {result.power['both'].value:.2f} for both together"
        )
    if result.noise and (text := noise.warning(result.noise, result.chosen.band)):
        yield text
