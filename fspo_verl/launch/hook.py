# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks a launch before Ray starts: what would train another loss than asked for is refused.

verl offers no hook between Hydra's composition and ``ray.init``: :mod:`fspo_verl.verl_patches` wraps functions to which
a launch hands its whole config, and calls what is here.

A launch that selects none of our losses is refused only if it clearly tried to. Any other error here is logged, and the
launch goes on. Where a loss of ours is selected, a check that fails is an error.
"""

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from fspo_verl.findings import ERROR, WARNING, Finding
from fspo_verl.keys import EXAMINE, OVERRIDES, RECORDS_DIR
from fspo_verl.launch import receipts, selection
from fspo_verl.launch.receipts import COMPOSED, LAUNCHED, PRINTED, REFUSED, Receipt
from fspo_verl.launch.view import Launch

if TYPE_CHECKING:
    from fspo_verl.launch.asked import Taken

logger = logging.getLogger("fspo_verl")
FIRST = "auto_set_device"
"""The function that a main of verl calls first."""
_NOT_LOOKED_AT = "fspo_verl did not look at this launch"
_PRINTS = {"--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help"}  # options of Hydra that train nothing


@dataclass
class Start:
    """One launch of this process, from where its config is first seen until Ray starts."""

    composed: DictConfig | None = None
    """As Hydra has composed it, where anything is asked of a launch."""

    taken: "Taken | None" = None
    """What it takes of the environment's request."""

    places: set[str] = field(default_factory=set)
    """The functions that have been handed its config."""

    checked: object = None
    """The content of its config that was checked last."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def note(self, state: str, config: DictConfig | None = None) -> None:
        """Tell ``fspo-verl run`` how far this launch has come."""
        if os.environ.get(OVERRIDES):
            launch, taken = Launch(OmegaConf.create() if config is None else config), self.taken
            known = {name: getattr(taken, name) for name in ("added", "left_out", "rest")} if taken else {}
            loss = _asked_loss()
            receipts.note(Receipt(self.id, state, loss, launch.get(RECORDS_DIR), str(launch.checkpoints), **known))


_start = Start()


def _asked_loss() -> str:
    from fspo_verl.launch import asked

    with contextlib.suppress(ValueError):
        return asked.Request.of_environment().loss
    return ""


# --- where a launch is seen ------------------------------------------------------------------------------------------


def composed(config: DictConfig, taken: "Taken | None", is_of_several: bool) -> None:
    """Hydra has composed the config of a launch, which takes this of the environment's request.

    Args:
        is_of_several: a job of ``--multirun``; each is composed once more before any of them starts.
    """
    global _start
    if taken is None and not os.environ.get(EXAMINE):
        return
    _start = Start(config, taken)
    if taken is not None and not is_of_several:
        taken.say()
        prints = any(word.partition("=")[0] in _PRINTS for word in sys.argv[1:])
        _start.note(PRINTED if prints else COMPOSED, config)


def has_composed() -> bool:
    """Whether a config that takes something was composed in this process."""
    return _start.composed is not None


def refused_to_compose(problem: Exception, is_asked: bool) -> None:
    """Hydra composes no config, and raises this problem."""
    if os.environ.get(EXAMINE):
        from fspo_verl.launch import doctor

        doctor.hand_back(lambda: [doctor.not_composed(problem)])
    if is_asked:
        Start().note(REFUSED)


def begin(place: str, config: DictConfig | None) -> None:
    """A launch is seen before Ray starts: check it, once for each content of its config.

    Args:
        place: the function that its main has called. One that is called again begins another launch.
        config: what the main has handed over; None where that is nothing.

    Raises:
        ValueError: it would train another loss than is asked for.
    """
    global _start
    if os.environ.get(EXAMINE):
        from fspo_verl.launch import doctor

        doctor.hand_back(lambda: doctor.examine(_start.composed if config is None else config))
    if place in _start.places or (place == FIRST and _start.places):
        _start = Start()
    is_seen = bool(_start.places)
    _start.places.add(place)
    if config is None:
        if _start.composed is not None and _start.taken is not None and not is_seen:
            _go(_start.composed)
        return
    content = None
    with _never_ending_the_launch(_NOT_LOOKED_AT):
        content = OmegaConf.to_container(config) if OmegaConf.is_config(config) else config
    if content != _start.checked or content is None:
        _start.checked = content
        _check_a_launch(config)


def _check_a_launch(config: DictConfig) -> None:
    try:
        _check_what_is_asked(config)
        check(config)
        claim_records(config)
    except ValueError:
        _start.note(REFUSED, config)
        raise
    _go(config)


def _go(config: DictConfig) -> None:
    """The launch starts Ray now."""
    if not os.environ.get(OVERRIDES) or not Launch(config).trains_a_policy:
        return
    from fspo_verl.launch import asked

    if (taken := _start.taken) is not None:
        taken.say()
        earlier = [one for one in receipts.launches() if one.state == LAUNCHED and one.id != _start.id]
        for number, one in enumerate(earlier, 1):
            if [*one.rest] == taken.rest and [*one.left_out] != taken.left_out:
                asked.say(f"this is the same training as launch {number}: what they differ in was left out")
    _start.note(LAUNCHED, config)


def at_the_logger(config: Mapping) -> None:
    """A trainer builds its logger: refuse what can be refused on its config alone.

    It may do so in a worker of Ray, which has the driver's environment and not its state.

    Raises:
        ValueError: it would train another loss than is asked for.
    """
    whole = OmegaConf.create({})
    with _never_ending_the_launch(_NOT_LOOKED_AT):
        whole = OmegaConf.create(dict(config))
    if os.environ.get(EXAMINE):
        from fspo_verl.launch import doctor

        doctor.hand_back(lambda: doctor.examine(whole))
    launch, start = Launch(whole), Start()
    for known in receipts.launches():  # the driver's
        if (known.records, known.run) == (launch.get(RECORDS_DIR), str(launch.checkpoints)):
            start.id = known.id
    try:
        _check_what_is_asked(whole)
        _refuse_or_say(_errors_of_the_config_alone(launch))
    except ValueError:
        start.note(REFUSED, whole)
        raise
    if launch.trains_a_policy and not any(one.id == start.id and one.state == LAUNCHED for one in receipts.launches()):
        start.note(LAUNCHED, whole)


# --- checks ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _never_ending_the_launch(lost: str) -> Iterator[None]:
    """Log what goes wrong, with what is lost by it, in place of raising it."""
    try:
        yield
    except Exception as problem:
        logger.warning("%s: %s: %s", lost, type(problem).__name__, problem)


def check(config: DictConfig) -> None:
    """Refuse or warn about a composed config of a verl main; say which band is in effect if the loss is ``fspo``.

    What trains no policy is left alone.

    Raises:
        ValueError: the config asks for a loss that it would not train, or a field of the band is wrong.
    """
    launch, is_ours = Launch(config), False
    findings: list[Finding] = []
    with _never_ending_the_launch(_NOT_LOOKED_AT):
        if not launch.trains_a_policy:
            return
        is_ours = launch.selects_ours
        findings = [] if is_ours else [*selection.lost_selections(launch)]
    if is_ours:
        from fspo_verl.launch import checks, installation

        findings = [*installation.verl_version(), *checks.findings(config)]
    _refuse_or_say(findings)


def _errors_of_the_config_alone(launch: Launch) -> list[Finding]:
    errors: list[Finding] = []
    with _never_ending_the_launch(_NOT_LOOKED_AT):
        if launch.trains_a_policy:
            errors += selection.lost_selections(launch)
            if launch.selects_ours:
                from fspo_verl.launch import checks

                errors += checks.errors_of_the_config_alone(launch.config)
    return errors


def _check_what_is_asked(config: DictConfig) -> None:
    if os.environ.get(OVERRIDES):
        from fspo_verl.launch import asked

        _refuse_or_say([*filter(None, [asked.problem(config, _start.taken is not None)])])


def _refuse_or_say(findings: list[Finding]) -> None:
    if errors := [one.in_one_line for one in findings if one.severity == ERROR]:
        raise ValueError("\n".join(errors))
    for one in findings:
        logger.log(logging.WARNING if one.severity == WARNING else logging.INFO, "%s", one.in_one_line)


def claim_records(config: DictConfig) -> None:
    """Make ``records_dir`` that of this run; :func:`check` has warned of a folder that only the workers can write.

    Raises:
        ValueError: the folder is that of another run; names a free one.
    """
    launch = Launch(config)
    records_dir = launch.policy_loss.get("records_dir") if launch.is_ours else None
    if records_dir is not None and launch.checkpoints is not None:
        from fspo_verl.observe import attempts

        with contextlib.suppress(OSError):
            attempts.claim(Path(records_dir), launch.checkpoints)
