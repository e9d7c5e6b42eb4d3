# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The selection of a launch: keys that were to select a loss and do not, and config files that say another thing.

Every launch of verl passes :func:`lost_selections`, so that nothing of verl is imported before a launch names a loss.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping

from omegaconf import ListConfig

from fspo_verl.findings import Finding
from fspo_verl.keys import ACTOR, GROUP, OVERRIDES, POLICY_LOSS, SELECTS
from fspo_verl.launch import group, hydra_files
from fspo_verl.launch.view import Launch, check, error, warning

# --- keys that select nothing ----------------------------------------------------------------------------------------


def lost_selections(launch: Launch) -> Iterator[Finding]:
    """A key names a loss of this package where nothing reads it. Select it by ``algorithm.policy_loss=NAME``.

    Either the name of the group is a key of the config, in a launch that selects no loss of this package. Or the value
    ``fspo`` stands at a key of ``algorithm``, ``actor_rollout_ref`` or ``policy_loss`` that speaks of a loss, and
    another loss trains. ``gspo``, like other options, may be the user's own word, and is a warning. Any other key is
    the user's.
    """
    trains = launch.get(f"{POLICY_LOSS}.loss_mode")
    if not launch.has_actor or trains == "fspo":
        return
    if not launch.selects_ours and launch.get("algorithm.adv_estimator") == "fspo":
        yield from loss_as_advantages(launch)
    for key, value in hydra_files.leaves(launch.config).items():
        if key.startswith(f"{POLICY_LOSS}.") or (key == GROUP and launch.selects_ours):
            continue
        value = launch.get(key) if key == GROUP else value  # resolved
        values = value if isinstance(value, list | ListConfig) else [value]
        named = [one for one in values if one in hydra_files.OPTIONS]
        if not named or not (key == GROUP or (named == ["fspo"] and _SPEAKS_OF_A_LOSS.match(key))):
            continue
        # Beside a value of the name of the group, Hydra takes the word without a plus for another value.
        word = f"{'+' if key == GROUP else ''}{GROUP}={named[-1]}"
        fix = f" on the command line, or `defaults: [ppo_trainer, {GROUP}: {named[-1]}, _self_]` in a YAML, selects it"
        why = f"verl reads no such key and would train loss_mode={trains!r}"
        remove, severity = group.overrides_that_decide(key), error if named[-1] == "fspo" else warning
        what = f"{key}={value!r} selects nothing"
        yield severity(what, why, fix, "lost_selection", remove, [word])


_SPEAKS_OF_A_LOSS = re.compile(r"policy_loss|(algorithm|actor_rollout_ref)\b.*(loss|policy)")


@check(needs="config", may_refuse=True)
def loss_as_advantages(launch: Launch) -> Iterator[Finding]:
    """``adv_estimator`` names a policy loss. Name an estimator there, such as grpo."""
    if (estimator := launch.get("algorithm.adv_estimator")) not in hydra_files.OPTIONS:
        return
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    if estimator not in ADV_ESTIMATOR_REGISTRY:
        what = f"algorithm.adv_estimator={estimator} names a policy loss"
        add = ["algorithm.adv_estimator=grpo", *([] if launch.selects_ours else [f"{GROUP}={estimator}"])]
        yield error(what, "the run fails after its first rollout", id="loss_as_advantages", add=add)


@check(needs="config")
def unregistered_loss(launch: Launch) -> Iterator[Finding]:
    """No plugin has registered the loss to observe. Correct its name, or load its plugin in every worker."""
    mode = launch.get(f"{POLICY_LOSS}.loss_mode")
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    if isinstance(mode, str) and mode not in POLICY_LOSS_REGISTRY:
        what = f"{POLICY_LOSS}.loss_mode={mode!r} is not registered here"
        why = "unless a worker registers it, the run fails at its first actor update, after a whole rollout"
        known = ", ".join(sorted(POLICY_LOSS_REGISTRY))
        yield warning(what, why, f" if it was to be FSPO, or one of {known}", add=[f"{GROUP}=fspo"])


# --- another loss, or other values, than the group has ----------------------------------------------------------------


@check(needs="files", may_refuse=True)
def overridden_group(launch: Launch) -> Iterator[Finding]:
    """Another loss is composed than the group asks for. Remove the override that replaces it."""
    if launch.choice is None:
        return
    sets = hydra_files.option(launch.choice)
    keys = [key for key in SELECTS if key in sets]
    lost = {key: sets[key] for key in keys if launch.get(key) != sets[key]}
    if _is_of_others(launch.get(SELECTS[0])):  # which is meant to stand in for ours
        lost.pop(SELECTS[0], None)
    words = hydra_files.words_of_the_group()
    if not lost and all(one.package in (None, "_global_") for one in words):
        return
    removed, added = group.select_alone(words, keep_plus=True)
    for key in keys:
        removed += group.overrides_that_decide(key, sets[key])
    if not removed and not added:  # a file selects it elsewhere, or sets another loss
        is_there = GROUP in hydra_files.choices()
        added = [f"{key}={value}" for key, value in lost.items()] if is_there else [f"{GROUP}={launch.choice}"]
    trains = _as_overrides({key: launch.get(key) for key in lost or keys})
    what = f"{GROUP}={launch.choice} is asked for, and {trains} is composed"
    yield error(what, "another loss would train than was asked for", remove=[*dict.fromkeys(removed)], add=added)


@check(needs="files", may_refuse=True)
def lost_to_group(launch: Launch) -> Iterator[Finding]:
    """A config file of yours sets a value that the group replaces. Set it on the command line.

    A value that is verl's default counts as not said: a file may be a copy of verl's whole config.
    """
    if not (launch.is_ours and hydra_files.has_files_of_the_user()):
        return
    from verl.workers.config import ActorConfig

    stock = {f"{ACTOR}.{field.name}": field.default for field in dataclasses.fields(ActorConfig)}
    composed, said = hydra_files.leaves(launch.config), hydra_files.leaves_without_the_group()
    option = launch.choice or ("fspo" if launch.is_fspo else "observed")  # the base of an option of the user's own
    won = {key: value for key, value in hydra_files.option(option).items() if composed.get(key) == value}
    lost = {key: said[key] for key in won if key in said and said[key] not in (won[key], stock.get(key))}
    lost = {key: value for key, value in lost.items() if key not in SELECTS or _is_of_others(value)}
    if lost:
        what = f"a config file sets {_as_overrides(lost)}"
        trains = _as_overrides({key: won[key] for key in lost})
        why = f"{GROUP}={option} comes after that file and would train {trains}"
        fix = (
            " on the command line keeps them, and so does the group in that file's defaults before `_self_`; or remove "
            "them from the file"
        )
        severity = warning if os.environ.get(OVERRIDES) else error  # the variable is the later word than any file
        yield severity(what, why, fix, add=[f"{key}={hydra_files.as_value(value)}" for key, value in lost.items()])


def _is_of_others(target) -> bool:
    """Whether this names a class of another package; a name of a loss is none."""
    return "." in str(target) and not str(target).startswith(("verl.", "fspo_verl."))


def _as_overrides(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={hydra_files.as_value(value)}" for key, value in values.items())
