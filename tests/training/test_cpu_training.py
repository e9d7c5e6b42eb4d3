# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Short real runs of verl's stock trainer on the CPU: Ray, FSDP2 workers, a rollout engine, and the FSPO loss."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import live_reference
import numpy as np
import pandas as pd
import pytest
from small_training import MAIN, cpu_overrides, write_task
from small_training import overrides as small_overrides
from transformers import AutoModelForCausalLM

from fspo_verl.analysis import calibration, fit
from fspo_verl.analysis.clip_rates import MIN_COUNT
from fspo_verl.analysis.judgement import judge
from fspo_verl.analysis.runs import read_run
from fspo_verl.observe.metrics import LENGTH_BINS
from fspo_verl.observe.records import read, text_hash

ROOT = Path(__file__).parents[2]
STEPS = 2
# The recipe, which takes the override on verl's own config, with all that the CPU rollout's own loop leaves out: verl's
# agent loop, two FSDP ranks, and a reference policy.
RECIPE = [
    *("bash", ROOT / "recipe/fspo/run_qwen3_8b_fsdp.sh", *cpu_overrides()),
    *("actor_rollout_ref.rollout.agent.agent_loop_manager_class=null", "reward.num_workers=1"),
    *("actor_rollout_ref.rollout.agent.num_workers=1", "trainer.n_gpus_per_node=2"),
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
]
VLLM = [*MAIN, "algorithm.policy_loss=fspo", "cpu_rollout=vllm"]
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs requirements/cpu-vllm.txt")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with problems and a reward function."""
    return write_task(tmp_path_factory.mktemp("task"), problems=16)


@pytest.mark.trains
@pytest.mark.parametrize("words", [pytest.param(RECIPE, id="recipe"), pytest.param(VLLM, id="vllm", marks=needs_vllm)])
def test_training(task, untrained_model, tmp_path, words):
    command = [
        *words,
        *small_overrides(task, untrained_model),
        f"actor_rollout_ref.actor.policy_loss.records_dir={tmp_path / 'records'}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
        f"trainer.test_freq={STEPS}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        f"hydra.run.dir={tmp_path / 'hydra'}",
    ]
    env = os.environ | {"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"  # whose python3 the recipe takes
    # Ray's workers keep the pipe open, so a file.
    with (tmp_path / "log").open("w") as log:
        code = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path).returncode
    said = (tmp_path / "log").read_text()
    assert code == 0, said[-5000:]

    log = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))
    recorded = read(tmp_path / "records")
    records = recorded.table
    # Each problem is drawn once, and is known by what it says.
    problems = {text_hash(messages) for messages in pd.read_parquet(task / "problems.parquet").prompt}
    assert set(records.prompt_text_hash) == problems and len(problems) == 16
    for metrics in (line["data"] for line in log):
        # The rollout samples from exactly the policy that is trained, at every step: the weight sync is complete.
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["actor/grad_norm"] > 0
        assert 0 < metrics["critic/score/mean"] < 1
        # One record per response and optimiser step, and metrics that equal what they add up to, to the last count.
        step = records[records.step == metrics["training/global_step"]]
        assert step.groupby("mini_batch").size().to_dict() == {0: 16, 1: 16}
        assert set(step.groupby("prompt", observed=True).size()) == {4} and step.prompt.nunique() == 8
        assert (step[step.mini_batch == 0].log_ratio.abs() < 1e-3).all()
        series = {name: value for name, value in metrics.items() if name.startswith("fspo/")}
        expected = live_reference.series(step, recorded.settings, LENGTH_BINS, MIN_COUNT)
        assert series == pytest.approx({name: expected[name] for name in series}, rel=1e-6, abs=1e-12)
        assert len(series) <= 30 and not any(name.startswith("actor/fspo/") for name in metrics)
        assert 0 < series["fspo/clip_rate/all"] < 1
        # Trainer and engine differ by rounding: not at all in some runs, but every token is measured.
        assert (step.rollout_length == step.length).all() and (step.staleness == 0).all()
        assert (step.rollout_log_ratio.abs() < 1e-3).all() and series["fspo/mismatch_sigma"] < 1e-4
        assert (step.truncated == (step.length == 20)).all() and 0 < step.truncated.mean()
    assert "val-core/ledger/acc/mean@1" in log[-1]["data"]

    # `report` and `calibrate` say the same of it, also where so few responses lie all on one side of a band's centre.
    run = read_run(tmp_path, "run")
    side = np.sign(records.advantage)
    target = min((sign * records.log_ratio[side == sign] > 0).mean() for sign in (1, -1)) / 2  # which a band can reach
    if target > 0:
        *told, band = calibration.calibrate(run, target)
        assert told[0] == judge(run, target).findings[0] and band.id == calibration.EPS
    else:
        with pytest.raises(fit.Unreachable, match=r"only 0.0% of the responses with A [<>] 0 lie"):
            calibration.calibrate(run, 0.1)

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoints/global_step_{STEPS}/actor/huggingface")
    before = AutoModelForCausalLM.from_pretrained(untrained_model).state_dict()
    moved = {name: (weight - before[name]).abs().max().item() for name, weight in trained.state_dict().items()}
    assert min(moved.values()) > 0, moved
