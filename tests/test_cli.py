# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The `fspo-verl` command: its subcommands, and what it says when one cannot run."""

import io
import signal
import subprocess
import sys

import pytest

from fspo_verl import cli
from fspo_verl.report import figures


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(figures, "render", lambda draw, *kinds: [b"picture"] * len(kinds))


def test_ctrl_c_shows_no_traceback(monkeypatch, capsys):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupt)
    assert cli.main(["report", "RUN", "-o", "DIR"]) == 130 and capsys.readouterr().err == ""


def test_what_an_encoding_lacks_is_shown_as_its_escape(tmp_path, monkeypatch, no_pictures):
    log = tmp_path / "\udcff \u221a.log"
    log.write_text("step:1 - actor/pg_clipfrac:0.1 - response_length/mean:100.0\n")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), "ascii", "strict"))
    assert cli.main(["report", str(log)]) == 0
    assert rb"\udcff \u221a" in written.getvalue()


@pytest.mark.parametrize(("out", "code"), [("> /dev/full", 2), ("| :", 128 + signal.SIGPIPE)])
def test_a_full_disk_and_a_reader_that_has_left_end_a_command_in_one_line_or_none(out, code, tmp_path):
    log = tmp_path / "train.log"
    log.write_text("step:1 - actor/pg_clipfrac:0.1 - response_length/mean:100.0\n")
    command = f"set -o pipefail; {sys.executable} -m fspo_verl.cli report '{log}' -o '{tmp_path}/report' {out}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr == ("" if code > 2 else "fspo-verl report: [Errno 28] No space left on device\n")


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
