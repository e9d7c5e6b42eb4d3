# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Keys of verl's config and the environment, each written once."""

GROUP = "algorithm.policy_loss"
"""The config group of this package."""

ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"
RECORDS_DIR = f"{POLICY_LOSS}.records_dir"
SELECTS = (f"{POLICY_LOSS}._target_", f"{POLICY_LOSS}.loss_mode")
"""The keys that decide which loss trains."""

OVERRIDES = "FSPO_VERL_OVERRIDES"
"""The environment variable whose overrides every policy training below it takes (:mod:`fspo_verl.launch.asked`)."""

EXAMINE = "FSPO_VERL_EXAMINE"
"""The environment variable with the file to which a launch that ``fspo-verl doctor`` has started hands its findings."""
