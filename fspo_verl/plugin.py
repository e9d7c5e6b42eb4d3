# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The ``verl.plugins`` entry point, imported by every process that imports verl.

verl only imports it, calls nothing, and swallows what it raises; an error is therefore logged here before it is raised.
"""

import logging

try:
    import fspo_verl.cpu  # does nothing but under VERL_PLATFORM=cpu
    import fspo_verl.register  # noqa: F401
except Exception:
    logging.getLogger("fspo_verl").exception("fspo_verl could not plug itself into verl: loss_mode=fspo is missing")
    raise
