# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Makes what `fspo-verl demo` shows, from the records in tests/recorded; and the picture of a report on others there.

  python scripts/demo.py
  python scripts/demo.py --picture      docs/report.png as well; needs Chromium

The records of the demo are those of runs/quickstart/fspo-hf-seed0, after the command that it names, in one file.
"""

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pictures import small_png

from fspo_verl import cli
from fspo_verl.demo.command import PAGE, SAID

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "tests/recorded/fspo-hf-seed0"
BESIDE = "The numbers are in report.json beside this page, the figures in figures/. "
PICTURE, PICTURED = ROOT / "docs/report.png", ROOT / "tests/recorded/grpo-4-float32"
SIZE, SCALE = "600,735", 1.5  # of the window; pixels of the picture for each of the page


def report(folder: str, records: Path = RECORDS, *options: str) -> str:
    """Write the report on some records into a folder; returns what it prints, without the places of files."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if cli.main(["report", str(records), "-o", folder, *options]):
            raise SystemExit(1)
    return "".join(line for line in printed.getvalue().splitlines(True) if not line.startswith(("page", "next:")))


def take_picture(folder: str) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("no Chromium is on the PATH")
    report(folder, PICTURED, "--names", "SmolLM2-135M")
    command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE}"]
    command += [f"--force-device-scale-factor={SCALE}", f"--screenshot={PICTURE}"]
    subprocess.run([*command, f"file://{folder}/report.html"], check=True, stderr=sys.stderr)
    PICTURE.write_bytes(small_png(PICTURE.read_bytes()))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        SAID.write_text(report(folder), encoding="utf-8")
        page = (Path(folder) / "report.html").read_text(encoding="utf-8")
        # The wheel carries the page alone.
        PAGE.write_text(page.replace(BESIDE, ""), encoding="utf-8")
        if "--picture" in sys.argv[1:]:
            take_picture(folder)


if __name__ == "__main__":
    main()
