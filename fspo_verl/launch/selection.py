# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a launch selects: keys that were to select a loss and do not, and the config files that have a say in it.

Every launch of verl passes :func:`lost_selections`, so that nothing of verl is imported before a launch names a loss.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator

from omegaconf import OmegaConf

from fspo_verl.keys import ACTOR, GROUP, OVERRIDES, POLICY_LOSS
from fspo_verl.launch import hydra_files
from fspo_verl.launch.view import Finding, Launch, error, warning

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
    findings = [*filter(None, (_lost_selection(launch, *leaf) for leaf in hydra_files.leaves(launch.config).items()))]
    yield from (finding for finding in findings if finding.severity == "error")
    yield from [finding for finding in findings if finding.severity == "warning"][:1]
    yield from _unregistered_loss(launch)
    yield from _loss_as_advantages(launch)


def _lost_selection(launch: Launch, key: str, value) -> Finding | None:
    """A key that looks as if it were to select a loss of this package, where nothing reads it."""
    sections = re.split("[./@]", key)
    names = sections[1:] if sections[0] in ("algorithm", "actor_rollout_ref") else sections[:1]
    if key.startswith(f"{POLICY_LOSS}.") or not isinstance(value, str):
        return None
    group = max(_likeness(name, "policy_loss") for name in names or [""])
    mode = max(_likeness(name, "loss_mode") for name in names or [""])
    option = next((option for option in ("fspo", *hydra_files.OPTIONS) if _is_close(value, option)), None)
    if option == "fspo" and max(group, mode) > _CLOSE:
        severity = "error"
    elif option is not None and key == GROUP and value != option:
        severity = "error"
    elif option is not None and group > _MISSPELT:
        severity = "warning"
    else:
        return None
    why = f"verl reads no such key and would train loss_mode={launch.get(f'{POLICY_LOSS}.loss_mode')!r}"
    fix = (
        f"if it was to select the config group: {GROUP}={option} on the command line, or in your YAML "
        f"`defaults: [ppo_trainer, {GROUP}: {option}, _self_]`"
    )
    return Finding(severity, "lost_selection", f"{key}={value!r} selects nothing", why, fix)


def _loss_as_advantages(launch: Launch) -> Iterator[Finding]:
    """A loss named as the advantage estimator, unless a plugin has registered an estimator of that name."""
    estimator = launch.get("algorithm.adv_estimator")
    if estimator != "fspo" and not (launch.selects_ours and estimator in hydra_files.OPTIONS):
        return
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    if estimator not in ADV_ESTIMATOR_REGISTRY:
        what = f"algorithm.adv_estimator={estimator} names a policy loss"
        fix = "algorithm.adv_estimator=grpo" + ("" if launch.selects_ours else f" {GROUP}={estimator}")
        yield Finding("error", "loss_as_advantages", what, "the run fails after its first rollout", fix)


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
        yield Finding("warning", "unregistered_loss", what, why, fix)


_CLOSE, _MISSPELT = 0.8, 0.9  # likenesses above which a name is close to another one, or a misspelling of it


def _is_close(text: str, word: str) -> bool:
    return _likeness(text, word) > _CLOSE


def _likeness(text: str, word: str) -> float:
    """How alike two words are: 1 if they have the same letters in any order, less if some differ or are missing."""
    text = text.lower().replace("-", "_")
    return 1.0 if sorted(text) == sorted(word) else difflib.SequenceMatcher(None, text, word).ratio()


# --- which file has the last word -------------------------------------------------------------------------------------


def missing_choice(launch: Launch) -> Iterator[Finding]:
    """``optional algorithm.policy_loss: NAME`` with a name that no file has: Hydra passes over it."""
    choice = launch.choice if hydra_files.has_files_of_the_user() else None
    if choice and not any(part.name == f"{GROUP}/{choice}" for part in launch.parts):
        what = f"{GROUP}={choice} is optional in the defaults list, and no file has that name"
        yield error(what, "nothing is selected", f"{GROUP}: fspo without `optional`")


def hidden_files(_launch: Launch) -> Iterator[Finding]:
    """Hydra takes the first file of a name, and searches --config-dir and hydra.searchpath last."""
    for hidden in hydra_files.passed_over():
        why = "fspo_verl packages a config of that name, and Hydra takes the first it finds"
        yield error(f"{hidden} is not read", why, f"rename {hidden.name}")


def lost_to_group(launch: Launch) -> Iterator[Finding]:
    """A value in a config file of the user's that the selected group, merged after that file, replaces."""
    if not hydra_files.has_files_of_the_user():
        return
    parts = launch.parts
    group = [part for part in parts if part.source == hydra_files.OWN_CONFIGS and part.name.startswith(f"{GROUP}/")]
    if not group:
        return
    sets = dict(leaf for part in group for leaf in hydra_files.leaves(part.content).items())
    final = hydra_files.leaves(launch.config)
    before = parts[: parts.index(group[0])]
    for part in (part for part in before if hydra_files.is_of_user(part.source)):
        lost = {
            key: value
            for key, value in hydra_files.leaves(part.content).items()
            if key in sets and value != sets[key] == final.get(key) and not _is_verls_own(part, key, value)
        }
        if lost:
            option = group[-1].name.removeprefix(f"{GROUP}/")
            what = f"{part.file} sets {', '.join(f'{key}={value}' for key, value in lost.items())}"
            trained = ", ".join(f"{key}={sets[key]}" for key in lost)
            kept = " ".join(f"{key}={'null' if value is None else value}" for key, value in lost.items())
            fix = f"{kept} on the command line, or the group in that file's defaults before `_self_`, to keep them"
            why = f"{GROUP}={option} comes after that file and would train {trained}"
            # The variable is the later word than any file.
            severity = warning if os.environ.get(OVERRIDES) else error
            yield severity(what, why, f"{fix}; or remove them from the file")


def _is_verls_own(part: hydra_files.Part, key: str, value) -> bool:
    """Whether a value in a user's file says nothing against the group: which loss to train, or verl's default."""
    if key == f"{POLICY_LOSS}.loss_mode" or str(value).startswith(("verl.workers.config.", "fspo_verl.config.")):
        return True
    if OmegaConf.select(part.content, f"{ACTOR}._target_") is None:
        return False
    # The file is a copy of verl's whole config, which sets every key to its default.
    from verl.workers.config import ActorConfig

    stock = {f"{ACTOR}.{field.name}": field.default for field in dataclasses.fields(ActorConfig)}
    return key in stock and value == stock[key]


def overridden_group(launch: Launch) -> Iterator[Finding]:
    """A leftover ``loss_mode`` that beats the selected group."""
    sets = hydra_files.option(launch.choice) if launch.choice in hydra_files.OPTIONS else {}
    selected = sets.get(f"{POLICY_LOSS}.loss_mode")  # none by observed, which takes any
    if selected and launch.loss_mode != selected:
        override = f"{POLICY_LOSS}.loss_mode={selected}"
        what = f"{POLICY_LOSS}.loss_mode={launch.loss_mode!r} overrides {GROUP}={launch.choice}, which sets {selected}"
        fix = f"{override}, or remove the leftover (of two overrides the last one counts), or select another {GROUP}"
        yield error(what, "the leftover value would train", fix)


OF_FILES = (missing_choice, hidden_files, lost_to_group, overridden_group)
"""The checks that need the files, and with them internals of Hydra."""
