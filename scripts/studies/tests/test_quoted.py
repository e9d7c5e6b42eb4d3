# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What README, docs/ and the studies' own pages quote is what the committed records say."""

import shutil
import sys
from pathlib import Path

import pytest
from compare import main

STUDIES = Path(__file__).parents[1]
ROOT = STUDIES.parents[1]
sys.path.insert(0, str(STUDIES))

import quoted  # noqa: E402

from fspo_verl.analysis import causes, runs  # noqa: E402
from fspo_verl.analysis.judgement import judge  # noqa: E402


def says(page: str, *sentences: str) -> None:
    """Each sentence stands on the page, wherever its lines break."""
    text = " ".join((ROOT / page).read_text().replace("\n> ", "\n").split())
    missing = [sentence for sentence in sentences if sentence not in text]
    assert not missing, missing


@pytest.mark.parametrize("part", quoted.PARTS, ids=lambda part: part.__name__)
def test_pages_quote_what_the_records_say(part):
    sentences = list(part())
    assert sentences
    for page, sentence in sentences:
        says(page, sentence)


# --- what other pages quote -------------------------------------------------------------------------------------------


def test_the_sentence_of_committed_records():
    folder = "tests/recorded/grpo-4-float32"
    sentence = judge(runs.read_run(ROOT / folder, "")).findings[0].sentence
    says("docs/measure.md", sentence, f"`fspo-verl report {folder}`")


def test_from_where_on_a_cause_is_concluded():
    says(
        "docs/measure.md",
        f"{causes.SHARE_NOT_FINITE:.1%} of the responses or more hold NaN or inf",
        f"{causes.SHARE_CUT_OFF:.0%} or more fill what they were allowed",
        f"or a rollout correction rejects {causes.SHARE_REJECTED:.0%}",
    )


def test_bytes_of_a_record():
    folders = [ROOT / "tests/recorded" / name for name in ("grpo-4-float32", "still-0-bfloat16")]
    sizes = [sum(file.stat().st_size for file in folder.glob("*.parquet")) for folder in folders]
    each = [size / len(runs.read_run(folder, "").records) for size, folder in zip(sizes, folders, strict=True)]
    says("docs/scripts.md", f"Records take {min(each):.0f} to {max(each):.0f} bytes of disk per response")


@pytest.mark.parametrize("name", ["comparison", "comparison_16_steps"])
def test_the_pages_of_comparisons_are_those_of_their_records(name, tmp_path):
    for kind in ("json", "md"):
        shutil.copy(STUDIES / name / f"{name}.{kind}", tmp_path)
    assert main([str(tmp_path / f"{name}.json")]) == 0
    assert (tmp_path / f"{name}.md").read_text() == (STUDIES / name / f"{name}.md").read_text()
