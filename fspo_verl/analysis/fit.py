# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Fits a range to the records of a run: the power of its width, and eps for a wished clip rate.

``records`` is a DataFrame of :mod:`fspo_verl.observe.records`. All responses with an advantage count, on-policy ones
included.
"""

import dataclasses
import math

import numpy as np
import pandas as pd

from fspo_verl.analysis import clip_rates
from fspo_verl.analysis.clip_rates import prompts_of, strata_of
from fspo_verl.analysis.length_effect import MIN_PROMPTS
from fspo_verl.band import Band
from fspo_verl.clips import BandClip, standardized, upper_quantile
from fspo_verl.keys import ACTOR

WIDTHS = ROOT, FIXED, POWER = ("sqrt(length)", "fixed", "a fitted power")
"""Shapes that the width of a range may follow, those with fewer numbers to fit first."""
_DUAL_SHARE = 0.1  # of the target: how many of the responses with A < 0 the dual clip may clip before it is widened


class Unreachable(ValueError):
    """No range of this shape has the wished clip rate on these records; the text says why."""


# --- eps for a clip rate ---------------------------------------------------------------------------------------------


def with_eps(records: pd.DataFrame, band: Band, target: float) -> Band:
    """The range with the smallest eps, in four digits, that clip the share ``target`` of the responses of each side.

    The dual clip clips responses with A < 0, and counts for their side. It lies on the upper edge, or above it, so that
    beyond it lies at most a tenth of the target. A range without a dual clip gets none.

    Raises:
        Unreachable: fewer than that lie on one side of the centre, or there are none with one sign of the advantage.
    """
    score, sides = standardized(records, band), clip_rates.sides(records)
    better, worse = score[sides["upper"]], score[sides["lower"]]
    if not (len(better) and len(worse)):
        raise Unreachable(f"no response has an advantage {'<' if len(better) else '>'} 0")
    high = digits(_end(records, "upper", better, target, target))
    beyond = digits(1.001 * upper_quantile(worse, _DUAL_SHARE * target))  # not rounded down, or more would lie beyond
    dual = math.inf if math.isinf(band.dual) else max(high, beyond)
    below = target - float(np.mean(worse > dual))
    low = digits(_end(records, "lower", -worse, below, target))
    eps_dual = None if dual == high else dual
    return dataclasses.replace(band, eps=None, eps_low=low, eps_high=high, eps_dual=eps_dual)


def _end(records: pd.DataFrame, side: str, score: np.ndarray, share: float, target: float) -> float:
    """The distance from the centre beyond which a share of one side's scores lies; Unreachable if fewer lie there."""
    if (end := upper_quantile(score, share)) > 0:
        return end
    where = "> 0 lie above" if side == "upper" else "< 0 lie below"
    text = (
        f"no range clips {target:g} of the responses on each side with a width of this shape: only "
        f"{np.mean(score > 0):.1%} of the responses with A {where} the centre, and eps must be positive"
    )
    of_side = records[clip_rates.sides(records)[side]]
    moved = (of_side["quadratic_variation"] > 0).mean()
    if moved < target:
        text += (
            f"; {1 - moved:.1%} have not moved, as those of the first of {of_side['mini_batch'].max() + 1} "
            f"mini-batches of each rollout, which no range can clip: lower the target, or {ACTOR}.ppo_mini_batch_size"
        )
    raise Unreachable(text)


def clipped_by(band: Band, records: pd.DataFrame) -> np.ndarray:
    """Whether a range clips each response, 0 or 1 ``[rows]``."""
    return BandClip("", "", band).clipped(records)


# --- the fitted power -------------------------------------------------------------------------------------------------


def fitted_power(records: pd.DataFrame, target: float) -> float:
    """p, from 0 to 1 in two digits, of the width L^p at which the clip rate has no slope in the length.

    The slope is the score of :mod:`fspo_verl.analysis.length_effect`: Σ (x − x̄)·clipped, with x = log L and its mean
    within the stratum (step, mini-batch, sign of A). Lengths and moves that rise over training together are then no
    effect of length. Each side clips the target share, as :func:`with_eps` has it. (Derived here.)

    Raises:
        Unreachable: a width does not reach the target, or there are too few lengths or prompts.
    """
    used = records[clip_rates.sides(records)["all"] & (records["length"] > 0)]
    stratum, x = strata_of(used), np.log(used["length"].to_numpy(np.float64))
    x = x - (np.bincount(stratum, x) / np.bincount(stratum))[stratum]
    prompts = prompts_of(used)

    def slope(power: float) -> float:
        clipped = clipped_by(with_eps(used, Band(length_power=power), target), used)
        if np.unique(prompts[clipped > 0]).size < MIN_PROMPTS or np.ptp(x) < 1e-9:
            raise Unreachable("too few lengths and prompts to fit a power of the length")
        return float(x @ clipped)

    low, high = 0.0, 1.0
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return round((low + high) / 2, 2)


# --- what a range does ------------------------------------------------------------------------------------------------


def name_of(band: Band) -> str:
    """The law of a range's width in words."""
    name = {0.5: ROOT, 0.0: FIXED, 1.0: "length"}.get(band.length_power, f"length^{band.length_power:g}")
    return name if band.normalization == "plain" else f"{name}, drift-corrected"


def is_later_half(records: pd.DataFrame) -> np.ndarray:
    """bool ``[rows]``: in the later half of the steps; of one step every other prompt."""
    if records["step"].nunique() > 1:
        steps = np.unique(records["step"])
        return (records["step"] > steps[(len(steps) - 1) // 2]).to_numpy()
    return prompts_of(records) % 2 == 1


def digits(value: float) -> float:
    """The number rounded to four significant digits."""
    return float(f"{value:.4g}")
