# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Quotations of README and docs/ are what the committed records say."""

import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[1]
ROOT = STUDIES.parents[1]
sys.path.insert(0, str(STUDIES))

import quoted  # noqa: E402

from fspo_verl.analysis import causes, runs  # noqa: E402
from fspo_verl.analysis.judgement import judge  # noqa: E402

RECORDED = ROOT / "tests/recorded"


def the_sentence_of_committed_records():
    """docs/measure.md shows it beside its command."""
    sentence = judge(runs.read_run(RECORDED / "grpo-4-float32", "")).findings[0].sentence
    yield "docs/measure.md", sentence
    yield "docs/measure.md", "`fspo-verl report tests/recorded/grpo-4-float32`"


def from_where_on_a_cause_is_concluded():
    yield "docs/measure.md", f"{causes.SHARE_NOT_FINITE:.1%} of the responses or more hold NaN or inf"
    yield "docs/measure.md", f"{causes.SHARE_CUT_OFF:.0%} or more fill what they were allowed"
    yield "docs/measure.md", f"a rollout correction rejects {causes.SHARE_REJECTED:.0%}"


OTHERS = (the_sentence_of_committed_records, from_where_on_a_cause_is_concluded)


@pytest.mark.parametrize("part", [*quoted.PARTS, *OTHERS], ids=lambda part: part.__name__)
def test_pages_quote_what_the_records_say(part):
    """Each sentence stands on its page, wherever its lines break."""
    sentences = list(part())
    texts = {page: " ".join((ROOT / page).read_text().replace("\n> ", "\n").split()) for page, _ in sentences}
    assert sentences and not [sentence for page, sentence in sentences if sentence not in texts[page]]
