# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes what `fspo-verl demo` shows, from the records in tests/recorded.

  python scripts/demo.py

The records are those of runs/quickstart/gspo_10-hf-seed0, after the command that the demo names, in one file.
"""

import contextlib
import io
import shutil
import tempfile
from pathlib import Path

from fspo_verl import cli
from fspo_verl.demo.command import PAGE, SAID

RECORDS = Path(__file__).parents[1] / "tests/recorded/gspo_10-hf-seed0"


def report(folder: str) -> str:
    """Write the report on the records into a folder; returns what it prints, without the places of files."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if cli.main(["report", str(RECORDS), "-o", folder]):
            raise SystemExit(1)
    return "".join(line for line in printed.getvalue().splitlines(True) if not line.startswith(("page", "next:")))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        SAID.write_text(report(folder), encoding="utf-8")
        shutil.copy(f"{folder}/report.html", PAGE)


if __name__ == "__main__":
    main()
