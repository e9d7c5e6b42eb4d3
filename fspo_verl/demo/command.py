# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Show what you would get: the conclusion and the page of a small recorded run. Nothing is trained or written.

The run is GSPO on the quickstart's task. Two commands made it, without a GPU:

  bash scripts/quickstart.sh --loss gspo
  fspo-verl report runs/quickstart/gspo-hf-seed0
"""

import argparse
from pathlib import Path

from fspo_verl.output import say, show

HERE = Path(__file__).parent
PAGE, SAID = HERE / "report.html", HERE / "report.txt"
"""The page, and what ``fspo-verl report`` prints of the run but for places. scripts/demo.py makes both."""


def main(_args: argparse.Namespace) -> int:
    """Print the conclusion, where the page is, what made them, and how to see the same of a run."""
    lines = SAID.read_text(encoding="utf-8").splitlines()
    show([(line[:8].rstrip(), line[9:]) for line in lines], widths=(8,))
    show([("page", str(PAGE))], widths=(8,))
    say(
        "\nmade by\n  bash scripts/quickstart.sh --loss gspo\n  fspo-verl report runs/quickstart/gspo-hf-seed0\n"
        "to see the same of your run\n  fspo-verl run --loss observed -- bash my_script.sh"
    )
    return 0
