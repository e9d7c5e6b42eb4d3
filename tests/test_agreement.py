# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every command says the same of a run: report, calibrate, alerts and JSON agree in cause, value and action."""

import json
import math
import shutil
from operator import attrgetter

import numpy as np
import pytest
import synthetic_run
from test_live import logged_by_verl

from fspo_verl import cli
from fspo_verl.analysis import alerts, live, runs
from fspo_verl.analysis import causes as c
from fspo_verl.analysis.judgement import judge
from fspo_verl.analysis.metric_facts import LEARN_MORE
from fspo_verl.findings import FIX, KEEP, RECORD, TAKE

STEPS = c.STEPS  # so that the window of alerts is the run


def quickstart():
    return synthetic_run.records(np.random.default_rng(1), "fspo", STEPS), "fspo", 4


def observed_gspo():
    rng = np.random.default_rng(1)
    return synthetic_run.records(rng, "gspo", STEPS, lengths=(20, 2000), sigma=0.004), "gspo", 4


def one_step():
    table = synthetic_run.records(np.random.default_rng(1), "fspo", STEPS, mini_batches=1)
    s = np.float32(0.05) * np.sqrt(table.length) * np.random.default_rng(2).standard_normal(len(table))
    outside = (s.abs() > 0.03 * np.sqrt(table.length)) & (np.sign(s) == np.sign(table.advantage))
    moved = {"log_ratio": s.astype(np.float32), "quadratic_variation": (0.05**2 * table.length).astype(np.float32)}
    side = np.where(outside, np.where(table.advantage > 0, "upper", "lower"), "kept")
    return table.assign(**moved, clipped=outside.astype(np.float32), decision=side), "fspo", 1


def not_finite():
    table, loss, mini_batches = quickstart()
    broken = np.arange(len(table)) % 20 == 0
    zero = {name: table[name].where(~broken, 0) for name in ("log_ratio", "quadratic_variation", "clipped")}
    return table.assign(**zero, decision=table.decision.where(~broken, "nonfinite")), loss, mini_batches


def cut_off():
    table, loss, mini_batches = quickstart()
    return table.assign(truncated=(table.length >= table.length.quantile(0.6)).astype(np.float32)), loss, mini_batches


RUNS = {
    "a quickstart": (quickstart, c.EVEN, KEEP),
    "an observed run of gspo": (observed_gspo, c.LENGTH, TAKE),
    "one optimiser step a rollout": (one_step, c.NOISE, FIX),
    "NaN": (not_finite, c.NOT_FINITE, FIX),
    "cut off": (cut_off, c.CUT_OFF, FIX),
}


@pytest.fixture
def written(request, tmp_path):
    """A run's folder: records, metrics of verl's file logger, and config."""
    table, loss, mini_batches = RUNS[request.param][0]()
    synthetic_run.write_records(tmp_path / "records", table, loss)
    synthetic_run.write_config(tmp_path, loss)
    band = runs.read_run(tmp_path, "run").settings.trained_band if loss == "fspo" else None
    raw = [logged_by_verl(part, [2, 2], mini_batches, band) for _, part in table.groupby("step")]
    logged = [*map(live.logged, raw)]
    lines = [json.dumps({"step": step, "data": metrics}) + "\n" for step, metrics in enumerate(logged, start=1)]
    (tmp_path / "metrics-1.jsonl").write_text("".join(lines))
    return request.param, tmp_path, logged


def said_by(capsys, *arguments):
    assert cli.main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("written", RUNS, indirect=True)
def test_every_command_says_the_same_of_one_run(written, capsys, tmp_path):
    name, folder, logged = written
    _, cause, action = RUNS[name]
    first, *others = judge(runs.read_run(folder, "run")).findings
    assert (first.id, first.action) == (cause, action)

    report = json.loads(said_by(capsys, "report", folder, "-o", tmp_path / "report", "--json"))
    assert report["runs"][0]["findings"] == [one.to_json() for one in (first, *others)]
    text = said_by(capsys, "report", folder, "-o", tmp_path / "report")
    assert first.sentence in text and first.advice in text

    calibrated = json.loads(said_by(capsys, "calibrate", folder, "--json"))["findings"]
    assert calibrated[: 1 + len(others)] == report["runs"][0]["findings"]
    text = said_by(capsys, "calibrate", folder)
    assert first.sentence in text and first.advice in text

    alerting = alerts.Alerts(runs.read_run(folder, "run").config)
    for metrics in logged[:-1]:
        alerting.of_step(metrics)
    alerting._said = set()  # a cause is said once, when it begins: here over all steps
    alerted = alerting.of_step(logged[-1])
    if cause == c.EVEN:
        assert alerted == []
        return
    found = alerted[0]
    expected = RECORD if cause == c.LENGTH else action  # sums of steps carry no test, so they advise no range
    assert (found.id, found.action, found.value) == (cause, expected, pytest.approx(first.value, rel=1e-6))


RATES = ("clip_rate", "sides", "not_finite", "cut_off", "noise.sigma", "moved", "one_step", "noise.outside")


@pytest.mark.parametrize("written", RUNS, indirect=True)
def test_the_log_alone_gives_the_cause_and_the_rates_of_the_records(written, capsys, tmp_path):
    """Lengths are not tested without records: they are named where rates differ much, and never called alike."""
    name, folder, _ = written
    _, cause, action = RUNS[name]
    recorded = judge(runs.read_run(folder, "run")).evidence
    shutil.rmtree(folder / "records")
    (said,) = json.loads(said_by(capsys, "report", folder, "-o", tmp_path / "report", "--json"))["runs"]
    first = said["findings"][0]
    assert first["id"] == (c.UNKNOWN if cause == c.EVEN else cause)
    assert first["action"] == (action if action == FIX else RECORD)
    logged = judge(runs.read_run(folder, "run")).evidence
    for rate in RATES[: -1 if name == "an observed run of gspo" else None]:  # the last is logged of fspo alone
        of_log, of_records = map(attrgetter(rate), (logged, recorded))
        assert of_log == (None if of_records is None else pytest.approx(of_records, rel=0.01)), rate
    assert said["clip"]["rate"] == logged.clip_rate > 0


CONSOLE = "step:{} - actor/pg_clipfrac:{:.4f} - actor/grad_norm:{} - response_length/mean:{}\n"


@pytest.mark.parametrize(("gradient", "cause", "action"), [(0.2, c.UNKNOWN, RECORD), (math.nan, c.NOT_FINITE, FIX)])
def test_every_command_says_the_same_of_a_console_log(gradient, cause, action, tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text("".join(CONSOLE.format(step, 0.1, gradient, 100.0 + step) for step in range(1, STEPS + 1)))
    first, *others = judge(runs.read_run(log, "train")).findings
    assert (first.id, first.action) == (cause, action)
    report = json.loads(said_by(capsys, "report", log, "-o", tmp_path / "report", "--json"))
    assert report["runs"][0]["findings"] == [one.to_json() for one in (first, *others)]
    assert cli.main(["calibrate", str(log)]) == 2
    error = capsys.readouterr().err
    assert LEARN_MORE in error
