# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""An arm of a comparison: a loss, and what is changed of it."""

from __future__ import annotations  # as in baselines.py, which reads a call before anything is installed

import argparse
import re
from typing import NamedTuple

from options import LOSSES, run_name

ACTOR = "actor_rollout_ref.actor"
BOUNDS = [f"{ACTOR}.clip_ratio_{side}" for side in ("low", "high")]
BOUNDS += [f"{ACTOR}.policy_loss.{name}" for name in ("eps", "eps_low", "eps_high", "eps_dual")]
"""What a multiple of a clip range multiplies."""


class Arm(NamedTuple):
    """One of the things that are compared.

    Attributes:
        name: as results call it, and their folders.
        trains: the packaged loss, algorithm.policy_loss.
        changes: Hydra overrides ``key=value`` after those of the package.
    """

    name: str
    trains: str
    changes: tuple[str, ...] = ()

    @property
    def tuned(self) -> bool:
        """Whether it has a clip range that could be tuned."""
        return self.trains != "no_clip"


def packaged_arms(text: str) -> list[Arm]:
    """Parse names of losses, for example fspo,gspo."""
    names = text.split(",")
    if unknown := set(names) - set(LOSSES):
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(LOSSES)}")
    return [Arm(name, name) for name in names]


def own_arm(text: str) -> Arm:
    """Parse an arm, for example ``wide=fspo,policy_loss.eps_low=0.1``; keys are those of actor_rollout_ref.actor."""
    first, *changes = text.split(",")
    name, _, trains = first.partition("=")
    if trains not in LOSSES:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=LOSS,KEY=VALUE,... with LOSS one of {', '.join(LOSSES)}")
    if wrong := [change for change in changes if not re.match(r"[^-=][^=]*=", change)]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)} in {text}: not KEY=VALUE")
    return Arm(run_name(name), trains, tuple(f"{ACTOR}.{change}" for change in changes))
