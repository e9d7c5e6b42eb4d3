# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all, pages of which a program writes a part, and tables in them."""

import json
import os
from collections.abc import Iterable, Sequence
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


def between(page: str, begin: str, end: str, text: str) -> str:
    """The page, a text with blank lines around it in place of what stood between its two marks; "" is the marks alone.

    Raises:
        ValueError: the page does not hold each mark once, or not in this order.
    """
    page = page or f"{begin}\n{end}\n"
    before, *rest = page.split(begin)
    if len(rest) != 1 or len(parts := rest[0].split(end)) != 2:
        raise ValueError(f"the page needs {begin!r} and {end!r} once each")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{parts[1]}"


def publish(numbers: Path, result: dict, page: Path, begin: str, end: str, text: str) -> None:
    """Write a result as JSON, and a text made of it into a page :func:`between` its marks; a missing page is begun."""
    content = between(page.read_text() if page.exists() else "", begin, end, text)
    write_whole([(numbers, f"{json.dumps(result, indent=1)}\n".encode()), (page, content.encode())])


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
