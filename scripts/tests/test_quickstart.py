# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The quickstart's task, and what it does about finished, foreign and failing runs."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import launch
import ledger
import pytest
import report
from ledger_experiment import LedgerExperiment

from fspo_verl.analysis import runs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("response", "score"), [("a+7=07", 1.0), ("=07", 1.0), ("07", 0.0), ("a+7=17", 0.0), ("a+7=07b", 0.0), ("", 0.0)]
)
def test_score(response, score):
    assert ledger.compute_score("ledger", response, "07") == score


def test_tokenizer_and_the_fast_encoding_agree():
    tokenizer, rng = ledger.tokenizer(), random.Random(0)
    for problem in (ledger.draw_problem(rng) for _ in range(50)):
        chat = [{"role": "user", "content": problem.prompt}]
        prompt_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert prompt_ids == ledger.encode_prompt(problem.prompt)
        response_ids = ledger.encode_response(problem.demonstration)
        assert tokenizer.decode(response_ids, skip_special_tokens=True) == problem.demonstration
        assert len(prompt_ids) <= ledger.MAX_PROMPT_TOKENS and len(response_ids) <= ledger.MAX_RESPONSE_TOKENS
        assert tokenizer.unk_token_id not in prompt_ids + response_ids


def test_metrics_of_several_attempts(tmp_path):
    def record(step: int, **metrics) -> str:
        return json.dumps({"step": step, "data": metrics})

    first = [record(0, **{"val-core/ledger/acc/mean@1": 0.3})]
    first += [record(step, **{"critic/score/mean": 0.4, "fspo/clip_rate/all": 0.1}) for step in (1, 2)]
    second = [record(step, **{"critic/score/mean": 0.6, "fspo/clip_rate/all": 0.2}) for step in (2, 3)]
    (tmp_path / "metrics-1.jsonl").write_text("\n".join([*first, record(3)[:-4]]))  # killed while writing
    (tmp_path / "metrics-10.jsonl").write_text("\n".join(second))
    metrics = report.read_metrics(runs.metric_files(tmp_path))
    assert list(metrics.index) == [0, 1, 2, 3]
    assert metrics.reward.tolist()[1:] == [0.4, 0.6, 0.6]
    assert metrics.clip_rate.tolist()[1:] == [0.1, 0.2, 0.2]
    assert metrics.accuracy[0] == 0.3 and metrics.accuracy[1:].isna().all()

    report.draw(tmp_path, "title")
    assert (tmp_path / "progress.png").stat().st_size > 10_000


def quickstart(*options, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts/quickstart/run.py", *options]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture
def warm(tmp_path, untrained_model):
    """An output folder with a warm start: an untrained model will do."""
    experiment = LedgerExperiment(tmp_path)
    experiment.start.mkdir()
    (experiment.start / "model").symlink_to(untrained_model)
    return experiment


def test_a_finished_run_is_shown_again_and_only_for_its_own_settings(warm):
    shares = ("edge_steps", "reward_first", "reward_last", "accuracy_before", "accuracy_after", "clip_rate_median")
    summary = dict.fromkeys((*shares, "shortest", "longest", "seconds_per_step"), 0.25)
    warm.run.mkdir()
    (warm.run / "settings.json").write_text(json.dumps({"steps": warm.steps, "overrides": []}))
    (warm.run / "summary.json").write_text(json.dumps(summary | {"seconds": {}}))

    again = quickstart("--output", warm.output)
    assert again.returncode == 0 and "finished before" in again.stdout and "0.25 after" in again.stdout, again

    other = quickstart("--output", warm.output, "--steps", "3")
    assert other.returncode != 0 and "holds a run with" in other.stderr

    named = LedgerExperiment(warm.output, name="wide", overrides=("a.b=1",))
    assert named.run.name == "wide-hf-seed0" and named.start == warm.start
    launch.claim(named)
    with pytest.raises(launch.Failure, match="holds a run with"):
        launch.claim(dataclasses.replace(named, loss="gspo"))
    assert quickstart("--name", "gspo", "--parse-only").returncode == 2

    other_loss, other_seed = LedgerExperiment(warm.output, loss="gspo"), LedgerExperiment(warm.output, seed=1)
    assert len({warm.run, other_loss.run, other_seed.run}) == 3 and other_seed.start != warm.start == other_loss.start


@pytest.mark.long
def test_a_failure_shows_its_cause(warm):
    # What an attempt leaves behind that was interrupted before its first checkpoint is not in the way.
    for left in ("checkpoints/policy_loss.json", "records/step-000001-rank-0000.parquet"):
        (warm.run / left).parent.mkdir(parents=True)
        (warm.run / left).write_text("[]")
    failed = quickstart("--output", warm.output, "--", "actor_rollout_ref.actor.policy_loss.eps_low=-1")
    assert failed.returncode != 0
    assert "eps_low" in failed.stderr and "train.log" in failed.stderr and "holds records" not in failed.stderr
    assert not (warm.run / "summary.json").exists()


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("quickstart", ["--steps", "0"], "--steps: 0 is no whole number above 0"),
        ("quickstart", ["--", "--config-name=x"], "--config-name=x is neither an option nor"),
        ("real_model", ["--task-option", "max_terms"], "--task-option: max_terms is not KEY=VALUE"),
        ("compare_baselines", ["--check", "--factors", "fspo=1"], "--check has arms and ranges of its own"),
        ("install", [], "usage: bash scripts/install.sh VENV"),
        ("install", ["VENV", "nope.txt"], "no file nope.txt; there are requirements/cpu-vllm.txt requirements/cpu.txt"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_installed(script, arguments, words, tmp_path):
    arguments = [str(tmp_path / "venv") if argument == "VENV" else argument for argument in arguments]
    command = ["bash", ROOT / f"scripts/{script}.sh", *arguments]
    if script != "install":
        command += ["--venv", tmp_path / "venv"] if "--" not in arguments else []
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode != 0 and words in run.stderr and "Traceback" not in run.stderr, run.stderr
    assert "[install]" not in run.stdout and not (tmp_path / "venv").exists()


def test_a_place_where_verl_would_fail_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)  # which Ray would take instead
    run = quickstart("--output", tmp_path / "out", TMPDIR=f"/tmp/{'x' * 90}")
    assert run.returncode == 1 and run.stderr.startswith("quickstart failed: Ray cannot open its sockets in /tmp/xxx")
    assert "export RAY_TMPDIR=/tmp" in run.stderr and len(run.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []

    launch.check_place(tmp_path / "ö ( ) = { [ ' # & ~ ,")
    for name in ("a*", "a?", "a[1]", "${a}"):
        with pytest.raises(launch.Failure, match="cannot be read as the name of one folder"):
            launch.check_place(tmp_path / name)


@pytest.mark.parametrize(("sent", "when"), [(signal.SIGINT, "imports"), (signal.SIGTERM, "warm start")])
def test_a_signal_ends_without_a_traceback_and_says_how_to_go_on(sent, when, tmp_path):
    (tmp_path / "slow").mkdir()
    if when == "imports":  # a package that takes for ever
        (tmp_path / "slow/pandas.py").write_text("import time\nprint('imports', flush=True)\ntime.sleep(600)\n")
    command = [sys.executable, ROOT / "scripts/quickstart/run.py", "--output", tmp_path / "out"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tmp_path / "slow")}, **pipes)
    assert when in run.stdout.readline()
    run.send_signal(sent)
    said = run.communicate()[1]
    if when == "imports":
        assert said == "" and run.returncode == -sent  # 128 + the signal, to a shell
    else:
        assert said.endswith("interrupted; the same command goes on from the last checkpoint\n")
        assert run.returncode == 128 + sent


@pytest.mark.parametrize("script", ["quickstart", "real"])
def test_help_needs_no_installed_package(script):
    command = [sys.executable, "-I", "-S", ROOT / f"scripts/{script}/run.py", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0 and "--loss {fspo,gspo,grpo,fixed_band,no_clip}" in shown.stdout
