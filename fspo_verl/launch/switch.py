# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Switch a script that trains with verl to FSPO, or to be measured. The script is read, and never run.

  fspo-verl switch my_script.sh                     what would change, and what the new script would train
  fspo-verl switch my_script.sh -o new_script.sh    ... and write the new script
  fspo-verl switch my_script.sh --loss observed     measure the loss that the script trains
  fspo-verl switch my_config.yaml                   the same for a config of yours

Every training that the script launches is given `algorithm.policy_loss=...` and a folder for its records, a new one for
each start. Settings in the way of FSPO are taken out. Nothing is started, expanded or contacted, and no module of
yours is imported.

Exit code: 0 if the new script trains the loss, 1 if something is left that only you can fix, 2 for a wrong call.
"""

import argparse
import contextlib
import difflib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf
from packaging.version import InvalidVersion, Version

from fspo_verl import output
from fspo_verl.keys import ACTOR, GROUP, POLICY_LOSS, RECORDS_DIR
from fspo_verl.launch import installation, own_yaml, stock, trainings
from fspo_verl.launch.hydra_files import leaves, option
from fspo_verl.launch.script import HIDDEN, Script, shown
from fspo_verl.launch.trainings import Switch, Training

_OLDEST = Version(installation.SUPPORTED_VERL.removeprefix(">="))
_ENGINES = ("dp", "megatron", "veomni", "torchtitan")
_DISTILLATION = "distillation.distillation_loss.use_task_rewards"
# A value of one of these decides whether the loss trains.
_DECIDE = ("trainer.val_only", "distillation.enabled", _DISTILLATION, f"{POLICY_LOSS}.loss_mode", GROUP)
_CONTAINER = re.compile(r"docker|podman|apptainer|singularity|enroot|--container-image\S*|ssh|kubectl")
_CHECK = 'python3 -c "import fspo_verl.plugin"'
_PYTHON = {"null": "None", "true": "True", "false": "False", "Infinity": 'float("inf")'}


class Verl(NamedTuple):
    """The verl that a script would run."""

    root: Path  # the folder that holds the package
    version: str
    folders: list[Path]  # in which Python may look for modules
    is_own: bool  # the script's, and not the installed one


class Verdict(NamedTuple):
    """What keeps a switched training from training the loss; all three are empty if nothing does."""

    problems: list[str]
    unknown: dict[str, str]  # keys that verl does not know, and what to write instead
    depends: list[str]  # what hides whether it does


class Result(NamedTuple):
    """The answer in words, and the new script."""

    conclusion: str
    details: list[str]
    new: bytes
    left: list[str]  # alone, and why
    checks: list[str]  # of environments
    trains: bool


def main(args: argparse.Namespace) -> int:
    """Print conclusion, diff, what was left alone and the next step; returns the exit code that the module promises."""
    path: Path = args.script
    source = path.read_bytes()
    if path.suffix in (".yaml", ".yml"):
        result = _of_yaml(source.decode(), path, args.loss)
    elif path.suffix == ".py":
        result = _without_training(path, [], args.loss)
    else:
        result = of_script(source, path, args.loss, args.records)
    target: Path | None = path.resolve() if args.in_place else args.output
    is_new = not args.output or not os.path.lexists(args.output)
    if not is_new and not (args.output.exists() and args.output.read_bytes() == result.new):
        raise ValueError(f"{args.output} is there already: remove it, or name another file")
    print(result.conclusion)
    output.show([("", line) for line in result.details], widths=(1,))
    if result.new != source:
        print(f"\n{_diff(source, result.new, path.name)}")
    output.show([("left alone:", line) for line in result.left], widths=(11,))
    if target and result.new != source:
        mode = path.stat().st_mode
        output.write_whole([(target, result.new)])
        target.chmod(mode)
    if not result.trains:
        step = "fix what is named above, and run this again"
    elif result.new == source:
        step = f"start {path} as before"
    else:
        step = f"start {args.output or path} as before" if target else f"-o NEW{path.suffix} or --in-place writes it"
    steps = [*(f"check the environment that trains: {line}" for line in result.checks), step]
    output.show([("next:", line) for line in steps], widths=(11,))
    return int(not result.trains)


def of_script(source: bytes, path: Path, loss: str, records: str | None) -> Result:
    """The new script, and what it would train.

    Raises:
        ValueError: verl is not installed here, or ``records`` holds what cannot stand in the script.
    """
    script = Script(source)
    own, others = trainings.find(script)
    left = [f"line {other.command.line}: {other.main}, {why}" for other, why in others]
    unread = script.unread(trainings.MENTION)
    mains = [training.main for training in (*own, *(other for other, _ in others))]
    if not unread and not any(main.startswith("verl.") for main in mains) and not own:
        return _without_training(path, left, loss)
    verl = which_verl(script, path)
    if verl.is_own and (not verl.version or Version(verl.version) < _OLDEST):
        of = f"the verl {verl.version}" if verl.version else "a verl that names no version,"
        conclusion = f"{path.name} runs {of} of {verl.root}: fspo_verl needs {_OLDEST} or newer."
        return Result(conclusion, ["nothing is changed"], source, left, [], False)
    if not own and not unread:
        return _without_training(path, left, loss)
    switches = [
        (
            training,
            trainings.switch(training, loss, trainings.folder(records, path.stem, number, training.command.quoting)),
        )
        for number, training in enumerate(own, 1)
    ]
    verdicts = [judge(training, switch, verl) for training, switch in switches]
    by_hand = f"add by hand: {GROUP}={loss} {RECORDS_DIR}=FOLDER"
    left += [f"line {number}: a text that may start a training is not read; {by_hand}" for number in unread]
    return Result(
        _conclusion(path.name, loss, switches, verdicts, unread, verl),
        _details(switches, verdicts),
        trainings.edited(script, switches),
        [*left, *_stays(switches, loss)],
        _environments(script),
        not unread and not any(map(any, verdicts)),
    )


# --- which verl ------------------------------------------------------------------------------------------------------


def which_verl(script: Script, path: Path) -> Verl:
    """The verl that a script would run: of a folder that it starts in, enters or puts on PYTHONPATH, or the installed.

    Raises:
        ValueError: there is none, and none is installed.
    """
    beside = path.resolve().parent
    above = [beside, *beside.parents]
    above = above[: next((place for place, up in enumerate(above, 1) if (up / ".git").exists()), len(above))]
    folders = [Path.cwd(), *above, *(up / inside for up in (Path.cwd(), *above) for inside in ("src", "verl"))]
    words = [[word.text for word in command.words[:2]] for command in script.commands]
    entered = [two[1] for two in words if len(two) == 2 and two[0] in ("cd", "pushd")]
    on_path = [part for value in script.values("PYTHONPATH") for part in value.split(":") if part]
    folders += [place for text in (*entered, *on_path) for place in _places(text, [Path.cwd(), beside])]
    installed = stock.installed_root()
    for folder in folders:
        if (folder / "verl/__init__.py").is_file() and folder.resolve() != installed.resolve():
            return Verl(folder.resolve(), _version(folder), folders, is_own=True)
    return Verl(installed, _version(installed), [*folders, installed], is_own=False)


def _places(text: str, bases: list[Path]) -> list[Path]:
    """What a folder in a script may be; hidden at its start is nearly always the script's own, or where it starts."""
    return [base / HIDDEN.sub(".", text) for base in bases]


def _version(root: Path) -> str:
    for file, pattern in (("version/version", r"(.+)"), ("__init__.py", r"__version__ = [\"'](.+)[\"']")):
        with contextlib.suppress(OSError, InvalidVersion):
            if match := re.search(pattern, (root / "verl" / file).read_text()):
                return str(Version(match[1].strip()))
    return ""


# --- what the new script would train ---------------------------------------------------------------------------------


def judge(training: Training, switch: Switch, verl: Verl) -> Verdict:
    """Compose a switched training from config files, and say what keeps it from training the loss."""
    main = stock.find_main(training.main, verl.folders)
    if main is None:
        return Verdict([], {}, [*training.opaque, f"{training.main}, which is not there to be read"])
    name, place = training.flag("--config-name", "-cn"), training.flag("--config-path", "-cp", "--config-dir", "-cd")
    depends = [*training.opaque, *HIDDEN.findall(name or "")]
    if not main.file.is_relative_to(verl.root / "verl"):
        depends.append(f"{training.main}, which is no main of verl's")
    if name and not HIDDEN.search(name):
        main = main._replace(name=name.removesuffix(".yaml"))
    if place:
        places = _places(place, [main.folder.parent, *verl.folders])
        main = main._replace(folder=next((at for at in places if (at / f"{main.name}.yaml").is_file()), main.folder))
    if not any((at / f"{main.name}.yaml").is_file() for at in (main.folder, *stock.searched(verl.root))):
        return Verdict([], {}, [*depends, f"the config {main.name}, which is not there to be read"])
    known = [text for text in switch.overrides if not HIDDEN.search(text.partition("=")[0])]
    depends += [shown(text) for text in known if _is_open(text, training)]
    groups = [text for text in known if stock.is_group(trainings.split(text)[0], main, verl.root)]
    values = [HIDDEN.sub("1", text) for text in known if text not in groups]
    chosen = [text for text in groups if not HIDDEN.search(text)]
    engines = [f"model_engine={engine}" for engine in _ENGINES] if len(chosen) < len(groups) else []
    try:
        bases = [stock.compose(main, verl.root, (*chosen, engine)) for engine in engines] or [
            stock.compose(main, verl.root, tuple(chosen))
        ]
        tables = [stock.unknown_keys(base, values, verl.root) for base in bases]
        unknown = {key: new for key, new in tables[0].items() if all(key in table for table in tables)}
        # With ++, as the script may add a key in several branches.
        accepted = [re.sub(r"^\++", "++", text) for text in values if not _is_in(text, tables)]
        config = stock.compose(main, verl.root, (*chosen, *accepted))
    except Exception as error:  # whatever Hydra raises
        return Verdict([f"its config does not compose: {str(error).strip().splitlines()[0]}"], {}, depends)
    missing, given = stock.missing_sizes(config), {trainings.split(text)[0] for text in known}
    unknown |= {key: f"{new} (a size for one GPU)" for key, new in missing.items() if key in given}
    problems = [f"verl wants {new}" for key, new in missing.items() if key not in given]
    if OmegaConf.select(config, "distillation.enabled") is True and OmegaConf.select(config, _DISTILLATION) is False:
        problems.append(f"{_DISTILLATION}=False drops the policy loss")
    problems = [] if training.opaque else problems  # what is hidden may mend these
    problems += _refused(main, switch, verl)
    return Verdict(problems, unknown, list(dict.fromkeys(depends)))


def _refused(main: stock.Main, switch: Switch, verl: Verl) -> list[str]:
    """Settings of the loss in a config of the user's: a launch that would replace them is refused."""
    file = main.folder / f"{main.name}.yaml"
    if file.is_relative_to(verl.root / "verl") or not file.is_file():
        return []
    own, sets = leaves(OmegaConf.load(file)), option(switch.loss)
    if f"{ACTOR}._target_" in own:  # a copy of verl's whole config, which has a value for every key
        return []
    lost = [key for key in own.keys() & sets.keys() if own[key] != sets[key] and key.split(".")[-1] != "loss_mode"]
    return [f"{file.name} sets {key}={own[key]}: fspo-verl switch {file} takes it out" for key in sorted(lost)]


def _is_open(override: str, training: Training) -> bool:
    """Whether an override decides about the loss, and has a value that is not known, or several."""
    key = trainings.split(override)[0]
    return key in _DECIDE and (bool(HIDDEN.search(override)) or len(training.values(key)) > 1)


def _is_in(override: str, tables: list[dict[str, str]]) -> bool:
    return any(trainings.split(override)[0] == key.lstrip("+") for table in tables for key in table)


# --- what is said ----------------------------------------------------------------------------------------------------


def _conclusion(
    name: str,
    loss: str,
    switches: list[tuple[Training, Switch]],
    verdicts: list[Verdict],
    unread: list[int],
    verl: Verl,
) -> str:
    what = {"observed": "its own loss, measured", "fixed_band": "the fixed band", "no_clip": "FSPO without a clip"}
    trained = what.get(loss, loss.upper())
    failing = [verdict for verdict in verdicts if verdict.problems or verdict.unknown]
    some = f", in {len(failing)} of its {len(verdicts)} trainings" if len(verdicts) > 1 else ""
    if unknown := {key for verdict in verdicts for key in verdict.unknown}:
        keys = f"{len(unknown)} of its keys" if len(unknown) > 1 else f"the key {unknown.pop()}"
        return f"{name} would not start{some}: verl {verl.version} does not know {keys}."
    if failing:
        return f"{name} would not train {trained}{some}: {failing[0].problems[0]}."
    if unread:
        return f"{name} may start a training in a text that is not read, in line {', '.join(map(str, unread))}."
    if depends := list(dict.fromkeys(text for verdict in verdicts for text in verdict.depends)):
        return f"Whether {name} trains {trained} is up to {', '.join(depends)}."
    changes = sum(len(switch.removed) + len(switch.added) for _, switch in switches)
    every = f", in all of its {len(verdicts)} trainings," if len(verdicts) > 1 else ""
    return f"{name}{every} trains {trained} {_after(changes)}."


def _after(changes: int) -> str:
    return "as it is" if not changes else "after this change" if changes == 1 else f"after these {changes} changes"


def _details(switches: list[tuple[Training, Switch]], verdicts: list[Verdict]) -> list[str]:
    """A line for every setting that is taken out, every key that verl does not know, and every other problem."""
    said = []
    for (training, switch), verdict in zip(switches, verdicts, strict=True):
        at = f"line {training.command.line}: "
        said += [f"{shown(word.text)} is taken out, {why}" for word, why in switch.removed]
        for word, why in switch.overridden:
            stays = trainings.split(word.text)[0] not in dict(switch.added)
            said.append(f"{at}{shown(word.text)} {'stays' if stays else 'is overridden'}, {why}")
        said += [f"{at}{key} -> {new}" for key, new in verdict.unknown.items()]
        said += [f"{at}{problem}" for problem in verdict.problems]
    return list(dict.fromkeys(said))


def _stays(switches: list[tuple[Training, Switch]], loss: str) -> Iterator[str]:
    """What is left alone in the trainings, and why."""
    for training, switch in switches:
        at = f"line {training.command.line}: "
        if training.takes_arguments:
            place = "after what is added, and win over it"
            if not training.arguments_come_last:
                place = "before what is added, and lose to it: set records_dir in the script"
            yield f'{at}"$@", your own arguments' + (f", which come {place}" if switch.added else "")
        if values := sorted({name for word in training.overrides for name in HIDDEN.findall(word.text)}):
            yield f"{at}values that only a run knows: {', '.join(values)}"
        own = [text for text in switch.kept if re.match(rf"[+]*{ACTOR}\.(clip_ratio\w*|loss_\w+)=", text)]
        if own and loss in ("gspo", "grpo"):
            yield f"{at}{', '.join(map(shown, own))}, with which {loss} trains instead of its own"


def _environments(script: Script) -> list[str]:
    """Lines that check whether this package is where the script trains, if that is not where this command runs."""
    said: dict[str, None] = {}
    for texts in ([shown(word.text) for word in command.words] for command in script.commands):
        if "uv" in texts and "run" in texts:
            start = texts.index("uv")
            stop = next((at for at in range(start, len(texts)) if texts[at].startswith("python")), start + 2)
            said[f"{' '.join(texts[start:stop])} {_CHECK}"] = None
        elif texts[:2] == ["conda", "activate"] or (texts[:1] in (["source"], ["."]) and "activate" in texts[-1]):
            said[f"{' '.join(texts)} && {_CHECK}"] = None
        elif any(map(_CONTAINER.fullmatch, texts)):
            said[f"{_CHECK}, in the container or on the machine that trains"] = None
    return list(said)


def _diff(source: bytes, new: bytes, name: str) -> str:
    """A unified diff that `patch` takes, without the lines beside a change: they may hold secrets."""
    old, after = (re.findall(r"[^\n]*\n|[^\n]+", text.decode(errors="replace")) for text in (source, new))
    lines = difflib.unified_diff(old, after, name, name, n=0)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


# --- launches that are no script -------------------------------------------------------------------------------------


def _of_yaml(text: str, path: Path, loss: str) -> Result:
    new, changes = own_yaml.switched(text, loss)
    conclusion = f"{path.name} selects {loss} {_after(len(changes))}; it is not composed here."
    folder = trainings.folder(None, path.stem, 1)
    left = [f"the folder for records, of each start its own: start with {RECORDS_DIR}=\"'{folder}'\""]
    return Result(conclusion, changes, new.encode(), left, [], True)


def _without_training(path: Path, left: list[str], loss: str) -> Result:
    """A Python program, or a script that starts no training, or starts it by a Python program."""
    merged = OmegaConf.create()
    for key, value in (option(loss) | {RECORDS_DIR: "/A/NEW/FOLDER"}).items():
        OmegaConf.update(merged, key, value)
    text = json.dumps(OmegaConf.to_container(merged), indent=2)
    text = re.sub(r"\b(null|true|false|Infinity)\b", lambda word: _PYTHON[word[0]], text)
    conclusion = f"{path.name} has no training launch to switch: no command gives a main of verl its settings."
    how = "a Python program that makes the config itself has to merge this, before verl gets the config:"
    lines = f"settings = OmegaConf.create({text})\nconfig = OmegaConf.merge(config, settings)".split("\n")
    return Result(conclusion, [how, *lines], path.read_bytes(), left, [], False)
