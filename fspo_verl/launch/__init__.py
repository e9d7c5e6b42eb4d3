# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The part before Ray starts: a launch is composed, checked, and refused where another loss would train."""

from fspo_verl.launch.hydra_files import override as override
