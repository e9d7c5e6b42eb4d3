# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What you would get: the conclusion and the page of a small recorded run. Nothing is trained or written.

The run is GSPO on the quickstart's task. These commands made it, without a GPU:

  bash scripts/quickstart.sh --loss gspo
  fspo-verl report runs/quickstart/gspo-hf-seed0
"""

import argparse
from pathlib import Path

from fspo_verl.output import say

HERE = Path(__file__).parent
PAGE, SAID = HERE / "report.html", HERE / "report.txt"
"""The page of the report, and what ``fspo-verl report`` prints of it but for its place. Made by scripts/demo.py."""


def main(_args: argparse.Namespace) -> int:
    """Print the conclusion, where the page is, and what made it."""
    say(SAID.read_text(encoding="utf-8").rstrip())
    say(f"page: {PAGE}")
    say("made by: bash scripts/quickstart.sh --loss gspo, then fspo-verl report")
    say("next: fspo-verl run --loss observed -- bash my_script.sh, to see the same of your own run")
    return 0
