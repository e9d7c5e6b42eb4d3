# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The pages of studies are those of their records."""

import json
import shutil
from pathlib import Path

import pytest
from compare import compare, load, main
from studies.regimes import regimes

STUDIES = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["comparison", "comparison_16_steps", "comparison_real"])
def test_the_pages_of_comparisons_are_those_of_their_records(name, tmp_path):
    for kind in ("json", "md"):
        shutil.copy(STUDIES / name / f"{name}.{kind}", tmp_path)
    assert main([str(tmp_path / f"{name}.json")]) == 0
    assert (tmp_path / f"{name}.md").read_text() == (STUDIES / name / f"{name}.md").read_text()


def test_other_studies_answer_from_their_records(tmp_path):
    for name in ("README.md", "regimes.json"):
        shutil.copy(STUDIES / "regimes" / name, tmp_path)
    regimes.write(json.loads((tmp_path / "regimes.json").read_text()), tmp_path)
    assert (tmp_path / "README.md").read_text() == (STUDIES / "regimes/README.md").read_text()
    for name in ("parts", "solvable"):
        assert compare(load(STUDIES / name / f"{name}.json")).losses[0] == "fspo"
