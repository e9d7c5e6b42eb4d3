# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a comparison trains: packaged losses, and these with settings of their own. Needs nothing installed."""

from __future__ import annotations  # so that a Python too old to train with can still say what is wrong with a call

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from options import LOSSES, run_name  # noqa: E402

ACTOR = "actor_rollout_ref.actor"
CALIBRATED = "calibrated"
SIZES = {
    "prompts": "data.train_batch_size",
    "responses": "actor_rollout_ref.rollout.n",
    "mini_batch": f"{ACTOR}.ppo_mini_batch_size",
    "validate_every": "trainer.test_freq",
}
"""What options of the sizes of a cell set in verl."""
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


def chosen(losses: Sequence[str], more: Sequence[Arm]) -> list[Arm]:
    """The arms of these names, and the others; the band of the calibrated one is still to be found."""
    return [Arm(name, "fspo" if name == CALIBRATED else name) for name in losses] + list(more)


def names(text: str) -> list[str]:
    """For example fspo,gspo."""
    found = text.split(",")
    if unknown := set(found) - {*LOSSES, CALIBRATED}:
        known = ", ".join((*LOSSES, CALIBRATED))
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; there are {known}")
    return found


def arm(text: str) -> Arm:
    """For example ``wide=fspo,policy_loss.eps_low=0.1``; keys are those of actor_rollout_ref.actor."""
    first, *changes = text.split(",")
    name, _, trains = first.partition("=")
    if run_name(name) == CALIBRATED or trains not in LOSSES:
        raise argparse.ArgumentTypeError(
            f"{text} is not NAME=LOSS,KEY=VALUE,... with a NAME other than {CALIBRATED}, and LOSS one of "
            + ", ".join(LOSSES)
        )
    if wrong := [change for change in changes if not re.match(r"[^-=][^=]*=", change)]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)} in {text}: not KEY=VALUE")
    return Arm(name, trains, tuple(f"{ACTOR}.{change}" for change in changes))


def calibrated(run: Path) -> Arm:
    """FSPO with the band that ``fspo-verl calibrate`` recommends to a run.

    Raises:
        ValueError: its records cannot be calibrated.
    """
    import numpy as np

    from fspo_verl.analysis.calibrate import calibrate
    from fspo_verl.analysis.runs import read_run
    from fspo_verl.clips import MATCHED_RATE
    from fspo_verl.report.calibration import KEY, overrides

    band = calibrate(read_run(run, run.name).records, MATCHED_RATE, np.random.default_rng(0)).chosen.band
    values = {key: "null" if value is None else value for key, value in overrides(band).items()}
    return Arm(CALIBRATED, "fspo", tuple(f"{KEY}{key}={value}" for key, value in values.items()))
