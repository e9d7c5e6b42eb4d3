# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Takes docs/report.png: the top of a report on records of this repository. Needs Chromium.

python scripts/docs/report.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fspo_verl import cli

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from pictures import small_png  # noqa: E402

PICTURE = ROOT / "docs/report.png"
RECORDS = ROOT / "tests/recorded/grpo-4-float32"
SIZE, SCALE = "600,735", 1.5  # of the window, narrow, for phones; and pixels of the picture for each of the page


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("no Chromium is on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        if cli.main(["report", str(RECORDS), "--names", "SmolLM2-135M", "-o", folder]):
            raise SystemExit(1)
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE}"]
        command += [f"--force-device-scale-factor={SCALE}", f"--screenshot={PICTURE}"]
        subprocess.run([*command, f"file://{folder}/report.html"], check=True, stderr=sys.stderr)
    PICTURE.write_bytes(small_png(PICTURE.read_bytes()))


if __name__ == "__main__":
    main()
