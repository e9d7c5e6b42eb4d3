# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The training launches of a script, and the edits that switch each of them to a loss of this package."""

import itertools
import re
from typing import NamedTuple

from fspo_verl.keys import ACTOR, GROUP, POLICY_LOSS, RECORDS_DIR
from fspo_verl.launch.hydra_files import option
from fspo_verl.launch.script import ARGUMENTS, Command, Script, Word, shown, written

"""Where this package is missing, verl refuses this key. The override of the loss alone it would accept, and ignore."""
PLACE = "fspo_records"
"""Folder for the records of all launches, if the user names none."""
FSPO = ("fspo", "fixed_band", "no_clip")

MENTION = re.compile(r"\bverl\.trainer\.main_ppo|\bmain_ppo\w*\.py|\bverl\.[\w.]*fully_async_main")
"""Of a main that trains, somewhere in a text."""

_MAIN = re.compile(r"verl\.(trainer|experimental)\.[\w.]*main_ppo\w*|verl\.[\w.]*fully_async_main|\S*/main_ppo\w*\.py")
_OTHERS = re.compile(r"sft|eval|gener|infer|merge|serve|preprocess|convert|prepare|test|rollout")  # of a file or module
_NO_MAIN = re.compile(r"(torch\.|accelerate|deepspeed|uv$|pip|venv|http|json|debugpy|pdb|ray)")
_PYTHON = re.compile(r"(\S*/)?(python[\d.]*|torchrun|accelerate|deepspeed|ipython|run)$")
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/]*=|~[\w.]+$")
_ANY_KEY = re.compile(r"\0|[^=\0]*\0[^=]*=")  # hidden from its start, or before its "="
_CLIP_RATIOS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
# Of each start its own folder. The nanoseconds are for launches that a loop starts in the same second.
_START = "$(date +%Y%m%d-%H%M%S-%N)"


class Training(NamedTuple):
    """A launch of a training."""

    command: Command
    main: str  # its module or file
    words: list[Word]  # the arguments of the main

    @property
    def overrides(self) -> list[Word]:
        """The words that are overrides of Hydra, by what is known of them."""
        return [word for word in self.words if _OVERRIDE.match(word.text)]

    def flag(self, *names: str) -> str | None:
        """The value of an option of Hydra, such as ``--config-name``."""
        texts = [word.text for word in self.words]
        for place, text in enumerate(texts):
            name, _, value = text.partition("=")
            if name in names:
                return value or next(iter(texts[place + 1 :]), None)
        return None

    def values(self, key: str) -> set[str]:
        """All values that the script gives a key."""
        return {value for word in self.overrides for name, _, value in [split(word.text)] if name == key}

    @property
    def takes_arguments(self) -> bool:
        """Whether the user's own arguments reach it."""
        return any(word.text == '\0"$@"\0' for word in self.words)

    @property
    def arguments_come_last(self) -> bool:
        """Whether they stand at the end of the command by themselves, so that overrides can be added before them."""
        return bool(ARGUMENTS.fullmatch(written(self.command.parts[-1])))

    @property
    def opaque(self) -> list[str]:
        """Words that may be any setting, as their key is not known; the user's own arguments are left out."""
        return [shown(word.text) for word in self.words if _ANY_KEY.match(word.text) and word.text != '\0"$@"\0']


def split(override: str) -> tuple[str, str, str]:
    """Key, marks in front of it, and value of an override."""
    name, _, value = override.partition("=")
    key = name.lstrip("+~")
    return key, name[: len(name) - len(key)], value


def find(script: Script) -> tuple[list[Training], list[tuple[Training, str]]]:
    """The trainings of a script, and every other program that it starts with Python, with a sentence why it is none."""
    found: list[Training] = []
    others: list[tuple[Training, str]] = []
    for command in script.commands:
        texts = [word.text for word in command.words]
        place = _main(texts)
        own = itertools.takewhile(lambda part: not ARGUMENTS.fullmatch(written(part)), command.parts)
        if place is None or place >= sum(len(script.words(part)) for part in own):
            continue  # a function that starts what it is given is read where it is called
        training = Training(command, texts[place], command.words[place + 1 :])
        keys = [split(word.text)[0] for word in training.overrides]
        stem = re.sub(r"\.py$", "", training.main).rsplit("/", 1)[-1].rsplit(".", 1)[-1]
        is_main = bool(_MAIN.fullmatch(training.main))
        if not is_main and (_OTHERS.search(stem) or not any(key.startswith("actor_rollout_ref.") for key in keys)):
            others.append((training, "which is given no settings of a policy (actor_rollout_ref)"))
        elif {value.lower() for value in training.values("trainer.val_only")} == {"true"}:
            others.append((training, "which only validates (trainer.val_only=True)"))
        else:
            found.append(training)
    return found, others


def _main(texts: list[str]) -> int | None:
    """The place of the Python program among the words of a command."""
    for place, text in enumerate(texts):
        if _MAIN.fullmatch(text):
            return place
    for place, text in enumerate(texts):
        before = texts[:place]
        if before[-1:] == ["-m"] and not _NO_MAIN.match(text):
            return place
        if re.fullmatch(r"[^\s=]+\.py", text) and any(map(_PYTHON.match, before)):
            return place
    return None


# --- edits -----------------------------------------------------------------------------------------------------------


class Switch(NamedTuple):
    """What makes a training train a loss."""

    loss: str  # an option of the group
    removed: list[tuple[Word, str]]  # and why
    overridden: list[tuple[Word, str]]  # settings that do not stand as words of their own, so that they stay, and why
    added: list[tuple[str, str]]  # keys and values; in those of records_dir the shell has its say
    kept: list[str]  # the overrides of the script that stay

    @property
    def overrides(self) -> list[str]:
        """Those that the launch then has, as verl's own config wants them: the group with its ``+``."""
        added = [
            f"+{key}={value}" if key == GROUP else f"{key}=/records" if key == RECORDS_DIR else f"{key}={value}"
            for key, value in self.added
        ]
        return [*self.kept, *(word.text for word, _ in self.overridden), *added]


def switch(training: Training, loss: str, folder: str) -> Switch:
    """The settings to take out, and the overrides to add.

    Args:
        training: one of :func:`find`.
        loss: an option of the group.
        folder: for its records, in the syntax of bash between double quotes.
    """
    sets = option(loss)
    words = dict.fromkeys(training.overrides)  # a variable may be used twice
    reasons = [(word, in_the_way(word.text, loss, sets)) for word in words]
    hindering = [(word, why) for word, why in reasons if why]
    removed = [(word, why) for word, why in hindering if word.span]
    overridden = [(word, why) for word, why in hindering if not word.span]
    kept = [word.text for word, why in reasons if not why]
    keys = {split(text)[0] for text in kept}
    added = [] if GROUP in keys else [(GROUP, loss)]
    for key in dict.fromkeys(split(word.text)[0] for word, _ in overridden):
        if (value := sets.get(key)) is not None:
            added.append((key, str(value)))
    return Switch(loss, removed, overridden, added if RECORDS_DIR in keys else [*added, (RECORDS_DIR, folder)], kept)


def in_the_way(override: str, loss: str, sets: dict) -> str | None:
    """Why a setting of the script is in the way of a loss; None where it is not. Nothing is in the way of observation.

    Args:
        override: a word of the script.
        loss: an option of the group.
        sets: what this option sets.
    """
    key, _, value = split(override)
    section, _, name = key.rpartition(".")
    if loss == "observed":
        return None
    if key == GROUP or (section == POLICY_LOSS and name in ("loss_mode", "_target_")):
        return None if value == (loss if key == GROUP else sets[key]) else "which selects another loss"
    if loss not in FSPO:
        return None
    if section == POLICY_LOSS and key not in sets:
        return "a setting of another loss"
    if section == ACTOR and key in sets:
        return "which would replace FSPO's aggregation"
    return "which FSPO does not read" if section == ACTOR and name in _CLIP_RATIOS else None


def edited(script: Script, switches: list[tuple[Training, Switch]]) -> bytes:
    """The script after all its switches; every byte outside of them stays."""
    spans = {word.span for _, switch in switches for word, _ in switch.removed if word.span}
    edits = {_with_blanks(script.source, *span): b"" for span in spans}
    for training, switch in switches:
        if switch.added:
            place, text = _insertion(training, switch.added, spans)
            edits[place, place] = text
    source = script.source
    for (start, end), text in sorted(edits.items(), reverse=True):
        source = source[:start] + text + source[end:]
    return source


def _with_blanks(source: bytes, start: int, end: int) -> tuple[int, int]:
    """What to take out with a word: its line if it stands there alone, else the blanks beside it."""
    line = source.rfind(b"\n", 0, start) + 1
    alone = re.match(rb"[ \t]*(\\?)\n", source[end:]) if not source[line:start].strip() else None
    if alone and (alone[1] or not source[:line].endswith(b"\\\n")):
        return line, end + alone.end()
    if not source[line:start].strip() and not alone and line:
        return start, end + len(source[end:]) - len(source[end:].lstrip(b" \t"))
    before = re.search(rb"(\\\n|[ \t])*$", source[:start])
    return start - len(before[0] if before else b""), end


def _insertion(training: Training, added: list[tuple[str, str]], removed: set) -> tuple[int, bytes]:
    """Where the overrides go, and their text: after the last override that stays, before ``"$@"``."""
    command = training.command
    parts = command.parts
    while ARGUMENTS.fullmatch(written(parts[-1])):
        parts.pop()
    main = next((at for at, part in enumerate(parts) if training.main in written(part)), 0)
    is_override = [bool(_OVERRIDE.match(written(part)) or re.match(r'"?\$', written(part))) for part in parts]
    if any(is_override[main + 1 :]):
        del parts[len(parts) - is_override[::-1].index(True) :]  # options of Hydra, which wants all overrides together
    while (parts[-1].start_byte, parts[-1].end_byte) in removed:
        parts.pop()
    words = [_quoted(command, key, value) for key, value in added]
    if command.quoting in ("'", '"'):
        return parts[-1].end_byte, "".join(f" {word}" for word in words).encode()
    last = command.parts[-1]
    text = command.node.text or b""
    indent = re.search(rb"\\\n([ \t]*)\S", text)
    blanks = indent[1].decode() if indent else " " * (last.start_point[1] and command.node.start_point[1] + 4)
    return parts[-1].end_byte, "".join(f" \\\n{blanks}{word}" for word in words).encode()


def _quoted(command: Command, key: str, value: str) -> str:
    """An override in the place where the command stands: a folder with what the shell expands, all else as it is."""
    escaped = value.replace("$", "\\$") if command.quoting in ('"', "<<") else value
    if key == RECORDS_DIR:
        # For Hydra between quotes of its own, so that it takes any folder; within a string that is not to be had.
        return f"{key}={escaped}" if command.quoting in ("'", '"') else f"{key}=\"'{escaped}'\""
    if "$" not in value:
        return f"{key}={value}"
    if written(command.parts[0]) == "eval":
        return f"\\'{key}={value}\\'".replace("$", "\\$")
    return f'"{key}={value}"'.replace("$", "\\$") if command.quoting == "'" else f"'{key}={escaped}'"


def folder(base: str | None, script: str, number: int, quoting: str = "") -> str:
    """Where a launch keeps its records, in the syntax of bash between double quotes: of each start a folder of its own.

    Args:
        base: of the user's; may hold variables; below the folder of the launch if it is relative.
        script: name of the script.
        number: of the launch in the script, from 1.
        quoting: of the command that launches.

    Raises:
        ValueError: a quote in the folder, which would end the text that it becomes part of; or, where the command is
            itself between quotes, what the shell that runs it would split the folder at.
    """
    base = base or PLACE
    if set(base) & set("\"'`"):
        raise ValueError(f"--records {base}: a folder without quotes, please")
    if quoting in ("'", '"') and re.search(r"[^\w./~${}@%+,:-]", base):
        raise ValueError(
            f"--records {base}: a training of {script} starts within quotes; a folder without blanks, please"
        )
    base = base.rstrip("/")
    base = re.sub(r"^~(?=/|$)", "$HOME", base)
    name = re.sub(r"[^\w.-]+", "-", script) + (f"-{number}" if number > 1 else "")
    return f"{base if not base or base[0] in '/$' else f'$PWD/{base}'}/{name}/{_START}"
