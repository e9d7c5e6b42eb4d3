# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes files so that what was there before is lost neither to a full disk nor to an interruption."""

import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(files: Iterable[tuple[Path, bytes]]) -> None:
    """Write files (path and content), in this order, once all of them are on the disk; make missing folders.

    Raises:
        OSError: the disk is full, or a folder cannot be written; no file has changed then.
    """
    written: list[tuple[Path, Path]] = []
    try:
        for path, content in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".unfinished.{os.getpid()}.{len(written)}")
            written.append((unfinished, path))
            unfinished.write_bytes(content)
        for unfinished, path in written:
            unfinished.replace(path)
    finally:
        for unfinished, _ in written:
            unfinished.unlink(missing_ok=True)
