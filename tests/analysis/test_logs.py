# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Logs as people have them: every kind gives the same table, and pasted ones give what they hold."""

import contextlib
import json
import math
import shutil

import numpy as np
import pandas as pd
import pytest
import synthetic_run
from hypothesis import given, settings
from hypothesis import strategies as st
from pasted import PASTED
from torch.utils.tensorboard import SummaryWriter
from verl.utils.logger.aggregate_logger import concat_dict_to_str
from verl.utils.tracking import FileLogger

from fspo_verl import cli
from fspo_verl.analysis import causes, logs, runs
from fspo_verl.analysis.judgement import evidence_of_metrics, judge
from fspo_verl.analysis.metric_facts import LEARN_MORE, facts
from fspo_verl.findings import FIX

NAN, INF = math.nan, math.inf
STEPS = {
    1: {"actor/pg_clipfrac": 0.25, "response_length/mean": 100.0, "val/test_score/openai/gsm8k": 0.5},
    2: {"actor/pg_clipfrac": 0.125, "response_length/mean": 2.0**-20, "actor/grad_norm": NAN},
    10: {"actor/pg_clipfrac": 0.0, "response_length/mean": -3.0, "actor/grad_norm": INF},
}
"""By step; a float32 holds each number. Step 1 logs no gradient norm, the others no score."""


def read(path):
    return runs.read_run(path, "a")


# --- every kind of log gives the same table -------------------------------------------------------------------------


def console():
    """A console log in Ray's colours, with progress bars, and highlighted by grep."""
    prefix, bar = "\x1b[36m(TaskRunner pid=42)\x1b[0m ", "Training Progress:  21%|██        | 1/4 [42:39<12:34:07]\r"
    text = "".join(f"loading\n{bar}{prefix}{concat_dict_to_str(data, step)}\n" for step, data in STEPS.items())
    return text.replace("pg_clipfrac", "\x1b[01;31m\x1b[Kpg_clipfrac\x1b[m\x1b[K")


def write_file_logger(file):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VERL_FILE_LOGGER_PATH", str(file))
        logger = FileLogger("project", "experiment")
    for step, metrics in STEPS.items():
        logger.log(metrics, step)
    logger.finish()
    return file


def write_tensorboard(folder):
    with SummaryWriter(str(folder)) as writer:
        for step, metrics in STEPS.items():
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
    return next(folder.iterdir())


OF_WANDB = {
    step: {name: {"nan": "NaN", "inf": "Infinity"}.get(str(value), value) for name, value in data.items()}
    for step, data in STEPS.items()
}
TABLE = pd.DataFrame.from_dict(OF_WANDB, "index").rename_axis("_step")
PANEL = TABLE.add_prefix("a run - b - ").rename_axis("Step")
HISTORY = [{"_step": step, "_wandb": None} | data for step, data in OF_WANDB.items()]
KINDS = {  # file: what kind it is, whether it is read out of a folder, and its text, or what writes it
    "train.log": ("console output", True, console()),
    "run.jsonl": ("verl's file logger", True, write_file_logger),
    "tensorboard": ("TensorBoard", True, write_tensorboard),
    "history.csv": ("a CSV of W&B", False, TABLE.to_csv()),
    "panel.csv": ("a CSV of W&B", False, PANEL.assign(**{f"{n}__MIN": -1 for n in PANEL}).to_csv()),
    "history.jsonl": ("a history of W&B", False, "".join(f"{json.dumps(entry)}\n" for entry in HISTORY)),
    "history.json": ("a history of W&B", False, json.dumps(HISTORY, indent=1)),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_log_gives_the_same_table(name, tmp_path):
    source, in_folders, content = KINDS[name]
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/linked").symlink_to("../disk")
    file = tmp_path / "disk" / name
    if isinstance(content, str):
        file.write_text(content)
    else:
        file = content(file)
    folders = [tmp_path / "disk", tmp_path / "run"] if in_folders else []
    for run in map(read, [file, *folders]):
        assert run.log.source == source
        assert run.log.not_finite == {"actor/grad_norm": [2, 10]}
        expected = pd.DataFrame.from_dict(STEPS, "index").replace(INF, NAN).rename_axis("step")
        pd.testing.assert_frame_equal(run.metrics.replace(INF, NAN), expected, check_like=True)


def test_the_folder_of_a_run_of_wandb(tmp_path):
    files = tmp_path / "wandb/run-20260101_000000-abc/files"
    files.mkdir(parents=True)
    (files / "wandb-summary.json").write_text(json.dumps({"_step": 7, "actor/pg_clipfrac": 0.5, "_wandb": {"x": 1}}))
    actor = {"policy_loss": {"loss_mode": "gspo"}, "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    saved = {"_wandb": {"value": {}}, "actor_rollout_ref": {"value": {"actor": actor}}}
    (files / "config.yaml").write_text(json.dumps(saved))
    run = read(tmp_path)
    assert run.metrics["actor/pg_clipfrac"].to_dict() == {7: 0.5}
    assert (run.settings.loss, run.settings.clip_ratio_high) == ("gspo", 4e-4)
    (files / "output.log").write_text("step:6 - actor/pg_clipfrac:0.25\nstep:7 - actor/pg_clipfrac:0.5\n")
    assert read(tmp_path).metrics["actor/pg_clipfrac"].to_dict() == {6: 0.25, 7: 0.5}  # all steps, not only the last


def test_a_resumed_run_goes_on_in_the_folder_of_tensorboard(tmp_path):
    for start, value in ((1, 0.25), (2, 0.5)):
        with SummaryWriter(str(tmp_path)) as writer:
            for step in range(start, start + 3):
                writer.add_scalar("actor/pg_clipfrac", value, step)
    assert read(tmp_path).metrics["actor/pg_clipfrac"].to_dict() == {1: 0.25, 2: 0.5, 3: 0.5, 4: 0.5}


@pytest.mark.parametrize(("value", "counts"), [(0.0, True), (1.0, True), (1.01, False), (4.1, False), (-0.1, False)])
def test_a_clip_fraction_is_a_share(value, counts):
    table = logs.Log.of([(1, {"actor/pg_clipfrac": 0.5}), (2, {"actor/pg_clipfrac": value, "actor/lr": 2.0})]).metrics
    assert (table.loc[2].get("actor/pg_clipfrac") == value) == counts and table.loc[2, "actor/lr"] == 2.0
    broken = logs.Log.of([(1, {"actor/pg_clipfrac": math.nan})])
    assert broken.not_finite == {"actor/pg_clipfrac": [1]}


def test_verls_own_name_is_never_overwritten():
    log = logs.Log.of([(1, {"actor/entropy": 0.5, "actor/entropy_loss": 2.0, "mismatch/mismatch_kl": 3.0})])
    assert log.metrics.loc[1].to_dict() == {"actor/entropy": 0.5, "actor/entropy_loss": 2.0, "rollout_corr/kl": 3.0}


# --- the console ----------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(["actor/pg_clipfrac", "val-core/openai/gsm8k/acc/mean@1", "a b/c", "response_length/mean"])
VALUES = st.floats() | st.integers(-(2**50), 2**50) | st.floats().map(np.float64)
STEPS_PRINTED = st.lists(st.tuples(st.integers(2, 99), st.dictionaries(KEYS, VALUES, min_size=1)), min_size=1)


@given(STEPS_PRINTED, st.integers(80, 300), st.booleans())
@settings(deadline=None)
def test_what_a_terminal_has_wrapped_is_read_as_it_was_printed(steps, width, stripped):
    """Copied out of a terminal, a line is cut at any place, and may have lost the spaces at the cut.

    Nobody can tell a space within a name that was lost there; verl's own names have none.
    """
    lines, expected = [], {}
    for step, metrics in steps:
        if stripped:
            metrics = {name.replace(" ", "_"): value for name, value in metrics.items()}
        line = f"(TaskRunner pid=1) {concat_dict_to_str(metrics, step)}"
        pieces = [line[at : at + width] for at in range(0, len(line), width)]
        lines += [(piece.strip() if stripped else piece) + "\n" for piece in pieces]
        lines.append("INFO 01-01 - loading: 3 - done\n")
        expected.setdefault(step, {}).update({name: float(value) for name, value in metrics.items()})
    found = {}
    for step, metrics in logs.console(lines):
        found.setdefault(step, {}).update(metrics)
    assert {step: metrics.keys() for step, metrics in found.items()} == {k: v.keys() for k, v in expected.items()}
    for step, metrics in expected.items():
        np.testing.assert_array_equal([found[step][name] for name in metrics], list(metrics.values()))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_last_line_that_is_cut_off_gives_only_what_is_whole(wrapped):
    """Cut anywhere, as by a kill or while it is written, no value is another one than the whole line has."""
    pairs = {"actor/pg_clipfrac": 4.1e-05, "actor/lr": 1e-06, "response_length/mean": 1234.5}
    whole = "step:7" + "".join(f" - {name}:{value!r}" for name, value in pairs.items())
    if wrapped:
        whole = whole.replace(" - actor/lr", " - \nactor/lr")
    assert dict(logs.console(f"{whole}\n".splitlines(keepends=True)))[7] == pairs
    for stop in range(len("step:7"), len(whole) + 1):
        found = dict(logs.console(f"step:6 - actor/lr:1.0\n{whole[:stop]}".splitlines(keepends=True)))
        assert found.get(7, {}).items() <= pairs.items()


def test_of_runs_after_each_other_the_last_counts_and_a_resumed_one_goes_on(tmp_path, caplog):
    def lines(steps, value):
        return "".join(f"step:{step} - actor/pg_clipfrac:{value}\n" for step in steps)

    file = tmp_path / "nohup.out"
    file.write_text(lines([1, 2, 3], 0.1) + lines([2, 3, 4], 0.2))
    assert read(file).metrics["actor/pg_clipfrac"].to_dict() == {1: 0.1, 2: 0.2, 3: 0.2, 4: 0.2}
    assert not caplog.text
    file.write_text(lines([0, 1, 2, 3], 0.1) + lines([0, 1, 2], 0.2))
    assert read(file).metrics["actor/pg_clipfrac"].to_dict() == {0: 0.2, 1: 0.2, 2: 0.2}
    assert "another run begins after step 3" in caplog.text


def test_a_console_with_one_metric_a_line_is_read():
    step = (
        "(TaskRunner pid=1) [INFO] [log]: step:{}\nactor/pg_clipfrac:0.1\n(TaskRunner pid=1) rollout_corr/k3_kl:nan\n"
    )
    text = step.format(1) + step.format(2) + "saved at step:7\n"
    found = logs.Log.of(logs.console(text.splitlines(keepends=True)))
    assert found.metrics["actor/pg_clipfrac"].to_dict() == {1: 0.1, 2: 0.1}
    assert found.not_finite == {"rollout_corr/k3_kl": [1, 2]}


TRL = {"loss": 0.1, "completions/clipped_ratio": 0.0, "clip_ratio/region_mean": 0.03}
LOGS_OF_TRL = {
    "trainer_state.json": json.dumps({"log_history": [{"step": 1} | TRL]}),
    "logging.jsonl": json.dumps(TRL | {"global_step/max_steps": "1/9"}),  # of ms-swift
    "wandb.csv": pd.DataFrame([{"_step": 1} | {f"train/{name}": value for name, value in TRL.items()}]).to_csv(),
    "console.log": f"{TRL}\n",
}


@pytest.mark.parametrize("name", LOGS_OF_TRL)
def test_a_log_of_trl_is_refused_by_name(name, tmp_path):
    (tmp_path / name).write_text(LOGS_OF_TRL[name])
    with pytest.raises(ValueError, match="this is no log of verl: TRL's names"):
        read(tmp_path / name)


# --- pasted logs ----------------------------------------------------------------------------------------------------

EXPECTED = {  # of each log that was pasted into an issue: numbers of its facts, and from which step on it is broken
    "agent_r1_30.log": {"not finite": 83, "no advantage": 1.0, "cut off": 1.0},
    "awesome_ml_sys_106.log": {"no advantage": 1.0, "lengths": 330.437},
    "verl_1224.log": {"kl": 0},
    "verl_1458.log": {"clipped": 0.001},
    "verl_316.log": {"cut off": 0.521, "kl to reference": 0.071},
    "verl_498.log": {"not finite": 1, "lengths": 257.125},
    "verl_721.log": {"not finite": 59, "clipped": 0.002},
    "verl_7356.csv": {"clipped": 0.41},
    "verl_7412.log": {
        "clipped": 0.0007935191160472839,
        "lengths": 1267.024169921875,
        "kl": -8.163164312320433e-06,
        "kl to reference": 0.0013280365410537343,
    },
}
NO_LOGS = {"verl_5637.txt", "open_r1_704.txt", "tinylora_4.log", "ui_r1_20.log"}


@pytest.mark.parametrize("name", sorted(file.name for file in PASTED.iterdir() if file.name not in NO_LOGS))
def test_a_pasted_log_gives_what_it_holds_and_the_launch_that_tells_more(name):
    run = read(PASTED / name)
    found, evidence, expected = {one.id: one.value for one in facts(run)}, evidence_of_metrics(run), EXPECTED[name]
    broken, cut_off = expected.get("not finite"), expected.get("cut off")
    assert expected.items() <= (found | {"not finite": broken, "cut off": cut_off}).items()
    assert cut_off in (None, evidence.cut_off)
    assert bool(evidence.broken) == (broken is not None)
    assert not broken or f"from step {broken} on" in evidence.broken[0]
    assert "one step" not in found  # three digits cannot tell 0 from little
    first, *others = judge(run).findings
    cause = causes.NOT_FINITE if broken else causes.CUT_OFF if cut_off else None
    assert first.id == (cause or causes.UNKNOWN) and (first.action == FIX) == bool(cause)
    assert {one.sentence for one in facts(run)} <= {one.sentence for one in (first, *others)}
    assert LEARN_MORE in first.advice


@pytest.mark.parametrize("name", sorted(NO_LOGS))
def test_what_is_no_log_gets_one_line(name, tmp_path, capsys):
    assert cli.main(["report", str(PASTED / name), "-o", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name} holds no step of a training run" in line or f"{name}: this is no log of verl: TRL" in line


# --- what cannot be read --------------------------------------------------------------------------------------------


def test_several_runs_are_named_and_never_refuse_the_records_beside_them(tmp_path, caplog):
    csv = tmp_path / "a.csv"
    csv.write_text("Step,one - actor/pg_clipfrac,two - actor/pg_clipfrac\n1,0.1,0.2\n")
    with pytest.raises(ValueError, match=r"2 runs \(one, two\)"):
        read(csv)
    for run in "ab":
        shutil.copy(PASTED / "verl_721.log", tmp_path / f"{run}.log")
    with pytest.raises(ValueError, match="several runs; name one: .*a.log, .*b.log"):
        read(tmp_path)
    rows = synthetic_run.records(np.random.default_rng(0), steps=2, prompts=16)
    synthetic_run.write_records(tmp_path / "records", rows, "fspo")
    run = read(tmp_path)
    assert len(run.records) == len(rows) and run.metrics.empty
    assert "read without metrics" in caplog.text and "a.log" in caplog.text


def test_the_file_that_only_wandb_reads_is_named(tmp_path):
    file = tmp_path / "run-abc.wandb"
    file.write_bytes(b":W&B\x00")
    with pytest.raises(ValueError, match="only W&B reads this file"):
        read(file)


SUFFIXES = [".log", ".csv", ".json", ".jsonl", ".tfevents.1"]
JUNK = ['{"step": ', '"data": {', "step:1 - ", "a:1 - ", *"{},\n", "nan", "1e999", "9" * 999, "[" * 9999, "Step"]
JUNK_FILES = st.binary() | st.lists(st.sampled_from(JUNK)).map(lambda parts: "".join(parts).encode())


@given(st.sampled_from(SUFFIXES), JUNK_FILES)
@settings(deadline=None, max_examples=300)
def test_any_file_is_read_or_refused_in_words(tmp_path_factory, suffix, content):
    file = tmp_path_factory.mktemp("junk") / f"events{suffix}"
    file.write_bytes(content)
    with contextlib.suppress(ValueError, OSError):
        run = read(file)
        assert run.metrics.size and facts(run) is not None
