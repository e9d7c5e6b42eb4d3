# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The ``verl.plugins`` entry point, imported by every process that imports verl.

It imports nothing of verl: it registers the losses and has launches checked once verl has imported what that takes.
``VERL_USE_EXTERNAL_PLUGINS`` leaves it out; ``VERL_USE_EXTERNAL_MODULES=fspo_verl.plugin`` loads it all the same.
"""

import importlib
import os

from fspo_verl import verl_patches
from fspo_verl.keys import EXAMINE


def _hook():
    from fspo_verl.launch import hook

    return hook


verl_patches.when_imported(
    "verl.trainer.ppo.core_algos",
    lambda _: importlib.import_module("fspo_verl.register"),
    "the losses fspo and observed are not registered",
)
verl_patches.see_launches(lambda *seen: _hook().begin(*seen), lambda config: _hook().at_the_logger(config))
if os.environ.get(EXAMINE):
    verl_patches.end_before_ray(lambda: _hook().begin("ray.init", None))
