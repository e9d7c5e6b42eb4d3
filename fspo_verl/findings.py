# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A finding: one result of a check, a cause or a fact of a log, and how it is shown.

Every command, alert and JSON object takes its sentences from findings and adds no conclusion of its own.
"""

import dataclasses
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fspo_verl import output

SEVERITIES = ERROR, WARNING, NOTE = ("error", "warning", "note")
"""``error``: it fails, or is not what it says. ``warning``: it works against what is meant."""

ACTIONS = TAKE, KEEP, RECORD, FIX = ("take", "keep", "record", "fix")
"""``take`` another clip, ``keep`` this one, ``record`` more first, or ``fix`` something other than the clip first."""


@dataclass(frozen=True)
class Finding:
    """One finding. Texts are plain, in sentences, and without line breaks."""

    id: str
    """Its name for programs: that of a cause, a check, or a fact."""

    severity: str
    """One of :data:`SEVERITIES`."""

    sentence: str
    advice: str = ""
    """The next step of the user; empty where there is none."""

    value: float | None = None
    """The number that it rests on; NaN is not known, like None."""

    action: str = ""
    """One of :data:`ACTIONS`, in a word what :attr:`advice` says; empty without advice."""

    overrides: Mapping[str, float | str | None] = field(default_factory=dict)
    """Hydra overrides to paste, by key; None stands for null."""

    command: str = ""
    """The subcommand of ``fspo-verl`` that :attr:`advice` names, if any."""

    remove: Sequence[str] = ()
    """Overrides of the launch that :attr:`advice` takes away, as they were typed; the key of what a file sets."""

    add: Sequence[str] = ()
    """Overrides that it adds, unquoted."""

    @property
    def in_one_line(self) -> str:
        """The finding as one line, for logs and errors."""
        return f"{self.sentence} Fix: {self.advice}" if self.advice else self.sentence

    def __str__(self) -> str:
        return " ".join(filter(None, (self.sentence, self.advice)))

    def to_json(self) -> dict:
        """Return plain values by field; overrides as a shell takes them."""
        value = self.value if self.value is not None and math.isfinite(self.value) else None
        lists = {"overrides": pasted(self.overrides), "remove": [*self.remove], "add": [*self.add]}
        return vars(self) | {"value": value} | lists

    def without_advice(self) -> "Finding":
        return dataclasses.replace(self, advice="", action="", overrides={}, command="", remove=(), add=())


def rows(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Return labelled lines for :func:`fspo_verl.output.show`: each finding, and below it what to do."""
    lines = []
    for one in findings:
        lines.append((one.severity, one.sentence))
        if one.advice:
            lines.append((f"{one.action}:", one.advice))
        if one.overrides:
            *others, last = pasted(one.overrides)
            lines += [*(("", f"{text} \\") for text in others), ("", last)]
    return lines


def show(findings: Iterable[Finding]) -> None:
    """Print findings."""
    output.show(rows(findings), widths=(8,))


def exit_code(findings: Iterable[Finding], strict: bool = False) -> int:
    """Return 1 where there is an error, or a warning if ``strict``; else 0."""
    return int(any(one.severity == ERROR or (strict and one.severity == WARNING) for one in findings))


def pasted(overrides: Mapping[str, float | str | None]) -> list[str]:
    """Return Hydra overrides as a shell takes them."""
    return [f"{key}={'null' if value is None else shlex.quote(str(value))}" for key, value in overrides.items()]
