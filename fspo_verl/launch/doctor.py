# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Examine an installation and a launch, before anything is trained.

  fspo-verl doctor                                          the installation
  fspo-verl doctor algorithm.policy_loss=fspo data.train_batch_size=512 ...
                                                            ... and what these overrides make of verl's main_ppo
  fspo-verl doctor -- python3 -m verl.trainer.main_ppo --config-name fspo_trainer ...
                                                            ... and a whole command line, of any of its mains

The main itself is started, as a child process with a variable set, and composes its config. The child hands back what
it finds where it would start Ray, and ends there.

Exit code: 0 without errors (warnings are printed), 1 with errors, or with --strict warnings; 2 for a wrong call.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig, OmegaConf

from fspo_verl import findings, output, versions
from fspo_verl.findings import ERROR, NOTE, SEVERITIES, WARNING, Finding
from fspo_verl.keys import ACTOR, EXAMINE, GROUP, OVERRIDES, POLICY_LOSS
from fspo_verl.launch import hydra_files, installation
from fspo_verl.launch.starts import RECEIPT
from fspo_verl.launch.view import Launch, error, note, warning

DEFAULT_MAIN = "verl.trainer.main_ppo"
_DEFAULT_OVERRIDES = [f"{GROUP}=fspo"]
# Seconds in which a main has composed its config.
_PATIENCE = 600.0
# As `python -m MAIN`, but nothing of the main runs before `ray.init` ends the child.
_CHILD = "import fspo_verl.plugin, runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def main(args: argparse.Namespace) -> int:
    """Print the findings; without a launch, those of verl's defaults with fspo. Returns the exit code."""
    module, overrides = split_command(args.launch)
    if os.getcwd() not in sys.path:  # where `python -m` looks first: in a checkout of verl, that one runs
        sys.path.insert(0, os.getcwd())
    if versions.installed("verl") is None:
        raise ValueError(f"verl is not installed in {sys.prefix}: pip install 'verl{installation.SUPPORTED_VERL}'")
    installed = [*installation.findings()]
    # With an error there the launch would be as without this package.
    found = [] if findings.exit_code(installed) else judge(module, overrides)
    if not args.launch:  # of verl's defaults no more counts than that they compose
        found = [one for one in found if one.severity == ERROR]
        found.append(note("No launch given; verl's defaults compose with algorithm.policy_loss=fspo", id="example"))
    found = sorted([*found, *installed], key=lambda one: SEVERITIES.index(one.severity))
    counts = Counter(one.severity for one in found)
    if args.json:
        told = {"main": module, "errors": counts[ERROR], "warnings": counts[WARNING]}
        print(json.dumps(told | {"findings": [one.to_json() for one in found]}, indent=1))
    else:
        said = [f"{counts[severity]} {severity}{'s' * (counts[severity] != 1)}" for severity in (ERROR, WARNING)]
        print(f"fspo-verl doctor: {', '.join(said)}")
        findings.show(found)
        output.show([("next:", _next_step(found[0], args.launch))], widths=(8,))
    return findings.exit_code(found, args.strict)


def _next_step(gravest: Finding, launch: list[str]) -> str:
    if gravest.severity != NOTE:
        return gravest.advice
    if not launch:
        return f"fspo-verl doctor -- python3 -m {DEFAULT_MAIN} ..., the command of your launch"
    return "start the launch" if "-m" in launch else f"python3 -m {DEFAULT_MAIN} {shlex.join(launch)}"


def split_command(launch: list[str]) -> tuple[str, list[str]]:
    """The main's module and its arguments, from a command line with ``-m`` or from overrides alone.

    Raises:
        ValueError: neither one: it does not run a module of Python, or its first word is no override.
    """
    if "-m" in launch[:-1]:
        position = launch.index("-m")
        return launch[position + 1], launch[position + 2 :]
    if launch and not re.match(r"[-~]|[^=]+=", launch[0]):
        raise ValueError(
            f"{launch[0]} begins neither overrides (KEY=VALUE ...) nor a command with `-m MAIN` (a module of Python); "
            "for a script, write down the command that it runs"
        )
    return DEFAULT_MAIN, launch or list(_DEFAULT_OVERRIDES)


# --- the launch, started as a child ----------------------------------------------------------------------------------


def judge(module: str, arguments: list[str]) -> list[Finding]:
    """A main that ends before it hands over a config to verl or starts Ray; or else what the main's process finds."""
    with tempfile.TemporaryDirectory(prefix="fspo_verl_doctor_") as folder:
        answer, said = Path(folder, "findings.json"), Path(folder, "said")
        # A `run` around the doctor is not to count what it starts.
        env = os.environ | {EXAMINE: str(answer), RECEIPT: "", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", _CHILD, module, *arguments]
        with said.open("wb") as out:
            child = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            try:
                end = time.monotonic() + _PATIENCE
                while child.poll() is None and not answer.exists() and time.monotonic() < end:
                    time.sleep(0.05)
            finally:
                with contextlib.suppress(ProcessLookupError):  # what it has started, too
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if answer.exists():
            return [Finding(**one) for one in json.loads(answer.read_text())]
        lines = said.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    what = f"{module} ended before it handed over a config to verl or started Ray"
    return [error(what, last.removesuffix("."), "correct it, or name a main of verl", id="composition")]


def hand_back(config: DictConfig | None, problem: Exception | None = None) -> NoReturn:
    """End this process, a launch that a doctor has started, and tell the doctor what was found.

    The first answer counts. Whatever goes wrong, nothing of the launch runs after this.

    Args:
        config: with which it would go on, as far as it is known.
        problem: why Hydra has composed none.
    """
    try:
        answer = Path(os.environ[EXAMINE])
        if not answer.exists():
            found = examine(config) if problem is None else [not_composed(problem)]
            text = json.dumps([dataclasses.asdict(one) for one in found])
            output.write_whole([(answer, text.encode())])
    except BaseException as problem:  # the doctor shows it
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def not_composed(problem: Exception) -> Finding:
    """Hydra composes no config. Correct what it names."""
    if (finding := getattr(problem, "finding", None)) is not None:
        return finding
    text = " ".join(str(problem).split()).removesuffix(".")
    return error("Hydra composes no config", text, "correct what it names, and run this again", id="composition")


def examine(config: DictConfig | None) -> list[Finding]:
    """A launch that trains no policy, or of several jobs; and what all checks find of its config."""
    from fspo_verl.launch import asked, checks

    launch = Launch(OmegaConf.create() if config is None else config)
    if not launch.has_actor:
        what = f"the launch hands over no config with {ACTOR}"
        return [error(what, "it is no policy training", "name a main that trains a policy", id="composition")]
    other_loss = asked.problem(launch.config) if os.environ.get(OVERRIDES) else None
    found = [*filter(None, [other_loss]), *checks.findings(launch.config)]
    if (hydra := hydra_files.running()) is not None and hydra.mode is not None and hydra.mode.name == "MULTIRUN":
        what = "of a launch with --multirun only the first job is examined"
        found.append(warning(what, fix="examine each job by its own overrides", id="multirun"))
    return found if findings.exit_code(found) else [*found, *checks.run(launch, not_selected, batches)]


# --- checks of the doctor alone --------------------------------------------------------------------------------------


def not_selected(launch: Launch) -> Iterator[Finding]:
    """The launch trains without this package. Add ``algorithm.policy_loss=fspo``."""
    if not launch.is_ours:
        what, why = f"{POLICY_LOSS}.loss_mode={launch.loss_mode} trains", "neither FSPO nor one of its baselines"
        yield warning(what, why, add=[f"{GROUP}=fspo"])


def batches(launch: Launch) -> Iterator[Finding]:
    """The number of responses and optimiser steps between two refreshes of the old policy."""
    prompts, n = launch.prompts_per_rollout, launch.config.actor_rollout_ref.rollout.n
    what = f"{prompts} prompts x {n} = {prompts * n:,} responses per rollout"
    mini, epochs, steps = launch.actor.ppo_mini_batch_size, launch.actor.ppo_epochs, launch.optimizer_steps_per_rollout
    said = f"{steps} optimiser step{'s' * (steps != 1)} on them ({prompts} / {mini}, rounded up, x {epochs})"
    yield note(f"{what}, {said}")
