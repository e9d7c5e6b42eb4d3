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
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fspo_verl.keys import GROUP, OVERRIDES, RECORDS_DIR
from fspo_verl.launch import asked, installation
from fspo_verl.launch.starts import PRINTED, RECEIPT, REFUSED, Receipt, receipts
from fspo_verl.observe.attempts import attempts_below, is_attempt
from fspo_verl.output import see

_PATIENCE = 300.0  # seconds in which a launch has composed its config
_SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


def main(args: argparse.Namespace) -> int:
    """Run the command, say what became of its launches, and return its exit code."""
    if not args.argv:
        raise ValueError("what is to run? fspo-verl run -- COMMAND, such as `fspo-verl run -- bash my_script.sh`")
    overrides = shlex.join([f"{GROUP}={args.loss}", *args.overrides])
    asked.Request.parse(overrides)
    if (off := installation.left_out()) is not None:
        raise ValueError(off.in_one_line)
    env, began = os.environ | {OVERRIDES: overrides}, time.time()
    with contextlib.ExitStack() as stack:
        receipt = os.environ.get(RECEIPT, "")  # of a `run` around this one, which counts the launches, too
        if not os.path.isfile(receipt):
            with contextlib.suppress(OSError):
                own = tempfile.TemporaryDirectory(prefix="fspo_verl_run_", ignore_cleanup_errors=True)
                receipt = f"{stack.enter_context(own)}/launches"
                Path(receipt).touch()
        start = os.path.getsize(receipt) if os.path.isfile(receipt) else 0

        def warn() -> None:
            if not receipts(receipt, start):
                _say(f"after {_PATIENCE:g} s, {_none_took(args.loss)}. A training that has begun trains its own loss")

        code = _run(args.argv, env | {RECEIPT: receipt}, warn)
        launches = receipts(receipt, start)
    for line in _summary(launches, args.loss, began):
        _say(line)
    return code


def _none_took(loss: str) -> str:
    return (
        f"no launch took {loss}: the command started no policy training of verl, or one that does not see {OVERRIDES} "
        "or fspo_verl (env -i, another Python, a container, ssh, ray job submit, a job that starts later, "
        f"VERL_USE_EXTERNAL_PLUGINS). Both have to reach the process that starts verl{see('install.md')}"
    )


def _run(command: list[str], env: dict[str, str], warn: Callable[[], None]) -> int:
    """The exit code of a command, which gets the signals of this process; ``warn`` is called once, after a while."""
    signals, timeout = {*_SIGNALS, signal.SIGCHLD}, _PATIENCE
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # Where it is ignored, no end of a command is told. None is a handler that Python has not installed.
    inherited = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL

    def as_without_run() -> None:
        signal.signal(signal.SIGCHLD, inherited)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        process = subprocess.Popen(command, env=env, preexec_fn=as_without_run)
        while process.poll() is None:
            got = signal.sigtimedwait(signals, timeout)
            if got is None and timeout == _PATIENCE:
                warn()
                timeout = float(2**31)
            elif got is not None and got.si_signo in _SIGNALS and got.si_code <= 0:
                process.send_signal(got.si_signo)  # a key of the terminal has reached the command by itself
        while signal.sigtimedwait(signals, 0):  # what came for the command is not for us
            pass
    finally:
        as_without_run()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _summary(launches: list[Receipt], loss: str, began: float) -> Iterator[str]:
    """A sentence on each kind of launch: where its records are, or why it has none; and what to do next."""
    kinds: dict[str, list[Receipt]] = {kind: [] for kind in _SENTENCES}
    for launch in launches:
        kinds[_became(launch, began)].append(launch)
    for kind, these in kinds.items():
        if these:
            losses = " and ".join(dict.fromkeys(one.loss or loss for one in these))
            yield f"{len(these)} launch{'es' * (len(these) > 1)} {_SENTENCES[kind].format(loss=losses)}"
    if not launches:
        yield _none_took(loss)
    if folders := [*dict.fromkeys(_to_report(one.records) for one in kinds[RECORDED] if one.records)]:
        yield f"next: fspo-verl report {shlex.join(folders)}{' -o report' if len(folders) > 1 else ''}"
    for_good: dict[str, None] = {}
    for one in (*kinds[RECORDED], *kinds[UNRECORDED]):
        words = [word for word in one.added if not word.startswith(f"{RECORDS_DIR}=")]
        out = f", take out {shlex.join(one.left_out)}" if one.left_out else ""
        for_good |= {f"for good: add {shlex.join(words)}{out}": None} if words else {}
    yield from for_good


def _to_report(records: str) -> str:
    """The folder of an attempt; that of its run where it has resumed, with the attempts before."""
    resumed = any(attempt.began > 1 and is_attempt(attempt.folder) for attempt in attempts_below(records))
    return str(Path(records).parent) if resumed else records


RECORDED, GOES_ON, ENDED, UNRECORDED = "recorded", "goes on", "ended", "unrecorded"
_SENTENCES = {
    RECORDED: "took {loss}, and recorded it",
    GOES_ON: "took {loss}, and goes on in the background, without a record yet",
    ENDED: "took {loss}, and ended before a first record of it",
    UNRECORDED: "took {loss}, and recorded nothing, as records_dir is null",
    REFUSED: "refused, see above",
    PRINTED: "printed a config with {loss}, and trained nothing",
}


def _became(launch: Receipt, began: float) -> str:
    """Say what has become of a launch of a command that began then, in seconds since the epoch."""
    if launch.state in (REFUSED, PRINTED):
        return launch.state
    with contextlib.suppress(OSError):
        files = Path(launch.records or os.devnull).rglob("step-*.parquet")
        if any(file.stat().st_mtime >= began for file in files):
            return RECORDED
    with contextlib.suppress(OSError):
        if Path(f"/proc/{launch.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
            return GOES_ON
    return ENDED if launch.records else UNRECORDED


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a full disk ends no training, and changes no exit code
        os.write(sys.stderr.fileno(), f"fspo-verl run: {text}\n".encode(errors="backslashreplace"))
