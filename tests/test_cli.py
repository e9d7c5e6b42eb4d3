# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The `fspo-verl` command: its subcommands, and what it says when one cannot run."""

import io
import os
import signal
import subprocess
import sys

import pytest

from fspo_verl import cli
from fspo_verl.report import figures


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(figures, "render", lambda draw, columns, *kinds: [b"picture"] * len(kinds))


def test_ctrl_c_shows_no_traceback(monkeypatch, capsys):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupt)
    assert cli.main(["report", "RUN", "-o", "DIR"]) == 130 and capsys.readouterr().err == ""


def stream(kind):
    """As a shell can leave one: closed, on a full disk, into a pipe that nobody reads, or of a poor encoding."""
    if kind == "broken pipe":
        reading, writing = os.pipe()
        os.close(reading)
        return os.fdopen(writing, "w")
    return {"closed": lambda: None, "full": lambda: open("/dev/full", "w")}.get(kind, io.StringIO)()


@pytest.mark.parametrize("error", ["open", "closed", "full", "broken pipe"])
@pytest.mark.parametrize("out", ["open", "closed", "full", "broken pipe"])
@pytest.mark.parametrize(
    "command", ["report LOG -o OUT", "watch --once LOG", "calibrate NOTHING", "report NOTHING -o OUT"]
)
def test_no_stream_ends_a_command_in_a_traceback(command, out, error, tmp_path, monkeypatch, no_pictures):
    log = tmp_path / "train.log"
    log.write_text("step:1 - actor/pg_clipfrac:0.1 - response_length/mean:100.0\n")
    words = {"LOG": str(log), "OUT": str(tmp_path / "out"), "NOTHING": str(tmp_path / "nothing")}
    streams = stream(out), stream(error)
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    codes = {"full": {2}, "broken pipe": {128 + signal.SIGPIPE}}.get(out, {0})
    expected = {2} if "NOTHING" in command else codes
    if error == "broken pipe":
        expected = expected | {128 + signal.SIGPIPE}
    assert cli.main([words.get(word, word) for word in command.split()]) in expected
    assert (sys.stdout, sys.stderr) == streams
    if error == "open" and 2 in expected:
        (line,) = [line for line in streams[1].getvalue().splitlines() if not line.startswith("waiting")]
        assert line.startswith(f"fspo-verl {command.split()[0]}: ")
        assert words["NOTHING"] in line or "NOTHING" not in command


def test_what_an_encoding_lacks_is_shown_as_its_escape(tmp_path, monkeypatch, no_pictures):
    log = tmp_path / "\udcff \u221a.log"
    log.write_text("step:1 - actor/pg_clipfrac:0.1 - response_length/mean:100.0\n")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), "ascii", "strict"))
    assert cli.main(["report", str(log)]) == 0
    assert rb"\udcff \u221a" in written.getvalue()


@pytest.mark.parametrize(
    ("streams", "code"), [("<&- >&- 2>&-", 0), ("> /dev/full 2>&1", 2), ("| :", 128 + signal.SIGPIPE)]
)
def test_the_end_of_the_interpreter_complains_of_no_stream(streams, code, tmp_path):
    log = tmp_path / "train.log"
    log.write_text("step:1 - actor/pg_clipfrac:0.1 - response_length/mean:100.0\n")
    command = f"set -o pipefail; {sys.executable} -m fspo_verl.cli watch --once '{log}' {streams}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert ended.returncode == code and ended.stderr == ""


def test_a_missing_package_names_the_extra(monkeypatch, capsys):
    def absent(name):
        raise ModuleNotFoundError(name="matplotlib")

    monkeypatch.setattr(cli.importlib, "import_module", absent)
    assert cli.main(["report", "RUN", "-o", "DIR"]) == 2 and "fspo-verl[report]" in capsys.readouterr().err


def test_help_and_version_import_nothing_heavy():
    code = """
import sys
from fspo_verl import cli
for options in (["--help"], ["--version"], *([command, "--help"] for command in cli.COMMANDS)):
    try:
        cli.main(options)
    except SystemExit as ended:
        assert ended.code == 0
print(*sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert all(f"usage: fspo-verl {command}" in run.stdout for command in cli.COMMANDS)
    heavy = {"torch", "verl", "ray", "transformers", "hydra", "omegaconf", "numpy", "pandas", "scipy", "matplotlib"}
    assert heavy.isdisjoint(run.stdout.splitlines()[-1].split())
