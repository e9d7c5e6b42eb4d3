# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Files of a training run are read as they were written: cut off, resumed, in several formats, or not at all."""

import json
import os
from functools import partial

import numpy as np
import pytest
import synthetic_run
from hypothesis import given
from hypothesis import strategies as st

from fspo_verl import cli
from fspo_verl.analysis import runs
from fspo_verl.analysis.metric_facts import LEARN_MORE
from fspo_verl.observe.records import COLUMNS


def line(step, **data):
    return json.dumps({"step": step, "data": data}) + "\n"


def write(file, *lines, end=""):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines) + end)
    return file


def write_records(folder):
    synthetic_run.write_records(folder, synthetic_run.records(np.random.default_rng(0), steps=1, prompts=1), "gspo")


VALUES = st.floats(allow_nan=False, allow_infinity=False, width=32)
ATTEMPTS = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1)), max_size=6),
    max_size=4,
)


@given(ATTEMPTS, st.data())
def test_attempts_merge_to_the_latest_value_of_each_step(tmp_path_factory, attempts, data):
    folder, expected = tmp_path_factory.mktemp("run"), {}
    for number, attempt in enumerate(attempts, start=9):  # 9, 10, 11: as text they would sort otherwise
        lines = [line(step, **values) for step, values in attempt]
        unfinished = line(99, a=1.0)
        cut = data.draw(st.integers(0, len(unfinished) - 2))
        write(folder / f"metrics-{number}.jsonl", *lines, end=unfinished[:cut])
        for step, values in attempt:
            for name, value in values.items():
                expected[name, step] = value
    frame = runs.read_metrics(runs.metric_files(folder))
    found = {(name, step): value for name in frame for step, value in frame[name].dropna().items()}
    assert found == expected
    assert frame.index.is_monotonic_increasing and frame.index.name == "step"
    assert set(frame.dtypes) <= {np.dtype(float)}


def test_attempts_without_numbers_are_ordered_by_time(tmp_path, caplog):
    for age, name in enumerate(("newest", "middle", "oldest")):
        os.utime(write(tmp_path / f"{name}.jsonl", line(1, a=age)), (10**9 - age, 10**9 - age))
    assert [file.stem for file in runs.metric_files(tmp_path)] == ["oldest", "middle", "newest"]
    assert runs.read_metrics(runs.metric_files(tmp_path)).a.item() == 0
    assert "middle.jsonl, newest.jsonl, oldest.jsonl are read as attempts of one run" in caplog.text


def test_broken_line_amid_others_is_said(tmp_path, caplog):
    file = write(tmp_path / "metrics-1.jsonl", line(1, a=1), '{"step": 2, "da\n', line(3, a=3))
    assert list(runs.read_metrics([file]).index) == [1, 3]
    assert f"{file}: line 2" in caplog.text


def test_whole_run(tmp_path):
    write(tmp_path / "metrics-1.jsonl", line(1, a=1))
    write(tmp_path / "rollouts/1.jsonl", '{"input": "x", "output": "y", "step": 1}\n')
    os.utime(write(tmp_path / "first/.hydra/config.yaml", "a: 1\n"), (1, 1))
    config = "actor_rollout_ref: {actor: {optim: {lr: 1e-06}, policy_loss: {loss_mode: fspo}}}\n"
    write(tmp_path / "second/.hydra/config.yaml", config)
    write_records(tmp_path / "records")
    (run,) = runs.read_runs([tmp_path])
    assert run.name == tmp_path.name and run.folder == tmp_path
    assert run.metrics.a.to_dict() == {1: 1}
    assert run.config["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-6
    assert len(run.records) and run.settings.loss == "gspo"  # as the records say, which know what was trained


@pytest.mark.parametrize("there", ["DISK/records", "DISK", "/", "..", "${trainer.root}"])
def test_a_config_leads_nowhere_and_says_where_records_are(there, tmp_path, caplog):
    """The user names that folder, or it is not read: the config may be somebody else's."""
    write_records(tmp_path / "disk/records")
    there = there.replace("DISK", str(tmp_path / "disk"))
    section = f"{{actor: {{policy_loss: {{loss_mode: fspo, records_dir: '{there}'}}}}}}"
    config = f"actor_rollout_ref: {section}\ntrainer: {{root: {tmp_path}/disk}}\n"
    write(tmp_path / "a/.hydra/config.yaml", config)
    run = runs.read_run(tmp_path / "a", "a")
    assert run.records.empty and list(run.records.columns) == list(COLUMNS) and run.settings.loss == "fspo"
    assert there.replace("${trainer.root}", str(tmp_path / "disk")) in caplog.text


def test_records_within_the_run_are_read_wherever_its_config_has_them(tmp_path, caplog):
    for folder in ("a", "b"):  # the second one before its first record
        config = f"actor_rollout_ref: {{actor: {{policy_loss: {{records_dir: {tmp_path}/{folder}/x}}}}}}"
        write(tmp_path / folder / ".hydra/config.yaml", config)
    write_records(tmp_path / "a/x")
    assert len(runs.read_run(tmp_path / "a", "a").records) and runs.read_run(tmp_path / "b", "b").records.empty
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("{", ValueError, "a.jsonl holds no step of a training run"),
        ("[1]\n", ValueError, "a.jsonl holds no step of a training run"),
        ('{"step": 1}\n', ValueError, "a.jsonl holds no step of a training run"),
        ("\xff\n", ValueError, "a.jsonl holds no step of a training run"),
        ("", FileNotFoundError, "nothing is logged yet"),
        (None, FileNotFoundError, "no such folder or file"),
    ],
)
def test_what_is_no_run(text, error, said, tmp_path):
    file = tmp_path / "a.jsonl" if text is None else write(tmp_path / "a.jsonl", text)
    with pytest.raises(error, match=said):
        runs.read_run(file, "a")
    with pytest.raises(FileNotFoundError, match=r"\*\.jsonl.*records_dir=DIR.*\.hydra"):
        runs.read_run(tmp_path, "a")


def test_run_that_has_only_begun(tmp_path):
    write(tmp_path / "metrics-1.jsonl", "")
    write(tmp_path / ".hydra/config.yaml", "a: 1\n")
    run = runs.read_run(tmp_path, "a")
    assert run.metrics.empty and run.metrics.index.name == "step"


LOGGED = "step:1 - timing_s/gen:3.0 - perf/throughput:12.0\n"
NOTHING = {  # a file, and what the error names as missing
    "an empty folder": ("run/", "", ("metrics of verl's file logger", "records")),
    "Hydra's config alone": ("run/.hydra/config.yaml", "data: {train_batch_size: 8}\n", ("records", LEARN_MORE)),
    "an empty log": ("train.log", "", ("nothing is logged yet",)),
    "a log of something else": ("train.log", "hello\n", ("no step of a training run", "verl's console output")),
    "a log without a name of ours": ("train.log", LOGGED, ("records", LEARN_MORE)),
}


@pytest.mark.parametrize("command", ["report", "calibrate"])
@pytest.mark.parametrize("case", NOTHING)
def test_a_command_that_has_nothing_to_judge_ends_with_2_and_says_what_is_missing(case, command, tmp_path, capsys):
    file, text, missing = NOTHING[case]
    run = tmp_path / file.split("/")[0]
    (run.mkdir if file.endswith("/") else partial(write, tmp_path / file, text))()
    before = {*tmp_path.rglob("*")}
    assert cli.main([command, str(run)]) == 2
    out, err = capsys.readouterr()
    assert not out and {*tmp_path.rglob("*")} == before
    assert f"fspo-verl {command}: {run}" in err and all(part in err for part in missing)


def test_folder_of_several_runs_is_refused(tmp_path):
    for what, make in {
        "metrics": lambda folder: write(folder / "metrics-1.jsonl", line(1, a=1)),
        "records": write_records,
    }.items():
        make(tmp_path / what / "one")
        runs.read_run(tmp_path / what, "a")
        make(tmp_path / what / "two")
        with pytest.raises(ValueError, match=f"{what} of several runs.*/one.*/two"):
            runs.read_run(tmp_path / what, "a")


def test_names(tmp_path):
    paths = [write(tmp_path / folder / "run.jsonl", line(1, a=1)) for folder in "ab"]
    assert [run.name for run in runs.read_runs(paths)] == [str(path) for path in paths]
    assert [run.name for run in runs.read_runs(paths, ["x", "y"])] == ["x", "y"]
    for names in (["x"], ["x", "x"]):
        with pytest.raises(ValueError, match="2 runs need as many different names"):
            runs.read_runs(paths, names)
