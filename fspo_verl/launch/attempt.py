# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a launch's records, which the driver names before Ray starts: its workers write where they are told."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from fspo_verl.findings import Finding
from fspo_verl.keys import RECORDS_DIR
from fspo_verl.launch.view import Launch, warning
from fspo_verl.observe import attempts


def name_attempt(config: DictConfig) -> None:
    """Set ``records_dir`` to a folder of this launch alone; see :func:`fspo_verl.observe.attempts.new`.

    A name that an earlier call has given, to this config or to one that it was copied from, stays until something is
    recorded there.
    """
    launch = Launch(config)
    if launch.is_ours and (folder := launch.policy_loss.get("records_dir")) is not None:
        OmegaConf.update(config, RECORDS_DIR, str(attempts.new(folder, launch.checkpoints)))


def shared_folder(launch: Launch) -> Iterator[Finding]:
    """Earlier records in the folder of a main that calls none of verl's functions, so that no attempt is named."""
    folder = launch.policy_loss.get("records_dir") if launch.is_ours else None
    if folder is not None and not attempts.is_attempt(folder) and attempts.attempts_below(folder):
        why = "another training has written them, and a report cannot tell the two apart"
        yield warning(f"{RECORDS_DIR}={folder} holds records already", why, f"{RECORDS_DIR}=DIR of this training alone")
