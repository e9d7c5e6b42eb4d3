# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How a launch is composed: its overrides, the run of its main up to the config, and the files that went into it.

Hydra tells a running application its sources, the overrides and the choices of groups. The defaults list, in which a
later file wins, is computed from these once more with internals of Hydra (1.3): there is no public way. Nothing of verl
is imported before a main runs.
"""

import importlib.util
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from omegaconf import DictConfig, OmegaConf

from fspo_verl import output

OWN_CONFIGS = "pkg://fspo_verl.configs"


def override(key: str, text: str | Path) -> str:
    """``key='text'``, a Hydra override quoted so that Hydra reads the text as it is; for bash see scripts/launch.

    Unquoted, any of ``( ) = { [ ' # & ~ ,`` or a letter beyond ASCII ends the launch, or changes what is read. Only
    ``${...}`` still has its meaning.
    """
    from hydra.core.override_parser.types import Quote, QuotedString

    return f"{key}={QuotedString(str(text), Quote.single).with_quotes()}"


class _Composed(BaseException):
    """Leaves a verl main at the point where it hands its config to verl."""


def with_config(module: str, arguments: list[str], look: Callable):
    """Run a verl main as ``python -m`` does, up to its call of ``auto_set_device(config)``; returns ``look(config)``.

    That call is where a launch is checked, too (:mod:`fspo_verl.launch.hook`). Hydra's own state (config sources,
    choices of groups) is there while ``look`` runs. Hydra's output goes to a temporary folder.

    Raises:
        ValueError: the module makes no such call, so that it could not be stopped.
        Exception: what Hydra raises on a config that it cannot compose.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or "auto_set_device(config)" not in Path(spec.origin).read_text():
        raise ValueError(f"{module} is no main of verl: it does not call auto_set_device(config)")
    import verl.utils.device

    def take(config):
        raise _Composed(look(config))

    # A mark on a function: the launch's own check is not to run before it.
    take.checks_launches = True  # type: ignore[attr-defined]

    with tempfile.TemporaryDirectory() as scratch:
        folders = [override(f"hydra.{mode}.dir", scratch) for mode in ("run", "sweep")]
        # Hydra wants all overrides together: ours come after the last one that is given.
        given = [place for place, text in enumerate(arguments, 1) if re.match(r"~|[^-=][^=]*=", text)]
        last = max(given, default=len(arguments))
        argv = [spec.origin, *arguments[:last], *folders, "hydra.output_subdir=null", *arguments[last:]]
        with (
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(verl.utils.device, "auto_set_device", take),
            mock.patch.dict(os.environ, HYDRA_FULL_ERROR="1"),  # errors are raised, not printed
            output.reserved(),  # what verl warns about, it says again at the launch
        ):
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except _Composed as composed:
                return composed.args[0]
    raise ValueError(f"{module} ended before it handed over its config")


class Part(NamedTuple):
    """One config file that went into the composed config."""

    name: str  # as in the defaults list, such as actor/dp_actor
    source: str  # the entry of Hydra's search path that holds it, such as pkg://verl.trainer.config
    content: DictConfig  # under the package it was composed into, interpolations as written

    @property
    def file(self) -> str:
        return f"{self.source.removeprefix('file://')}/{self.name}.yaml"


def is_of_user(source: str) -> bool:
    """Whether neither verl nor this package nor Hydra ships what an entry of Hydra's search path holds."""
    if source.startswith("pkg://"):
        return source.removeprefix("pkg://").split(".")[0] not in ("verl", "fspo_verl", "hydra")
    # A main that is started as a file, and the asynchronous ones, name verl's own folders by path.
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None:
        return True
    return not Path(source.removeprefix("file://")).is_relative_to(Path(verl.origin).parent)


def has_files_of_the_user() -> bool:
    """Whether the search path of the running Hydra application has an entry of a user's."""
    return any(is_of_user(source) for source in _sources() if not source.startswith("structured://"))


def _sources() -> list[str]:
    """The search path of the running Hydra application, first entry first; empty outside of one."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return []
    return [f"{source.schema}://{source.path}" for source in HydraConfig.get().runtime.config_sources]


def parts() -> list[Part]:
    """The files of the running Hydra application in the order in which they were merged; empty outside of one."""
    from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser

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


def passed_over() -> list[Path]:
    """Files of a user's that Hydra does not read, as this package ships one of the same name and comes first."""
    sources, own = _sources(), _folder(OWN_CONFIGS)
    if OWN_CONFIGS not in sources or own is None:
        return []
    names = [file.relative_to(own) for file in own.rglob("*.yaml")]
    later = filter(None, map(_folder, sources[sources.index(OWN_CONFIGS) + 1 :]))
    return [folder / name for folder in later for name in names if (folder / name).exists()]


def _folder(source: str) -> Path | None:
    """The folder of an entry of Hydra's search path; None for one that is no folder."""
    scheme, path = source.split("://", 1)
    if scheme == "pkg":
        spec = importlib.util.find_spec(path)
        return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    return Path(path) if scheme == "file" else None
