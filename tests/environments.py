# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Virtual environments of a test's own, and the distributions of this package to install there."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Environment:
    """A virtual environment that sees every installed package of this one but fspo_verl."""

    def __init__(self, path: Path):
        venv.create(path, with_pip=True)
        self.python = str(path / "bin" / "python")
        site = Path(self.output("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        view = path / "dependencies"
        view.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not any(word in entry.name.lower() for word in ("fspo", "__pycache__", ".pth", "__editable__")):
                (view / entry.name).symlink_to(entry)
        (site / "dependencies.pth").write_text(f"{view}\n")

    def run(self, *args, cwd="/", **env):
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(
            [self.python, *args], cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=600
        )

    def output(self, *args, **kwargs):
        run = self.run(*args, **kwargs)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def pip(self, *args):
        return self.output("-m", "pip", "--quiet", "--disable-pip-version-check", *args)


def copy_sources(copy: Path) -> Path:
    """A copy of the sources, of a checkout or of an unpacked sdist, so that building leaves nothing there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout if listed.returncode == 0 else (ROOT / "fspo_verl.egg-info/SOURCES.txt").read_text()
    for name in names.splitlines():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    return copy


def build(source: Path, kind: str) -> Path:
    """Build a ``bdist_wheel`` or an ``sdist`` from the sources with this interpreter's setuptools; returns the file."""
    command = [sys.executable, "setup.py", "--quiet", kind, "--dist-dir", f"dist-{kind}"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next((source / f"dist-{kind}").iterdir())
