# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A fitted band as the Hydra overrides that train it."""

import dataclasses
import math
import shlex
from typing import Any

from fspo_verl.analysis.fit import digits
from fspo_verl.band import Band
from fspo_verl.keys import ACTOR, GROUP, POLICY_LOSS
from fspo_verl.observe.settings import RunSettings


def band_overrides(band: Band, settings: RunSettings | None = None) -> dict[str, float | str | None]:
    """Hydra overrides that give this band in a launch like that of the run; None stands for null.

    The width of a GSPO run, the length, is that of verl's loss gspo, which takes a range of the ratio.

    Args:
        settings: of the run, whose loss and band have to be undone; a launch of the loss fspo at its defaults if None.
    """
    if settings and settings.loss == "gspo" and band.form == Band(length_power=1.0).form:
        return gspo_overrides(band)
    trained = settings.band if settings and settings.band else Band()
    values: dict[str, Any] = {"eps": None, "eps_low": band.low, "eps_high": band.high, "eps_dual": band.eps_dual}
    for name in (field.name for field in dataclasses.fields(Band) if field.name not in values):
        value = getattr(band, name)
        if not value == getattr(trained, name) == getattr(Band, name):
            values[name] = str(value).replace(" ", "") if isinstance(value, list) else value
    if settings and settings.target_clip_rate is not None:
        values["target_clip_rate"] = None  # or eps would move on from these values
    loss = {GROUP: "fspo"} if settings and settings.loss != "fspo" else {}
    return loss | {f"{POLICY_LOSS}.{name}": value for name, value in values.items()}


def gspo_overrides(band: Band) -> dict[str, float | str | None]:
    """Overrides that give the ends of this band, on S/L, to verl's loss gspo."""
    low, high = digits(-math.expm1(-band.low)), digits(math.expm1(band.high))
    return {GROUP: "gspo", f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": high}


def ends_following(settings: RunSettings | None) -> str | None:
    """What to know of :func:`band_overrides` for a run whose eps followed a clip rate; None for any other run."""
    if settings is None or settings.target_clip_rate is None:
        return None
    return (
        f"The eps of this run followed a clip rate of {settings.target_clip_rate:g}, and these overrides fix it. With "
        "target_clip_rate=RATE for null it starts there and follows RATE."
    )


def pasted(items: dict[str, float | str | None]) -> list[str]:
    """Hydra overrides as a shell takes them."""
    return [f"{key}={'null' if value is None else shlex.quote(str(value))}" for key, value in items.items()]
