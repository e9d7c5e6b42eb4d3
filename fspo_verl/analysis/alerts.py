# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Alerts in the log of a run: what :mod:`fspo_verl.analysis.causes` finds while it trains, once per cause.

They are asked for where a trainer hands the metrics of a step to its loggers (:mod:`fspo_verl.verl_patches`), of the
last steps together. While a cause that makes advice on the range worthless holds, none on the range is given. No
alert is about a range that clips little: a run may begin so. None is about a break of the policy, which a dip that is
made good resembles until it is, or about a test of lengths, which needs single responses: a report has both.
``policy_loss.alerts=False`` turns them off.
"""

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from fspo_verl.analysis.causes import HEALTH, LEVEL, MOST, STEPS, conclude
from fspo_verl.analysis.evidence import TRAINED, TYPICAL, Evidence, evidence_of
from fspo_verl.analysis.live import over_steps
from fspo_verl.findings import NOTE, Finding
from fspo_verl.keys import POLICY_LOSS
from fspo_verl.observe.metrics import NAMES, SERIES
from fspo_verl.output import ONCE

logger = logging.getLogger("fspo_verl")


class Alerts:
    """The alerts of one run.

    Args:
        config: of the run, or None if it is not known; there is no range then to hold noise against.
    """

    def __init__(self, config: Mapping | None = None):
        from fspo_verl.analysis import runs  # imports pandas

        self.on = runs.setting(config, f"{POLICY_LOSS}.alerts") is not False
        self._settings = runs.settings_of(config)
        self._window: deque[Mapping[str, float]] = deque(maxlen=STEPS)
        self._said: set[str] = set()  # causes
        self._cut_off: float | None = None  # share at the start

    def of_step(self, metrics: Mapping[str, Any]) -> list[Finding]:
        """The alerts after another step, by what is logged of it; none where no loss of this package trains."""
        if not self.on or not any(name.startswith(SERIES) for name in metrics):
            return []
        from fspo_verl.analysis import logs  # imports pandas

        read = (*TRAINED, SERIES, NAMES["response_length"])
        step = logs.numbers({name: value for name, value in metrics.items() if name.startswith(read)})
        self._window.append(step)
        # What is broken is broken in this step, whatever the others are like.
        usual = over_steps(self._window) | self._typical(step)
        evidence = evidence_of(step | usual, self._settings, len(self._window))
        if self._cut_off is None:
            self._cut_off = evidence.cut_off
        evidence = replace(evidence, cut_off_before=self._cut_off)
        new = [one for one in alarming(conclude(evidence), evidence) if one.id not in self._said]
        self._said |= {one.id for one in new}
        return new

    def _typical(self, step: Mapping[str, float]) -> dict[str, float]:
        """Medians over the window of what is told of a typical step: one response may outweigh all others of a step."""
        names = [name for name, value in step.items() if name.startswith(TYPICAL) and math.isfinite(value)]
        of_steps = {
            name: [one[name] for one in self._window if math.isfinite(one.get(name, math.nan))] for name in names
        }
        return {name: median(values) for name, values in of_steps.items()}


def alarming(findings: Iterable[Finding], evidence: Evidence) -> list[Finding]:
    """Return the findings that a user should act on while the run goes on.

    Below :data:`STEPS` steps none on the range is: steps differ, and a few say little of a run.
    """
    found = [one for one in findings if one.severity != NOTE]
    if broken := [one for one in found if one.id in HEALTH]:
        return broken
    is_idle = (evidence.clip_rate or 0) <= MOST
    return [one for one in found if not (one.id == LEVEL and is_idle)] if evidence.steps >= STEPS else []


_LOST = "there are no alerts for a step"


def of_run(config: Mapping | None) -> Alerts | None:
    """Return the alerts of a run with this config; None, with a warning, where they cannot be made."""
    try:
        return Alerts(config)
    except Exception as error:
        ONCE.lost(error, _LOST)
    return None


def say(alerts: Alerts | None, metrics: Mapping, step: Any = None) -> None:
    """Log the alerts of a step; a warning, once, where that fails: logging must not stop training."""
    try:
        for finding in alerts.of_step(metrics) if alerts else ():
            logger.warning("step %s: %s Said once.", step, finding)
    except Exception as error:
        ONCE.lost(error, _LOST)
