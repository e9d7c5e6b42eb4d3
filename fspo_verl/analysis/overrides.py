# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A fitted range as the Hydra overrides that train it."""

import dataclasses
import math
from typing import Any

from fspo_verl.analysis.fit import digits
from fspo_verl.band import Band
from fspo_verl.keys import ACTOR, POLICY_LOSS
from fspo_verl.observe.settings import RunSettings


def band_overrides(band: Band, settings: RunSettings | None = None) -> dict[str, float | str | None]:
    """Hydra overrides that give this band to a launch of :func:`loss_of`; None stands for null.

    They select no loss, as Hydra takes one choice of a group, and a launch of that loss has made it.

    Args:
        settings: of the run, whose band has to be undone; a launch of the loss fspo at its defaults if None.
    """
    if loss_of(band, settings) == "gspo":
        low, high = digits(-math.expm1(-band.low)), digits(math.expm1(band.high))
        return {f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": high}
    trained = settings.band if settings and settings.band else Band()
    values: dict[str, Any] = {"eps": None, "eps_low": band.low, "eps_high": band.high, "eps_dual": band.eps_dual}
    for name in (field.name for field in dataclasses.fields(Band) if field.name not in values):
        value = getattr(band, name)
        if not value == getattr(trained, name) == getattr(Band, name):
            values[name] = str(value).replace(" ", "") if isinstance(value, list) else value
    if settings and settings.target_clip_rate is not None:
        # Or eps would move on from these values; a bound of it is refused without.
        values |= {"target_clip_rate": None, "eps_max": None}
    return {f"{POLICY_LOSS}.{name}": value for name, value in values.items()}


def loss_of(band: Band, settings: RunSettings | None) -> str:
    """The loss that trains a range: fspo, or verl's gspo for a GSPO run that keeps its shape."""
    is_gspo = settings is not None and settings.loss == "gspo" and band.form == Band(length_power=1.0).form
    return "gspo" if is_gspo else "fspo"


def to_know(band: Band, settings: RunSettings | None) -> str:
    """Name where :func:`band_overrides` go, and what else they change."""
    loss = loss_of(band, settings)
    option = "" if loss == "fspo" else f"--loss {loss} "
    text = f"`fspo-verl run {option}OVERRIDES -- bash your_script.sh` trains with them."
    if settings is None or settings.target_clip_rate is None:
        return text
    return (
        f"{text} The eps of this run followed a clip rate of {settings.target_clip_rate:g}, and these overrides fix "
        "it. With target_clip_rate=RATE for null it follows RATE from there."
    )
