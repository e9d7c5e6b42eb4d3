# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Make the packaged configs visible to every Hydra application of verl, and check its launches.

Hydra imports every ``hydra_plugins.*`` module in every Hydra application, so this one imports only Hydra.
"""

import importlib
import logging
import os
import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

logger = logging.getLogger("fspo_verl")


class FSPOVerlSearchPathPlugin(SearchPathPlugin):
    """Append ``pkg://fspo_verl.configs`` in verl applications, unless ``VERL_USE_EXTERNAL_PLUGINS`` leaves it out.

    Files of the user's own come first: :mod:`fspo_verl.launch.composition` sees to those that Hydra appends later.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        is_asked = bool(os.environ.get("FSPO_VERL_OVERRIDES"))  # also of a main that imports verl later
        if not (
            is_asked or "verl" in sys.modules or any(_is_verl(element.path or "") for element in search_path.get_path())
        ):
            return
        try:
            from fspo_verl.launch import composition, installation

            if installation.left_out() is None:
                search_path.append(provider="fspo_verl", path="pkg://fspo_verl.configs")
                composition.begin_application()
                if installation.too_old() is None:  # verl loads the plugin by itself where the package is installed
                    importlib.import_module("fspo_verl.plugin")
        except Exception as error:  # as where this file is left of an fspo_verl that is gone
            logger.warning("%s: fspo_verl does not check this launch: %s", __file__, error)


def _is_verl(path: str) -> bool:
    return path.startswith("pkg://verl.") or f"{os.sep}verl{os.sep}" in path
