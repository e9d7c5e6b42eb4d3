# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Functions around Hydra's composition of a launch: two functions, called in place of two methods of its loader.

They select an option of the group, with a plus or without, put a user's own files of the group before the packaged
ones, refuse an old verl and what comes in the way of the group, and add what the environment asks for
(:mod:`fspo_verl.launch.asked`). Whoever does not name the group, and sets no variable, gets what Hydra composes.
"""

import contextlib
import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path

from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.types import OverrideType
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from fspo_verl import verl_patches
from fspo_verl.findings import ERROR, Finding
from fspo_verl.keys import EXAMINE, GROUP, OVERRIDES
from fspo_verl.launch import asked, hook, installation, selection
from fspo_verl.launch.asked import Refused
from fspo_verl.launch.hydra_files import words_of_the_group
from fspo_verl.launch.view import Launch

logger = logging.getLogger("fspo_verl")
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

    def compose(words: list[str]) -> DictConfig:
        return _composed(load, loader, config_name, words, run_mode, *args, **kwargs)

    is_asked = _is_asked(run_mode)
    try:
        config, taken = asked.composed(compose, overrides) if is_asked else (compose(overrides), None)
        _refuse_an_old_verl(config)
        if run_mode == RunMode.RUN:
            _refuse_what_is_in_the_way(config, compose)
    except Exception as problem:
        hook.refused_to_compose(problem, is_asked)
        raise
    if os.environ.get(EXAMINE):
        _write_elsewhere(config, Path(os.environ[EXAMINE]).parent)
    hook.composed(config, taken, config.hydra.mode == RunMode.MULTIRUN)
    return config


def compute_defaults_list(compute: Callable, loader, config_name, overrides, run_mode):
    """List the defaults of what :func:`load_configuration` composes: ``--info``, and ``hydra.verbose=true``."""
    if _is_asked(run_mode):
        load = _unwrapped(loader, "load_configuration")
        hydra = load_configuration(load, loader, config_name, overrides, run_mode).hydra
        overrides = [*hydra.overrides.hydra, *hydra.overrides.task]
    loader = _users_first(loader, config_name, overrides)
    return compute(loader, config_name, _as_listed(loader, config_name, overrides, run_mode), run_mode)


def _is_asked(run_mode: RunMode) -> bool:
    return bool(os.environ.get(OVERRIDES)) and run_mode == RunMode.RUN  # each job of a --multirun by itself


def _unwrapped(loader, name: str) -> Callable:
    method = getattr(type(loader), name)
    return getattr(method, "__wrapped__", method)


# --- one composition -------------------------------------------------------------------------------------------------


def _composed(load: Callable, loader, config_name, overrides: list[str], run_mode, *args, **kwargs) -> DictConfig:
    """The config of overrides; an option of the group takes no plus, or has one.

    Where the config has a key with the name of the group, a word without a plus is a value of that key.
    """
    loader = _users_first(loader, config_name, overrides)
    words = words_of_the_group(overrides)
    if not words:
        return load(loader, config_name, overrides, run_mode, *args, **kwargs)
    config: DictConfig | None = None
    problem: Exception = ConfigCompositionException()
    try:
        listed = _as_listed(loader, config_name, overrides, run_mode)
        config = load(loader, config_name, listed, run_mode, *args, **kwargs)
    except ConfigCompositionException as refused:
        problem = refused
    except ValueError as refused:  # where the value is no name, of which Hydra would show a traceback
        problem = ConfigCompositionException(str(refused))
    may_be_a_value = not any(one.type == OverrideType.ADD or one.is_delete() or one.package for one in words)
    if may_be_a_value and (config is None or OmegaConf.select(config, GROUP) is not None):
        try:
            return load(_without_ours(loader), config_name, overrides, run_mode, *args, **kwargs)
        except ConfigCompositionException:
            if config is not None:
                raise
    if config is None:
        raise problem
    return config


def _as_listed(loader, config_name, overrides: list[str], run_mode) -> list[str]:
    """The overrides with the last option of the group alone, as Hydra takes it: with a plus where it is to be added to
    the defaults list, and without one where that has another to be replaced."""
    words = words_of_the_group(overrides)
    # An option of ours names the package _global_ by itself.
    here = {one.input_line for one in words if one.package in (None, "_global_") and not one.is_delete()}
    if not here:
        return overrides
    others = [text for text in overrides if text not in here]
    plus = "" if GROUP in _choices(loader, config_name, others, run_mode) else "+"
    *earlier, last = (place for place, text in enumerate(overrides) if text in here)
    word = plus + overrides[last].lstrip("+").replace("@_global_", "", 1)
    return [word if place == last else text for place, text in enumerate(overrides) if place not in earlier]


def _choices(loader, config_name, overrides: list[str], run_mode) -> dict[str, str]:
    """The groups of the defaults list that Hydra makes of these overrides, by their options."""
    compute = _unwrapped(loader, "compute_defaults_list")
    return compute(loader, config_name, overrides, run_mode).overrides.known_choices


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


def _refuse_what_is_in_the_way(config: DictConfig, compose: Callable[[list[str]], DictConfig]) -> None:
    """Refuse a config in which something comes in the way of an option of the group."""
    found: list[Finding] = []
    with hook.never_ending_the_launch("fspo_verl did not look whether files of yours have a say in the loss"):
        found += selection.lost_of_the_group(config, compose)
    for one in found:
        if one.severity == ERROR:
            raise Refused(one)
        logger.warning("%s", one.in_one_line)


def _write_elsewhere(config: DictConfig, folder: Path) -> None:
    """Have Hydra write its output of an examined launch to a folder."""
    with open_dict(config.hydra):
        config.hydra.run.dir = config.hydra.sweep.dir = str(folder)
        config.hydra.output_subdir = None
