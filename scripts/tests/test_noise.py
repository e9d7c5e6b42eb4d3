# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The noise of the engine, as the bench measures it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.long
def test_float32_and_one_layout_silence_the_noise():
    settings = ["bf16, 8 rows, then 1", "fp32, 8 rows, then 1", "bf16, 4 rows both times"]
    command = [sys.executable, BENCH / "noise.py", "--responses", "16", "--longest", "48", "--settings", *settings]
    ended = subprocess.run(command, env=os.environ | {"VERL_PLATFORM": "cpu"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    rounded, full, same = (float(ended.stdout.split(f"\n{name} ")[1].split()[0]) for name in settings)
    assert rounded > 1e-3 > 1e-5 > full and same < rounded / 10
