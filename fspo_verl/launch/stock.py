# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Composes the config of a launch from verl's own config files, and says which keys verl does not know.

Neither verl nor any module of a user's is imported: config files are read, and Python is read as text.
"""

import ast
import contextlib
import difflib
import functools
import importlib.util
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from fspo_verl.keys import ACTOR
from fspo_verl.launch.hydra_files import OWN_CONFIGS, PACKAGED, leaves
from fspo_verl.launch.renamed import RENAMED


class Main(NamedTuple):
    """Where a main of Hydra says that its config is."""

    folder: Path
    name: str
    file: Path  # of the main itself


def installed_root() -> Path:
    """The folder that holds the installed package verl, which is not imported.

    Raises:
        ValueError: there is none.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ValueError("verl is not installed in this environment: its config files say what a script would train")
    return Path(spec.origin).parents[1]


def find_main(name: str, roots: Sequence[Path]) -> Main | None:
    """The ``@hydra.main`` of a module (``a.b``) or file (``a/b.py``) below one of these folders; None without one."""
    place = name if name.endswith(".py") else name.replace(".", "/") + ".py"
    for file in (root / place for root in roots):
        for call in _nodes(file):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("hydra.main", "main"):
                given = {
                    word.arg: ast.literal_eval(word.value)
                    for word in call.keywords
                    if isinstance(word.value, ast.Constant)
                }
                path, config = given.get("config_path"), given.get("config_name")
                if isinstance(path, str) and isinstance(config, str):
                    package = path.removeprefix("pkg://").replace(".", "/")
                    packages = (root / package for root in roots if path.startswith("pkg://"))
                    folder = next(filter(Path.is_dir, packages), file.parent / path)
                    return Main(folder, config, file)
    return None


def searched(root: Path) -> tuple[Path, Path]:
    """The folders of config files beside that of a main: verl's, and this package's."""
    return root / "verl/trainer/config", PACKAGED


def is_group(key: str, main: Main, root: Path) -> bool:
    """Whether a key chooses among config files."""
    return any((place / key.partition("@")[0]).is_dir() for place in (main.folder, *searched(root)))


@functools.cache
def compose(main: Main, root: Path, overrides: tuple[str, ...]) -> DictConfig:
    """The config of a main; not to be changed.

    Args:
        main: where its config is.
        root: the folder that holds the package verl whose config files are read.
        overrides: as Hydra takes them.

    Raises:
        Exception: what Hydra raises on a config that it cannot compose.
    """
    import hydra

    # In the place of what the files say, which may name a package, and be relative to where the launch is started.
    path = f"hydra.searchpath=['file://{root}/verl/trainer/config','{OWN_CONFIGS}']"
    with hydra.initialize_config_dir(str(main.folder.resolve()), version_base=None):
        return hydra.compose(main.name, overrides=[path, *overrides])


def unknown_keys(config: DictConfig, overrides: Iterable[str], root: Path) -> dict[str, str]:
    """The keys of overrides that verl does not know, each with what to write instead.

    Args:
        config: composed without these overrides, with the groups that the launch chooses.
        overrides: ``key=value``, with Hydra's ``+``, ``++`` or ``~`` in front.
        root: as for :func:`compose`.
    """
    known, unknown = leaves(config), {}
    for name in (override.partition("=")[0] for override in overrides):
        key = name.lstrip("+~")
        if "@" in key or key.startswith("hydra."):
            continue
        exists, allowed = _holds(config, key), _allows(config, key, root)
        old = next((old for old in RENAMED if f"{key}.".startswith(f"{old}.")), None)
        if exists or (name.startswith("+") and allowed):
            if re.match(r"\+[^+]", name) and OmegaConf.select(config, key) is not None and not _is_section(config, key):
                unknown[name] = f"{key}, without +, as verl has it"
        elif old is not None:
            new = RENAMED[old]
            unknown[key] = f"remove it: {new[1:].strip()}" if new.startswith("-") else new + key[len(old) :]
        else:
            unknown[key] = _nearest(key, known, allowed)
    return unknown


def missing_sizes(config: DictConfig) -> dict[str, str]:
    """Micro-batch sizes without which verl does not train: the key that verl read before, and the one that it reads."""
    get = functools.partial(OmegaConf.select, config)
    if get(f"{ACTOR}.use_dynamic_bsz"):
        return {}
    has_critic = get("critic.enable") or (get("critic.enable") is None and get("algorithm.adv_estimator") == "gae")
    sizes = {f"{ACTOR}.ppo_micro_batch_size": True, "actor_rollout_ref.rollout.log_prob_micro_batch_size": True}
    sizes["actor_rollout_ref.ref.log_prob_micro_batch_size"] = get(f"{ACTOR}.use_kl_loss") or get(
        "algorithm.use_kl_in_reward"
    )
    sizes["critic.ppo_micro_batch_size"] = has_critic and not get("critic.use_dynamic_bsz")
    return {key: f"{key}_per_gpu" for key, is_used in sizes.items() if is_used and get(f"{key}_per_gpu") is None}


def _nodes(file: Path) -> Iterable[ast.AST]:
    """The syntax tree of a Python file; empty if the file is missing or not Python."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        return ast.walk(ast.parse(file.read_bytes()))
    return ()


def _is_section(config: DictConfig, key: str) -> bool:
    return OmegaConf.is_dict(OmegaConf.select(config, key))


def _holds(config: DictConfig, key: str) -> bool:
    node: Any = config
    for part in key.split("."):
        if not OmegaConf.is_dict(node) or part not in set(node):  # `in` alone denies a value that is missing (???)
            return False
        node = node._get_node(part)
    return True


def _allows(config: DictConfig, key: str, root: Path) -> bool:
    """Whether a key may be added: the nearest section above it that verl builds a class of has such a field."""
    parts = key.split(".")
    if parts[0] != "actor_rollout_ref":
        return True  # of most other sections verl builds no class
    for depth in range(len(parts) - 1, 0, -1):
        section = OmegaConf.select(config, ".".join(parts[:depth]))
        if OmegaConf.is_dict(section) and (target := section.get("_target_")):
            fields = _fields(str(target).rpartition(".")[2], root)
            return fields is None or parts[depth] in fields
    return True


def _nearest(key: str, known: dict, can_be_added: bool) -> str:
    same_end = [name for name in known if name.endswith(f".{key}") or name.endswith("." + key.split(".", 1)[-1])]
    if near := same_end[:1] or difflib.get_close_matches(key, known, 1, 0.85):
        return near[0]
    return f"+{key}" if can_be_added and "." in key else "remove it: verl has no such key"


def _fields(name: str, root: Path) -> set[str] | None:
    """The fields of a config class of verl, those of its bases included; None of an unknown class."""
    classes = _classes(root)
    if name not in classes:
        return None
    of_bases = [_fields(base, root) or set() for base in classes[name][0]]
    return classes[name][1].union(*of_bases)


@functools.cache
def _classes(root: Path) -> dict[str, tuple[list[str], set[str]]]:
    """Bases and own fields of verl's config classes, by class name."""
    folders = ("workers/config", "trainer/config", "utils/profiler")
    classes = {}
    own_classes = [PACKAGED.with_name(f"{name}.py") for name in ("config", "adaptive", "band")]
    of_verl = [file for folder in folders for file in (root / "verl" / folder).glob("*.py")]
    for file in [root / "verl/base_config.py", *of_verl, *own_classes]:
        for node in _nodes(file):
            if isinstance(node, ast.ClassDef):
                own = {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
                classes[node.name] = ([ast.unparse(base).rpartition(".")[2] for base in node.bases], own)
    return classes
