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
import sys
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fspo_verl import verl_patches
from fspo_verl.findings import ERROR, WARNING, Finding
from fspo_verl.keys import GROUP, OVERRIDES
from fspo_verl.launch import group, hydra_files, selection
from fspo_verl.launch.view import Launch

logger = logging.getLogger("fspo_verl")
_NOT_LOOKED_AT = "fspo_verl did not look at this launch"


@contextlib.contextmanager
def _never_ending_the_launch(lost: str) -> Iterator[None]:
    """Log what goes wrong, with what is lost by it, in place of raising it."""
    try:
        yield
    except Exception as problem:
        logger.warning("%s: %s: %s", lost, type(problem).__name__, problem)


def check(config: DictConfig) -> None:
    """Refuse or warn about a composed config of a verl main; say which band is in effect if the loss is ``fspo``.

    Anything without ``actor_rollout_ref.actor`` is left alone.

    Raises:
        ValueError: the config asks for a loss that it would not train, or a field of the band is wrong.
    """
    launch, is_ours = Launch(config), False
    findings: list[Finding] = []
    with _never_ending_the_launch(_NOT_LOOKED_AT):
        is_ours = launch.selects_ours
        findings = [] if is_ours else [*selection.lost_selections(launch)]
    if is_ours:
        from fspo_verl.launch import checks, installation

        findings = [*installation.verl_version(), *checks.findings(config)]
    _refuse_or_say(findings)


def _refuse_or_say(findings: list[Finding]) -> None:
    if errors := [_in_one_line(one) for one in findings if one.severity == ERROR]:
        raise ValueError("\n".join(errors))
    for one in findings:
        logger.log(logging.WARNING if one.severity == WARNING else logging.INFO, "%s", _in_one_line(one))


def _in_one_line(finding: Finding) -> str:
    return f"{finding.sentence} Fix: {finding.advice}" if finding.advice else finding.sentence


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


# --- where a launch is seen ------------------------------------------------------------------------------------------


def begin_application_of_hydra() -> None:
    """The checks before a Hydra application of verl composes its config."""
    ask = None
    if os.environ.get(OVERRIDES):
        from fspo_verl.launch import asked

        ask = asked.composed
    verl_patches.select_without_plus(GROUP, group.with_plus, at_a_config_file, ask)
    if "fspo_verl.plugin" in sys.modules:
        return
    from fspo_verl.launch import installation

    # Where verl loads no plugins (VERL_USE_EXTERNAL_PLUGINS), nothing else would check what the config selects.
    if installation.too_old() is None:
        verl_patches.see_launches(check_once, refuse_the_config)


def at_a_config_file(name: str) -> None:
    """Refuse a config file of this package's group, by its name, where an old verl would train its own loss.

    Such a verl in a folder shadows the installed one. Of this package it sees the configs alone.
    """
    section, _, option = name.rpartition("/")
    if section != GROUP:
        return
    if option.removesuffix(".yaml") in hydra_files.OPTIONS:
        from hydra.errors import ConfigCompositionException

        from fspo_verl.launch import installation

        if (finding := installation.too_old()) is not None:
            raise ConfigCompositionException(_in_one_line(finding))  # which Hydra prints without a traceback


_checked: list = []  # the config of this launch


def check_once(config) -> None:
    """Check a launch and claim its records; verl's asynchronous mains come here twice."""
    if any(config is known for known in _checked):
        return
    is_asked = bool(os.environ.get(OVERRIDES))
    if is_asked:
        from fspo_verl.launch import asked

        asked.check(config)
    check(config)
    claim_records(config)
    if is_asked:
        asked.confirm(config)
    _checked[:] = [config]


def refuse_the_config(config) -> None:
    """Refuse at the trainer's logger what :func:`check` refuses on the config alone."""
    errors: list[Finding] = []
    with _never_ending_the_launch(_NOT_LOOKED_AT):
        launch = Launch(OmegaConf.create(config or {}))
        errors += selection.lost_selections(launch)
        if launch.selects_ours:
            from fspo_verl.launch import checks

            errors += checks.errors_of_the_config_alone(launch.config)
    _refuse_or_say(errors)
