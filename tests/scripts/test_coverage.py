# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The studies of coverage and predictions: published tables are those of their numbers, and the simulations run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "scripts/studies"
COVERAGE = STUDIES / "coverage"
sys.path[:0] = [str(COVERAGE), str(STUDIES / "predictions")]

import predict_halves  # noqa: E402
import simulate_coverage  # noqa: E402
import simulate_paired  # noqa: E402

from fspo_verl.files import between  # noqa: E402


@pytest.mark.parametrize(
    ("study", "folder", "numbers"),
    [
        (simulate_coverage, "coverage", "coverage.json"),
        (simulate_paired, "coverage", "paired_coverage.json"),
        (predict_halves, "predictions", "predictions.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_published_table_is_that_of_the_published_numbers(study, folder, numbers):
    page, result = (STUDIES / folder / "results.md").read_text(), json.loads((STUDIES / folder / numbers).read_text())
    assert between(page, study.BEGIN, study.END, study.table(result)) == page


def test_the_published_numbers_are_those_of_the_scripts_settings():
    rows = json.loads((COVERAGE / "coverage.json").read_text())["rows"]
    assert {row["scenario"]: row["settings"] for row in rows} == simulate_coverage.SCENARIOS
    paired = json.loads((COVERAGE / "paired_coverage.json").read_text())
    cells = [(law, seeds) for law in simulate_paired.LAWS for seeds in simulate_paired.SEEDS]
    assert [(row["law"], row["seeds"]) for row in paired["rows"]] == cells
    # What is exact for six seeds of a symmetric law, within three standard errors.
    exact = next(row["flips"] for row in paired["rows"] if row["law"] == "normal" and row["seeds"] == 6)
    assert exact == pytest.approx(1 - 2 / 64, abs=3 * (2 / 64 / paired["comparisons"]) ** 0.5)


@pytest.mark.long
def test_a_small_simulation_writes_numbers_and_table(tmp_path):
    for script, options in (("coverage", ["--runs", "3", "--only", "few data"]), ("paired", ["--comparisons", "2"])):
        command = [sys.executable, COVERAGE / f"simulate_{script}.py", *options, "--output", tmp_path / script]
        subprocess.run(command, check=True, capture_output=True)
    (row,) = json.loads((tmp_path / "coverage/coverage.json").read_text())["rows"]
    assert row["settings"] == simulate_coverage.SCENARIOS["few data"]
    for name in simulate_coverage.COLUMNS:
        assert row[name] is None or row[name] in (0, 1) or row[name] == pytest.approx(round(3 * row[name]) / 3)
    assert "| few data | 6 x 8 x 8" in (tmp_path / "coverage/results.md").read_text()
    assert "| normal | 6 |" in (tmp_path / "paired/results.md").read_text()
