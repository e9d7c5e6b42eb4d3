# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the checks on a launch, before Ray starts: what would train another loss than asked for is refused.

What a launch that passes trains with is kept beside its checkpoints (:mod:`fspo_verl.preflight.loss_history`).
"""

import functools
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import verl.utils.device
from omegaconf import DictConfig, OmegaConf, open_dict

from fspo_verl import versions
from fspo_verl.observe import folder
from fspo_verl.preflight import checks, contract, loss_history
from fspo_verl.preflight.launch import ACTOR, Finding, Launch

logger = logging.getLogger("fspo_verl")


def check(config: DictConfig) -> None:
    """Refuse or warn about a launch config; say which band is in effect if the loss is ``fspo``.

    Args:
        config: the composed config of a verl main. Anything without ``actor_rollout_ref.actor`` is left alone.

    Raises:
        ValueError: the config asks for a loss that it would not train, or a field of the band is wrong.
    """
    found = [*_untested_verl(config), *checks.findings(config)]
    if errors := [str(finding) for finding in found if finding.severity == "error"]:
        raise ValueError("\n".join(errors))
    for finding in found:
        logger.log(logging.WARNING if finding.severity == "warning" else logging.INFO, "%s", finding)


def _untested_verl(config: DictConfig) -> Iterator[Finding]:
    """On a verl that was never tested: whether what this package takes for granted of it holds."""
    if OmegaConf.select(config, ACTOR) is None or not Launch(config).is_ours:
        return
    if version := versions.untested_verl():
        tested = f"tested are {', '.join(versions.TESTED['verl'])}"
        yield Finding("warning", "untested_verl", f"verl {version} was not tested with fspo_verl", tested)
        yield from contract.findings("loss", "launch", "records", "live", here=("loss",))


def keep_loss_settings(config: DictConfig) -> None:
    """Keep what a launch trains with beside its checkpoints, if a loss of this package trains, or has until now.

    :func:`fspo_verl.preflight.checks.changed_on_resume` compares the next launch with it.
    """
    if OmegaConf.select(config, ACTOR) is None or config.trainer.save_freq <= 0:
        return
    try:
        known = loss_history.loss_before(config) is not None
    except ValueError:  # the file that tells is broken, but it is there
        known = True
    if not known and not Launch(config).is_ours:
        return
    try:
        loss_history.keep(config)
    except OSError as error:
        logger.warning("if this run is resumed with another loss, no warning will follow: %s", error)


def claim_records(config: DictConfig) -> None:
    """Make ``records_dir`` that of this run, and tell its workers the identity of the run in the config.

    A folder that only the workers can write is claimed by them.

    Raises:
        ValueError: the folder is that of another run; names a free one.
    """
    if OmegaConf.select(config, ACTOR) is None or not Launch(config).is_ours:
        return
    observation = config.actor_rollout_ref.actor.policy_loss
    if observation.get("records_dir") is None:
        return
    with open_dict(observation):
        observation.records_run = uuid.uuid4().hex
        observation.checkpoint_dir = str(Path(config.trainer.default_local_dir).absolute())
    resumes = loss_history.point(config) is not None
    try:
        folder.claim(Path(observation.records_dir), observation.records_run, Path(observation.checkpoint_dir), resumes)
    except OSError as error:
        logger.warning("records_dir=%s cannot be written on this machine: %s", observation.records_dir, error)


def install() -> None:
    """Run what this module does on the composed config of every launch, before Ray starts.

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
        claim_records(config)
        return auto_set_device(config)

    verl.utils.device.auto_set_device = checked_auto_set_device
