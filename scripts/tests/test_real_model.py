# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""scripts/real_model.sh: its task, its two ways to start, and that it trains SmolLM2-135M-Instruct.

What needs reasoning-gym, the model's package and minutes runs by ``scripts/test.sh --real``.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import gguf_to_hf
import pytest
import small_gguf
from hydra import compose, initialize_config_module
from real_experiment import RealExperiment, launch

from fspo_verl.analysis.runs import metric_files, read_metrics
from fspo_verl.observe.records import read_records

real = pytest.mark.real
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/real/run.py"
SUMS = {"max_terms": 3, "max_digits": 1, "operators": ["+"], "allow_parentheses": False}


def real_model(*options, **env) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *options], env=os.environ | env, capture_output=True, text=True)


def test_a_model_that_is_not_there_is_refused_at_once(tmp_path):
    refused = real_model("--parse-only", MODEL_PATH=str(tmp_path))
    assert refused.returncode == 2 and refused.stderr.endswith(
        f"MODEL_PATH={tmp_path} is no folder with a config.json\n"
    )
    (tmp_path / "config.json").touch()
    assert real_model("--parse-only", MODEL_PATH=str(tmp_path)).returncode == 0


@real
def test_validation_problems_are_no_training_problems_and_seeds_differ():
    import task

    held_out = task.data_set("basic_arithmetic", SUMS, 50, seed=0)
    questions = {prompt[0]["content"] for prompt in held_out.prompt}
    first, again, other = (
        task.data_set("basic_arithmetic", SUMS, 200, seed, frozenset(questions)) for seed in (1, 1, 2)
    )
    assert first.equals(again) and not first.prompt.equals(other.prompt)
    assert len(first) == 200 and not questions & {prompt[0]["content"] for prompt in first.prompt}
    asked = task.data_set("basic_arithmetic", SUMS, 200, 1, instruction="Be brief.")
    held_out = frozenset(prompt[0]["content"] for prompt in asked.prompt[:20])
    assert all(prompt.endswith(("? Be brief.", ". Be brief.")) for prompt in held_out)
    other = task.data_set("basic_arithmetic", SUMS, 200, 1, held_out, "Be brief.")
    assert not held_out & {prompt[0]["content"] for prompt in other.prompt}
    for name, options in (("basic_arithmetic", {"no_such": 1}), ("no_such", {})):
        with pytest.raises(ValueError, match="no_such"):
            task.data_set(name, options, 4, seed=0)


@real
def test_score():
    import task

    right = [("6 + 10 = 16", "16"), ("It is 1,016.", "1016"), ("<answer>16</answer> and 3", "16")]
    wrong = [("16, as 6 + 10 is", "16"), ("116", "16"), ("-4", "4"), ("", "16")]  # what is said last counts
    for response, truth in right + wrong:
        entry = {"entry": json.dumps({"question": "", "answer": truth, "metadata": {}})}
        assert task.compute_score("basic_arithmetic", response, truth, entry) == ((response, truth) in right)


@pytest.mark.parametrize("rollout", ["vllm", "hf"])
def test_a_gpus_launch_composes(rollout):
    experiment = RealExperiment(ROOT, rollout=rollout, gpu=True, model="a/model", task_name="basic_arithmetic")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("fspo_cpu", launch.overrides(experiment))
    actor = config.actor_rollout_ref.actor
    assert config.trainer.device == "cuda" and config.actor_rollout_ref.rollout.name == rollout
    assert actor.fsdp_config.mixed_precision.param_dtype == "fp32" and actor.policy_loss.eps > 0


@real
def test_another_model_trains_and_an_interrupted_run_goes_on(tmp_path):
    gguf_to_hf.convert(small_gguf.write(tmp_path / "small.gguf"), tmp_path / "model")
    options = ["--output", tmp_path / "runs", "--steps", "3", "--response-tokens", "16", "--prompt-tokens", "160"]
    options += ["--", "data.val_max_samples=8", "trainer.save_freq=1"]
    checkpoint = tmp_path / "runs/fspo-hf-seed0/checkpoints/latest_checkpointed_iteration.txt"
    environment = os.environ | {"MODEL_PATH": str(tmp_path / "model")}
    with subprocess.Popen([sys.executable, SCRIPT, *options], env=environment, stderr=subprocess.PIPE) as first:
        while first.poll() is None and not checkpoint.exists():
            time.sleep(0.2)
        first.terminate()
        assert "goes on from the last checkpoint" in first.stderr.read().decode()
    done = int(checkpoint.read_text())
    assert 1 <= done < 3

    second = real_model(*options, MODEL_PATH=str(tmp_path / "model"))
    assert second.returncode == 0, second.stdout + second.stderr
    shown = [int(step) for step in re.findall(r"step +(\d+)/3", second.stdout)]
    assert shown == list(range(done + 1, 4))
    other = real_model(*options)
    assert other.returncode != 0 and "holds a run with" in other.stderr


@real
def test_smollm2_trains(tmp_path):
    options = ["--output", tmp_path, "--steps", "2", "--", "data.val_max_samples=16"]
    trained = real_model(*options)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "step   2/2  reward" in trained.stdout and "validation accuracy  0." in trained.stdout
    run = tmp_path / "fspo-hf-seed0"

    # The rollouts may be in bfloat16; the ratio knows only the trainer's float32.
    records = read_records(run / "records")
    assert len(records) == 2 * 64 and records.prompt.nunique() == 16
    first = records[records.mini_batch == 0]
    assert (first.log_ratio.abs() < 1e-3).all() and (records.quadratic_variation[records.mini_batch == 3] > 1e-4).any()

    metrics = read_metrics(metric_files(run))
    assert metrics["response_length/max"].max() > 4 * metrics["response_length/min"].min()
    for command in (["report", run, "-o", tmp_path / "report"], ["calibrate", run]):
        said = subprocess.run([sys.executable, "-m", "fspo_verl.cli", *command], capture_output=True, text=True)
        assert said.returncode == 0, said.stdout + said.stderr

    again = real_model(*options)
    assert again.returncode == 0 and "finished before" in again.stdout
