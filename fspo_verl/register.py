# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The ``verl.plugins`` entry point: importing it plugs this package into verl."""

import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    import fspo_verl.cpu  # noqa: F401  registers the platform, engines and rollout for machines without a GPU
