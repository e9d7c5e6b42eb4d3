# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Make the configs of this package visible to Hydra in applications of verl.

Hydra imports this module in every application.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class FSPOVerlCPUSearchPathPlugin(SearchPathPlugin):
    """Append ``pkg://fspo_verl_cpu.configs``, in verl applications only."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if any("verl" in (element.path or "") for element in search_path.get_path()):
            search_path.append(provider="fspo_verl_cpu", path="pkg://fspo_verl_cpu.configs")
