# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A run that is damaged in every way at once: each command names what it leaves out, and reads the rest."""

import errno
import json
import os
from pathlib import Path

import compare
import numpy as np
import pytest
import synthetic_run

from fspo_verl import cli
from fspo_verl.analysis import runs
from fspo_verl.report import figures


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No pictures: no test here is about these."""
    monkeypatch.setattr(figures, "render", lambda draw, columns, *kinds: [b""] * len(kinds))
    monkeypatch.setattr(compare, "small_png", bytes)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A folder with one run: a file of records cut off, a config that is no YAML."""
    run = tmp_path_factory.mktemp("runs") / "fspo-seed1"
    synthetic_run.write_run(run, "fspo", steps=8, prompts=64)
    bad = run / "records/step-000004-rank-0000.parquet"
    bad.write_bytes(bad.read_bytes()[:-10])
    (run / "hydra/.hydra/config.yaml").write_text("trainer: [\n")
    return run


def run_command(command: str, run: Path, output: Path) -> int:
    if command == "compare":
        return compare.main([str(run.parent), "--output", str(output)])
    options = {"report": ["-o", str(output)], "watch": ["--once"]}
    return cli.main([command, str(run), *options.get(command, [])])


@pytest.mark.parametrize("command", ["calibrate", "compare", "report", "watch"])
def test_every_command_reads_what_is_whole(command, damaged, tmp_path, caplog):
    with pytest.warns(UserWarning, match="step-000004-rank-0000.parquet is left out"):
        assert run_command(command, damaged, tmp_path) == 0
    assert f"{damaged}/hydra/.hydra is left out, it cannot be read" in caplog.text
    if command == "report":
        (summary,) = json.loads((tmp_path / "report.json").read_text())["runs"]
        assert summary["records"] == 7 * 64 * 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", ["report", "calibrate"])
def test_a_damaged_file_of_records_counts_as_missing(command, damaged, tmp_path, capsys):
    options = ["-o", str(tmp_path)] if command == "report" else []
    assert cli.main([command, str(damaged), *options, "--json"]) == 0
    texts = [capsys.readouterr().out, *(file.read_text() for file in tmp_path.glob("*.html"))]
    assert all("Steps with missing records: 1." in text for text in texts)


def test_the_last_config_that_can_be_read_counts(tmp_path, caplog):
    broken = {
        "b": b"\x00",
        "c": b"- a\n",
        "d": b"",
        "e": b"1\n",
        "f": b"\xff\xfe",
        "g": b"a: &b [*b]\n",
        "h": b"a: {\n",
    }
    for time, (folder, content) in enumerate({"a": b"data: {seed: 3}\n", **broken}.items()):
        config = tmp_path / folder / ".hydra/config.yaml"
        config.parent.mkdir(parents=True)
        config.write_bytes(content)
        os.utime(config, (time, time))
    assert runs.read_run(tmp_path, "a").config == {"data": {"seed": 3}}
    said = [record.message for record in caplog.records]
    assert len(said) == len(broken) and all(len(text.splitlines()) == 1 for text in said)
    assert [text.split("/.hydra is left out")[0] for text in said] == [f"{tmp_path}/{name}" for name in "hgfedcb"]


@pytest.fixture
def full_disk(monkeypatch):
    """From the third file on the disk takes only half of what is written."""
    write, written = Path.write_bytes, []

    def write_half(file, content):
        written.append(file)
        if len(written) < 3:
            return write(file, content)
        write(file, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    monkeypatch.setattr(Path, "write_bytes", write_half)


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_full_disk_leaves_the_earlier_result_as_it_was(command, damaged, tmp_path, capsys, request):
    (tmp_path / "comparison.md").write_text("mine\n")
    with pytest.warns(UserWarning):
        assert run_command(command, damaged, tmp_path) == 0
    before = everything_in(tmp_path)
    assert len(before) >= 3
    synthetic_run.write_metrics(damaged / "metrics-2.jsonl", np.random.default_rng(1), "fspo", 8)
    request.getfixturevalue("full_disk")
    capsys.readouterr()
    with pytest.warns(UserWarning):
        assert run_command(command, damaged, tmp_path) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    program = "compare" if command == "compare" else f"fspo-verl {command}"
    assert said.startswith(f"{program}: No space left on device: {tmp_path}")
    assert everything_in(tmp_path) == before
