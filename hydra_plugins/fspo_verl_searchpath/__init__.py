# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Make the packaged configs visible to every Hydra application of verl.

Hydra imports every ``hydra_plugins.*`` module in every Hydra application, so this one imports only Hydra.
"""

import os
import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class FSPOVerlSearchPathPlugin(SearchPathPlugin):
    """Append ``pkg://fspo_verl.configs`` (lowest priority: it can shadow nothing), in verl applications only."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if "verl" in sys.modules or any(_is_verl(element.path or "") for element in search_path.get_path()):
            search_path.append(provider="fspo_verl", path="pkg://fspo_verl.configs")


def _is_verl(path: str) -> bool:
    return path.startswith("pkg://verl.") or f"{os.sep}verl{os.sep}" in path
