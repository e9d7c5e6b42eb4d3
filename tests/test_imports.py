# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The package is built in layers: an import leads down, and never around in a circle."""

import ast
import graphlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fspo_verl"
LAYERS = (  # the lowest first; what stands in one layer does not know its neighbours
    {"band", "token_sums", "files", "terminal", "versions", "configs"},
    {"loss", "clips"},
    {"observe"},
    {"analysis"},
    {"live", "register"},
    {"config"},
    {"preflight", "report"},
    {"compare", "selftest", "cpu"},
    {"plugin", "cli"},
)


def modules() -> dict[str, Path]:
    names = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


def imports(file: Path, known: set[str]) -> set[str]:
    """Modules of the package that a file imports, inside functions as well."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {name if (name := f"{node.module}.{alias.name}") in known else node.module for alias in node.names}
    return found & known


def test_an_import_leads_down():
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    known = set(modules())
    arrows = {
        (of.split(".")[1], to.split(".")[1])
        for of, file in modules().items()
        for to in imports(file, known)
        if of.count(".") and to.count(".")
    }
    assert {name for arrow in arrows for name in arrow} <= set(level)
    assert [arrow for arrow in arrows if arrow[0] != arrow[1] and level[arrow[0]] <= level[arrow[1]]] == []


def test_no_imports_go_round_in_a_circle():
    known = set(modules())
    graph = {of: imports(file, known) - {of} for of, file in modules().items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
