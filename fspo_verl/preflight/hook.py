# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the checks on a launch, before Ray starts: what would train another loss than asked for is refused.

What a launch that passes trains with is kept beside its checkpoints (:mod:`fspo_verl.preflight.loss_history`).
"""

import functools
import logging
from collections.abc import Iterator

import verl.utils.device
from omegaconf import DictConfig, OmegaConf

import fspo_verl.preflight.checks
import fspo_verl.preflight.contract
import fspo_verl.preflight.loss_history
import fspo_verl.versions

logger = logging.getLogger("fspo_verl")

_LEVELS = {"warning": logging.WARNING, "note": logging.INFO}


def check(config: DictConfig) -> None:
    """Refuse or warn about a launch config; say which band is in effect if the loss is ``fspo``.

    Args:
        config: the composed config of a verl main. Anything without ``actor_rollout_ref.actor`` is left alone.

    Raises:
        ValueError: the config asks for a loss that it would not train, or a field of the band is wrong.
    """
    found = [*_untested_verl(config), *fspo_verl.preflight.checks.findings(config)]
    errors = [str(finding) for finding in found if finding.severity == "error"]
    if errors:
        raise ValueError("\n".join(errors))
    for finding in found:
        logger.log(_LEVELS[finding.severity], "%s", finding)


def _untested_verl(config: DictConfig) -> Iterator["fspo_verl.preflight.checks.Finding"]:
    """On a verl that was never tested: whether what this package takes for granted of it holds."""
    if (
        OmegaConf.select(config, fspo_verl.preflight.checks.ACTOR) is None
        or not fspo_verl.preflight.checks.Launch(config).is_ours
    ):
        return
    if version := fspo_verl.versions.untested_verl():
        tested = f"tested are {', '.join(fspo_verl.versions.TESTED['verl'])}"
        what = f"verl {version} was not tested with fspo_verl"
        yield fspo_verl.preflight.checks.Finding("warning", "untested_verl", what, tested)
        yield from fspo_verl.preflight.contract.findings("loss", "launch", "records", "live", here=("loss",))


def keep_loss_settings(config: DictConfig) -> None:
    """Keep what a launch trains with beside its checkpoints, if a loss of this package trains, or has until now.

    :func:`fspo_verl.preflight.checks.changed_on_resume` compares the next launch with it.
    """
    if OmegaConf.select(config, fspo_verl.preflight.checks.ACTOR) is None or config.trainer.save_freq <= 0:
        return
    try:
        known = fspo_verl.preflight.loss_history.loss_before(config) is not None
    except ValueError:  # the file that tells is broken, but it is there
        known = True
    if not known and not fspo_verl.preflight.checks.Launch(config).is_ours:
        return
    try:
        fspo_verl.preflight.loss_history.keep(config)
    except OSError as error:
        logger.warning("if this run is resumed with another loss, no warning will follow: %s", error)


def install() -> None:
    """Run :func:`check` and :func:`keep_loss_settings` on the composed config of every launch, before Ray starts.

    verl (0.9.1) offers no hook between Hydra's composition and ``ray.init``. ``auto_set_device(config)`` is the first
    function of verl to which the mains (main_ppo, fully-async, one-step-off) hand the whole config, so it is wrapped. A
    config that never selected this package's group passes here too, so that a setting that would silently train another
    loss is caught.
    """
    auto_set_device = verl.utils.device.auto_set_device

    @functools.wraps(auto_set_device)
    def checked_auto_set_device(config):
        check(config)
        keep_loss_settings(config)
        return auto_set_device(config)

    verl.utils.device.auto_set_device = checked_auto_set_device
