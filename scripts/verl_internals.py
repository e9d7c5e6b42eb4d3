# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/verl_internals.md from the contract, with the files that use each name of verl.

python scripts/verl_internals.py
"""

import ast
import functools
from pathlib import Path

from fspo_verl.files import between
from fspo_verl.preflight import contract, sources

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "verl_internals.md"
BEGIN, END = "<!-- written by scripts/verl_internals.py, from here -->", "<!-- to here -->"


@functools.cache
def uses() -> dict[str, set[str]]:
    """Every dotted name of verl that Python files of this repository use -> those files (read, none is imported)."""
    found = {}
    for folder in ("fspo_verl", "hydra_plugins", "scripts"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for name in _names(ast.parse(file.read_text())):
                found.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    return found


def _names(tree: ast.Module) -> set[str]:
    meant = {}  # name in the file -> dotted name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meant |= {alias.asname: alias.name for alias in node.names if alias.asname}
            meant |= {alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names if not alias.asname}
        elif isinstance(node, ast.ImportFrom):
            meant |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    dotted = [_dotted(node) for node in ast.walk(tree) if id(node) not in inner]
    names = {".".join((meant[first], *rest)) for first, *rest in filter(None, dotted) if first in meant}
    return {name for name in names | {*meant.values()} if name.startswith("verl.") and not name.endswith("__file__")}


def _dotted(node: ast.AST) -> list[str] | None:
    """``a.b.c`` as its words; None for anything else."""
    words = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return [node.id, *reversed(words)] if isinstance(node, ast.Name) else None


def unlisted() -> set[str]:
    """The names in use, modules aside, that no line of the contract lists, nor what they belong to."""
    listed = [symbol for line in contract.LINES for symbol in line.symbols]
    return {n for n in uses() if not sources.source(n) and not any(_belongs(n, symbol) for symbol in listed)}


def _belongs(name: str, symbol: str) -> bool:
    """Whether a dotted name is the symbol, or an attribute of it where it is no module."""
    return name == symbol or (name.startswith(f"{symbol}.") and not sources.source(symbol))


def renewed(page: str) -> str:
    """The page with its tables written anew."""
    return between(page, BEGIN, END, "\n\n".join(map(_table, contract.PARTS)))


def _table(part: str) -> str:
    rows = ["| name in verl | what for | lost without it | made sure of | used in |", "|---|---|---|---|---|"]
    for line in (line for line in contract.LINES if line.part == part):
        names = "<br>".join(f"`{symbol.removeprefix('verl.')}`" for symbol in line.symbols)
        files = {file for name, where in uses().items() for file in where
                 if any(_belongs(name, symbol) for symbol in line.symbols)}  # fmt: skip
        used = "<br>".join(sorted(file.removeprefix("fspo_verl/") for file in files))
        rows.append(f"| {names} | {line.reason} | {line.lost} | {line.expects or 'it is there'} | {used} |")
    title = contract.PARTS[part]
    return f"### {title[0].upper()}{title[1:]}\n\n" + "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
