# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""scripts/evaluate.sh: a real evaluation on the CPU, what it launches and refuses; and the arithmetic of the table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import evaluate
import ledger
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

SCRIPT = Path(evaluate.__file__).with_name("evaluate.sh")


def run(*options, **variables) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": sys.executable} | {name: str(value) for name, value in variables.items()}
    return subprocess.run(["bash", SCRIPT, *options], env=environment, capture_output=True, text=True)


# --- the interval ----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40).map(np.array))
def test_interval_holds_the_mean_and_stays_a_share(accuracies):
    low, high = evaluate.interval(accuracies)
    narrow_low, narrow_high = evaluate.interval(accuracies, confidence=0.5)
    assert 0 <= low <= narrow_low < narrow_high <= high <= 1
    assert low <= accuracies.mean() + 1e-12 and accuracies.mean() - 1e-12 <= high
    assert evaluate.interval(1 - accuracies) == pytest.approx((1 - high, 1 - low))


def test_interval_values():
    # 34 questions with the four added ones, two of them right: variance 2/34 * 32/34 * 34/33.
    half = 1.959964 * np.sqrt(2 / 34 * 32 / 34 / 33)
    assert evaluate.interval(np.zeros(30)) == pytest.approx((0, 2 / 34 + half))
    # Many questions: the normal interval.
    half = 1.959964 * np.sqrt(0.25 / 100_000)
    assert evaluate.interval(np.tile([0.0, 1.0], 50_000)) == pytest.approx((0.5 - half, 0.5 + half), rel=1e-4)


@pytest.mark.parametrize(
    ("questions", "k", "easy", "hard"),
    [(30, 1, 0.3, 0.7), (30, 32, 0.3, 0.7), (30, 32, 0.02, 2), (30, 32, 5, 1), (500, 4, 2, 1)],
)
def test_interval_holds_the_true_mean_as_often_as_it_says(questions, k, easy, hard):
    """Each draw of questions brings chances of a right answer of its own, from a beta distribution."""
    rng = np.random.default_rng(0)
    chances = rng.beta(easy, hard, size=(2000, questions))
    true_mean = easy / (easy + hard)
    held = [low <= true_mean <= high for low, high in map(evaluate.interval, rng.binomial(k, chances) / k)]
    assert np.mean(held) >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / len(held))


# --- the table -------------------------------------------------------------------------------------------------------


def write_evaluation(folder: Path, problems: list[tuple[str, str]], responses: list[dict], k: int) -> Path:
    """What evaluate.sh leaves of verl's run: the configuration and the responses; and the validation files."""
    frame = pd.DataFrame(problems, columns=["data_source", "prompt"])
    frame["prompt"] = [[{"role": "user", "content": text}] for text in frame["prompt"]]
    frame.to_parquet(folder / "validation.parquet")
    rollout = {"val_kwargs": {"n": k, "temperature": 1.0, "top_p": 0.7}}
    data = {"val_files": [str(folder / "validation.parquet")], "max_prompt_length": 8, "max_response_length": 8}
    config = {"actor_rollout_ref": {"model": {"path": "a/model"}, "rollout": rollout}, "data": data}
    (folder / "hydra/.hydra").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(config), folder / "hydra/.hydra/config.yaml")
    (folder / "generations").mkdir()
    (folder / "generations/0.jsonl").write_text("\n".join(map(json.dumps, responses)))
    return folder


def answers(question: str, text: str, *accuracies: float) -> list[dict]:
    return [
        {"uid": f"{question}_{index}_0", "input": f"user\n{text}\nassistant\n", "acc": accuracy}
        for index, accuracy in enumerate(accuracies)
    ]


def test_table(tmp_path, capsys):
    # The text of one question is part of another's; the same question twice counts twice; one has no response at all.
    problems = [("hard", "2+2?"), ("easy", "1+2+2?"), ("easy", "3?"), ("easy", "3?"), ("easy", "4?")]
    responses = [
        *answers("d", "2+2?", 0.0, 0.0),
        *answers("a", "1+2+2?", True, False),
        *answers("c", "3?", 1.0, 1.0),
        *answers("b", "3?", 1.0),  # the other response is missing
    ]
    responses.append(responses[0] | {"uid": "d_0_1"})  # another turn of the same response
    evaluate.report(write_evaluation(tmp_path, problems, responses, k=2))
    results = json.loads((tmp_path / "results.json").read_text())
    hard, easy = results.pop("data_sets")
    assert results["model"] == "a/model" and results["k"] == 2 and results["top_p"] == 0.7
    assert (hard["data_source"], hard["mean"], hard["questions"], hard["missing"]) == ("hard", 0.0, 1, 0)
    assert (hard["low"], hard["high"]) == evaluate.interval(np.zeros(1))
    assert (easy["mean"], easy["questions"], easy["missing"]) == (0.5, 4, 3)
    assert (easy["low"], easy["high"]) == evaluate.interval(np.array([0.5, 1.0, 0.5, 0.0]))
    assert "3 responses are missing and count as wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("problems", "responses", "message"),
    [
        ([("a", "1?")], answers("q", "2?", 1.0), "none of the validation files: user"),
        ([("a", "1?"), ("b", "1?")], answers("q", "1?", 1.0), "in a and in b"),
        ([("a", "1?")], answers("q", "1?", -1.0), "no accuracy from 0 to 1"),
        ([("a", "1?")], answers("q", "1?", None), "no accuracy from 0 to 1"),
    ],
)
def test_responses_that_cannot_be_counted(tmp_path, problems, responses, message):
    with pytest.raises(evaluate.EvaluationError, match="holds no finished evaluation"):
        evaluate.report(tmp_path)
    with pytest.raises(evaluate.EvaluationError, match=message):
        evaluate.report(write_evaluation(tmp_path, problems, responses, k=1))
    assert not (tmp_path / "results.json").exists()


# --- what is launched ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def validation(tmp_path_factory):
    """Two validation files whose problems are of different data sources."""
    folder = tmp_path_factory.mktemp("validation")
    files = []
    for source, seed in (("short", 0), ("long", 1)):
        files.append(folder / f"{source}.parquet")
        ledger.data_set(12, seed).assign(data_source=source).to_parquet(files[-1])
    return files


@pytest.mark.long
def test_the_gpu_configuration_passes_verls_checks(tmp_path, validation):
    output = tmp_path / "ö ( ) = { [ ' # & ~ ,"
    variables = dict(TEST_FILES=" ".join(map(str, validation)), VAL_N=16, OUTPUT=output, ROLLOUT_TP=4)
    dry = run("Qwen/Qwen3-8B-Base", "data.seed=7", DRY_RUN=1, **variables)
    assert dry.returncode == 0, dry.stderr
    config = OmegaConf.create(dry.stdout)
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert not need_critic(config) and config.trainer.val_only and config.trainer.resume_mode == "disable"
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen3-8B-Base"
    assert list(config.data.val_files) == list(map(str, validation)) and config.data.seed == 7
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.max_model_len) == ("vllm", 4, 2048 + 8192)
    assert (rollout.val_kwargs.n, rollout.val_kwargs.temperature, rollout.val_kwargs.top_p) == (16, 1.0, 0.7)
    assert config.trainer.validation_data_dir == f"{output}/generations"
    assert "-m' 'verl.trainer.main_ppo'" in dry.stderr
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ([], {}, "which model?"),
        (["--gpu"], {}, "unknown option --gpu"),
        (["a/model"], {"TEST_FILES": "nowhere.parquet"}, "no file nowhere.parquet; python scripts/prepare_data.py"),
        (["a/model"], {"TEMPERATURE": "0.0"}, "32 responses at TEMPERATURE=0 are 32 times the same"),
        (["a/model"], {"OUTPUT": "/"}, "/ exists"),
        (["no/such/folder"], {}, "no/such/folder is no checkpoint"),
        (["/"], {}, "is no checkpoint"),
    ],
)
def test_refused_before_anything_starts(tmp_path, validation, options, variables, message):
    defaults = {"TEST_FILES": validation[0], "OUTPUT": tmp_path / "out", "DRY_RUN": 1}
    refused = run(*options, **defaults | variables)
    assert refused.returncode == 1 and message in refused.stderr, refused.stderr


@pytest.mark.long
def test_evaluation_of_a_sharded_checkpoint(tmp_path, validation, untrained_model):
    """verl's merger, its validation on the CPU, and a table that says what verl's own metrics say."""
    actor = tmp_path / "global_step_7/actor"
    model = AutoModelForCausalLM.from_pretrained(untrained_model)
    model.config.save_pretrained(actor / "huggingface")
    AutoTokenizer.from_pretrained(untrained_model).save_pretrained(actor / "huggingface")
    torch.save(model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text('{"world_size": 1}')
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, **_): return float(len(solution_str) % 3 == 0)")

    ended = run(
        *(actor.parent, "--cpu", f"reward.custom_reward_function.path={reward}", "trainer.logger=[console,file]"),
        TEST_FILES=" ".join(map(str, validation)),
        VAL_N=3,
        MAX_PROMPT_LENGTH=ledger.MAX_PROMPT_TOKENS,
        MAX_RESPONSE_LENGTH=8,
        OUTPUT=tmp_path / "out",
        VERL_FILE_LOGGER_PATH=tmp_path / "metrics.jsonl",
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]

    metrics = json.loads((tmp_path / "metrics.jsonl").read_text())["data"]
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["model"] == str(tmp_path / "out/model") and results["k"] == 3
    assert [row["data_source"] for row in results["data_sets"]] == ["short", "long"]
    for row in results["data_sets"]:
        assert row["mean"] == pytest.approx(metrics[f"val-core/{row['data_source']}/acc/mean@3"], abs=1e-12)
        assert 0 < row["mean"] < 1 and row["questions"] == 12 and row["missing"] == 0
    assert "mean@3" in ended.stdout
