# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The selection of a launch: keys that were to select a loss and do not, and what comes in the way of the group.

Every launch of verl passes :func:`lost_selections`, so that nothing of verl is imported before a launch names a loss.
:func:`lost_of_the_group` judges a config where Hydra composes it (:mod:`fspo_verl.launch.composition`).
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from fspo_verl import versions
from fspo_verl.findings import Finding
from fspo_verl.keys import ACTOR, GROUP, OVERRIDES, POLICY_LOSS, SELECTS
from fspo_verl.launch.hydra_files import (
    OPTIONS,
    as_typed,
    as_value,
    leaves,
    option,
    overrides_that_decide,
    words_of_the_group,
)
from fspo_verl.launch.view import Launch, error, warning

# --- keys that select nothing ----------------------------------------------------------------------------------------

_SPEAKS_OF_A_LOSS = re.compile(r"policy_loss|algorithm.adv_estimator|(algorithm|actor_rollout_ref)\b.*(loss|policy)")


def lost_selections(launch: Launch) -> Iterator[Finding]:
    """A key names a policy loss where nothing is selected by it, so that another one would train. Write
    ``algorithm.policy_loss=NAME``.

    Either the name of the group is a key of the config, in a launch that selects no loss of this package. Or the value
    ``fspo`` stands at a key of ``algorithm``, ``actor_rollout_ref`` or ``policy_loss`` that speaks of a loss, and
    another loss trains. ``gspo``, like other options, may be the user's own word, and is a warning. Any other key is
    the user's.
    """
    trains = launch.get(f"{POLICY_LOSS}.loss_mode")
    if not launch.has_actor or trains == "fspo":
        return
    for key, value in leaves(launch.config).items():
        if key.startswith(f"{POLICY_LOSS}.") or (key == GROUP and launch.is_ours):
            continue
        value = launch.get(key) if key == GROUP else value  # resolved
        values = value if isinstance(value, list | ListConfig) else [value]
        named = [one for one in values if one in OPTIONS]
        if not named or not (key == GROUP or (named == ["fspo"] and _SPEAKS_OF_A_LOSS.match(key))):
            continue
        # Beside a value of the name of the group, Hydra takes the word without a plus for another value.
        word = f"{'+' if key == GROUP else ''}{GROUP}={named[-1]}"
        fix = f" on the command line, or `defaults: [ppo_trainer, {GROUP}: {named[-1]}, _self_]` in a YAML, selects it"
        why = f"no policy loss is selected there, and loss_mode={trains!r} would train"
        remove, severity = overrides_that_decide(key), error if named[-1] == "fspo" else warning
        yield severity(f"{key}={value!r} selects nothing", why, fix, "lost_selection", remove, [word])


def unregistered_loss(launch: Launch) -> Iterator[Finding]:
    """No plugin has registered the loss to observe, and its first update would fail. Correct it, or load its plugin."""
    mode = launch.get(f"{POLICY_LOSS}.loss_mode")
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    if isinstance(mode, str) and mode not in POLICY_LOSS_REGISTRY:
        what = f"{POLICY_LOSS}.loss_mode={mode!r} is not registered here"
        why = "unless a worker registers it, the run fails at its first actor update, after a whole rollout"
        known = ", ".join(sorted(POLICY_LOSS_REGISTRY))
        yield warning(what, why, f" if it was to be FSPO, or one of {known}", add=[f"{GROUP}=fspo"])


# --- another loss, or other values, than the group has ----------------------------------------------------------------


def lost_of_the_group(config: DictConfig, compose: Callable[[list[str]], DictConfig]) -> Iterator[Finding]:
    """Find what comes in the way of an option of the group in a config that Hydra composed, with its ``hydra`` section.

    Args:
        compose: Hydra's composition of a list of overrides.
    """
    launch, words = Launch(config), words_of_the_group(_typed(config))
    choice, of_user = _chosen(launch, words), [*filter(_is_of_user, config.hydra.runtime.config_sources)]
    if choice is not None and not any(_has(source, choice) for source in of_user):
        yield from overridden_group(launch, choice, words)
    if launch.is_ours and of_user:
        choice = choice or ("fspo" if launch.is_fspo else "observed")  # the base of an option of the user's own
        yield from lost_to_group(launch, choice, leaves(compose(_without_the_group(config, words))))


def _without_the_group(config: DictConfig, words: Sequence) -> list[str]:
    """The overrides of a config without an option of the group.

    Those of ``policy_loss`` are left out, as many of its keys would not be there.
    """
    options = [one for one in words if not one.is_delete()]
    here, named = [one for one in options if one.package is None], {one.input_line for one in options}
    kept = [text for text in _typed(config) if text not in named and not text.lstrip("+~").startswith(POLICY_LOSS)]
    if (here or GROUP in config.hydra.runtime.choices) and not any(one.is_add() for one in here):
        kept.append(f"~{GROUP}")  # a file has it
    return [*as_typed(config.hydra.overrides.hydra), *kept]


def _typed(config: DictConfig) -> list[str]:
    return as_typed(config.hydra.overrides.task)


def _chosen(launch: Launch, words: Sequence) -> str | None:
    """The option of the group that was asked for, whatever was composed, if it is one of this package's.

    A word without a plus is a value where the config has the name of the group as a key.
    """
    is_own_key, choices = launch.get(GROUP) is not None, as_typed(launch.config.hydra.runtime.choices)
    named = [one for one in reversed(words) if not one.is_delete() and (one.is_add() or not is_own_key)]
    # A word may be an interpolation, which only the choices resolve; they hold no list.
    asked = [choices.get(f"{GROUP}@{one.package}" if one.package else GROUP, one.value()) for one in named]
    asked += [value for name, value in sorted(choices.items()) if name.partition("@")[0] == GROUP]  # those in files
    last = (value[-1] if isinstance(value, list) and value else value for value in asked)
    names = (str(value).removesuffix(".yaml") for value in last)
    return next((name for name in names if name in OPTIONS), None)


def overridden_group(launch: Launch, choice: str, words: Sequence) -> Iterator[Finding]:
    """Another override or file replaces the loss that ``algorithm.policy_loss`` selects. Remove it."""
    sets = option(choice)
    keys = [key for key in SELECTS if key in sets]
    lost = {key: sets[key] for key in keys if launch.get(key) != sets[key]}
    if _is_of_others(launch.get(SELECTS[0])):  # which is meant to stand in for ours
        lost.pop(SELECTS[0], None)
    elsewhere = [one.input_line for one in words if one.package not in (None, "_global_")]
    if not lost and not elsewhere:
        return
    removed = elsewhere + [one.input_line for one in words if one.is_delete()]
    added = [f"{GROUP}={choice}"] if len(removed) == len(words) > 0 else []
    for key in keys:
        removed += overrides_that_decide(key, sets[key], _typed(launch.config))
    if not removed and not added:  # a file selects it elsewhere, or sets another loss
        is_there = GROUP in launch.config.hydra.runtime.choices
        added = [f"{key}={value}" for key, value in lost.items()] if is_there else [f"{GROUP}={choice}"]
    trains = _as_overrides({key: launch.get(key) for key in lost or keys})
    what = f"{GROUP}={choice} is asked for, and {trains} is composed"
    why = "another loss would train than was asked for"
    yield error(what, why, id="overridden_group", remove=[*dict.fromkeys(removed)], add=added)


def lost_to_group(launch: Launch, choice: str, said: Mapping[str, object]) -> Iterator[Finding]:
    """A config file of yours sets a value that ``algorithm.policy_loss`` replaces. Set it on the command line as well.

    A value that is verl's default counts as not said: a file may be a copy of verl's whole config.

    Args:
        said: what the launch sets without the group, by dotted key.
    """
    from verl.workers.config import ActorConfig

    stock = {f"{ACTOR}.{field.name}": field.default for field in dataclasses.fields(ActorConfig)}
    composed = leaves(launch.config)
    won = {key: value for key, value in option(choice).items() if composed.get(key) == value}
    lost = {key: said[key] for key in won if key in said and said[key] not in (won[key], stock.get(key))}
    lost = {key: value for key, value in lost.items() if key not in SELECTS or _is_of_others(value)}
    if lost:
        trains = _as_overrides({key: won[key] for key in lost})
        why = f"{GROUP}={choice} comes after that file and would train {trains}"
        fix = (
            " on the command line keeps them, and so does the group in that file's defaults before `_self_`; or remove "
            "them from the file"
        )
        severity = warning if os.environ.get(OVERRIDES) else error  # the variable is the later word than any file
        add = [f"{key}={as_value(value)}" for key, value in lost.items()]
        yield severity(f"a config file sets {_as_overrides(lost)}", why, fix, "lost_to_group", add=add)


def _is_of_user(source) -> bool:
    """Whether neither verl nor this package nor Hydra ships what an entry of Hydra's search path holds."""
    if source.schema != "file":
        return source.schema == "pkg" and source.path.split(".")[0] not in ("verl", "fspo_verl", "hydra")
    # A main that is started as a file, and the asynchronous ones, name verl's own folders by path.
    folder = versions.verl_folder()
    return folder is None or not Path(source.path).is_relative_to(folder)


def _has(source, choice: str) -> bool:
    """Whether an entry of Hydra's search path has a file of its own for an option."""
    from hydra._internal.sources_registry import SourcesRegistry

    kind = SourcesRegistry.instance().resolve(source.schema)
    return kind(source.provider, f"{source.schema}://{source.path}").is_config(f"{GROUP}/{choice}")


def _is_of_others(target) -> bool:
    """Whether this names a class of another package; a name of a loss is none."""
    return "." in str(target) and not str(target).startswith(("verl.", "fspo_verl."))


def _as_overrides(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={as_value(value)}" for key, value in values.items())
