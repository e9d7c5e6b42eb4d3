# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a launch selects: keys that were to select a loss and do not, and the config files that have a say in it.

Every launch of verl passes :func:`lost_selections`, so that nothing of verl is imported before a launch names a loss.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping

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
    the group and its value nearly an option. Other options, such as ``gspo``, are everybody's names: of the keys
    that misspell the group and have one of those the first is a warning. Any other key is the user's.
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
    sections = re.split("[./@]", key)
    names = sections[1:] if sections[0] in ("algorithm", "actor_rollout_ref") else sections[:1]
    value = launch.get(key) if key == GROUP else value  # resolved
    values = [*value] if key == GROUP and OmegaConf.is_list(value) else [value]
    values = [text for text in values if isinstance(text, str)]
    if key.startswith(f"{POLICY_LOSS}.") or not values:
        return None
    like_group = max(_likeness(name, "policy_loss") for name in names or [""])
    like_mode = max(_likeness(name, "loss_mode") for name in names or [""])
    options = ("fspo", *hydra_files.OPTIONS)
    option = next((option for option in options if any(_is_close(text, option) for text in values)), None)
    if option == "fspo" and max(like_group, like_mode) > _CLOSE:
        severity = ERROR
    elif option is not None and key == GROUP and values != [option]:
        severity = ERROR
    elif option is not None and like_group > _MISSPELT:
        severity = WARNING
    else:
        return None
    sets = hydra_files.option(option)
    if launch.asked is not None:  # the group selects a loss, of which this key is a leftover, or another word for it
        if key == GROUP or all(launch.asked.sets.get(name) == sets.get(name) for name in SELECTS):
            return None
    elif not _other_loss(launch, sets):
        return None
    why = f"verl reads no such key and would train loss_mode={launch.get(f'{POLICY_LOSS}.loss_mode')!r}"
    # Beside a value of the name of the group, Hydra takes the word without a plus for another value.
    word = f"+{GROUP}={option}" if key == GROUP else f"{GROUP}={option}"
    fix = group.as_fix(group.overrides_that_decide(key), [word])
    fix += f" on the command line selects the loss, or `defaults: [ppo_trainer, {GROUP}: {option}, _self_]` in a YAML"
    return finding(severity, f"{key}={value!r} selects nothing", why, fix, id="lost_selection")


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
    own = [part for part in launch.parts if part.source == hydra_files.OWN_CONFIGS and part.option]
    if not own:
        return
    sets = {key: value for part in own for key, value in part.sets.items()}
    final = hydra_files.leaves(launch.config)
    for part in launch.parts[: launch.parts.index(own[0])]:
        if not hydra_files.is_of_user(part.source):
            continue
        differs = {key: value for key, value in part.sets.items() if key in sets and value != sets[key]}
        lost = [key for key in differs if final.get(key) == sets[key] and not _is_verls_own(part, key, differs[key])]
        if lost:
            what = f"{part.file} sets {_as_overrides(differs, lost, ', ')}"
            why = f"{GROUP}={own[-1].option} comes after that file and would train {_as_overrides(sets, lost, ', ')}"
            fix = f"{_as_overrides(differs, lost)} on the command line keeps them, and so does the group in that file's"
            # The variable is the later word than any file.
            severity = warning if os.environ.get(OVERRIDES) else error
            yield severity(what, why, f"{fix} defaults before `_self_`; or remove them from the file")


def _as_overrides(values: Mapping[str, object], keys: Iterable[str], between: str = " ") -> str:
    return between.join(f"{key}={hydra_files.as_value(values[key])}" for key in keys)


def _is_verls_own(part: hydra_files.Part, key: str, value) -> bool:
    """Whether a value in a user's file says nothing against the group: which loss to train, or verl's default."""
    if key == f"{POLICY_LOSS}.loss_mode" or str(value).startswith(("verl.workers.config.", "fspo_verl.config.")):
        return True
    if f"{ACTOR}._target_" not in part.sets:
        return False
    # The file is a copy of verl's whole config, which sets every key to its default.
    from verl.workers.config import ActorConfig

    stock = {f"{ACTOR}.{field.name}": field.default for field in dataclasses.fields(ActorConfig)}
    return key in stock and value == stock[key]


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
        composed = _as_overrides(lost, lost)
    what = f"{GROUP}={asked.name} is asked for, and {composed} is composed"
    fix = group.as_fix(list(dict.fromkeys(removed)), added)
    yield error(what, "another loss would train than was asked for", fix)
