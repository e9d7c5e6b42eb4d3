# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The ``verl.plugins`` entry point, imported by every process that imports verl.

It imports nothing of verl: it registers the losses and has launches checked once verl has imported what that takes.
``VERL_USE_EXTERNAL_PLUGINS`` leaves it out; ``VERL_USE_EXTERNAL_MODULES=fspo_verl.plugin`` loads it all the same.
"""

import os

from fspo_verl import verl_patches
from fspo_verl.keys import EXAMINE


def _register_losses(_core_algos) -> None:
    import fspo_verl.register  # noqa: F401


def _begin(place: str, config) -> None:
    from fspo_verl.launch import hook

    hook.begin(place, config)


def _at_the_logger(config) -> None:
    from fspo_verl.launch import hook

    hook.at_the_logger(config)


verl_patches.when_imported(
    "verl.trainer.ppo.core_algos", _register_losses, "the losses fspo and observed are not registered"
)
verl_patches.see_launches(_begin, _at_the_logger)
if os.environ.get(EXAMINE):
    verl_patches.end_before_ray(lambda: _begin("ray.init", None))
