# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Launches verl's stock trainer on the ledger task, from a warm start, and watches it."""

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ledger
import pandas as pd
import psutil
import report

from fspo_verl.resume import TRACKER

HERE = Path(__file__).resolve().parent

# The band of this task: a little tighter than the default of 0.03.
EPS = 0.02
TRAIN_PROBLEMS, VALIDATION_PROBLEMS = 4096, 256


class Failure(Exception):
    """A phase failed; the message says why."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What is trained, and where its results go. Losses share the warm start of their seed."""

    output: Path
    loss: str = "fspo"
    rollout: str = "hf"
    seed: int = 0
    steps: int = 30
    overrides: tuple[str, ...] = ()

    @property
    def start(self) -> Path:
        return self.output / f"warm-start-seed{self.seed}"

    @property
    def run(self) -> Path:
        return self.output / f"{self.loss}-{self.rollout}-seed{self.seed}"

    @property
    def resumes(self) -> bool:
        return (self.run / "checkpoints" / TRACKER).exists()


def warm_start(experiment: Experiment) -> None:
    """Write the seed's data sets and its warm-started model, unless they are there."""
    start, seed = experiment.start, experiment.seed
    start.mkdir(parents=True, exist_ok=True)
    # Every seed has its own training problems; all seeds share the validation problems.
    for name, size, data_seed in (("train", TRAIN_PROBLEMS, 1_000 + seed), ("validation", VALIDATION_PROBLEMS, 999)):
        if not (start / f"{name}.parquet").exists():
            unfinished = start / f"{name}.unfinished"
            ledger.data_set(size, data_seed).to_parquet(unfinished)
            unfinished.rename(start / f"{name}.parquet")
    if not (start / "model").exists():
        unfinished = start / "model.unfinished"
        command = [sys.executable, HERE / "warm_start.py", unfinished, f"--seed={seed}"]
        # On matrices this small a second thread costs more than it brings.
        if subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode:
            raise Failure("the warm start failed, see above")
        unfinished.rename(start / "model")


def overrides(experiment: Experiment) -> list[str]:
    """The Hydra overrides that make ``--config-name fspo_cpu`` this experiment."""
    start, run = experiment.start, experiment.run
    loss = "actor_rollout_ref.actor.policy_loss"
    return [
        f"algorithm.policy_loss={experiment.loss}",
        f"cpu_rollout={experiment.rollout}",
        *([f"{loss}.eps_low={EPS}", f"{loss}.eps_high={EPS}"] if experiment.loss == "fspo" else []),
        f"{loss}.records_dir={run / 'records'}",
        f"{loss}.length_bins=[10,20,40]",
        f"data.train_files={start / 'train.parquet'}",
        f"data.val_files={start / 'validation.parquet'}",
        f"data.max_prompt_length={ledger.MAX_PROMPT_TOKENS}",
        f"data.max_response_length={ledger.MAX_RESPONSE_TOKENS}",
        f"data.seed={experiment.seed}",
        f"reward.custom_reward_function.path={HERE / 'ledger.py'}",
        f"actor_rollout_ref.model.path={start / 'model'}",
        f"actor_rollout_ref.rollout.seed={experiment.seed}",
        # 32 prompts x 8 responses per rollout, in four optimiser steps: from the second on the ratio is not 1.
        "data.train_batch_size=32",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"actor_rollout_ref.rollout.max_model_len={ledger.MAX_PROMPT_TOKENS + ledger.MAX_RESPONSE_TOKENS}",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
        "actor_rollout_ref.actor.optim.lr=2e-4",
        "trainer.logger=[console,file]",
        "trainer.project_name=quickstart",
        f"trainer.experiment_name={run.name}",
        f"trainer.total_training_steps={experiment.steps}",
        f"trainer.total_epochs={experiment.steps}",  # an upper bound: the number of steps ends the run
        "trainer.test_freq=5",
        # A run that goes on from a checkpoint has been validated there.
        f"trainer.val_before_train={not experiment.resumes}",
        "trainer.save_freq=5",
        "trainer.max_actor_ckpt_to_keep=1",
        # Besides what resuming needs, the model in transformers' format.
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.actor.checkpoint.load_contents=[model,optimizer,extra]",
        f"trainer.default_local_dir={run / 'checkpoints'}",
        f"hydra.run.dir={run / 'hydra'}",
        *experiment.overrides,
    ]


def train(experiment: Experiment) -> int:
    """Run verl's trainer to its end, printing a line per step; return the peak memory of its processes in bytes."""
    run = experiment.run
    # verl truncates its metrics file, so an attempt that resumes gets one of its own.
    if not experiment.resumes:  # an attempt that was interrupted before its first checkpoint
        shutil.rmtree(run / "records", ignore_errors=True)
    attempts = len(list(run.glob("metrics-*.jsonl")))
    log, metrics = run / "train.log", run / f"metrics-{attempts + 1}.jsonl"
    env = os.environ | {"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(metrics), "HYDRA_FULL_ERROR": "1"}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "fspo_cpu", *overrides(experiment)]
    with log.open("a") as log_file:
        trainer = subprocess.Popen(command, env=env, stdout=log_file, stderr=subprocess.STDOUT)
    process, peak, printed = psutil.Process(trainer.pid), 0, 0
    try:
        running = True
        while running:
            running = trainer.poll() is None
            peak = max(peak, _memory(process))
            rows = report.read_metrics([metrics])
            _print_steps(rows.iloc[printed:], experiment.steps)
            printed = len(rows)
            time.sleep(2)
    finally:
        _stop(process)
    if trainer.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "warn" not in line.lower()]
        raise Failure("\n".join([*lines[-25:], f"verl's trainer ended with {trainer.returncode}; whole log: {log}"]))
    return peak


def _print_steps(rows: pd.DataFrame, steps: int) -> None:
    for step, row in rows.iterrows():
        line = f"  step {step:3d}/{steps}"
        if pd.notna(row.reward):  # step 0 is a validation only
            line += f"  reward {row.reward:.2f}  clipped {row.clip_fraction:6.1%}  {row.seconds:5.1f} s"
        if pd.notna(row.accuracy):
            line += f"  validation accuracy {row.accuracy:.2f}"
        print(line, flush=True)


def _memory(process: psutil.Process) -> int:
    """Memory of a process and all below it, in bytes; what they share counts once."""
    total = 0
    for member in _tree(process):
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            pass
    return total


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
