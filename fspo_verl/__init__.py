# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""FSPO (Fair Sequence Policy Optimization, arXiv 2509.09177) for verl.

The public names: :func:`fspo_verl.loss.fspo_loss`, :class:`fspo_verl.band.Band` and
:func:`fspo_verl.observe.records.read_records`. Each is imported when it is first asked for: verl loads the plugin while
verl itself is still being imported, and nothing of this package may be imported then.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fspo_verl.band import Band
    from fspo_verl.loss import fspo_loss
    from fspo_verl.observe.records import read_records

__version__ = "0.1.0"
__all__ = ["Band", "fspo_loss", "read_records"]

_MODULES = {"Band": "fspo_verl.band", "fspo_loss": "fspo_verl.loss", "read_records": "fspo_verl.observe.records"}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
