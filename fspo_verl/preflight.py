# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the checks on a launch, before Ray starts: what would train another loss than asked for is refused."""

import logging

from omegaconf import DictConfig

import fspo_verl.checks

logger = logging.getLogger("fspo_verl")

_LEVELS = {"warning": logging.WARNING, "note": logging.INFO}


def check(config: DictConfig) -> None:
    """Refuse or warn about a launch config; say which band is in effect if the loss is ``fspo``.

    Args:
        config: the composed config of a verl main. Anything without ``actor_rollout_ref.actor`` is left alone.

    Raises:
        ValueError: the config asks for a loss that it would not train, or a field of the band is wrong.
    """
    found = fspo_verl.checks.findings(config)
    errors = [str(finding) for finding in found if finding.severity == "error"]
    if errors:
        raise ValueError("\n".join(errors))
    for finding in found:
        logger.log(_LEVELS[finding.severity], "%s", finding)
