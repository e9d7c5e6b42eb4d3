# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""From which files Hydra composed the config of a launch, and in which order: a later one wins.

Hydra tells a running application its sources, the overrides and the choices of groups; the defaults list is computed
from these once more. Imports nothing of verl.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

OWN_CONFIGS = "pkg://fspo_verl.configs"


class Part(NamedTuple):
    """One config file that went into the composed config."""

    name: str  # as in the defaults list, such as actor/dp_actor
    source: str  # the entry of Hydra's search path that holds it, such as pkg://verl.trainer.config
    content: DictConfig  # under the package it was composed into, interpolations as written

    @property
    def file(self) -> str:
        return f"{self.source.removeprefix('file://')}/{self.name}.yaml"

    @property
    def is_own(self) -> bool:
        """Whether this package ships the file."""
        return self.source == OWN_CONFIGS

    @property
    def is_of_user(self) -> bool:
        """Whether neither verl nor this package nor Hydra ships the file."""
        if self.source.startswith("pkg://"):
            return self.source.removeprefix("pkg://").split(".")[0] not in ("verl", "fspo_verl", "hydra")
        # A main that is started as a file, and the asynchronous ones, name verl's own folders by path.
        verl = importlib.util.find_spec("verl")
        return verl is None or not Path(self.source.removeprefix("file://")).is_relative_to(Path(verl.origin).parent)


def parts() -> list[Part]:
    """The files of the running Hydra application in the order in which they were merged; empty outside of one."""
    if not HydraConfig.initialized():
        return []
    hydra = HydraConfig.get()
    search_path = ConfigSearchPathImpl()
    for source in hydra.runtime.config_sources:
        search_path.append(source.provider, f"{source.schema}://{source.path}")
    # Cached, as each file is needed twice: for its defaults and for its content.
    repository = CachingConfigRepository(ConfigRepository(search_path))
    overrides = OverridesParser.create().parse_overrides([*hydra.overrides.hydra, *hydra.overrides.task])
    name = hydra.job.config_name
    defaults = create_defaults_list(repository, name, overrides, prepend_hydra=True, skip_missing=False).defaults
    found = []
    for default in defaults:
        loaded = repository.load_config(default.config_path)
        if loaded is None or loaded.provider == "hydra":
            continue
        package = loaded.header["package"] if default.package is None else default.package
        content = OmegaConf.create() if package else loaded.config
        if package:
            OmegaConf.update(content, package, loaded.config)
        found.append(Part(default.config_path, loaded.path, content))
    return found


def passed_over() -> list[str]:
    """Files of a user's that Hydra does not read, as this package ships one of the same name and comes first."""
    if not HydraConfig.initialized():
        return []
    sources = [(source.schema, source.path) for source in HydraConfig.get().runtime.config_sources]
    own = ("pkg", OWN_CONFIGS.removeprefix("pkg://"))
    if own not in sources:
        return []
    search_path = ConfigSearchPathImpl()
    for schema, path in sources[sources.index(own) :]:
        search_path.append("", f"{schema}://{path}")
    packaged, *later = ConfigRepository(search_path).get_sources()
    names = _config_names(packaged, "")
    return [f"{source.path}/{name}.yaml" for source in later for name in names if source.is_config(name)]


def _config_names(source, folder: str) -> list[str]:
    prefix = f"{folder}/" if folder else ""
    here = [prefix + name for name in source.list(folder, ObjectType.CONFIG)]
    return here + [n for name in source.list(folder, ObjectType.GROUP) for n in _config_names(source, prefix + name)]


def leaves(content, prefix: str = "") -> dict[str, object]:
    """Dotted key to value of every leaf of a config, interpolations as written; a list or empty mapping is a leaf."""
    if OmegaConf.is_config(content):
        content = OmegaConf.to_container(content, resolve=False)
    found = {}
    for key, value in content.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        found |= leaves(value, path) if isinstance(value, dict) and value else {path: value}
    return found
