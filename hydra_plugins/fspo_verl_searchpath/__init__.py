# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Make the packaged configs visible to every Hydra application of verl, and check its launches.

Hydra imports every ``hydra_plugins.*`` module in every Hydra application, so this one imports only Hydra.
"""

import logging
import os
import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class FSPOVerlSearchPathPlugin(SearchPathPlugin):
    """Append ``pkg://fspo_verl.configs`` (lowest priority: it can shadow nothing), in verl applications only."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if "verl" in sys.modules or any(_is_verl(element.path or "") for element in search_path.get_path()):
            search_path.append(provider="fspo_verl", path="pkg://fspo_verl.configs")
            _check_launches()


def _check_launches() -> None:
    """Where verl loads no plugins (VERL_USE_EXTERNAL_PLUGINS), nothing else would check what these configs select."""
    if "verl" not in sys.modules:
        return
    try:
        from fspo_verl.launch import hook

        hook.install_on_mains()
        if "verl.trainer.main_ppo" in sys.modules:
            hook.install_on_run_ppo()
    except Exception:
        logging.getLogger("fspo_verl").exception("fspo_verl does not check launches")


def _is_verl(path: str) -> bool:
    return path.startswith("pkg://verl.") or f"{os.sep}verl{os.sep}" in path
