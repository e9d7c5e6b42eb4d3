# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What commands write: labelled lines on the standard output, files that are written whole or not at all, and pages of
which a program writes a part.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim", "fix:": "green"}


def show(rows: Sequence[tuple[str, ...]], widths: Sequence[int]) -> None:
    """Print rows of cells, each at least as wide as ``widths`` says; the last column takes the rest of the line.

    A terminal shows long cells in several lines below each other, and labels of :data:`COLOURS` in colour; NO_COLOR
    turns colours off. A pipe gets one line per row.
    """
    if not sys.stdout.isatty():
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)]
            print(" ".join(cells).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1), pad_edge=False)
    for width in (*widths, 0):
        table.add_column(min_width=width, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, COLOURS.get(row[0], "") if i == 0 else "") for i, cell in enumerate(row)))
    Console(highlight=False).print(table)


def percent(share: float) -> str:
    """A share in per cent, with two digits below 10%."""
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}" if share >= 0.001 else f"{share:.2%}"


@contextlib.contextmanager
def reserved() -> Iterator[None]:
    """Keep the standard output for this package: what others print goes to stderr, and their warnings are dropped."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def one_line(error: OSError | ValueError) -> str:
    """An error as one line; for a file its reason, then its name."""
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)


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


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
