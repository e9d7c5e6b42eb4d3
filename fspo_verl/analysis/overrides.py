# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A fitted band as the Hydra overrides that train it."""

import dataclasses
import math
from typing import Any

from fspo_verl.analysis.fit import digits
from fspo_verl.band import Band
from fspo_verl.keys import ACTOR, POLICY_LOSS
from fspo_verl.observe.settings import RunSettings

SWITCH = "fspo-verl switch your_script.sh -o new.sh"


def band_overrides(band: Band, settings: RunSettings | None = None) -> dict[str, float | str | None]:
    """Hydra overrides that give this band behind the arguments of the run's launch; None stands for null.

    They select no loss, as Hydra takes one choice of a group: a launch of another loss is first switched to fspo
    (:func:`to_know`). A GSPO run that keeps its width keeps verl's loss gspo, which takes a range of the ratio.

    Args:
        settings: of the run, whose band has to be undone; a launch of the loss fspo at its defaults if None.
    """
    if _stays_gspo(band, settings):
        return gspo_overrides(band)
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


def _stays_gspo(band: Band, settings: RunSettings | None) -> bool:
    return settings is not None and settings.loss == "gspo" and band.form == Band(length_power=1.0).form


def gspo_overrides(band: Band) -> dict[str, float | str | None]:
    """Overrides that give the ends of this band, on S/L, to a launch of verl's loss gspo."""
    low, high = digits(-math.expm1(-band.low)), digits(math.expm1(band.high))
    return {f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": high}


def to_know(band: Band, settings: RunSettings | None) -> str | None:
    """Which launch takes :func:`band_overrides`, and what else they change.

    None for a run of their own loss whose eps was fixed.
    """
    if _stays_gspo(band, settings):
        return None
    if settings is None or settings.loss != "fspo":
        return f"`{SWITCH}` makes your script train fspo; these overrides go behind the last argument there."
    if settings.target_clip_rate is None:
        return None
    return (
        f"The eps of this run followed a clip rate of {settings.target_clip_rate:g}, and these overrides fix it. With "
        "target_clip_rate=RATE for null it follows RATE from there."
    )
