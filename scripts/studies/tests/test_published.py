# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The pages of studies are those of their records."""

import shutil
from pathlib import Path

import pytest
from compare import compare, load, main

STUDIES = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["comparison", "comparison_16_steps"])
def test_the_pages_of_comparisons_are_those_of_their_records(name, tmp_path):
    for kind in ("json", "md"):
        shutil.copy(STUDIES / name / f"{name}.{kind}", tmp_path)
    assert main([str(tmp_path / f"{name}.json")]) == 0
    assert (tmp_path / f"{name}.md").read_text() == (STUDIES / name / f"{name}.md").read_text()


def test_the_records_of_solvable_problems_are_read():
    assert compare(load(STUDIES / "solvable/solvable.json")).losses[0] == "fspo"
