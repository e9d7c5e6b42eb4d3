# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A run that is damaged in every way at once: each command names what it leaves out, and reads the rest."""

import json
import os

import pytest
import synthetic_run

from fspo_verl import cli
from fspo_verl.analysis import runs
from fspo_verl.report import figures

OPTIONS = {"calibrate": ["--json"], "report": ["--json", "-o"]}


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_reads_what_is_whole_and_says_what_is_not(command, tmp_path, caplog, capsys, monkeypatch):
    """The run has a file of records that is cut off, and a config that is no YAML."""
    monkeypatch.setattr(figures, "render", lambda draw, *kinds: [b""] * len(kinds))
    run = synthetic_run.write_run(tmp_path / "run", "fspo", steps=8, prompts=64)
    bad = run / "records/step-000004-rank-0000.parquet"
    bad.write_bytes(bad.read_bytes()[:-10])
    (run / "hydra/.hydra/config.yaml").write_text("trainer: [\n")
    output = [str(tmp_path)] if command == "report" else []
    with pytest.warns(UserWarning, match="step-000004-rank-0000.parquet is left out"):
        assert cli.main([command, str(run), *OPTIONS[command], *output]) == 0
    assert f"{run}/hydra/.hydra is left out, it cannot be read" in caplog.text
    said = capsys.readouterr().out
    pages = [file.read_text() for file in tmp_path.glob("*.html")]
    assert all("Steps with missing records: 1." in text for text in (said, *pages))
    if command == "report":
        assert json.loads(said)["runs"][0]["records"] == 7 * 64 * 8


def test_the_last_config_that_can_be_read_counts(tmp_path, caplog):
    contents = [b"data: {seed: 3}\n", b"\x00", b"- a\n", b"", b"1\n", b"\xff\xfe", b"a: &b [*b]\n", b"a: {\n"]
    for age, content in enumerate(contents):
        config = tmp_path / f"{age}/.hydra/config.yaml"
        config.parent.mkdir(parents=True)
        config.write_bytes(content)
        os.utime(config, (age, age))
    assert runs.read_run(tmp_path, "a").config == {"data": {"seed": 3}}
    said = [record.message for record in caplog.records]
    assert all(len(text.splitlines()) == 1 for text in said)
    broken = [f"{tmp_path}/{age}" for age in reversed(range(1, len(contents)))]
    assert [text.split("/.hydra is left out")[0] for text in said] == broken
