# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The package is built in layers: an import leads down, and never around in a circle."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fspo_verl"
LAYERS = (  # the lowest first; what stands in one layer does not know its neighbours
    {"output", "configs", "keys", "versions"},
    {"band", "findings"},
    {"loss", "clips", "adaptive"},
    {"observe"},
    {"analysis"},
    {"register"},
    {"verl_patches"},
    {"config"},
    {"launch", "report"},
    {"demo"},
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


def test_an_import_leads_down_and_around_in_no_circle():
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    files = modules()
    graph = {of: imports(file, set(files)) - {of} for of, file in files.items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    arrows = {
        (of.split(".")[1], to.split(".")[1])
        for of, imported in graph.items()
        for to in imported
        if of.count(".") and to.count(".")
    }
    assert {name for arrow in arrows for name in arrow} <= set(level)
    assert [arrow for arrow in arrows if arrow[0] != arrow[1] and level[arrow[0]] <= level[arrow[1]]] == []


def test_the_losses_register_without_pandas_pyarrow_and_scipy():
    """Follow the imports at the top of modules, from the losses, the live series and the rules of causes."""
    files, heavy, seen = modules(), {"pandas", "pyarrow", "scipy", "hydra", "matplotlib"}, set()
    queue = ["fspo_verl.register", "fspo_verl.analysis.live", "fspo_verl.analysis.causes"]
    while queue:
        name = queue.pop()
        seen.add(name)
        for node in ast.parse(files[name].read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{name}" for name in names)]
            assert not heavy & {name.split(".")[0] for name in names}, name
            queue += [name for name in names if name in files and name not in seen]
    assert "fspo_verl.observe.observer" in seen and "fspo_verl.observe.records" not in seen


def test_one_file_alone_changes_verl_and_hydra():
    """Whoever asks what this package does to the rest of a process reads verl_patches.py, and nothing else."""
    elsewhere, not_ours = [], ("verl", "hydra", "unittest", "ray", "sys")
    for name, file in modules().items():
        if name == "fspo_verl.verl_patches":
            continue
        tree = ast.parse(file.read_text())
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        named = [(getattr(node, "module", None) or alias.name, alias) for node in nodes for alias in node.names]
        foreign = {(a.asname or a.name).split(".")[0] for of, a in named if of.split(".")[0] in not_ours}
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "mock.patch.object"):
                targets = [ast.Attribute(node.args[0], "")]
            for target in targets:
                base = target
                while isinstance(base, ast.Attribute | ast.Subscript):
                    base = base.value
                if isinstance(target, ast.Attribute) and isinstance(base, ast.Name) and base.id in foreign:
                    elsewhere.append((name, ast.unparse(node)))
    assert elsewhere == []


def test_the_public_names_are_imported_when_they_are_asked_for():
    code = """
import sys
import fspo_verl

assert not {"torch", "numpy", "verl", "fspo_verl.band"} & set(sys.modules)
fspo_verl.Band(eps=0.02), fspo_verl.fspo_loss, fspo_verl.read_records
assert fspo_verl.Band is sys.modules["fspo_verl.band"].Band and "verl" not in sys.modules
try:
    fspo_verl.Bnad
except AttributeError as error:
    assert "Bnad" in str(error)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (PACKAGE / "py.typed").exists()
