# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`fspo-verl watch`: the lines of runs of known cause, and how they end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import synthetic_run
from pasted import PASTED
from test_alerts import FIRES, SOUND, raw

from fspo_verl import cli
from fspo_verl.analysis import alerts, runs, watch
from fspo_verl.analysis.metric_facts import LEARN_MORE
from fspo_verl.clips import CLIPS
from fspo_verl.observe.attempts import FINISHED, MARK
from fspo_verl.output import percent

LOGS = [file for file in sorted(PASTED.iterdir()) if file.suffix != ".txt"]  # those hold no step
COMMAND = [sys.executable, "-m", "fspo_verl.cli", "watch"]


def lines_of(path, capsys, *options):
    assert cli.main(["watch", str(path), "--once", *options]) == 0
    return capsys.readouterr().out.splitlines()


def steps_of(lines):
    return [int(step) for line in lines for step in re.findall(r"^step (\d+): ", line)]


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A run in which no update moves anything, with a range that noise leaves."""
    folder, rng = tmp_path_factory.mktemp("run"), np.random.default_rng(0)
    table = synthetic_run.records(rng, "gspo", 24)
    s = 2e-4 * table.length * rng.standard_normal(len(table))  # as wide as GSPO's range at any length
    table = table.assign(log_ratio=s, quadratic_variation=s**2 / table.length)
    table["clipped"] = CLIPS["gspo"].clipped(table).astype(np.float32)
    synthetic_run.write_records(folder / "records", table, "gspo")
    return folder, table


def test_a_line_says_what_the_last_ten_steps_hold_and_why_the_clip_acts(noisy, capsys):
    folder, table = noisy
    *lines, following = lines_of(folder, capsys, "--every", "12")
    assert steps_of(lines) == [1, 12, 24] and "fspo-verl report" in following
    for line, step in zip(lines, steps_of(lines), strict=True):
        counted = table[table.step.between(step - 9, step) & (table.advantage != 0)]
        assert f": {percent(counted.clipped.mean())} clipped" in line
        assert int(re.search(r"noise is (\d+)% of the variance", line)[1]) >= 90
    assert "numerical noise" in lines[0] and "float32" in lines[0] and "float32" not in lines[1] + lines[2]


def test_following_gives_the_lines_of_the_whole(noisy, tmp_path):
    """Step by step, with a file that is being written: the same as at the end."""
    folder, table = noisy
    whole = [*watch.Watcher(5).lines(runs.read_run(folder, "a"), True)]
    watcher, said = watch.Watcher(5), []
    for step in sorted(table.step.unique()):
        synthetic_run.write_records(tmp_path / "records", table[table.step == step], "gspo")
        run = runs.read_run(tmp_path, "a", since=watcher.last - watch.STEPS)
        said += watcher.lines(run, False)
        assert watcher.last == step - 1 or step == 1
    assert [*said, *watcher.lines(run, True)] == whole and len(set(whole)) == len(whole)


@pytest.mark.parametrize("name", [name for name in FIRES if name != "noise"])  # which the band of a config tells
def test_metrics_without_records_have_the_words_of_the_alerts(name, tmp_path, capsys):
    cause, sums, others = FIRES[name]
    bad = SOUND | raw(sums) | {key: None for key in others}  # as verl's file logger writes NaN
    steps = enumerate([SOUND] * 15 + [bad] * 12 + [SOUND] * 25, start=1)
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps({"step": step, "data": metrics}) + "\n" for step, metrics in steps))
    lines = lines_of(file, capsys, "--every", "100")
    run = alerts.Alerts()
    told = [
        (step, f"{one.sentence} {one.advice}")
        for step, metrics in enumerate([SOUND] * 15 + [SOUND | raw(sums) | others] * 12, start=1)
        for one in run.of_step(metrics)
    ]
    assert len(told) == 1
    changes = [line for line in lines if not line.startswith("next") and "Over" not in line][:-1]
    assert [(steps_of([line])[0], line.partition(". ")[2]) for line in changes] == told
    over = steps_of([line for line in lines if f"Over: {cause}." in line])
    assert over and over[0] >= 27 + watch.STEPS  # once no line speaks of steps in which it held


@pytest.mark.parametrize("file", LOGS, ids=lambda file: file.name)
def test_a_log_gets_what_it_says_and_never_why(file, capsys):
    *lines, following = lines_of(file, capsys)
    assert lines and LEARN_MORE in following and "nothing to say" not in "".join(lines)
    assert "variance" not in "".join(lines)


def test_steps_without_an_advantage_are_said_without_an_empty_clause(tmp_path, capsys):
    table = synthetic_run.records(np.random.default_rng(0), "fspo", 12).assign(advantage=np.float32(0))
    synthetic_run.write_records(tmp_path / "records", table, "fspo")
    *lines, _ = lines_of(tmp_path, capsys)
    assert lines and all(re.match(r"step \d+: no response", line) for line in lines)


# --- how it ends -----------------------------------------------------------------------------------------------------


def test_a_run_whose_newest_records_mark_its_end_ends_it(tmp_path):
    """Whatever else it has written since then."""
    first, second = files = [tmp_path / f"attempt-000{number}-ab/step-000002-rank-0000.parquet" for number in (1, 2)]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.touch()
        os.utime(file, (number, number))
    (tmp_path / "train.log").touch()
    (second.parent / "finished_runs.txt").touch()  # a user's
    (first.parent / MARK.format(what=FINISHED, step=2)).touch()
    assert not watch.has_ended(runs.written(tmp_path)) and not watch.has_ended(set())
    (second.parent / MARK.format(what=FINISHED, step=2)).touch()
    assert watch.has_ended(runs.written(tmp_path))


def write_run(folder, how, steps, value):
    """A run of these steps behind what lies there: overwritten, appended to, or as an attempt of its own."""
    if how == "records":
        table = synthetic_run.records(np.random.default_rng(0), "fspo", max(steps))
        table["log_ratio"] *= value
        number = len(list(folder.glob("records/*")))
        attempt = folder / f"records/attempt-{number:04d}-{number:08x}"
        synthetic_run.write_records(attempt, table[table.step.isin(steps)], "fspo")
        return
    with (folder / "train.log").open("w" if how == "overwritten" else "a") as log:
        log.writelines(f"step:{step} - actor/pg_clipfrac:{value} - timing_s/step:1.0\n" for step in steps)


@pytest.mark.parametrize("how", ["overwritten", "appended", "records"])
@pytest.mark.parametrize("steps", [range(1, 4), range(15, 19)], ids=["new", "resumed"])
def test_a_step_that_goes_back_is_said_and_spoken_of(how, steps, tmp_path, monkeypatch):
    """Whatever file it stands in: another run, or one that goes on from a checkpoint."""
    write_run(tmp_path, how, range(1, 22), 0.1)
    path = tmp_path / ("records" if how == "records" else "train.log")
    looks = [lambda: write_run(tmp_path, how, steps, 0.5), lambda: None]
    if how == "overwritten":  # what a launch prints before its first step, and a validation
        looks = [lambda text=text: path.write_text(text) for text in ("loading\n", "step:0 - val/acc:0.5\n")] + looks
    looks = iter(looks)
    monkeypatch.setattr(time, "sleep", lambda seconds: next(looks)())
    lines, followed = [], watch.follow(path, 1, False)
    with contextlib.suppress(RuntimeError):  # of the generator, which looks a third time
        lines.extend(iter(lambda: next(followed), None))
    (back,) = [place for place, line in enumerate(lines) if not steps_of([line])]
    assert f"from step {max(steps)}" in lines[back] and "step 21" in lines[back]
    assert steps_of(lines[:back]) == [*range(1, 21)]
    there = steps if how == "overwritten" else range(1, max(steps) + 1)
    assert steps_of(lines[back + 1 :]) == [step for step in there if max(steps) - watch.STEPS < step < max(steps)]


def test_ctrl_c_ends_it_and_each_line_is_there_before(noisy):
    # Whoever runs the tests in the background may have Ctrl-C ignored, which a process inherits.
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([*COMMAND, str(noisy[0]), "--every", "1"], **pipes) as run:
        assert "clipped" in run.stdout.readline()
        while "waiting" not in run.stderr.readline():
            pass
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 0 and "Traceback" not in run.stderr.read()


def test_where_there_is_no_run_it_says_so(tmp_path, capsys):
    assert cli.main(["watch", str(tmp_path / "run")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
