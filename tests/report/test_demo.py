# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`fspo-verl demo` shows what `fspo-verl report` makes of the records that the repository holds."""

import demo

from fspo_verl import cli
from fspo_verl.analysis.judgement import judge
from fspo_verl.analysis.runs import read_run
from fspo_verl.clips import CLIPS
from fspo_verl.demo.command import PAGE, SAID


def test_demo_prints_what_report_prints_of_the_same_records(tmp_path, capsys):
    said = demo.report(str(tmp_path))
    assert said == SAID.read_text(), "python scripts/demo.py makes it again"
    assert cli.main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(said) and str(PAGE) in shown


def test_the_page_of_the_demo_begins_with_the_conclusion():
    (conclusion, *_) = judge(read_run(demo.RECORDS, "")).findings
    assert conclusion.sentence in SAID.read_text()
    assert "report.json" not in PAGE.read_text()  # the wheel carries the page alone
    assert conclusion.sentence.replace("'", "&#39;") in PAGE.read_text()


def test_the_page_of_the_demo_has_every_clip_of_the_catalogue():
    assert [clip.label for clip in CLIPS.values() if clip.label not in PAGE.read_text()] == []
