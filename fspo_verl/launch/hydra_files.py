# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Knowledge of Hydra (1.3): how an override is quoted, and what a running application was asked for.

Hydra is imported only where it is asked: each process that imports verl imports this module.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fspo_verl import versions
from fspo_verl.keys import GROUP, OVERRIDES, POLICY_LOSS

PACKAGED = Path(__file__).parents[1] / "configs"
OPTIONS = tuple(sorted(file.stem for file in (PACKAGED / GROUP).glob("*.yaml")))
"""The options of this package's config group."""


def override(key: str, text: str | Path) -> str:
    """``key='text'``, a Hydra override quoted so that Hydra reads the text as it is; for bash see scripts/launch.

    Unquoted, any of ``( ) = { [ ' # & ~ ,`` or a letter beyond ASCII ends the launch, or changes what is read. Only
    ``${...}`` still has its meaning.
    """
    from hydra.core.override_parser.types import Quote, QuotedString

    return f"{key}={QuotedString(str(text), Quote.single).with_quotes()}"


def as_value(value) -> str:
    """A value of a config as Hydra reads it behind ``KEY=``."""
    return "null" if value is None else str(value).replace(" ", "")


def leaves(content, prefix: str = "") -> dict[str, object]:
    """Dotted key to value of every leaf of a config, interpolations as written; a list or empty mapping is a leaf."""
    if OmegaConf.is_config(content):
        content = OmegaConf.to_container(content, resolve=False)
    found: dict[str, object] = {}
    for key, value in content.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        found |= leaves(value, path) if isinstance(value, dict) and value else {path: value}
    return found


def option(name: str) -> dict[str, object]:
    """Return what an option of this package's config group sets, by dotted key; interpolations as written."""
    content: Any = OmegaConf.load(PACKAGED / GROUP / f"{name}.yaml")
    bases = content.pop("defaults", [])
    return {key: value for base in bases for key, value in option(base).items()} | leaves(content)


def is_of_user(source: str) -> bool:
    """Whether neither verl nor this package nor Hydra ships what an entry of Hydra's search path holds."""
    if source.startswith("pkg://"):
        return source.removeprefix("pkg://").split(".")[0] not in ("verl", "fspo_verl", "hydra")
    # A main that is started as a file, and the asynchronous ones, name verl's own folders by path.
    folder = versions.verl_folder()
    return folder is None or not Path(source.removeprefix("file://")).is_relative_to(folder)


def has_files_of_the_user() -> bool:
    """Whether the search path of the running Hydra application has an entry of a user's."""
    return any(is_of_user(source) for source in _sources() if not source.startswith("structured://"))


def _sources() -> list[str]:
    """The search path of the running Hydra application, first entry first; empty outside of one."""
    hydra = running()
    return [f"{source.schema}://{source.path}" for source in hydra.runtime.config_sources] if hydra else []


# --- the running application -----------------------------------------------------------------------------------------


def task_overrides() -> list[str]:
    """The overrides of the running Hydra application, as they were typed, without Hydra's own; empty outside of one."""
    return _as_typed(hydra.overrides.task) if (hydra := running()) else []


def choices() -> dict[str, str]:
    """The options that the running Hydra application has chosen of each group; empty outside of one."""
    return _as_typed(hydra.runtime.choices) if (hydra := running()) else {}


def _as_typed(content) -> Any:
    return OmegaConf.to_container(content, resolve=False)


def running():
    """The ``hydra`` section of the running Hydra application, which has composed its config; None outside of one."""
    module = sys.modules.get("hydra.core.hydra_config")
    return module.HydraConfig.get() if module and module.HydraConfig.initialized() else None


def parsed(overrides: Sequence[str]) -> list:
    """Overrides as Hydra's own parser reads them."""
    if not overrides:
        return []
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    return [parser.parse_override(text) for text in overrides]


# --- this package's group --------------------------------------------------------------------------------------------


def words_of_the_group() -> list:
    """The overrides of the running Hydra application that name the group, parsed: cheap, for every launch of verl."""
    named = parsed([text for text in task_overrides() if GROUP in text])
    return [one for one in named if one.key_or_group == GROUP]


def chosen(is_own_key: bool) -> str | None:
    """The option of the group that the running Hydra application was asked for, if it is one of this package's.

    Args:
        is_own_key: the config has the name of the group as a key. A word without a plus is then a value of that key.
    """
    words = [one for one in words_of_the_group() if not one.is_delete() and (one.is_add() or not is_own_key)]
    asked = [one.value() for one in reversed(words)]
    # An option in a file has no word. A word may be an interpolation, which only the choices resolve.
    asked += [value for group, value in sorted(choices().items()) if group.partition("@")[0] == GROUP]
    last = (value[-1] if isinstance(value, list) and value else value for value in asked)
    names = (str(value).removesuffix(".yaml") for value in last)
    return next((name for name in names if name in OPTIONS), None)


def leaves_without_the_group() -> dict[str, object]:
    """Return what the running Hydra application would compose without an option of the group, as :func:`leaves`.

    Overrides of ``policy_loss`` are left out, as many of its keys would not be there.
    """
    from unittest import mock

    from hydra import compose

    hydra, words = running(), words_of_the_group()
    left_out = {one.input_line for one in words}
    kept = [text for text in task_overrides() if text not in left_out and not text.lstrip("+~").startswith(POLICY_LOSS)]
    here = [one for one in words if one.package is None]
    if (here or GROUP in choices()) and not any(one.is_add() for one in here):
        kept.append(f"~{GROUP}")  # a file has it
    with mock.patch.dict(os.environ, {OVERRIDES: ""}):
        return leaves(compose(hydra.job.config_name, [*_as_typed(hydra.overrides.hydra), *kept]))
