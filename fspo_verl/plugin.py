# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The ``verl.plugins`` entry point, imported by every process that imports verl.

It imports nothing of verl: it registers the losses and has launches checked once verl has imported what that takes.

verl before 0.9 has no entry points and imports it only where ``VERL_USE_EXTERNAL_MODULES=fspo_verl.plugin`` says so.
"""

import fspo_verl.verl_patches


def _register_losses(_core_algos) -> None:
    import fspo_verl.register  # noqa: F401


def _check(config) -> None:
    from fspo_verl.launch import hook

    hook.check_once(config)


def _refuse(config) -> None:
    from fspo_verl.launch import hook

    hook.refuse_the_config(config)


LOSSES = fspo_verl.verl_patches.Addition(
    "verl.trainer.ppo.core_algos", _register_losses, "the losses fspo and observed are not registered"
)
fspo_verl.verl_patches.arm((LOSSES,))
fspo_verl.verl_patches.see_launches(_check, _refuse)
