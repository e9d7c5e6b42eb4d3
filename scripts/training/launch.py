# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs verl's stock trainer on this machine and watches it; what is trained, and on what, a subclass says."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import report
from options import Failure

from fspo_verl.launch import override

TRACKER = "latest_checkpointed_iteration.txt"  # of a folder of checkpoints: verl names the last one there


def stop_on_signals() -> None:
    """Turn Ctrl-C and SIGTERM into a KeyboardInterrupt with the signal's number, so that what runs is stopped."""

    def interrupt(number: int, _frame) -> None:
        raise KeyboardInterrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def check_place(output: Path) -> None:
    """Refuse folders in which verl or Ray would fail later.

    Raises:
        Failure: says which, and how to fix it.
    """
    place = Path(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")), "ray")
    # The longest of Ray's sockets, with a number of seven digits for the process.
    socket_file = place / "session_2000-01-01_00-00-00_000000_1234567/sockets/plasma_store"
    if "RAY_ADDRESS" not in os.environ and len(os.fsencode(socket_file)) > 107:
        raise Failure(f"Ray cannot open its sockets in {place}, whose name is too long; export RAY_TMPDIR=/tmp")
    if re.search(r"[*?]|\[.*\]|\$\{", str(output)):
        raise Failure(f"{output} cannot be read as the name of one folder (* ? [...] and ${{...}}); choose another")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A training and the folder of its results.

    Attributes:
        name: of the run where results show it, if not that of its loss.
    """

    output: Path
    loss: str = "fspo"
    rollout: str = "hf"
    seed: int = 0
    steps: int = 30
    overrides: tuple[str, ...] = ()
    gpu: bool = False  # trains on one, with what fspo_cpu sets; without one verl gets VERL_PLATFORM=cpu
    name: str | None = None

    @property
    def shown_as(self) -> str:
        """The name of the run in results."""
        return self.name or self.loss

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return self.output / f"{self.shown_as}-{self.rollout}-seed{self.seed}"

    @property
    def resumes(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return (self.run / "checkpoints" / TRACKER).exists()

    @property
    def settings(self) -> dict:
        """The settings that decide the results, besides those in the name of :attr:`run`."""
        named = {"loss": self.loss} if self.name else {}
        return {"steps": self.steps, "overrides": list(self.overrides)} | named

    preparation = "preparation"  # what prepare() is called where times are shown

    def prepare(self) -> None:
        """Make the data sets and the model to start from, unless they are there."""
        raise NotImplementedError

    def task(self) -> list[str]:
        """Hydra overrides: model, data, reward, sizes, learning rate, clip range."""
        raise NotImplementedError


def overrides(experiment: Experiment) -> list[str]:
    """The Hydra overrides of a launch."""
    run, policy_loss = experiment.run, "actor_rollout_ref.actor.policy_loss"
    return [
        f"algorithm.policy_loss={experiment.loss}",
        f"cpu_rollout={experiment.rollout}",
        f"trainer.device={'cuda' if experiment.gpu else 'cpu'}",
        override(f"{policy_loss}.records_dir", run / "records"),
        f"data.seed={experiment.seed}",
        f"actor_rollout_ref.rollout.seed={experiment.seed}",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
        "trainer.logger=[console,file,tensorboard]",
        f"trainer.experiment_name={run.name}",
        f"trainer.total_training_steps={experiment.steps}",
        f"trainer.total_epochs={experiment.steps}",  # an upper bound: the number of steps ends the run
        # A run that goes on from a checkpoint has been validated there.
        f"trainer.val_before_train={not experiment.resumes}",
        override("trainer.validation_data_dir", run / "validation"),
        "trainer.save_freq=5",
        "trainer.max_actor_ckpt_to_keep=1",
        # Besides what resuming needs, the model in transformers' format.
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.actor.checkpoint.load_contents=[model,optimizer,extra]",
        override("trainer.default_local_dir", run / "checkpoints"),
        override("hydra.run.dir", run / "hydra"),
        *experiment.task(),
        *experiment.overrides,
    ]


def main(experiment: Experiment, name: str, seconds: dict[str, float]) -> None:
    """Prepare and train an experiment, or what is missing of it, and print what came out; exits on a failure.

    Args:
        name: of the script, for messages.
        seconds: what the phases before this one took, by name.
    """
    stop_on_signals()
    summary_file = experiment.run / "summary.json"
    try:
        check_place(experiment.output)
        claim(experiment)
        begin = time.monotonic()
        experiment.prepare()
        seconds = seconds | {experiment.preparation: time.monotonic() - begin}
        if summary_file.exists():
            print(f"[train] finished before: {experiment.run}")
        else:
            print(f"[train] {experiment.run.name}, {experiment.steps} steps (verl needs a minute to start)", flush=True)
            begin = time.monotonic()
            train(experiment)
            seconds |= {"training": time.monotonic() - begin}
            report.draw(experiment.run, f"{experiment.shown_as}, seed {experiment.seed}")
            summary = report.summarize(experiment.run) | {"seconds": seconds}
            summary_file.write_text(json.dumps(summary, indent=1))
        report.show(json.loads(summary_file.read_text()), experiment.run)
        # A training that has finished does not fail for the sake of its page.
        subprocess.run([sys.executable, "-m", "fspo_verl.cli", "report", str(experiment.run)], check=False)
        command = os.path.relpath(Path(sys.executable).with_name("fspo-verl"))
        print(f"\nNext, your own script: {command} run -- bash your_script.sh")
    except Failure as failure:
        sys.exit(f"{name} failed: {failure}")
    except KeyboardInterrupt as signalled:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(128 + signalled.args[0])


def claim(experiment: Experiment) -> None:
    """Refuse a folder that holds a run with other settings: its results are not this experiment's.

    Raises:
        Failure: it does.
    """
    file, settings = experiment.run / "settings.json", experiment.settings
    if file.exists() and (found := json.loads(file.read_text())) != settings:
        raise Failure(
            f"{experiment.run} holds a run with {found}, not {settings}; remove it, or choose another --output"
        )
    experiment.run.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))


_CPU_ENV = {
    # OpenMP threads that wait asleep: on cores that others use, too, those that spin slow each other down.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    # glibc keeps what is freed: large tensors that go back to the kernel have all their pages faulted in again.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}


def train(experiment: Experiment) -> None:
    """Run verl's trainer to its end, printing a line per step.

    Raises:
        Failure: the trainer failed.
    """
    run = experiment.run
    # verl truncates its metrics file, so an attempt that resumes gets one of its own.
    if not experiment.resumes:  # an attempt that was interrupted before its first checkpoint
        shutil.rmtree(run / "records", ignore_errors=True)
    attempts = len(list(run.glob("metrics-*.jsonl")))
    log, metrics = run / "train.log", run / f"metrics-{attempts + 1}.jsonl"
    written = {"VERL_FILE_LOGGER_PATH": str(metrics), "TENSORBOARD_DIR": str(run / "tensorboard")}
    env = os.environ | written | {"HYDRA_FULL_ERROR": "1"}
    if experiment.gpu:
        modules = filter(None, (env.get("VERL_USE_EXTERNAL_MODULES"), "fspo_verl_cpu.rollout"))
        env |= {"VERL_USE_EXTERNAL_MODULES": ",".join(modules)}
    else:
        env = _CPU_ENV | env | {"VERL_PLATFORM": "cpu"}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "fspo_cpu", *overrides(experiment)]
    with log.open("a") as log_file:
        trainer = subprocess.Popen(command, env=env, stdout=log_file, stderr=subprocess.STDOUT)
    process, printed = psutil.Process(trainer.pid), 0
    try:
        running = True
        while running:
            running = trainer.poll() is None
            rows = report.read_metrics([metrics])
            _print_steps(rows.iloc[printed:], experiment.steps)
            printed = len(rows)
            time.sleep(2)
    finally:
        _stop(process)
    if trainer.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "warn" not in line.lower()]
        raise Failure("\n".join([*lines[-25:], f"verl's trainer ended with {trainer.returncode}; whole log: {log}"]))


def _print_steps(rows: pd.DataFrame, steps: int) -> None:
    for step, row in rows.iterrows():
        line = f"  step {step:3d}/{steps}"
        if pd.notna(row.reward):  # step 0 is a validation only
            rate = "     –" if pd.isna(row.clip_rate) else f"{row.clip_rate:6.1%}"  # no response has an advantage
            line += f"  reward {row.reward:.2f}  clip rate {rate}  {row.seconds:5.1f} s"
        if pd.notna(row.accuracy):
            line += f"  validation accuracy {row.accuracy:.2f}"
        print(line, flush=True)


def _stop(process: psutil.Process) -> None:
    """Terminate a process that still runs, so that Ray cleans up, and end what is left of its tree."""
    tree = _tree(process)
    for member in tree[:1]:
        member.terminate()
    for survivor in psutil.wait_procs(tree, timeout=20)[1]:
        survivor.kill()


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
