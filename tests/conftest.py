# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
import os

from hypothesis import settings

# Timed limits have no place in a shared CI; `HYPOTHESIS_PROFILE=long` runs many more generated cases.
settings.register_profile("ci", max_examples=150, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=20_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
