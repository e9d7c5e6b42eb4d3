# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The `fspo-verl` command: its subcommands, and what it says when one cannot run."""

import signal
import subprocess
import sys

import pytest

from fspo_verl import cli


@pytest.mark.parametrize("command", ["report", "calibrate"])
def test_what_a_user_can_mend_is_one_line(command, tmp_path, capsys):
    options = ["-o", str(tmp_path / "out")] if command == "report" else []
    assert cli.main([command, str(tmp_path / "nothing"), *options]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"fspo-verl {command}: ") and str(tmp_path / "nothing") in shown
    assert len(shown.splitlines()) == 1


def test_ctrl_c_shows_no_traceback(monkeypatch, capsys):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupt)
    assert cli.main(["report", "RUN", "-o", "DIR"]) == 130 and capsys.readouterr().err == ""


def test_a_pipe_that_is_closed_shows_no_traceback(tmp_path):
    """As of `fspo-verl report RUN | head -1`, here before the first line."""
    log = tmp_path / "train.log"
    log.write_text("step:1 - actor/pg_clipfrac:0.1 - response_length/mean:100.0\n")
    command = [sys.executable, "-m", "fspo_verl.cli", "report", str(log), "-o", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        run.stdout.close()
        assert run.wait() == 128 + signal.SIGPIPE and run.stderr.read() == ""


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
