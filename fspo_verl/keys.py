# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Keys of verl's config and the environment, each written once, and what became of fields that are gone."""

from collections.abc import Mapping

GROUP = "algorithm.policy_loss"
"""The config group of this package."""

ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"
RECORDS_DIR = f"{POLICY_LOSS}.records_dir"

OVERRIDES = "FSPO_VERL_OVERRIDES"
"""The environment variable whose overrides every policy training below it takes (:mod:`fspo_verl.launch.asked`)."""

GONE = {
    "shape": "a measured width is no longer read: set length_power, for which `fspo-verl calibrate` fits a value",
}
"""Fields of ``policy_loss`` that older versions had, and what to do instead. Null does nothing, and is read."""


class Gone(ValueError):
    """A field of :data:`GONE` has a value."""


def refuse_gone(settings: Mapping) -> None:
    """Let settings pass whose fields of :data:`GONE` are null or missing.

    Raises:
        Gone: one has a value; says what to do instead.
    """
    for name, instead in GONE.items():
        if (value := settings.get(name)) is not None:
            raise Gone(f"{POLICY_LOSS}.{name}={value!r} is gone: {instead}")
