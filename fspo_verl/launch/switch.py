# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Turn a script that trains with verl into a command that trains FSPO.

  fspo-verl switch -- bash my_script.sh ...

The script runs, and nothing that it starts: programs such as python3, ray, uv, torchrun, sbatch or wget are replaced by
stand-ins that only note their arguments. The command that reaches verl is composed by verl's own main, mended where
another setting is in the way, checked as every launch is, and printed ready to paste, one line per change.

Exit code: 0 if the printed command trains FSPO, 1 if something is left that only you can mend, 2 for a wrong call.
"""

import argparse
import dataclasses
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from fspo_verl.launch import doctor
from fspo_verl.launch.view import ACTOR, GROUP, POLICY_LOSS, Finding, Launch

SELECT = f"+{GROUP}=fspo"
TIME_LIMIT = 300
"""Seconds after which a script is stopped: with stand-ins for its programs it does next to nothing."""

_STAND_INS = (
    "python python3 pip pip3 uv conda ray torchrun accelerate deepspeed docker apptainer singularity git wget curl ssh "
    "scp rsync aws gsutil hf huggingface-cli nvidia-smi npu-smi sleep kill pkill killall"
).split()
_SUBMISSION = "sbatch srun salloc qsub bsub kubectl helm sky".split()
_STAND_IN = """#!/bin/bash
[[ ${{0##*/}} == python* && $1 == -c ]] && exec {python} "$@"  # arithmetic, and questions about the machine
call={noted}/$(date +%s%N)
printf '%s\\0' "${{0##*/}}" "$@" >$call.words
env -0 >$call.env
"""
# Python imports this at its start: also one that is not found by PATH, after `source .venv/bin/activate` for example.
_SITECUSTOMIZE = """import os, sys
if sys.orig_argv[1:2] != ["-c"]:
    os.execv({stand_in!r}, ["python3", *sys.orig_argv[1:]])
"""
_IN_THE_WAY = {
    **dict.fromkeys(("loss_agg_mode", "loss_scale_factor"), "which would replace FSPO's aggregation"),
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), "which FSPO does not read"),
}
_OF_A_SHELL = {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}


class Command(NamedTuple):
    """The command with which a script starts verl."""

    folder: str | None  # where it runs, if not where the script was started
    environment: dict[str, str]  # what the script exports for it
    words: list[str]  # up to the module, such as python3 -m verl.trainer.main_ppo
    arguments: list[str]

    @property
    def module(self) -> str:
        return self.words[-1]

    def __str__(self):
        exported = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        command = " \\\n  ".join([*exported, shlex.join(self.words), *map(shlex.quote, self.arguments)])
        return f"cd {shlex.quote(self.folder)} &&\n{command}" if self.folder else command


def main(args: argparse.Namespace) -> int:
    """Print the mended command; returns the exit code that the module's text promises."""
    if not args.script:
        raise ValueError("name a script: fspo-verl switch -- bash my_script.sh ...")
    print("Only the script itself runs; whatever it starts is noted instead of started.", file=sys.stderr)
    command = command_of(args.script)
    mended, changes, found = switched(command)
    left = [finding for finding in found if finding.severity == "error"]
    if left:
        print(f"This command does not train FSPO yet: {len(left)} thing{'s' * (len(left) > 1)} only you can mend.")
    else:
        print("This command trains FSPO.")
    for change in changes:
        print(f"  changed: {change}")
    for finding in found:
        if finding.severity != "note":
            print(f"  {finding.severity + ':':8} {finding}")
    print(f"\n{mended}\n")
    print(f"next: {'mend what is left, and run this again' if left else 'start it'}")
    return int(bool(left))


def command_of(script: list[str], folder: Path | None = None) -> Command:
    """The command with which a script starts verl, without starting it.

    Args:
        script: the words of the command line that runs the script.
        folder: where it runs; default: here.

    Raises:
        ValueError: it hands itself to a cluster, it starts nothing of verl, or it does not end.
    """
    with tempfile.TemporaryDirectory() as scratch:
        env, noted = _stand_ins(Path(scratch))
        try:
            run = subprocess.run(
                script,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"{shlex.join(script)} has not ended after {TIME_LIMIT} s") from None
        calls = [(_texts(file), file) for file in sorted(noted.glob("*.words"))]
        for words, file in calls:
            for place, word in enumerate(words[:-1], 1):
                if word == "-m" and ("verl" in words[place] or "main" in words[place]):
                    exported = dict(text.split("=", 1) for text in _texts(file.with_suffix(".env")))
                    moved = None if Path(exported["PWD"]).samefile(folder or ".") else exported["PWD"]
                    changed = {
                        name: value.replace(f"{scratch}:", "")
                        for name, value in exported.items()
                        if env.get(name) != value and name.isidentifier() and name not in _OF_A_SHELL
                    }
                    return Command(moved, changed, words[: place + 1], words[place + 1 :])
    if submitted := [words[0] for words, _ in calls if words[0] in _SUBMISSION]:
        raise ValueError(f"{shlex.join(script)} submits a job ({submitted[0]}): name the script that the job runs")
    said = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
    raise ValueError(f"{shlex.join(script)} starts no `python -m` of verl; the last that it says: {said}")


def _stand_ins(scratch: Path) -> tuple[dict[str, str], Path]:
    """The environment in which programs are noted instead of started, and the folder in which they are."""
    programs, noted = scratch / "bin", scratch / "noted"
    programs.mkdir()
    noted.mkdir()
    for name in (*_STAND_INS, *_SUBMISSION):
        (programs / name).write_text(_STAND_IN.format(python=shlex.quote(sys.executable), noted=noted))
        (programs / name).chmod(0o755)
    (scratch / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(stand_in=str(programs / "python3")))
    return os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": f"{scratch}:{os.environ.get('PYTHONPATH', '')}",
        "BASH_FUNC_ulimit%%": "() { :; }",  # which may need rights that only the training has
    }, noted


def _texts(file: Path) -> list[str]:
    return file.read_text(errors="replace").split("\0")[:-1]


def switched(command: Command) -> tuple[Command, list[str], list[Finding]]:
    """The command that trains FSPO, what was changed for it, and what the checks of a launch say of it."""
    from fspo_verl.config import FSPOPolicyLossConfig

    fields = {field.name for field in dataclasses.fields(FSPOPolicyLossConfig)}
    arguments, changes = [], []
    for argument in command.arguments:
        key, _, value = argument.lstrip("+~").partition("=")
        field = key.removeprefix(f"{POLICY_LOSS}.")
        if (key == GROUP or field == "loss_mode") and value != "fspo":
            changes.append(f"{argument} removed, which selects another loss")
        elif field != key and field not in fields:
            changes.append(f"{argument} removed, a field of another loss")
        elif why := _IN_THE_WAY.get(key.removeprefix(f"{ACTOR}.")):
            changes.append(f"{argument} removed, {why}")
        else:
            arguments.append(argument)
    if not {SELECT, SELECT.lstrip("+"), f"+{SELECT}"} & set(arguments):
        arguments.append(SELECT)
        changes.append(f"{SELECT} added")
    mended = command._replace(arguments=arguments)
    config, found = doctor.compose(command.module, arguments)
    if config is not None and (loss := Launch(config).loss_mode) != "fspo":
        found.append(Finding("error", "not_selected", f"{POLICY_LOSS}.loss_mode={loss} trains"))
    return mended, changes, found
