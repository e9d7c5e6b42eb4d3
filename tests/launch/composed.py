# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Launches composed in this process, with Hydra's own state as a main of verl has it."""

import argparse
from collections.abc import Callable, Sequence
from importlib import resources

import verl
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from fspo_verl.findings import Finding


def composed(arguments: list[str], look: Callable, folder: str = "trainer.config"):
    """``look(config)`` of the arguments after ``-m verl.trainer.main_ppo``, without the second that the main takes.

    Args:
        arguments: overrides, ``--config-name``, ``--config-path`` and ``--config-dir``.
        folder: of configs below verl, where no ``--config-path`` is given.
    """
    options = argparse.ArgumentParser()
    options.add_argument("--config-path", default=str(resources.files(verl).joinpath(*folder.split("."))))
    options.add_argument("--config-name", default="ppo_trainer")
    options.add_argument("--config-dir")
    given, overrides = options.parse_known_args(arguments)
    if given.config_dir:  # Hydra appends it like this one
        overrides += [f"hydra.searchpath=[pkg://verl.trainer.config,file://{given.config_dir}]"]
    if "experimental" in folder:  # these mains name verl's own configs by a path
        overrides += [f"hydra.searchpath=[file://{resources.files(verl) / 'trainer' / 'config'}]"]
    with initialize_config_dir(given.config_path, version_base=None):
        full = compose(given.config_name, overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(full)
        with open_dict(full):
            del full["hydra"]
        try:
            return look(full)
        finally:
            HydraConfig.instance().cfg = None


def mended(finding: Finding, overrides: Sequence[str]) -> list[str]:
    """The overrides of a launch after the first fix that a finding offers: some removed, others added at the end."""
    # Hydra records an option of the group that it adds with a plus, typed or not.
    removed = [text if text in overrides else text.removeprefix("+") for text in finding.remove]
    assert removed or finding.add, finding
    assert set(removed) <= set(overrides), f"{removed} is not all in {overrides}"
    return [text for text in overrides if text not in removed] + [*finding.add]
