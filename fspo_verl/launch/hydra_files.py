# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Knowledge of Hydra (1.3): how an override is quoted and read, and which overrides decide a key.

Hydra is imported only where it is asked: each process that imports verl imports this module.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fspo_verl.keys import GROUP

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


def parsed(overrides: Sequence[str]) -> list:
    """Overrides as Hydra's own parser reads them."""
    if not overrides:
        return []
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    return [parser.parse_override(text) for text in overrides]


def words_of_the_group(overrides: Sequence[str]) -> list:
    """The overrides that name this package's group, parsed, but for those that sweep over it."""
    named = parsed([text for text in overrides if GROUP in text])
    return [one for one in named if one.key_or_group == GROUP and not one.is_sweep_override()]


def as_typed(content) -> Any:
    """Plain values of a part of a config, interpolations as they were written."""
    return OmegaConf.to_container(content, resolve=False)


def running():
    """The ``hydra`` section of the running Hydra application, which has composed its config; None outside of one."""
    module = sys.modules.get("hydra.core.hydra_config")
    return module.HydraConfig.get() if module and module.HydraConfig.initialized() else None


def overrides_that_decide(key: str, than: object = ..., overrides: Sequence[str] | None = None) -> list[str]:
    """The overrides that take out a key, or set it to another value ``than`` this.

    Args:
        overrides: of a launch; by default those of the running Hydra application, as they were typed.
    """
    if overrides is None:
        overrides = as_typed(hydra.overrides.task) if (hydra := running()) else []
    found = []
    for one in parsed(overrides):
        value = None if one.is_delete() else one.value()
        sets = {} if one.is_delete() else leaves({one.key_or_group: value})
        takes_out = f"{key}.".startswith(f"{one.key_or_group}.") and not isinstance(value, dict)
        if (sets[key] != than) if key in sets else takes_out:
            found.append(one.input_line)
    return found


def without(*keys: str) -> list[str]:
    """Return what is to be removed for keys to go: the overrides that set them, or their names where a file does."""
    return [text for key in keys for text in overrides_that_decide(key)] or [*keys]
