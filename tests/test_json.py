# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The JSON that commands print has the keys of docs/json.md: that page is the schema."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import synthetic_run

from fspo_verl import cli
from fspo_verl.analysis import calibration, causes
from fspo_verl.findings import ACTIONS, SEVERITIES

PAGE = Path(__file__).parents[1] / "docs/json.md"
SIMPLE = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def schema():
    """Return the keys of each object on the page, with their types and whether they can be missing."""
    found = {}
    for section in re.split(r"^##+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| ?`(\w+)`(\??) ?\| ?([^|]+?) ?\|", section, flags=re.MULTILINE)
        found[section.split("\n")[0]] = {key: (kind, bool(missing)) for key, missing, kind in rows}
    return found


SCHEMA = schema()


def wrong(value, kind, at=""):
    """Yield each place where a value is not of a type, and why."""
    if " or " in kind:
        found = [list(wrong(value, one, at)) for one in kind.split(" or ")]
        yield from () if not all(found) else found[0]
    elif kind in SIMPLE:
        if not SIMPLE[kind](value):
            yield f"{at} is {value!r}, no {kind}"
    elif not isinstance(value, list if kind.startswith("[") else dict):
        yield f"{at} is no {kind}"
    elif kind.startswith("["):
        for place, one in enumerate(value):
            yield from wrong(one, kind[1:-1], f"{at}[{place}]")
    else:
        yield from (f"{at}.{key} is not documented" for key in value.keys() - SCHEMA[kind].keys())
        for key, (of, missing) in SCHEMA[kind].items():
            if key in value:
                yield from wrong(value[key], of, f"{at}.{key}")
            elif not missing:
                yield f"{at}.{key} is missing"


def assert_documented(value, command):
    assert list(wrong(value, command)) == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs with records, of a loss that clips tokens, with mismatch, of metrics alone, and a log."""
    folder, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    for loss in ("fspo", "gspo", "vanilla"):
        synthetic_run.write_run(folder / loss, loss, steps=12)
    table = synthetic_run.records(rng, "fspo", 12)
    sums = {"length": table.length, "log_ratio": 0.0, "quadratic_variation": 1e-4 * table.length, "k3": 5e-5}
    engine = {f"rollout_{name}": column for name, column in sums.items()} | {"tokens_masked_icepop": 0.0}
    synthetic_run.write_records(folder / "engine/records", table.assign(**engine), "fspo")
    synthetic_run.write_config(folder / "metrics", "fspo")
    synthetic_run.write_metrics(folder / "metrics/metrics-1.jsonl", rng, "fspo", 5)
    (folder / "train.log").write_text("step:1 - actor/pg_clipfrac:0.1 - response_length/mean:100.0\n")
    return folder


@pytest.mark.parametrize("run", ["fspo", "gspo", "vanilla", "engine", "metrics", "train.log"])
def test_report(run, folders, tmp_path, capsys):
    assert cli.main(["report", str(folders / run), "-o", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "report.json").read_text()
    assert_documented(told := json.loads(printed), "report")
    assert (told["runs"][0]["mismatch"] is not None) == (run == "engine")


@pytest.mark.parametrize("run", ["fspo", "gspo", "vanilla"])
def test_calibrate(run, folders, capsys):
    before = {file: file.read_bytes() for file in folders.rglob("*") if file.is_file()}
    assert cli.main(["calibrate", str(folders / run), "--json"]) == 0
    assert_documented(told := json.loads(capsys.readouterr().out), "calibrate")
    assert told["findings"][-1]["id"] == calibration.EPS
    for one in told["findings"]:
        assert one["severity"] in SEVERITIES and one["action"] in ("", *ACTIONS)
        assert bool(one["action"]) == bool(one["advice"])
    assert {file: file.read_bytes() for file in folders.rglob("*") if file.is_file()} == before


def test_doctor(capsys):
    assert cli.main(["doctor", "--json", "algorithm.policy_loss=fspo", "data.train_batch_size=64"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert told["findings"]
    assert_documented(told, "doctor")


def test_the_skill_names_keys_and_options_that_are_there():
    """An agent acts on this page alone."""
    text = (PAGE.parents[1] / "skills/fspo-verl/SKILL.md").read_text()
    assert len(text.splitlines()) <= 60
    for command, options in re.findall(r"^fspo-verl (\w+)(.*?)(?:#.*)?$", text, flags=re.MULTILINE):
        known = {option for action in cli.parsers()[1][command]._actions for option in action.option_strings}
        assert {word for word in options.split() if re.match(r"--?[a-z]", word)} <= known, command
    keys = {key for section in SCHEMA.values() for key in section}
    named = re.findall(r"`([a-z]\w+(?:\[\w*\])?(?:\.[a-z]\w+)*)`", text)
    words = {word for code in named for word in re.findall(r"[a-z]\w+", code)}
    ids = {*causes.CAUSES, *ACTIONS, *SEVERITIES, causes.UNKNOWN, causes.EVEN, calibration.EPS}
    others = {"run", "metrics", "json"}
    assert words <= keys | ids | others, words - keys - ids - others


@pytest.mark.parametrize("page, mark", [("json", "`{}`"), ("measure", "| {} |")])
def test_a_page_names_every_cause(page, mark):
    text = PAGE.with_name(f"{page}.md").read_text()
    assert [cause for cause in causes.CAUSES if mark.format(cause) not in text] == []
