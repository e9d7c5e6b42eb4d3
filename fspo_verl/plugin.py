# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The ``verl.plugins`` entry point, imported by every process that imports verl.

It imports nothing of verl. It asks to be told when the modules are imported that this package adds something to, so
that a process which never imports them pays next to nothing. Each addition stands alone: one that fails is logged, and
takes away neither another one nor the user's import.

verl before 0.9 has no entry points and imports it only where ``VERL_USE_EXTERNAL_MODULES=fspo_verl.plugin`` says so.
"""

import logging

import wrapt

logger = logging.getLogger("fspo_verl")


def _register_losses(_core_algos) -> None:
    import fspo_verl.register  # noqa: F401


def _check_launches_of_mains(_device) -> None:
    from fspo_verl.launch import hook

    hook.install_on_mains()


def _check_launches_of_own_mains(_main_ppo) -> None:
    from fspo_verl.launch import hook

    hook.install_on_run_ppo()


def _check_launches_at_the_logger(_tracking) -> None:
    from fspo_verl.launch import hook

    hook.install_on_tracking()


def _log_live_series(_tracking) -> None:
    from fspo_verl import live

    live.install()


ADDITIONS = (  # a module of verl, what is done when it has been imported, and what is missing if that fails
    ("verl.trainer.ppo.core_algos", _register_losses, "the losses fspo and observed are not registered"),
    ("verl.utils.device", _check_launches_of_mains, "launches are not checked"),
    ("verl.trainer.main_ppo", _check_launches_of_own_mains, "launches by run_ppo are not checked"),
    ("verl.utils.tracking", _check_launches_at_the_logger, "launches are not checked where the trainer logs"),
    ("verl.utils.tracking", _log_live_series, "no live series fspo/* are logged"),
)


def _when_imported(module: str, add, missing: str) -> None:
    def hook(imported) -> None:
        try:
            add(imported)
        except Exception:  # wrapt would hand it to whoever imports the module
            logger.exception("fspo_verl could not plug itself into %s: %s", module, missing)

    wrapt.register_post_import_hook(hook, module)


for _addition in ADDITIONS:
    _when_imported(*_addition)
