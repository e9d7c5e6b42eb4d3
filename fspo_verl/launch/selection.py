# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a launch selects: keys that were to select a loss and do not, and the config files that have a say in it.

Every launch of verl passes :func:`lost_selections`, so that nothing of verl is imported before a launch names a loss.
"""

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Iterator, Mapping

from omegaconf import OmegaConf

from fspo_verl.findings import ERROR, WARNING, Finding
from fspo_verl.keys import ACTOR, GROUP, OVERRIDES, POLICY_LOSS, SELECTS
from fspo_verl.launch import group, hydra_files
from fspo_verl.launch.view import Launch, check, error, finding, warning

# --- keys that select nothing ----------------------------------------------------------------------------------------


def lost_selections(launch: Launch) -> Iterator[Finding]:
    """Keys that look as if they were to select a loss of this package, where nothing reads them.

    Such a key stands at the top, or below ``algorithm`` or ``actor_rollout_ref``. It is an error where it can mean
    nothing else: its value is ``fspo`` and its name close to ``policy_loss`` or ``loss_mode``, or it is the key of
    the group and its value nearly an option. ``gspo``, like other options, may be the user's own word: a
    misspelt key of the group with that value is a warning, given once. Any other key is the user's.
    """
    if not launch.has_actor:
        return
    found = [*filter(None, (_lost_selection(launch, *leaf) for leaf in hydra_files.leaves(launch.config).items()))]
    yield from (one for one in found if one.severity == ERROR)
    yield from [one for one in found if one.severity == WARNING][:1]
    yield from _unregistered_loss(launch)
    yield from _loss_as_advantages(launch)


def _lost_selection(launch: Launch, key: str, value) -> Finding | None:
    """A key that looks as if it were to select a loss of this package, where nothing reads it."""
    if key.startswith(f"{POLICY_LOSS}."):
        return None
    if key == GROUP:
        value = launch.get(key)  # resolved
    texts = [text for text in (value if OmegaConf.is_list(value) else [value]) if isinstance(text, str)]
    option = next((one for one in ("fspo", *hydra_files.OPTIONS) if any(_is_close(text, one) for text in texts)), None)
    if option is None or (severity := _gravity(key, texts, option)) is None:
        return None
    sets = hydra_files.option(option)
    if launch.asked is None:
        if not _other_loss(launch, sets):
            return None
    # The group selects a loss. This key is a leftover, or another word for the same loss.
    elif key == GROUP or all(launch.asked.sets.get(name) == sets.get(name) for name in SELECTS):
        return None
    why = f"verl reads no such key and would train loss_mode={launch.get(f'{POLICY_LOSS}.loss_mode')!r}"
    # Beside a value of the name of the group, Hydra takes the word without a plus for another value.
    word = f"+{GROUP}={option}" if key == GROUP else f"{GROUP}={option}"
    fix = group.as_fix(group.overrides_that_decide(key), [word])
    fix += f" on the command line selects the loss, or `defaults: [ppo_trainer, {GROUP}: {option}, _self_]` in a YAML"
    return finding(severity, f"{key}={value!r} selects nothing", why, fix, id="lost_selection")


def _gravity(key: str, texts: list[str], option: str) -> str | None:
    """How plainly a key with nearly an option as its value was to select it; None if it may mean anything else."""
    first, *others = re.split("[./@]", key)
    names = others or [""] if first in ("algorithm", "actor_rollout_ref") else [first]
    like_group, like_mode = (max(_likeness(name, word) for name in names) for word in ("policy_loss", "loss_mode"))
    if option == "fspo" and max(like_group, like_mode) > _CLOSE:
        return ERROR
    if key == GROUP and texts != [option]:  # no other word for it, as it is misspelt
        return ERROR
    return WARNING if like_group > _MISSPELT else None


def _loss_as_advantages(launch: Launch) -> Iterator[Finding]:
    """A loss named as the advantage estimator, unless a plugin has registered an estimator of that name."""
    estimator = launch.get("algorithm.adv_estimator")
    if estimator != "fspo" and not (launch.selects_ours and estimator in hydra_files.OPTIONS):
        return
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    if estimator not in ADV_ESTIMATOR_REGISTRY:
        what = f"algorithm.adv_estimator={estimator} names a policy loss"
        fix = "algorithm.adv_estimator=grpo" + ("" if launch.selects_ours else f" {GROUP}={estimator}")
        yield error(what, "the run fails after its first rollout", fix, id="loss_as_advantages")


def _unregistered_loss(launch: Launch) -> Iterator[Finding]:
    """A loss to observe, or one of nearly the name fspo, that no plugin has registered in this process."""
    mode = launch.get(f"{POLICY_LOSS}.loss_mode")
    if not isinstance(mode, str) or not (launch.is_ours or _is_close(mode, "fspo")):
        return
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    if mode not in POLICY_LOSS_REGISTRY:
        what = f"{POLICY_LOSS}.loss_mode={mode!r} is not registered here"
        why = "unless a worker registers it, the run fails at its first actor update, after a whole rollout"
        known = ", ".join(sorted(POLICY_LOSS_REGISTRY))
        fix = f"{GROUP}=fspo if it was to be FSPO, or one of {known}"
        yield warning(what, why, fix, id="unregistered_loss")


def _other_loss(launch: Launch, sets: Mapping[str, object]) -> dict[str, object]:
    """Of the keys that decide which loss trains those that a config group sets and the config has otherwise.

    Another package's class is taken for one that is meant to stand in for ours.
    """
    has = {key: launch.get(key) for key in SELECTS if key in sets}
    if not str(has.get(SELECTS[0], "verl.")).startswith(("verl.", "fspo_verl.")):
        del has[SELECTS[0]]
    return {key: value for key, value in has.items() if value != sets[key]}


_CLOSE, _MISSPELT = 0.8, 0.9  # likenesses above which a name is close to another one, or a misspelling of it


def _is_close(text: str, word: str) -> bool:
    return _likeness(text, word) > _CLOSE


@functools.cache
def _likeness(text: str, word: str) -> float:
    """How alike two words are: 1 if they have the same letters in any order, less if some differ or are missing."""
    text = text.lower().replace("-", "_")
    return 1.0 if sorted(text) == sorted(word) else difflib.SequenceMatcher(None, text, word).ratio()


# --- which file has the last word -------------------------------------------------------------------------------------


@check(needs="files", may_refuse=True)
def missing_choice(launch: Launch) -> Iterator[Finding]:
    """``optional algorithm.policy_loss: NAME`` with a name that no file has: Hydra passes over it."""
    choice = hydra_files.choices().get(GROUP) if hydra_files.has_files_of_the_user() else None
    if choice and not any(part.option == choice.removesuffix(".yaml") for part in launch.parts):
        what = f"{GROUP}={choice} is optional in the defaults list, and no file has that name"
        near = difflib.get_close_matches(choice, hydra_files.OPTIONS, 1)
        yield error(what, "nothing is selected", f"{GROUP}={near[0] if near else 'fspo'}")


@check(needs="files", may_refuse=True)
def hidden_files(_launch: Launch) -> Iterator[Finding]:
    """A file that another of its name hides: Hydra takes the first, and searches --config-dir last."""
    for hidden in hydra_files.passed_over():
        why = "fspo_verl packages a config of that name, and Hydra takes the first it finds"
        yield error(f"{hidden} is not read", why, f"rename {hidden.name}")


@check(needs="files", may_refuse=True)
def lost_to_group(launch: Launch) -> Iterator[Finding]:
    """A value in a config file of the user's that the selected group, merged after that file, replaces."""
    if not hydra_files.has_files_of_the_user():
        return
    selected = [part for part in launch.parts if part.source == hydra_files.OWN_CONFIGS and part.option]
    files_before = launch.parts[: launch.parts.index(selected[0])] if selected else []
    group_sets = {key: value for part in selected for key, value in part.sets.items()}
    composed = hydra_files.leaves(launch.config)
    won = {key: value for key, value in group_sets.items() if composed.get(key) == value}
    for file in files_before:
        if not hydra_files.is_of_user(file.source):
            continue
        lost = {key: value for key, value in file.sets.items() if key in won and _is_against(file, key, won[key])}
        if lost:
            trains = _as_overrides({key: won[key] for key in lost}, ", ")
            why = f"{GROUP}={selected[-1].option} comes after that file and would train {trains}"
            fix = f"{_as_overrides(lost)} on the command line keeps them, and so does the group in that file's"
            # The variable is the later word than any file.
            severity = warning if os.environ.get(OVERRIDES) else error
            what = f"{file.file} sets {_as_overrides(lost, ', ')}"
            yield severity(what, why, f"{fix} defaults before `_self_`; or remove them from the file")


def _as_overrides(values: Mapping[str, object], between: str = " ") -> str:
    return between.join(f"{key}={hydra_files.as_value(value)}" for key, value in values.items())


def _is_against(file: hydra_files.Part, key: str, group_value) -> bool:
    """Whether a value in a user's file says another thing than the group, and not just which loss or verl's default."""
    value = file.sets[key]
    if value == group_value or key == f"{POLICY_LOSS}.loss_mode":
        return False
    if str(value).startswith(("verl.workers.config.", "fspo_verl.config.")):
        return False
    if f"{ACTOR}._target_" not in file.sets:
        return True
    # The file is a copy of verl's whole config, which sets every key to its default.
    from verl.workers.config import ActorConfig

    stock = {f"{ACTOR}.{field.name}": field.default for field in dataclasses.fields(ActorConfig)}
    return key not in stock or value != stock[key]


@check(needs="files", may_refuse=True)
def overridden_group(launch: Launch) -> Iterator[Finding]:
    """Another loss than the config group was asked for: the composed loss counts, not the word that selects it."""
    if (asked := launch.asked) is None or not asked.files:
        return
    files = [part.option for part in launch.parts if part.option and not part.package]
    is_composed = files[-len(asked.files) :] == asked.files
    lost = _other_loss(launch, asked.sets)
    if is_composed and not lost:
        return
    removed, added = ([], []) if is_composed else group.select_alone(asked.words, keep_plus=True)
    if not is_composed and not removed:  # a file puts it elsewhere
        added = [f"{GROUP}={asked.name}"]
    for key in SELECTS:
        removed += group.overrides_that_decide(key, asked.sets[key]) if key in asked.sets else []
    if not removed and not added:  # a file sets another loss
        added = [f"{key}={asked.sets[key]}" for key in lost]
    composed = f"{POLICY_LOSS}.loss_mode={launch.get(f'{POLICY_LOSS}.loss_mode')!r}"
    if not lost:
        composed = f"{GROUP}={files[-1] if files else 'null'}"
    elif SELECTS[1] not in lost:
        composed = _as_overrides(lost)
    what = f"{GROUP}={asked.name} is asked for, and {composed} is composed"
    fix = group.as_fix(list(dict.fromkeys(removed)), added)
    yield error(what, "another loss would train than was asked for", fix)
