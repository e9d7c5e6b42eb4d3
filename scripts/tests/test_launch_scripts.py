# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The launch scripts: what they compose, what they refuse, and that their arguments train.

Not trained here, as it needs GPUs: the Megatron engine and vLLM rollouts. Of these the whole composed configuration is
checked.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import ledger
import live_reference
import pytest
import tcp_checkpoint_engine
import torch
from composed import composed
from small_training import REWARD, cpu_overrides

from fspo_verl.analysis.clip_rates import MIN_COUNT
from fspo_verl.analysis.runs import read_metrics
from fspo_verl.launch import checks, override
from fspo_verl.launch.view import Launch
from fspo_verl.observe.metrics import LENGTH_BINS
from fspo_verl.observe.records import read

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAUNCH_SCRIPTS = sorted(script.name for script in SCRIPTS.glob("run_*.sh"))
LOSSES = ("fspo", "gspo", "grpo", "fixed_band", "no_clip")
QWEN = "run_qwen3_8b_fspo.sh"


@pytest.fixture(scope="module")
def task(tmp_path_factory, untrained_model):
    """Environment variables that name a small model and small data sets."""
    folder = tmp_path_factory.mktemp("task")
    ledger.data_set(32, seed=0).to_parquet(folder / "dapo.parquet")
    for name in ("math500", "aime24", "aime25"):
        ledger.data_set(4, seed=1).to_parquet(folder / f"{name}.parquet")
    (folder / "reward.py").write_text(REWARD)
    return {"MODEL_PATH": str(untrained_model), "DATA_DIR": str(folder), "PYTHON": sys.executable}


def launch(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if key not in ("WANDB_API_KEY", "RAY_ADDRESS")}
    command = ["bash", SCRIPTS / script, *arguments]
    return subprocess.run(command, env=clean | variables, capture_output=True, text=True)


# In place of Python: writes down what a script runs, a line for each, and ends as it is told.
RECORDER = """#!/bin/sh
printf '%s\\0' "$@" >>"$0.calls"
printf '\\n' >>"$0.calls"
exit {code}
"""


@pytest.fixture
def run(task, tmp_path):
    """Run a script; how it ended, and the arguments of each Python that it started."""

    def ran(script: str, *arguments: str, code: int = 0, **variables: str):
        python, calls = tmp_path / "python", tmp_path / "python.calls"
        python.write_text(RECORDER.format(code=code))
        python.chmod(0o755)
        calls.write_text("")
        done = launch(script, *arguments, **task | {"PYTHON": str(python)} | variables)
        return done, [call.split("\0")[:-1] for call in calls.read_text().splitlines()]

    return ran


@pytest.fixture
def words(run, tmp_path):
    """Hydra's words of the training that a dry run shows as a command to paste, and hands to the doctor."""

    def of(script: str, *arguments: str, **variables: str) -> list[str]:
        done, (call,) = run(script, *arguments, DRY_RUN="1", **variables)
        main = [str(tmp_path / "python"), "-m", "verl.trainer.main_ppo"]
        assert done.returncode == 0 and call[:7] == ["-m", "fspo_verl.cli", "doctor", "--", *main], done.stderr
        command = done.stdout.split("\n\n")[0]
        assert shlex.split(command.replace("\\\n", "")) == [*main, *call[7:]] and len(command.splitlines()) <= 40
        return call[7:]

    return of


def wrong(words: list[str]) -> set[str]:
    """The checks that find something wrong with a training."""
    return {one.id for one in composed(words, checks.findings) if one.severity != "note"}


@pytest.mark.parametrize(("script", "loss"), zip(LAUNCH_SCRIPTS, LOSSES, strict=True))
def test_the_arguments_of_a_script_compose_and_nothing_is_wrong(script, loss, words, tmp_path):
    run_dir = tmp_path / "ö ( ) = { [ ' # & ~ ,"  # what Hydra's grammar has a meaning for
    given = words(script, POLICY_LOSS=loss, RUN_DIR=str(run_dir))
    assert wrong(given) == set() and f"algorithm.policy_loss={loss}" in given

    launch = composed(given, Launch)
    assert (launch.prompts_per_rollout, launch.optimizer_steps_per_rollout) == (512, 4)
    for key, place in {"hydra.run.dir": "hydra", "trainer.default_local_dir": "checkpoints"}.items():
        assert override(key, run_dir / place) in given
    assert not run_dir.exists()


@pytest.mark.parametrize("dynamic", ["False", "True"])
def test_updates_are_cut_as_old_log_probs_unless_dynamic(dynamic, words, tmp_path):
    variables = {"USE_DYNAMIC_BSZ": dynamic, "MICRO_BATCH_SIZE_PER_GPU": "4", "RUN_DIR": str(tmp_path / "run")}
    variables |= {"DATA_DIR": str(tmp_path / "else(where)"), "NDEVICES_PER_NODE": "2"}  # data is not needed
    given = words(QWEN, **variables)
    shown = dict(word.split("=", 1) for word in given)
    assert len(shown) > 37 and shown["trainer.n_gpus_per_node"] == "2"
    assert shown["data.train_files"] == f"['{tmp_path}/else(where)/dapo.parquet']"
    assert {key: value for key, value in shown.items() if "micro_batch" in key} == {
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "4",
        "critic.ppo_micro_batch_size_per_gpu": "4",
    }
    assert {key: value for key, value in shown.items() if "dynamic" in key or "shuffle" in key} == {
        "actor_rollout_ref.actor.use_dynamic_bsz": dynamic
    }
    assert wrong(given) == ({"numerical_noise"} if dynamic == "True" else set())


def test_the_same_command_resumes(words, tmp_path):
    (tmp_path / "metrics-1.jsonl").touch()
    (tmp_path / "checkpoints/global_step_1").mkdir(parents=True)
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("1")
    again = words(QWEN, RUN_DIR=str(tmp_path))
    assert wrong(again) == set() and any(f"{tmp_path}/metrics-2.jsonl" in word for word in again)
    assert wrong(words(QWEN, "trainer.resume_mode=disable", RUN_DIR=str(tmp_path))) == set()


@pytest.mark.long
@pytest.mark.trains
@pytest.mark.parametrize(
    ("script", "loss", "disagreement"),
    [
        (QWEN, "fspo", 1e-4),
        ("run_qwen3_8b_fspo_lora.sh", "gspo", 1e-2),  # verl sends merged weights to the rollout in bfloat16
    ],
)
def test_the_arguments_of_a_script_train(script, loss, disagreement, task, tmp_path):
    steps = {"TRAIN_BATCH_SIZE": "8", "TOTAL_STEPS": "2"}  # four optimiser steps per rollout, as by default
    train_small(script, task, tmp_path / "run", POLICY_LOSS=loss, **steps)

    lines = (tmp_path / "run/metrics-1.jsonl").read_text().splitlines()
    metrics = {record["step"]: record["data"] for record in map(json.loads, lines)}
    assert list(metrics) == [0, 1, 2]  # 0 is the validation before training
    for step in (1, 2):
        assert metrics[step]["actor/grad_norm"] > 0
        assert metrics[step]["training/rollout_probs_diff_max"] < disagreement
    assert "val-core/ledger/acc/mean@4" in metrics[2]
    assert (tmp_path / "run/checkpoints/global_step_2/actor").is_dir()

    recorded = read(tmp_path / "run")
    records = recorded.table
    assert len(records) == 2 * 8 * 4 and set(records.mini_batch) == {0, 1, 2, 3}
    # At each step the policy starts where the rollout left it, to the last bit, and moves with every mini-batch.
    first = records[records.mini_batch == 0]
    assert (first.log_ratio == 0).all() and (first.quadratic_variation == 0).all()
    assert (records[records.mini_batch == 3].groupby("step").quadratic_variation.max() > 1e-7).all()
    assert recorded.settings.loss == loss


@pytest.mark.long
@pytest.mark.trains
def test_the_arguments_of_the_asynchronous_script_train(task, tmp_path):
    overrides = [
        # A pool of one slot that trains, and one that generates.
        *("++ray_kwargs.ray_init.num_gpus=2", "++ray_kwargs.ray_init.num_cpus=64"),
        "actor_rollout_ref.rollout.checkpoint_engine.backend=tcp",
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=tcp_checkpoint_engine",
        # verl's own agent loop, one response at a time.
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class=null",
        *("actor_rollout_ref.rollout.agent.num_workers=1", "reward.num_workers=1"),
        # A band that the small steps of this learning rate leave.
        *(f"actor_rollout_ref.actor.policy_loss.eps_{side}=2e-5" for side in ("low", "high")),
    ]
    pools = {"NGPUS_PER_NODE": "1", "ROLLOUT_NGPUS_PER_NODE": "1"}
    steps = {
        "TRAIN_BATCH_SIZE": "8",
        "TOTAL_STEPS": "3",
        "PYTHONPATH": str(Path(tcp_checkpoint_engine.__file__).parent),
        "DUMP_LOG_PROBS": str(tmp_path),
    }
    train_small("run_qwen3_8b_fspo_async.sh", task, tmp_path / "run", *overrides, **pools, **steps)

    metrics = read_metrics([tmp_path / "run/metrics-1.jsonl"])
    assert list(metrics.index) == [0, 1, 2, 3]  # 0 is the validation before training
    assert (tmp_path / "run/checkpoints/global_step_3/actor").is_dir()
    recorded = read(tmp_path / "run")
    records = recorded.table
    # At first trainer and rollout have the same weights; what is generated while the trainer moves on is older by that.
    disagreement = metrics["training/rollout_probs_diff_max"]
    assert disagreement[1] < 1e-5 and disagreement.max() < records.quadratic_variation.max() ** 0.5
    # A step of the records is what lies between two weight syncs, as in metrics and checkpoints.
    assert records.groupby(["step", "mini_batch"]).size().to_dict() == {(s, m): 8 for s in (1, 2, 3) for m in range(4)}
    assert set(records.groupby("prompt", observed=True).size()) == {4} and records.prompt.nunique() == 3 * 8
    for step, of_step in records.groupby("step"):
        series = metrics.loc[step].filter(regex="^fspo/").dropna().to_dict()
        expected = live_reference.series(of_step, recorded.settings, LENGTH_BINS, MIN_COUNT)
        assert series == pytest.approx({name: expected[name] for name in series}, rel=1e-6, abs=1e-12)
        assert "fspo/clip_rate/all" in series and len(series) <= 30
    # S_r of every response, by hand.
    dumped = [row for file in tmp_path.glob("*.pt") for row in torch.load(file)]
    by_hand = [(prompt, ((old - engine) * mask).sum().item()) for prompt, old, engine, mask in dumped]
    got = records[["prompt", "rollout_log_ratio"]].astype({"prompt": str}).itertuples(index=False, name=None)
    for (prompt, value), (expected_prompt, expected) in zip(sorted(got), sorted(by_hand), strict=True):
        assert prompt == expected_prompt and value == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert max(abs(value) for _, value in by_hand) > 1e-4  # of those that are older
    # The band refers to the weights of the last sync: at the first update S is 0, then it moves on and out.
    by_update = records.groupby("mini_batch")
    assert by_update.quadratic_variation.max()[0] == 0 < 1e-7 < by_update.quadratic_variation.max()[3]
    assert by_update.clipped.mean()[0] == 0 and 0 < by_update.clipped.mean()[3] < 1


def train_small(script: str, task: dict, run_dir: Path, *overrides: str, **variables: str) -> None:
    """Run a launch script to its end, with model, data, lengths and batch made small, and on a CPU."""
    small = {
        "MAX_PROMPT_LENGTH": "43",
        "MAX_RESPONSE_LENGTH": "20",
        "PPO_MINI_BATCH_SIZE": "2",
        "ROLLOUT_N": "4",
        "TEST_FILES": f"{task['DATA_DIR']}/math500.parquet",
        "VERL_PLATFORM": "cpu",
        "RUN_DIR": str(run_dir),
    }
    reward = f"reward.custom_reward_function.path={task['DATA_DIR']}/reward.py"
    run = launch(script, *cpu_overrides(), reward, *overrides, **task, **small, **variables)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


@pytest.mark.parametrize("script", LAUNCH_SCRIPTS)
def test_help_shows_every_variable_with_its_value(script, tmp_path):
    run = launch(script, "--help", PYTHON="/no/python", ACTOR_LR="3e-7")
    assert run.returncode == 0 and run.stderr == ""
    assert "ACTOR_LR=3e-7" in run.stdout
    shown = [line.split("=")[0].strip() for line in run.stdout.splitlines() if line.startswith("  ") and "=" in line]
    sources = [(SCRIPTS / script).read_text(), (SCRIPTS / "launch/body.sh").read_text()]
    assigned = {line.split("=")[0] for text in sources for line in text.splitlines() if "=${" in line[:40]}
    assert assigned == {name for name in shown if name.isupper()} and len(assigned) > 25


@pytest.mark.parametrize("name", ["TRAIN_FILE", "TEST_FILES"])
def test_a_file_that_is_not_there_is_refused_before_anything_starts(name, run, tmp_path):
    done, calls = run(QWEN, RUN_DIR=str(tmp_path / "run"), **{name: "/no/such.parquet"})
    assert done.returncode != 0 and calls == [] and not (tmp_path / "run").exists()
    assert all(word in done.stderr for word in ("no file /no/such.parquet", "prepare_data.py", name)), done.stderr


def test_what_the_doctor_refuses_does_not_start(run, tmp_path):
    done, calls = run(QWEN, RUN_DIR=str(tmp_path / "run"), code=1)
    assert done.returncode == 1 and "not started" in done.stderr and not (tmp_path / "run").exists()
    assert [call[2] for call in calls] == ["doctor"]
