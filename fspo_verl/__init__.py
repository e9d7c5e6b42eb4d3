# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FSPO (Fair Sequence Policy Optimization, arXiv 2509.09177) for verl.

This module imports nothing: verl loads the plugin while verl itself is still being imported.
"""

__version__ = "0.1.0"
