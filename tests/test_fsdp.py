# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One mini-batch over real FSDP2 ranks and every cut into micro-batches: the same gradient, the same metrics."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RANK = Path(__file__).parent / "fsdp_rank.py"


def train(model, output, ranks, cut):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {
        "VERL_PLATFORM": "cpu",
        "WG_BACKEND": "ray",
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, RANK, model, output, cut]
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **env, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(ranks)
    ]
    logs = [process.communicate(timeout=600)[0].decode() for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(log[-3000:] for log in logs)
    return torch.load(output)


@pytest.fixture(scope="module")
def whole(untrained_model, tmp_path_factory):
    return train(untrained_model, tmp_path_factory.mktemp("whole") / "out.pt", ranks=1, cut="8")


@pytest.mark.parametrize(
    "ranks, cut", [(1, "1"), (1, "dynamic:100"), (1, "packed:4"), (2, "4"), (2, "dynamic:110"), (4, "2")]
)
def test_gradient_and_metrics_do_not_depend_on_ranks_and_micro_batches(untrained_model, whole, tmp_path, ranks, cut):
    got = train(untrained_model, tmp_path / "out.pt", ranks, cut)
    norm = torch.cat([g.flatten() for g in whole["gradient"].values()]).norm()
    assert norm > 0
    for name, expected in whole["gradient"].items():
        torch.testing.assert_close(got["gradient"][name], expected, rtol=1e-5, atol=1e-6 * norm.item())
    for name, value in whole["metrics"].items():
        if name.startswith("actor/fspo/"):  # counts to the last one, sums but for the order of summation
            expected = value if "fraction" in name else pytest.approx(value, rel=1e-5, abs=1e-7)
            assert got["metrics"][name] == expected, name
    assert 0 < whole["metrics"]["actor/fspo/clip_fraction"] < 1
    assert whole["metrics"]["actor/fspo/sequence_fraction"] == 7 / 8
