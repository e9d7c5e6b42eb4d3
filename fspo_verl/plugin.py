# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The ``verl.plugins`` entry point, imported by every process that imports verl.

verl only imports it, calls nothing, and swallows what it raises; an error is therefore logged here before it is raised.
verl before 0.9 has no entry points and imports it only where ``VERL_USE_EXTERNAL_MODULES=fspo_verl.plugin`` says so.
"""

import logging

import fspo_verl.versions

fspo_verl.versions.warn_unsupported_verl()
try:
    import fspo_verl.cpu  # does nothing but under VERL_PLATFORM=cpu
    import fspo_verl.live
    import fspo_verl.preflight.hook
    import fspo_verl.register

    fspo_verl.preflight.hook.install()
    fspo_verl.live.install()
except Exception:
    logging.getLogger("fspo_verl").exception("fspo_verl could not plug itself into verl: loss_mode=fspo is missing")
    raise
