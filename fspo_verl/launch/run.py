# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Run a command, and have every policy training of verl that it starts train FSPO. Nothing is read or edited.

  fspo-verl run -- bash my_script.sh                      train FSPO
  fspo-verl run --loss observed -- bash my_script.sh      train the script's own loss, measured
  fspo-verl run actor_rollout_ref.actor.policy_loss.eps=0.02 -- bash my_script.sh

It sets FSPO_VERL_OVERRIDES for the command. Each training says in one line what it adds to its overrides, and which of
its own it leaves out. Records lie beside the checkpoints, in fspo_records, in a folder of each launch.

Exit code: that of the command; 2 for a wrong call.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

from fspo_verl.keys import GROUP, OVERRIDES, RECORDS_DIR
from fspo_verl.launch import asked

_PATIENCE = 300.0  # seconds in which a launch has composed its config
_SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


def main(args: argparse.Namespace) -> int:
    """Run the command, say what became of its launches, and return its exit code."""
    if not args.argv:
        raise ValueError("what is to run? fspo-verl run -- COMMAND, such as `fspo-verl run -- bash my_script.sh`")
    overrides = shlex.join([f"{GROUP}={args.loss}", *args.overrides])
    asked.parsed(overrides)
    outer = os.environ.get(asked.RECEIPT, "")
    with tempfile.NamedTemporaryFile(prefix="fspo_verl_run_") as own:
        receipt = outer if os.path.isfile(outer) else own.name  # a `run` around this one counts the launches, too
        with open(receipt) as told:
            before = told.seek(0, os.SEEK_END)
            none_took = f"no launch took {args.loss}: {_WHY_NONE}"

            def warn() -> None:
                if os.path.getsize(receipt) == before:
                    _say(f"after {_PATIENCE:g} s, {none_took}. A training that has begun trains its own loss")

            code = _run(args.argv, os.environ | {OVERRIDES: overrides, asked.RECEIPT: receipt}, warn)
            launches = [json.loads(line) for line in told]
    for line in _summary(launches) if launches else [none_took]:
        _say(line)
    return code


_WHY_NONE = (
    f"the command started no policy training of verl, or one that was refused, or that does not see {OVERRIDES} or "
    "fspo_verl (env -i, another Python, a container, ssh, ray job submit, a job that starts later); docs/install.md "
    "has the way for each"
)


def _run(command: list[str], env: dict[str, str], warn: Callable[[], None]) -> int:
    """The exit code of a command, which gets the signals of this process; ``warn`` is called once, after a while."""
    signals, timeout = {*_SIGNALS, signal.SIGCHLD}, _PATIENCE
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        unblock = lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # noqa: E731
        process = subprocess.Popen(command, env=env, preexec_fn=unblock)
        while process.poll() is None:
            told = signal.sigtimedwait(signals, timeout)
            if told is None and timeout == _PATIENCE:
                warn()
                timeout = float(2**31)
            elif told is not None and told.si_signo in _SIGNALS and told.si_code <= 0:
                process.send_signal(told.si_signo)  # a key of the terminal has reached the command by itself
        while signal.sigtimedwait(signals, 0):  # what came for the command is not for us
            pass
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _summary(launches: list[dict]) -> list[str]:
    """How many launches took which loss, where their records are, and what to do next."""
    losses = " and ".join(dict.fromkeys(launch["loss"] for launch in launches))
    folders = list(dict.fromkeys(launch["records"] for launch in launches if launch["records"]))
    lines = [f"{len(launches)} launch{'es' * (len(launches) > 1)} took {losses}"]
    if folders:
        page = " -o report" if len(folders) > 1 else ""
        lines.append(f"next: fspo-verl report {shlex.join(folders)}{page}")
    for launch in launches:
        words = [word for word in launch.get("added", ()) if not word.startswith(f"{RECORDS_DIR}=")]
        out = launch.get("left_out")
        line = f"for good: add {shlex.join(words)}{f', take out {shlex.join(out)}' if out else ''}"
        lines += [line] if words and line not in lines else []
    return lines


def _say(text: str) -> None:
    print(f"fspo-verl run: {text}", file=sys.stderr, flush=True)
