# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks a launch before Ray starts: what would train another loss than asked for is refused.

verl offers no hook between Hydra's composition and ``ray.init``: :mod:`fspo_verl.verl_patches` wraps functions to which
a launch hands its whole config, and calls what is here.

A launch that selects no loss of this package is refused only where it plainly meant to. Nothing else that goes wrong
here ends or changes such a launch. Where a loss of this package is selected, a check that fails is an error.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fspo_verl import verl_patches
from fspo_verl.findings import ERROR, WARNING, Finding
from fspo_verl.keys import GROUP, OVERRIDES
from fspo_verl.launch import group, hydra_files, selection
from fspo_verl.launch.view import Launch

logger = logging.getLogger("fspo_verl")


def check(config: DictConfig) -> None:
    """Refuse or warn about a launch config; say which band is in effect if the loss is ``fspo``.

    Args:
        config: the composed config of a verl main. Anything without ``actor_rollout_ref.actor`` is left alone.

    Raises:
        ValueError: the config asks for a loss that it would not train, or a field of the band is wrong.
    """
    try:
        launch = Launch(config)
        selected, meant = launch.selects_ours, [*selection.lost_selections(launch)]
    except Exception as problem:
        logger.warning("fspo_verl did not look at this launch: %s: %s", type(problem).__name__, problem)
        return
    if selected:
        from fspo_verl.launch import checks, installation

        meant = [*installation.verl_version(), *checks.findings(config)]  # which has what was meant as well
    _refuse_or_say(meant)
    if not selected and launch.has_actor:
        _say_a_forgotten_loss(launch)


def _refuse_or_say(findings: list[Finding]) -> None:
    if errors := [_in_one_line(one) for one in findings if one.severity == ERROR]:
        raise ValueError("\n".join(errors))
    for one in findings:
        logger.log(logging.WARNING if one.severity == WARNING else logging.INFO, "%s", _in_one_line(one))


def _in_one_line(finding: Finding) -> str:
    return f"{finding.sentence} Fix: {finding.advice}" if finding.advice else finding.sentence


def _say_a_forgotten_loss(launch: Launch) -> None:
    """Warn of a resume without the loss of this package that has trained the run so far."""
    try:
        if launch.resumes_ours:
            from fspo_verl.launch import resume

            _refuse_or_say([*resume.changed_on_resume(launch)])
    except Exception as problem:
        logger.warning("fspo_verl did not compare this launch with its checkpoint: %s", problem)


def keep_loss_settings(config: DictConfig) -> None:
    """Keep what a launch trains with beside its checkpoints, if a loss of this package trains, or has until now.

    The next launch is compared with it (:func:`fspo_verl.launch.resume.changed_on_resume`).
    """
    try:
        launch = Launch(config)
        if not (launch.has_actor and (launch.selects_ours or launch.resumes_ours)):
            return
        if (launch.get("trainer.save_freq") or 0) > 0:
            from fspo_verl.launch import resume

            resume.keep(launch)
    except Exception as problem:  # the run itself needs none of it
        logger.warning("if this run is resumed with another loss, no warning will follow: %s", problem)


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
    ask = with_what_is_asked if os.environ.get(OVERRIDES) else None
    verl_patches.select_without_plus(GROUP, group.with_plus, at_a_config_file, ask)
    if "fspo_verl.plugin" in sys.modules:
        return
    from fspo_verl.launch import installation

    # Where verl loads no plugins (VERL_USE_EXTERNAL_PLUGINS), nothing else would check what the config selects.
    if installation.too_old() is None:
        verl_patches.see_launches(check_once, refuse_the_config)


def with_what_is_asked(compose: Callable[[list[str]], DictConfig], overrides: list[str]) -> DictConfig:
    """The config of a launch, with what the environment asks for (:mod:`fspo_verl.launch.asked`)."""
    if not os.environ.get(OVERRIDES):
        return compose(overrides)
    from fspo_verl.launch import asked

    return asked.composed(compose, overrides)


def at_a_config_file(name: str) -> None:
    """Refuse a config file of this package's group where an old verl would train its own loss.

    Such a verl in a folder shadows the installed one. Of this package it sees the configs alone.

    Args:
        name: of a config, such as ``actor/dp_actor``.
    """
    section, _, option = name.rpartition("/")
    if section != GROUP:
        return
    group.seen.add(option)
    if option.removesuffix(".yaml") in hydra_files.OPTIONS:
        from hydra.errors import ConfigCompositionException

        from fspo_verl.launch import installation

        if (finding := installation.too_old()) is not None:
            raise ConfigCompositionException(_in_one_line(finding))  # which Hydra prints without a traceback


_checked: list = []  # the config of this launch


def check_once(config) -> None:
    """Check a launch, keep its loss and claim its records; verl's asynchronous mains come here twice."""
    if any(config is known for known in _checked):
        return
    is_asked = bool(os.environ.get(OVERRIDES))
    if is_asked:
        from fspo_verl.launch import asked

        asked.check(config)
    check(config)
    keep_loss_settings(config)
    claim_records(config)
    if is_asked:
        asked.confirm(config)
    _checked[:] = [config]


def refuse_the_config(config) -> None:
    """Refuse at the trainer's logger what :func:`check` refuses on the config alone."""
    try:
        launch = Launch(OmegaConf.create(config or {}))
        errors = [*selection.lost_selections(launch)]
        if launch.selects_ours:
            from fspo_verl.launch import checks

            errors += checks.errors_of_the_config_alone(launch.config)
    except Exception as problem:
        logger.warning("fspo_verl did not look at this launch: %s: %s", type(problem).__name__, problem)
        return
    _refuse_or_say(errors)
