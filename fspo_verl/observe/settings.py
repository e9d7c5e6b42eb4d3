# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of a run: which loss trained, and with which clip. Records carry them as JSON, from writer to report."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fspo_verl.band import Band
from fspo_verl.output import plain

# verl's losses (0.9.1) whose clip is a range of the importance-sampling ratio. Its others log the range and clip
# something else, or nothing.
_CLIP_A_RATIO = ("vanilla", "gspo", "geo_mean", "clip_cov", "cispo")


def clip_ratios(read: Callable[[str], Any]) -> dict[str, Any]:
    """verl's clip range as its losses take it: ``clip_ratio`` stands for a side that is null.

    Args:
        read: the value of a key of verl's ``ActorConfig``, None where it has none.
    """
    sides = {key: read(key) for key in ("clip_ratio_low", "clip_ratio_high")}
    sides = {key: read("clip_ratio") if value is None else value for key, value in sides.items()}
    return sides | {"clip_ratio_c": read("clip_ratio_c")}


# How verl's losses aggregate whatever ``loss_agg_mode`` says, read in its sources; tests/verl_contract calls them all.
_GSPO_OBEYS = ("0.9.1",)  # 0.9.0 does not, nor does main of August 2026
_AGGREGATION = {
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "geo_mean": "the mean over the responses of a micro-batch",
}


def own_aggregation(loss: str, verl: str | None) -> str | None:
    """The aggregation that a loss has of its own; None where it takes the one of ``loss_agg_mode``.

    Args:
        loss: verl's name of it.
        verl: the version of verl.
    """
    return None if loss == "gspo" and verl in _GSPO_OBEYS else _AGGREGATION.get(loss)


def aggregation_in_effect(loss: str, mode: str, verl: str | None) -> str:
    """Name what aggregates, in words for a list of settings."""
    own = own_aggregation(loss, verl)
    if own is None or own == mode:
        return f"loss_agg_mode={mode}"
    return f"aggregation {own} ({loss} of verl {verl} ignores loss_agg_mode={mode})"


@dataclass(frozen=True)
class RunSettings:
    """The settings that a run trained with; all but the loss may be unknown."""

    loss: str
    """verl's ``loss_mode``; of the loss ``observed`` the one that trained."""

    band: Band | None = None
    """None for a loss without one. With ``target_clip_rate`` where a run starts, as records store it; of records that
    were read its typical eps."""

    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float | None = None

    target_clip_rate: float | None = None
    """The clip rate that eps follows; None for a fixed eps."""

    old_log_probs_from_rollout: bool = False
    """Bypass mode: the old log-probs are those of the rollout engine."""

    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def trained_band(self) -> Band | None:
        """The range of S that trained; GSPO's range of the mean ratio is one. None for any other loss."""
        if self.loss == "gspo":
            low, high = self.clip_ratio_low, self.clip_ratio_high
            if low is None or high is None or low <= 0 or high <= 0:
                return None
            lowest = -math.log1p(-low) if low < 1 else math.inf  # no ratio is below 0
            return Band(eps_low=lowest, eps_high=math.log1p(high), eps_dual=math.inf, length_power=1.0)
        return self.band

    @property
    def clip(self) -> str | None:
        """The clip in one line; None where it is not known."""
        if self.band is not None:
            follows = "" if self.target_clip_rate is None else f", eps follows a clip rate of {self.target_clip_rate:g}"
            return f"{self.band.describe()}{follows}"
        if self.loss not in _CLIP_A_RATIO or self.clip_ratio_low is None or self.clip_ratio_high is None:
            return None
        dual = f", dual clip {self.clip_ratio_c:g}" if self.loss == "vanilla" and self.clip_ratio_c else ""
        return f"ratio from 1 − {self.clip_ratio_low:g} to 1 + {self.clip_ratio_high:g}{dual}"

    def to_json(self) -> dict:
        """Plain values by field."""
        return vars(self) | {"band": self.band and self.band.to_json()}

    @staticmethod
    def from_json(data: Mapping) -> "RunSettings":
        """The inverse of :meth:`to_json`; other keys are left out, and texts are as they can be printed.

        Raises:
            TypeError, ValueError: a field has a value that it cannot have.
        """
        known = {field.name: data[field.name] for field in fields(RunSettings) if field.name in data}
        kinds = dict.fromkeys(known, (int, float, type(None))) | {
            "loss": (str,),
            "band": (Mapping, type(None)),
            "old_log_probs_from_rollout": (bool,),
            "versions": (Mapping,),
        }
        if wrong := [name for name, value in known.items() if not isinstance(value, kinds[name])]:
            raise ValueError(", ".join(f"{name}={known[name]!r}" for name in wrong))
        known["loss"] = plain(data["loss"])
        if known.get("band") is not None:
            known["band"] = Band.from_json(known["band"])
        versions = known.get("versions", {})
        known["versions"] = {plain(str(name)): plain(str(version)) for name, version in versions.items()}
        return RunSettings(**known)
