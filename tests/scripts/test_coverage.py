# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The study of coverage: its published numbers are those of its settings, and the simulation runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COVERAGE = Path(__file__).parents[2] / "scripts/studies/coverage"
sys.path.insert(0, str(COVERAGE))

import simulate_paired  # noqa: E402


def test_the_published_numbers_are_those_of_the_scripts_settings():
    paired = json.loads((COVERAGE / "paired_coverage.json").read_text())
    cells = [(law, seeds) for law in simulate_paired.LAWS for seeds in simulate_paired.SEEDS]
    assert [(row["law"], row["seeds"]) for row in paired["rows"]] == cells
    # What is exact for six seeds of a symmetric law, within three standard errors.
    exact = next(row["flips"] for row in paired["rows"] if row["law"] == "normal" and row["seeds"] == 6)
    assert exact == pytest.approx(1 - 2 / 64, abs=3 * (2 / 64 / paired["comparisons"]) ** 0.5)


@pytest.mark.long
def test_a_small_simulation_writes_numbers_and_table(tmp_path):
    command = [sys.executable, COVERAGE / "simulate_paired.py", "--comparisons", "2", "--output", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    assert "| normal | 6 |" in (tmp_path / "results.md").read_text()
