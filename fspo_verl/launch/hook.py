# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks a launch before Ray starts: what would train another loss than asked for is refused.

verl offers no hook between Hydra's composition and ``ray.init``: :mod:`fspo_verl.verl_patches` wraps functions to which
a launch hands its whole config, and calls what is here.

A launch that selects none of our losses is refused only if it clearly tried to. Any other error here is logged, and the
launch goes on. Where a loss of ours is selected, a check that fails is an error.
"""

import contextlib
import copy
import logging
import os
import sys
from collections.abc import Iterator, Mapping

from omegaconf import DictConfig, OmegaConf

from fspo_verl.findings import ERROR, WARNING, Finding
from fspo_verl.keys import EXAMINE, OVERRIDES, RECORDS_DIR
from fspo_verl.launch import selection
from fspo_verl.launch.starts import PRINTED, REFUSED, TAKEN, Start, Taken, receipts
from fspo_verl.launch.view import Launch
from fspo_verl.observe import attempts

logger = logging.getLogger("fspo_verl")
FIRST = "auto_set_device"
"""The function that a main of verl calls first."""
_NOT_LOOKED_AT = "fspo_verl did not look at this launch"
_PRINTS = {"--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help"}  # options of Hydra that train nothing


_start = Start()


# --- where a launch is seen ------------------------------------------------------------------------------------------


def composed(config: DictConfig, taken: Taken | None, is_of_several: bool) -> None:
    """Hydra has composed the config of a launch, which takes this of the environment's request.

    What was composed before in the same way is no other launch: ``hydra.verbose=true`` composes twice.

    Args:
        is_of_several: a job of ``--multirun``; each is composed once more before any of them starts.
    """
    global _start
    if taken == _start.taken and not os.environ.get(EXAMINE):
        return
    _start = Start(config, taken)
    if taken is not None and not is_of_several:
        state = PRINTED if any(word.partition("=")[0] in _PRINTS for word in sys.argv[1:]) else TAKEN
        _start.tell(state)
        _start.note(state, config)


def refused_to_compose(problem: Exception, is_asked: bool) -> None:
    """Hydra composes no config, and raises this problem."""
    _end_if_examined(None, problem)
    if is_asked:
        Start().note(REFUSED)


def _end_if_examined(config: DictConfig | None, problem: Exception | None = None) -> None:
    """End this process where the doctor has started it, which is told what its checks find."""
    if os.environ.get(EXAMINE):
        from fspo_verl.launch import doctor

        doctor.hand_back(config, problem)


def begin(place: str, config: DictConfig | None) -> None:
    """A launch is seen before Ray starts: check it, once for each content of its config.

    Args:
        place: the function that its main has called. One that is called again begins another launch.
        config: what the main has handed over; None where that is nothing.

    Raises:
        ValueError: it would train another loss than is asked for.
    """
    global _start
    _end_if_examined(_start.composed if config is None else config)
    if place in _start.places or (place == FIRST and _start.places):
        _start = Start(_start.composed, _start.taken, _start.is_told)
    _start.places.add(place)
    if config is None:
        return
    content = _content(config)
    if content is None or content != _start.checked:
        with _refused_launches_noted(_start, config):
            check(config)
        _name_attempt(config)
        _start.checked = _content(config)
        if os.environ.get(OVERRIDES):
            from fspo_verl.launch import asked

            asked.confirm(config, _start)


def _content(config):
    """Return what a config holds, to see whether it has changed; None where that cannot be told."""
    with never_ending_the_launch(_NOT_LOOKED_AT):
        return OmegaConf.to_container(config) if OmegaConf.is_config(config) else copy.copy(config)


def at_the_logger(config: Mapping) -> None:
    """A trainer builds its logger: refuse what can be refused on its config alone.

    It may do so in a worker of Ray, which has the driver's environment and not its state.

    Raises:
        ValueError: it would train another loss than is asked for.
    """
    whole = OmegaConf.create()
    with never_ending_the_launch(_NOT_LOOKED_AT):
        whole = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    _end_if_examined(whole)
    launch = Launch(whole)
    where = launch.get(RECORDS_DIR), str(launch.checkpoints)
    known = [one for one in receipts() if (one.records, one.run) == where]  # from the driver
    start = Start(id=known[-1].id) if known else Start()
    with _refused_launches_noted(start, whole):
        check(whole, is_alone=True)
    if not known and os.environ.get(OVERRIDES):
        from fspo_verl.launch import asked

        asked.confirm(whole, start)


# --- checks ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def never_ending_the_launch(lost: str) -> Iterator[None]:
    """Log what goes wrong, with what is lost by it, in place of raising it."""
    try:
        yield
    except Exception as problem:
        logger.warning("%s: %s: %s", lost, type(problem).__name__, problem)


@contextlib.contextmanager
def _refused_launches_noted(start: Start, config: DictConfig) -> Iterator[None]:
    try:
        yield
    except ValueError:
        start.note(REFUSED, config)
        raise


def check(config: DictConfig, is_alone: bool = False) -> None:
    """Refuse or warn about a composed config of a verl main; say which range is in effect if the loss is ``fspo``.

    What trains no policy is left alone.

    Args:
        is_alone: nothing is known but the config, and warnings were given before if they could be.

    Raises:
        ValueError: the config asks for a loss that it would not train, or a field of the range is wrong.
    """
    launch, is_ours = Launch(config), False
    findings: list[Finding] = []
    if os.environ.get(OVERRIDES):
        from fspo_verl.launch import asked

        findings += filter(None, [asked.problem(config)])
    with never_ending_the_launch(_NOT_LOOKED_AT):
        is_ours = launch.trains_a_policy and launch.is_ours
        if launch.trains_a_policy and not is_ours:
            findings += selection.lost_selections(launch)
    if is_ours:
        from fspo_verl.launch import checks, installation

        findings += [] if is_alone else installation.verl_version()
        findings += checks.of_the_config_alone(config) if is_alone else checks.findings(config)
    if errors := [one.in_one_line for one in findings if one.severity == ERROR]:
        raise ValueError("\n".join(errors))
    for one in findings:
        logger.log(logging.WARNING if one.severity == WARNING else logging.INFO, "%s", one.in_one_line)


def _name_attempt(config: DictConfig) -> None:
    """Set ``records_dir`` to a folder of this launch alone, if it writes any; see :func:`attempts.new`.

    A name that an earlier call has given, to this config or to one that it was copied from, stays until something is
    recorded there. Workers make the folder.
    """
    launch = Launch(config)
    if launch.is_ours and (folder := launch.policy_loss.get("records_dir")) is not None:
        OmegaConf.update(config, RECORDS_DIR, str(attempts.new(folder, launch.checkpoints)))
