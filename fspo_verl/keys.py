# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Keys of verl's config and the environment, each written once, and what became of fields that are gone."""

from collections.abc import Mapping

GROUP = "algorithm.policy_loss"
"""The config group of this package."""

ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"
RECORDS_DIR = f"{POLICY_LOSS}.records_dir"
SELECTS = (f"{POLICY_LOSS}._target_", f"{POLICY_LOSS}.loss_mode")
"""What decides which loss trains."""

OVERRIDES = "FSPO_VERL_OVERRIDES"
"""The environment variable whose overrides every policy training below it takes (:mod:`fspo_verl.launch.asked`)."""

GONE = {
    "shape": "a measured width is no longer read: set length_power, for which `fspo-verl calibrate` fits a value",
    "mismatch_eps": "no response is masked: remove it, or have verl correct rollouts by algorithm.rollout_correction",
    "records_fraction": "all prompts are recorded: remove it, or record fewer steps with records_freq",
}
"""Fields of ``policy_loss`` that older versions had, and what to do instead. Null, and what did nothing, is read."""


_DID_NOTHING = {"records_fraction": 1.0}  # beside null


class Gone(ValueError):
    """A field of :data:`GONE` has a value."""


def refuse_gone(settings: Mapping) -> None:
    """Let settings pass whose fields of :data:`GONE` are null or missing.

    Raises:
        Gone: one has a value; says what to do instead.
    """
    for name, instead in GONE.items():
        if (value := settings.get(name)) not in (None, _DID_NOTHING.get(name)):
            raise Gone(f"{POLICY_LOSS}.{name}={value!r} is gone: {instead}")
