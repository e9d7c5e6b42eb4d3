# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Functions around Hydra's composition of a launch: two functions, called in place of two methods of its loader.

They select an option of the group without a plus, put a user's own files of the group before the packaged ones, refuse
an old verl, and add what the environment asks for (:mod:`fspo_verl.launch.asked`). Whoever does not name the group, and
sets no variable, gets what Hydra composes.
"""

import contextlib
import copy
import os
from collections.abc import Callable
from pathlib import Path

from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from fspo_verl import verl_patches
from fspo_verl.keys import EXAMINE, GROUP, OVERRIDES
from fspo_verl.launch import asked, group, hook, hydra_files, installation
from fspo_verl.launch.asked import Refused
from fspo_verl.launch.view import Launch, error

OURS = "fspo_verl"
"""Hydra's name for the provider of the packaged configs."""


def begin_application() -> None:
    """Wrap the two methods of Hydra, for an application of verl."""
    verl_patches.compose_with(load_configuration, compute_defaults_list)


def load_configuration(load: Callable, loader, config_name, overrides, run_mode, *args, **kwargs) -> DictConfig:
    """Compose a config, around Hydra's ``ConfigLoaderImpl.load_configuration``.

    Raises:
        Refused: the launch would not train the loss that it or the environment asks for.
        HydraException: what Hydra raises.
    """
    try:
        config, taken = _asked_for(load, loader, config_name, overrides, run_mode, *args, **kwargs)
    except Exception as problem:
        hook.refused_to_compose(problem, _is_asked(run_mode))
        raise
    if os.environ.get(EXAMINE):
        _write_elsewhere(config, Path(os.environ[EXAMINE]).parent)
    hook.composed(config, taken, config.hydra.mode == RunMode.MULTIRUN)
    return config


def compute_defaults_list(compute: Callable, loader, config_name, overrides, run_mode):
    """List the defaults of what :func:`load_configuration` composes: ``--info``, and ``hydra.verbose=true``."""
    if _is_asked(run_mode):
        config, taken = _asked_for(_unwrapped(loader, "load_configuration"), loader, config_name, overrides, run_mode)
        if not hook.has_composed():
            hook.composed(config, taken, False)
        overrides = [*config.hydra.overrides.hydra, *config.hydra.overrides.task]
    loader = _users_first(loader, config_name, overrides)
    return compute(loader, config_name, _with_plus(loader, config_name, overrides, run_mode), run_mode)


def _asked_for(load: Callable, loader, config_name, overrides, run_mode, *args, **kwargs):
    """The config, and what it takes of the environment's request, if anything."""

    def compose(words: list[str]) -> DictConfig:
        return _composed(load, loader, config_name, words, run_mode, *args, **kwargs)

    config, taken = asked.composed(compose, overrides) if _is_asked(run_mode) else (compose(overrides), None)
    _refuse_an_old_verl(config)
    return config, taken


def _is_asked(run_mode: RunMode) -> bool:
    return bool(os.environ.get(OVERRIDES)) and run_mode == RunMode.RUN  # each job of a --multirun by itself


def _unwrapped(loader, name: str) -> Callable:
    method = getattr(type(loader), name)
    return getattr(method, "__wrapped__", method)


# --- one composition -------------------------------------------------------------------------------------------------


def _composed(load: Callable, loader, config_name, overrides: list[str], run_mode, *args, **kwargs) -> DictConfig:
    """The config of overrides; an option of the group needs no plus.

    Where the config has a key with the name of the group, a word without a plus is a value of that key.
    """
    loader = _users_first(loader, config_name, overrides)
    words = _words(overrides)
    if not words:
        return load(loader, config_name, overrides, run_mode, *args, **kwargs)
    chosen = _with_plus(loader, config_name, overrides, run_mode)
    config: DictConfig | None = None
    problem: Exception = ConfigCompositionException()
    try:
        config = load(loader, config_name, chosen, run_mode, *args, **kwargs)
    except (ConfigCompositionException, ValueError) as refused:  # a ValueError where the value is no name
        problem = refused
    may_be_a_value = chosen != overrides and all(one.package is None for one in words)
    if may_be_a_value and (config is None or OmegaConf.select(config, GROUP) is not None):
        try:
            return load(_without_ours(loader), config_name, overrides, run_mode, *args, **kwargs)
        except ConfigCompositionException:
            if config is not None:
                raise
    if config is not None:
        return config
    removed, added = group.select_alone(words)
    is_of_the_group = not isinstance(problem, MissingConfigException) and _fails(loader, config_name, chosen, run_mode)
    if (removed or added) and is_of_the_group:
        raise Refused(error(str(problem), remove=removed, add=added, id="group")) from problem
    raise problem


def _words(overrides: list[str]) -> list[Override]:
    """The overrides that name the group, but for those that sweep over it."""
    named = hydra_files.parsed([text for text in overrides if GROUP in text])
    return [one for one in named if one.key_or_group == GROUP and not one.is_sweep_override()]


def _with_plus(loader, config_name, overrides: list[str], run_mode) -> list[str]:
    """The overrides, with a plus for the last option of the group where the defaults list has none to be replaced."""
    words = _words(overrides)
    plain = {one.input_line for one in words if one.type == OverrideType.CHANGE and one.package is None}
    of_the_group = {one.input_line for one in words}
    others = [text for text in overrides if text not in of_the_group]
    if not plain or GROUP in _choices(loader, config_name, others, run_mode):
        return overrides
    *earlier, last = (place for place, text in enumerate(overrides) if text in plain)
    return [f"+{text}" if place == last else text for place, text in enumerate(overrides) if place not in earlier]


def _choices(loader, config_name, overrides: list[str], run_mode) -> dict[str, str]:
    """The groups of the defaults list that Hydra makes of these overrides, by their options."""
    compute = _unwrapped(loader, "compute_defaults_list")
    return compute(loader, config_name, overrides, run_mode).overrides.known_choices


def _fails(loader, config_name, overrides: list[str], run_mode) -> bool:
    try:
        _choices(loader, config_name, overrides, run_mode)
    except (ConfigCompositionException, ValueError):
        return True
    return False


# --- the search path -------------------------------------------------------------------------------------------------


def _users_first(loader, config_name, overrides: list[str]):
    """The loader, or one that finds files of the group that Hydra appends (``hydra.searchpath``, ``--config-dir``)
    before the packaged ones."""
    sources = []
    with contextlib.suppress(Exception):  # what is wrong with them Hydra says by itself
        _, repository = loader._parse_overrides_and_create_caching_repo(config_name, overrides)
        sources = repository.get_sources()
    place = next((place for place, one in enumerate(sources) if one.provider == OURS), len(sources))
    own = [one for one in sources[place + 1 :] if one.provider != "schema" and one.available() and one.is_group(GROUP)]
    if not own:
        return loader
    path = copy.deepcopy(loader.config_search_path)
    for source in own:
        path.prepend(source.provider, f"{source.scheme()}://{source.path}", SearchPathQuery(provider=OURS))
    return type(loader)(path)


def _without_ours(loader):
    """A loader that does not know the packaged configs, as without this package."""
    path = copy.deepcopy(loader.config_search_path)
    entries = path.get_path()
    entries[:] = [one for one in entries if one.provider != OURS]
    return type(loader)(path)


# --- what is made of the composed config -----------------------------------------------------------------------------


def _refuse_an_old_verl(config: DictConfig) -> None:
    """Refuse a loss of this package where an old verl would train its own.

    Such a verl in a folder shadows the installed one. Of this package it sees the configs alone.
    """
    groups = {name.partition("@")[0] for name in config.hydra.runtime.choices}
    if (GROUP in groups or Launch(config).is_ours) and (finding := installation.too_old()) is not None:
        raise Refused(finding)


def _write_elsewhere(config: DictConfig, folder: Path) -> None:
    """Have Hydra write its output of an examined launch to a folder."""
    with open_dict(config.hydra):
        config.hydra.run.dir = config.hydra.sweep.dir = str(folder)
        config.hydra.output_subdir = None
