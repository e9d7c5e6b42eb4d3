# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Two raylets on this machine rehearse a launch on two nodes: a rank on each, and one report on the records of both.

Real nodes differ in their network, and in that they do not share a disk.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from small_training import MAIN, write_task
from small_training import overrides as small_overrides

from fspo_verl import cli
from fspo_verl.observe.attempts import attempts_below

pytestmark = [pytest.mark.long, pytest.mark.trains]
# What verl ends with, by who notices first: Ray, or the rank that waits for the lost one in a collective.
LOST = ("ActorDiedError", "ActorUnavailableError", "closed by peer", "reset by peer")
PATIENCE = 600  # seconds for anything here; a failure, not a measurement


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(what, process: subprocess.Popen, log: Path):
    """The first true value of ``what()``; fails where the process ends before."""
    deadline = time.monotonic() + PATIENCE
    while not (value := what()):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
        time.sleep(0.2)
    return value


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Two started raylets, each with the slot of one rank; RAY_ADDRESS leads to them."""
    # `ray start` of Ray 2.60 asks for a token, which drivers do not bring by default.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    address, log, processes = f"127.0.0.1:{free_port()}", tmp_path / "ray.log", []
    patience = {"RAY_raylet_start_wait_time_s": "300", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch, log.open("w") as file:  # sockets need a short path
        head = ["--head", f"--port={address.partition(':')[2]}", f"--temp-dir={scratch}", "--include-dashboard=false"]
        head += [f"--ray-client-server-port={free_port()}"]
        for where in (head, [f"--address={address}"]):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where, "--disable-usage-stats"]
            # Two raylets on one machine must not meet at a default port.
            command += ["--num-gpus=1", "--num-cpus=16", f"--object-store-memory={2**28}", "--metrics-export-port=0"]
            command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
            command += ["--dashboard-agent-grpc-port=0"]
            processes.append(subprocess.Popen(command, env=os.environ | patience, stdout=file, stderr=file))
            wait_for(lambda: log.read_text().count("Ray runtime started") == len(processes), processes[-1], log)
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield processes
        for process in reversed(processes):
            tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            process.wait()
            for survivor in psutil.wait_procs(tree, timeout=20)[1]:
                survivor.kill()


def ranks(node: subprocess.Popen) -> list[psutil.Process]:
    """The FSDP ranks that run on a node."""
    children = psutil.Process(node.pid).children(recursive=True)
    return [child for child in children if child.is_running() and "ray::WorkerDict" in " ".join(child.cmdline())]


def test_a_lost_worker_ends_a_launch_and_the_next_one_trains_on_both_nodes(nodes, untrained_model, tmp_path, capsys):
    write_task(tmp_path, problems=64)

    def launched(steps: int, metrics: Path) -> tuple[subprocess.Popen, Path]:
        command = [
            *(*MAIN, "algorithm.policy_loss=fspo"),
            *small_overrides(tmp_path, untrained_model),
            f"actor_rollout_ref.actor.policy_loss.records_dir={tmp_path / 'run/records'}",
            *("trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"trainer.total_training_steps={steps}"),
            *("trainer.total_epochs=100", "trainer.save_freq=-1", "trainer.test_freq=-1"),
            f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
            # The cluster has resources of its own, and an environment.
            *("ray_kwargs.ray_init.num_cpus=null", "ray_kwargs.ray_init.num_gpus=null"),
            f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={metrics}",
            f"hydra.run.dir={tmp_path / 'run/hydra'}",
        ]
        log = tmp_path / f"{steps}.log"
        with log.open("w") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, cwd=tmp_path), log

    process, log = launched(50, tmp_path / "lost.jsonl")
    wait_for(lambda: {file.rank for attempt in attempts_below(tmp_path / "run") for file in attempt.files} == {0, 1},
             process, log)  # fmt: skip
    assert [len(ranks(node)) for node in nodes] == [1, 1]
    ranks(nodes[1])[0].kill()
    assert process.wait(timeout=PATIENCE) != 0 and any(error in log.read_text() for error in LOST)
    wait_for(lambda: not any(map(ranks, nodes)), nodes[0], log)

    process, log = launched(2, tmp_path / "run/metrics.jsonl")
    assert process.wait(timeout=PATIENCE) == 0, log.read_text()[-5000:]
    first, second = attempts_below(tmp_path / "run")
    assert not first.counted and [(file.step, file.rank) for file in second.counted] == [(1, 0), (1, 1)]
    assert cli.main(["report", str(tmp_path / "run")]) == 0 and "page" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "run/report/report.json").read_text())["runs"]
    assert (row["steps"], row["records"]) == (2, 2 * 8 * 4) and 0 < row["clip"]["rate"] < 1
