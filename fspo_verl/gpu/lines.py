# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a check of a machine has to say."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """The outcome of one check."""

    status: str
    """``ok``, ``warning`` (it trains, not as it should), ``error`` (it trains wrong) or ``skipped``."""

    check: str
    """Name of the check, for programs."""

    what: str
    why: str = ""
    fix: str = ""
    figures: dict = field(default_factory=dict)
    """The numbers behind it, for programs."""


def first_line(error: Exception) -> str:
    """Of what an exception says."""
    return next(iter(str(error).strip().splitlines()), "")


def judged(good: bool, check: str, what: str, why: str, fix: str, figures: dict, note: str = "") -> Line:
    """``ok`` with a note, or else an ``error`` with its reason and remedy."""
    return Line("ok", check, what, note, "", figures) if good else Line("error", check, what, why, fix, figures)
