# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The published tables of simulated coverage are those of their numbers, and the scripts that make them run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/simulate_coverage.py"
sys.path.insert(0, str(SCRIPT.parent))

import simulate_coverage  # noqa: E402
import simulate_paired  # noqa: E402

from fspo_verl.files import between  # noqa: E402


def test_the_published_table_is_that_of_the_published_numbers():
    page, result = (ROOT / "docs/coverage.md").read_text(), json.loads((ROOT / "docs/coverage.json").read_text())
    text = simulate_coverage.table(result)
    assert between(page, simulate_coverage.BEGIN, simulate_coverage.END, text) == page
    assert [row["scenario"] for row in result["rows"]] == list(simulate_coverage.SCENARIOS)
    assert [row["settings"] for row in result["rows"]] == list(simulate_coverage.SCENARIOS.values())


def test_a_small_simulation_writes_numbers_and_table(tmp_path):
    (tmp_path / "coverage.md").write_text(
        f"before\n{simulate_coverage.BEGIN}\nan earlier table\n{simulate_coverage.END}\nafter\n"
    )
    command = [sys.executable, SCRIPT, "--runs", "3", "--only", "few data", "--output", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    (row,) = json.loads((tmp_path / "coverage.json").read_text())["rows"]
    assert row["settings"] == simulate_coverage.SCENARIOS["few data"]
    for name in simulate_coverage.COLUMNS:
        assert row[name] is None or row[name] in (0, 1) or row[name] == pytest.approx(round(3 * row[name]) / 3)
    page = (tmp_path / "coverage.md").read_text()
    assert (
        page.startswith("before\n")
        and page.endswith("after\n")
        and "an earlier table" not in page
        and "| few data | 6 x 8 x 8" in page
    )


def test_the_table_of_paired_differences_is_that_of_its_numbers(tmp_path):
    page, result = (ROOT / "docs/coverage.md").read_text(), json.loads((ROOT / "docs/paired_coverage.json").read_text())
    text = simulate_paired.table(result)
    assert between(page, simulate_paired.BEGIN, simulate_paired.END, text) == page
    cells = [(law, seeds) for law in simulate_paired.LAWS for seeds in simulate_paired.SEEDS]
    assert [(row["law"], row["seeds"]) for row in result["rows"]] == cells
    # What is exact for six seeds of a symmetric law, within three standard errors.
    exact = next(row["flips"] for row in result["rows"] if row["law"] == "normal" and row["seeds"] == 6)
    assert exact == pytest.approx(1 - 2 / 64, abs=3 * (2 / 64 / result["comparisons"]) ** 0.5)

    command = [sys.executable, ROOT / "scripts/simulate_paired.py", "--comparisons", "2", "--output", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    small = json.loads((tmp_path / "paired_coverage.json").read_text())["rows"]
    assert [set(row) for row in small] == [set(row) for row in result["rows"]]
    assert "| normal | 6 |" in (tmp_path / "coverage.md").read_text()


@pytest.mark.parametrize("script", ["simulate_coverage", "simulate_paired", "predict_halves"])
def test_help_needs_no_installed_package(script):
    command = [sys.executable, "-I", "-S", ROOT / f"scripts/{script}.py", "--help"]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_runs_that_cannot_be_are_refused():
    for options in (["--runs", "0"], ["--only", "no such scenario"]):
        refused = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True)
        assert refused.returncode == 2 and "has to be 1 or more" in refused.stderr
