# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the sources of the installed verl where running them would take workers or GPUs, and imports none of them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import verl

# Where verl 0.9.0 to 0.10.0.dev sets `loss_mode` to its own loss for bypass mode, and who asks for it: a step of the
# trainer, long after its workers have built their loss.
_SETS_BYPASS = {("verl.trainer.ppo.rollout_corr_helper", "apply_bypass_mode")}
_APPLIES_BYPASS = {
    ("verl.trainer.ppo.ray_trainer", "fit"),
    ("verl.experimental.separation.ray_trainer", "_fit_compute_log_prob"),
}


def source(module: str) -> str:
    """The source of a module of verl; empty if there is none."""
    path = _root().joinpath(*module.split(".")[1:])
    files = (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists())
    return next((file.read_text() for file in files), "")


def modules(text: str) -> Iterator[tuple[str, str]]:
    """Name and source of the modules of verl that hold a text."""
    for file in sorted(_root().rglob("*.py")):
        if text in (content := file.read_text(errors="replace")):
            yield ".".join(("verl", *file.relative_to(_root()).with_suffix("").parts)), content


def imported(tree: ast.Module, module: str) -> set[str]:
    """The names that a parsed module imports from another, without a new name."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == module)
    return {alias.name for node in nodes for alias in node.names if alias.asname is None}


def bypass_replaces_the_loss() -> bool:
    """Whether ``algorithm.rollout_correction.bypass_mode`` makes workers train verl's ``bypass_mode`` loss.

    It should, as verl's documentation has it (verl #4930), and up to 0.10.0.dev it does not: the driver's config is
    changed when the workers have built their loss. False only where all of that reads as it did, so that whatever
    verl does about it counts as replacing.
    """
    # `get("bypass_mode")` asks for the setting, `register_policy_loss("bypass_mode")` names the loss.
    sets = _functions_that(r'(?<!get\()(?<!register_policy_loss\()"bypass_mode"')
    applies = _functions_that(r"(?<!def )\bapply_bypass_mode\(")
    workers = {module for module, _ in modules("loss_mode") if module.startswith("verl.workers.")}
    elsewhere = {module for module in workers if not module.startswith("verl.workers.config")}
    takes_its_own = 'config.policy_loss.get("loss_mode", "vanilla")' in source("verl.workers.utils.losses")
    as_ever = sets == _SETS_BYPASS and applies <= _APPLIES_BYPASS and elsewhere == {"verl.workers.utils.losses"}
    return not (as_ever and takes_its_own)


def _functions_that(pattern: str) -> set[tuple[str, str]]:
    """Module and name of the functions of verl in which a pattern occurs, below the line that defines them."""
    found = set()
    for module, text in modules("bypass_mode"):
        for match in re.finditer(pattern, text):
            functions = re.findall(r"^ *(?:async )?def (\w+)", text[: text.rfind("\n", 0, match.start())], re.MULTILINE)
            found.add((module, functions[-1] if functions else ""))
    return found


def megatron_refuses_means_over_tokens() -> bool:
    """Whether Megatron's engine refuses ``seq-mean-token-mean`` where it normalises per token (verl #7914)."""
    engine = source("verl.workers.engine.megatron.transformer_impl")
    return "loss_agg_mode='seq-mean-token-mean' is incompatible" in engine


def _root() -> Path:
    return Path(verl.__file__).parent
