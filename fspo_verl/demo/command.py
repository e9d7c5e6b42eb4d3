# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Show what you would get: the conclusion and the page of a small recorded run. Nothing is trained or written.

The run is the quickstart: FSPO on 30 steps of a small task.
"""

import argparse
from pathlib import Path

from fspo_verl.output import say, show

HERE = Path(__file__).parent
PAGE, SAID = HERE / "report.html", HERE / "report.txt"
"""The page, and what ``fspo-verl report`` prints of the run but for places. scripts/demo.py makes both."""


MADE_BY = """\
  bash scripts/quickstart.sh
  fspo-verl report runs/quickstart/fspo-hf-seed0"""
NEXT = "  fspo-verl run --loss observed -- bash my_script.sh"


def main(_args: argparse.Namespace) -> int:
    """Print the conclusion, where the page is, what made them, and how to see the same of a run."""
    say(SAID.read_text(encoding="utf-8").rstrip("\n"))
    show([("page", str(PAGE))], widths=(8,))
    say(f"\nmade without a GPU by\n{MADE_BY}\nto see the same of your run\n{NEXT}")
    return 0
