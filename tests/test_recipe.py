# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""recipe/verl: what each patch mends in verl is shown by the tests that it brings, before it and after.

VERL_CHECKOUT names a checkout of verl to patch in place of the installed one.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATCHES = sorted((ROOT / "recipe/verl").glob("*.patch"))
SEPARATE = "verl/trainer/ppo/v1/trainer_separate_async.py"
CHECKOUT = os.environ.get("VERL_CHECKOUT")
# verl's own, without this package, which makes a launch by name work without the patch.
PYTEST = "import sys; sys.modules['fspo_verl'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"


def apply(folder: Path, patch: Path, *options: str) -> None:
    has_fault = "flush=True" in (folder / SEPARATE).read_text()  # main of August 2026, older than 0.9.1, has it not
    older = [] if has_fault or not CHECKOUT else ["--exclude=*separate_async*"]
    subprocess.run(["git", "apply", *older, *options, patch], cwd=folder, check=True)


@pytest.mark.long
def test_each_test_of_a_patch_fails_without_it_and_passes_with_it(tmp_path):
    verl = tmp_path / "verl_copy"
    shutil.copytree(Path(CHECKOUT or sysconfig.get_path("purelib")) / "verl", verl / "verl")
    subprocess.run(["git", "init", "--quiet", verl], check=True)
    tests = set()
    for patch in PATCHES:
        apply(verl, patch, "--include=tests/*")
        added = {file for file in verl.glob("tests/**/test_*.py")} - tests
        assert added, f"{patch.name} brings no test"
        tests |= added

    def outcomes() -> list[str]:
        """Return the outcome of each test."""
        command = [sys.executable, "-c", PYTEST, "-q", "-p", "no:cacheprovider", "-rA", *map(str, tests)]
        env = os.environ | {"PYTHONPATH": str(verl)}
        done = subprocess.run(command, cwd=verl, env=env, capture_output=True, text=True)
        words = [line.partition(" ")[0] for line in done.stdout.splitlines()]
        shown = [word for word in words if word in ("FAILED", "PASSED", "ERROR")]
        assert len(shown) >= len(PATCHES), done.stdout + done.stderr
        return shown

    assert set(outcomes()) == {"FAILED"}
    for patch in PATCHES:
        apply(verl, patch, "--exclude=tests/*")
    assert set(outcomes()) == {"PASSED"}
