# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A training on two FSDP ranks that SIGKILL ends, and the same command once more: which records there are."""

import contextlib
import os
import signal
import subprocess
import sys
import warnings

import psutil
import pytest
from small_training import overrides as small_overrides
from small_training import write_task
from test_cluster import wait_for

from fspo_verl.observe.attempts import attempts_below
from fspo_verl.observe.records import read

pytestmark = [pytest.mark.long, pytest.mark.trains]
STEPS = 6
TRACKER = "latest_checkpointed_iteration.txt"  # in which verl names the last checkpoint of a folder


@pytest.fixture
def launch(untrained_model, tmp_path):
    """Start the same training, which runs on; what is left of it ends with the test."""
    write_task(tmp_path, problems=64)
    started = []

    def started_anew(save_freq: int):
        command = [
            *(sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "fspo_cpu", "algorithm.policy_loss=fspo"),
            *small_overrides(tmp_path, untrained_model),
            f"actor_rollout_ref.actor.policy_loss.records_dir={tmp_path / 'records'}",
            *("trainer.n_gpus_per_node=2", f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=100"),
            *(f"trainer.save_freq={save_freq}", "trainer.test_freq=-1"),
            f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
            f"hydra.run.dir={tmp_path / 'hydra'}",
        ]
        log = tmp_path / f"{len(started)}.log"
        env = os.environ | {"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(tmp_path / f"{len(started)}.jsonl")}
        env |= {"RAY_raylet_start_wait_time_s": "600", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            started.append(subprocess.Popen(command, stdout=file, stderr=file, cwd=tmp_path, env=env))
        return started[-1], log

    yield started_anew
    for process in started:
        kill(process)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL for a launch and all that it has started, its ranks and Ray first."""
    if process.poll() is None:
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("save_freq", [2, -1])
def test_a_training_that_is_killed_and_started_again_loses_no_step_and_has_none_twice(launch, tmp_path, save_freq):
    """It goes on from its checkpoint; without one it begins anew, and that is told."""
    checkpoints = tmp_path / "checkpoints"

    def is_between_two_checkpoints():
        found = attempts_below(tmp_path / "records")
        if len([file for attempt in found for file in attempt.files]) < 2:
            return False
        steps = read(tmp_path / "records").table.step
        return steps.max() >= 3 and (save_freq < 0 or (checkpoints / TRACKER).exists())

    process, log = launch(save_freq)
    wait_for(is_between_two_checkpoints, process, log)
    kill(process)
    trained = int(read(tmp_path / "records").table.step.max())
    began = int((checkpoints / TRACKER).read_text()) + 1 if save_freq > 0 else 1
    process, log = launch(save_freq)
    assert process.wait(timeout=1200) == 0, log.read_text()[-5000:]

    first, second = attempts_below(tmp_path / "records")
    assert first.run == second.run and (first.began, second.began) == (1, began)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        recorded = read(tmp_path / "records")
    expected = {(step, mini_batch): 16 for step in range(1, STEPS + 1) for mini_batch in (0, 1)}
    assert recorded.table.groupby(["step", "mini_batch"]).size().to_dict() == expected
    assert recorded.incomplete_steps == 0 and began <= trained
    assert any(f"{first.folder.name} is not read" in str(one.message) for one in warned) == (save_freq < 0)
