# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The recipe as verl's recipe repository would take it, and the patch for verl itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_training import cpu_overrides, write_task

from fspo_verl.observe.records import read_records

RECIPE = Path(__file__).parents[2] / "recipe"
SCRIPT = RECIPE / "fspo/run_qwen3_8b_fsdp.sh"


@pytest.mark.long
@pytest.mark.trains
def test_the_script_trains(tmp_path, untrained_model):
    write_task(tmp_path, problems=16)
    small = {
        "MODEL_PATH": str(untrained_model),
        "TRAIN_FILES": f"['{tmp_path}/problems.parquet']",
        "VAL_FILES": f"['{tmp_path}/problems.parquet']",
        "RUN_DIR": str(tmp_path / "run"),
        "TRAIN_BATCH_SIZE": "8",
        "PPO_MINI_BATCH_SIZE": "2",
        "MAX_PROMPT_LENGTH": "43",
        "MAX_RESPONSE_LENGTH": "20",
        "ROLLOUT_N": "4",
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    reward = f"reward.custom_reward_function.path={tmp_path}/reward.py"
    command = ["bash", SCRIPT, *cpu_overrides(), reward, "trainer.total_epochs=1", "trainer.test_freq=-1"]
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | small, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    records = read_records(tmp_path / "run")
    assert records.attrs["settings"].loss == "fspo" and len(records) == 2 * 8 * 4


@pytest.mark.parametrize("checkout", [None, os.environ.get("VERL_CHECKOUT")])
def test_the_patch_adds_the_script_to_verl(checkout, tmp_path):
    """VERL_CHECKOUT names a folder with verl's main; an empty one takes the new files alone."""
    new_files = [] if checkout else ["--exclude=docs/index.rst"]
    folder = tmp_path / "verl"
    shutil.copytree(checkout, folder, symlinks=True) if checkout else folder.mkdir()
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    subprocess.run(["git", "apply", *new_files, RECIPE / "verl.patch"], cwd=folder, check=True)
    assert (folder / "examples/fspo_trainer" / SCRIPT.name).read_text() == SCRIPT.read_text()
    assert checkout is None or "algo/fspo.md" in (folder / "docs/index.rst").read_text()
