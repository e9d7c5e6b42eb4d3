# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`fspo-verl watch`: the lines of runs of known cause, and how they end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import synthetic_run
from test_alerts import FIRES, SOUND, raw

from fspo_verl import cli
from fspo_verl.analysis import alerts, runs, watch
from fspo_verl.analysis.metric_facts import LEARN_MORE
from fspo_verl.clips import CLIPS
from fspo_verl.observe.attempts import FINISHED
from fspo_verl.output import percent

PASTED = Path(__file__).parent / "logs"
LOGS = [file for file in sorted(PASTED.iterdir()) if file.suffix != ".txt"]  # those hold no step
COMMAND = [sys.executable, "-m", "fspo_verl.cli", "watch"]


def write_log(file, steps, first=1):
    with file.open("a") as log:
        for number, metrics in enumerate(steps, start=first):
            log.write(json.dumps({"step": number, "data": metrics}) + "\n")
    return file


def lines_of(path, capsys, *options):
    assert cli.main(["watch", str(path), "--once", *options]) == 0
    return capsys.readouterr().out.splitlines()


def steps_of(lines):
    return [int(step) for line in lines for step in re.findall(r"^step (\d+): ", line)]


def rates_of(records):
    counted = records[records.advantage != 0]
    return f": {percent(counted.clipped.mean())} clipped"


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
        assert rates_of(table[table.step.between(step - 9, step)]) in line
    share = int(re.search(r"(\d+)% of it noise", lines[-1])[1])
    assert share >= 90
    assert "numerical noise" in lines[0] and "float32" in lines[0] and "float32" not in lines[1] + lines[2]


def test_following_gives_the_lines_of_the_whole(noisy, tmp_path, monkeypatch):
    """Step by step, with a file that is being written: the same as at the end."""
    folder, table = noisy
    whole = [*watch.Watcher(5).lines(runs.read_run(folder, "a"), True)]
    watcher, said = watch.Watcher(5), []
    for step in sorted(table.step.unique()):
        synthetic_run.write_records(tmp_path / "records", table[table.step == step], "gspo")
        said += watcher.lines(runs.read_run(tmp_path, "a", since=watcher.last - watch.STEPS), False)
        assert watcher.last == step - 1 or step == 1
    said += watcher.lines(runs.read_run(tmp_path, "a", since=watcher.last - watch.STEPS), True)
    assert said == whole and len(said) == len(set(said))


@pytest.mark.parametrize("name", [name for name in FIRES if name != "noise"])  # which the band of a config tells
def test_metrics_without_records_have_the_words_of_the_alerts(name, tmp_path, capsys):
    cause, sums, others = FIRES[name]
    bad = SOUND | raw(sums) | {key: None for key in others}  # as verl's file logger writes NaN
    file = write_log(tmp_path / "run.jsonl", [SOUND] * 15 + [bad] * 12 + [SOUND] * 25)
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
    assert [line for line in lines if f"Over: {cause}." in line]


@pytest.mark.parametrize("file", LOGS, ids=lambda file: file.name)
def test_a_log_gets_what_it_says_and_never_an_attribution(file, capsys):
    *lines, following = lines_of(file, capsys)
    assert lines and LEARN_MORE in following and "nothing to say" not in "".join(lines)
    assert "of it" not in "".join(lines)


def test_steps_without_an_advantage_are_said_without_an_empty_clause(tmp_path, capsys):
    table = synthetic_run.records(np.random.default_rng(0), "fspo", 12).assign(advantage=np.float32(0))
    synthetic_run.write_records(tmp_path / "records", table, "fspo")
    *lines, _ = lines_of(tmp_path, capsys)
    assert lines and all(re.match(r"step \d+: no response", line) for line in lines)


# --- how it ends -----------------------------------------------------------------------------------------------------


def test_a_run_that_is_over_ends_it_and_one_that_goes_on_does_not(noisy, tmp_path):
    folder, table = noisy
    run, now = runs.read_run(folder, "a"), time.time()

    def files(age, name="step-000001-rank-0000.parquet", gap=20.0):
        return {(tmp_path / name, int((now - age - gap * back) * 1e9), 1) for back in range(3)}

    assert not watch.has_ended(run, files(100)) and watch.has_ended(run, files(400))
    assert not watch.has_ended(run, files(400, gap=200.0)) and watch.has_ended(run, files(1100, gap=200.0))
    (tmp_path / FINISHED).touch()
    assert watch.has_ended(run, files(1))


@pytest.mark.parametrize("end", ["interrupt", "pipe"])
def test_it_ends_without_a_traceback(end, noisy):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    # Whoever runs the tests in the background may have Ctrl-C ignored, which a process inherits.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([*COMMAND, str(noisy[0]), "--every", "1"], **pipes) as run:
        assert "clipped" in run.stdout.readline()
        if end == "interrupt":
            while "waiting" not in run.stderr.readline():
                pass
            run.send_signal(signal.SIGINT)
        else:
            run.stdout.close()
        code = run.wait(timeout=60)
        assert code == (0 if end == "interrupt" else 128 + signal.SIGPIPE)
        assert "Traceback" not in (said := run.stderr.read()) and "BrokenPipe" not in said


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_where_there_is_no_run_it_says_so(what, tmp_path, capsys):
    path = tmp_path / "run"
    if what == "empty":
        path.mkdir()
    assert cli.main(["watch", str(path), "--once"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
