# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What this package knows of Hydra (1.3): how an override is quoted, what a config file sets, which files are read.

Hydra tells a running application its sources, the overrides and the choices of groups. The defaults list, in which a
later file wins, is computed from these once more with internals of Hydra: there is no public way. Hydra is imported
only where it is asked: each process that imports verl imports this module.
"""

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from fspo_verl import versions
from fspo_verl.keys import GROUP

OWN_CONFIGS = "pkg://fspo_verl.configs"
PACKAGED = Path(__file__).parents[1] / "configs"
OPTIONS = tuple(sorted(file.stem for file in (PACKAGED / GROUP).glob("*.yaml")))
"""Those of this package's config group."""


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
    """What an option of this package's config group sets, by dotted key; interpolations as written."""
    content: Any = OmegaConf.load(PACKAGED / GROUP / f"{name}.yaml")
    bases = content.pop("defaults", [])
    return {key: value for base in bases for key, value in option(base).items()} | leaves(content)


class Part(NamedTuple):
    """One config file that went into the composed config."""

    name: str  # as in the defaults list, such as actor/dp_actor
    source: str  # the entry of Hydra's search path that holds it, such as pkg://verl.trainer.config
    content: DictConfig  # interpolations as written
    package: str  # the section of the config that it is merged into, empty for the whole config

    @property
    def file(self) -> str:
        return f"{self.source.removeprefix('file://')}/{self.name}.yaml"

    @property
    def sets(self) -> dict[str, object]:
        """What it sets in the config, by dotted key."""
        return leaves(self.content, self.package)

    @property
    def option(self) -> str:
        """Its name as an option of this package's group; empty for another file."""
        group, _, name = self.name.rpartition("/")
        return name.removesuffix(".yaml") if group == GROUP else ""


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


def parts() -> list[Part]:
    """The files of the running Hydra application in the order in which they were merged."""
    hydra, repository = running(), _repository()
    overrides = [*_as_typed(hydra.overrides.hydra), *task_overrides()]
    return list(loaded(_defaults(repository, hydra.job.config_name, overrides), repository))


def files_of(option: str) -> list[Part]:
    """The config files of an option of the group with its bases, as they are by themselves; none if there is none."""
    repository = _repository()
    if not repository.config_exists(f"{GROUP}/{option}"):
        return []
    return list(loaded(_defaults(repository, None, [f"+{override(GROUP, option)}"]), repository))


def _defaults(repository, name: str | None, overrides: Sequence[str]) -> list:
    """Hydra's defaults list of a config, by the name of the function that :mod:`fspo_verl.verl_patches` wraps."""
    from hydra._internal import config_loader_impl

    return config_loader_impl.create_defaults_list(
        repo=repository,
        config_name=name,
        overrides_list=parsed(overrides),
        prepend_hydra=True,
        skip_missing=False,
    ).defaults


def loaded(defaults: Iterable, repository) -> Iterator[Part]:
    """The config files of a defaults list of Hydra's, without Hydra's own."""
    for default in defaults:
        result = repository.load_config(default.config_path)
        if result is None or result.provider == "hydra":
            continue
        package = result.header["package"] if default.package is None else default.package
        yield Part(default.config_path, result.path, result.config, package or "")


def parsed(overrides: Sequence[str]) -> list:
    """Overrides as Hydra's own parser reads them."""
    if not overrides:
        return []
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    return [parser.parse_override(text) for text in overrides]


def _repository():
    """Of the config files that the running Hydra application finds; cached, as each is needed several times."""
    from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

    search_path = ConfigSearchPathImpl()
    for source in running().runtime.config_sources:
        search_path.append(source.provider, f"{source.schema}://{source.path}")
    return CachingConfigRepository(ConfigRepository(search_path))


def passed_over() -> list[Path]:
    """Files of a user's that Hydra does not read, as this package ships one of the same name and comes first."""
    sources = _sources()
    later = sources[sources.index(OWN_CONFIGS) + 1 :] if OWN_CONFIGS in sources else []
    names = [file.relative_to(PACKAGED) for file in PACKAGED.rglob("*.yaml")]
    return [folder / name for folder in filter(None, map(_folder, later)) for name in names if (folder / name).exists()]


def _folder(source: str) -> Path | None:
    """The folder of an entry of Hydra's search path; None for one that is no folder."""
    scheme, path = source.split("://", 1)
    if scheme == "pkg":
        spec = importlib.util.find_spec(path)
        return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    return Path(path) if scheme == "file" else None
