# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Command-line options that the scripts which train share; needs nothing installed."""

from __future__ import annotations  # so that a Python too old to train with can still say what is wrong with a call

import argparse
import re
from pathlib import Path

# Those of fspo_verl.clips, which may not be installed yet, and the one without a clip.
LOSSES = ("fspo", "gspo", "grpo", "fixed_band", "no_clip")


class Failure(Exception):
    """A phase failed; the message says why."""


def parser(script: str, description: str, examples: str, output: Path, steps: int) -> argparse.ArgumentParser:
    """A parser of ``bash scripts/SCRIPT`` with what every such script takes, and the defaults of this one."""
    parser = argparse.ArgumentParser(
        prog=f"bash scripts/{script}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=examples,
    )
    add = parser.add_argument
    add("--loss", choices=LOSSES, default="fspo", help="policy loss (default: %(default)s)")
    name = "what results call this run, where it has settings of its own (default: as its loss)"
    add("--name", type=run_name, help=name)
    add("--seed", type=int, default=0, help="of all that is drawn (default: %(default)s)")
    add("--steps", type=positive, default=steps, help="training steps (default: %(default)s)")
    add("--rollout", choices=("hf", "vllm"), default="hf", help="rollout engine without a GPU (default: %(default)s)")
    add("--output", type=Path, default=output, help="folder for results (default: %(default)s)")
    add("--venv", help="virtual environment (default: .venv, or .venv-vllm for vllm)")
    add("--python", help="interpreter of an environment that has everything; nothing is installed then")
    add("--install-seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    add("--parse-only", action="store_true", help=argparse.SUPPRESS)
    add("overrides", nargs="*", type=hydra_override, metavar="-- override", help="more Hydra overrides for verl")
    return parser


def run_name(text: str) -> str:
    """A new name for a run: results know the losses by theirs, and folders of warm starts begin with ``warm``."""
    if not re.fullmatch(r"[a-z0-9_]+", text) or text in (*LOSSES, "warm"):
        raise argparse.ArgumentTypeError(f"{text} is not a new name of a-z, 0-9 and _")
    return text


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def hydra_override(text: str) -> str:
    """Return a word that Hydra can take for an override."""
    if not re.match(r"~|[^-=][^=]*=", text):
        raise argparse.ArgumentTypeError(f"{text} is neither an option nor a Hydra override (KEY=VALUE)")
    return text
