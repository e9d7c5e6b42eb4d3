# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tests of the assumptions on verl: each docstring says what is lost where the installed verl does otherwise.

They cover losses in silence, or late in a run; the trainings show what stops a run at its start.
"read": by its sources, as running it would take workers or GPUs. Live series, through the trainers:
tests/analysis/test_live.py.
"""

import ast
from pathlib import Path

import pytest
import verl

ROOT = Path(verl.__file__).parent


@pytest.fixture(scope="session")
def modules() -> dict[str, str]:
    """Name of every module of verl -> its source."""
    files = {".".join(("verl", *file.relative_to(ROOT).with_suffix("").parts)): file for file in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): file.read_text(errors="replace") for name, file in files.items()}


@pytest.fixture(scope="session")
def imported(modules):
    """The names that a module imports from another, without a new name."""

    def names(module: str, other: str) -> set[str]:
        nodes = [node for node in ast.walk(ast.parse(modules[module])) if isinstance(node, ast.ImportFrom)]
        return {alias.name for node in nodes if node.module == other for alias in node.names if alias.asname is None}

    return names
