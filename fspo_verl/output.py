# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Output helpers: terminal-safe lines, atomic writes of files, warnings given once."""

import contextlib
import logging
import os
import sys
import traceback
import uuid
import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim", "fix:": "green"}


def plain(text: str) -> str:
    """Return the text in one line of printable characters: others, which a terminal obeys, become their escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def see(page: str) -> str:
    """Return the address of a page of docs/ in brackets, after a space; nothing while setup.py names no repository.

    A message says by itself what to do: an installed package has no docs/.
    """
    links: list[str] = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        links = metadata.metadata("fspo-verl").get_all("Project-URL") or []
    source = [link.partition(", ")[2] for link in links if link.startswith("Source, ")]
    return f" ({source[0]}/blob/main/docs/{page})" if source else ""


def say(text: str) -> None:
    """Print a text at once, each of its lines :func:`plain`."""
    print("\n".join(map(plain, text.split("\n"))), flush=True)


def show(rows: Sequence[tuple[str, ...]], widths: Sequence[int]) -> None:
    """Print rows of cells, each at least as wide as ``widths`` says; the last column takes the rest of the line.

    A terminal shows long cells in several lines below each other, and labels of :data:`COLOURS` in colour; NO_COLOR
    turns colours off. A pipe gets one line per row. Cells are :func:`plain`.
    """
    rows = [tuple(map(plain, row)) for row in rows]
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
    styles = {} if os.environ.get("NO_COLOR") else COLOURS
    for row in rows:
        table.add_row(*(Text(cell, styles.get(row[0], "") if i == 0 else "") for i, cell in enumerate(row)))
    Console(highlight=False).print(table)


def percent(share: float) -> str:
    """Return a share in per cent, with two digits below 10%."""
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}" if share >= 0.001 else f"{share:.2%}"


@contextlib.contextmanager
def reserved() -> Iterator[None]:
    """Keep the standard output for this package: what others print goes to stderr, and their warnings are dropped."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Make the standard streams fit for a command, whatever a shell has done to them.

    Closed ones lead nowhere, and what an encoding lacks is written as its escape. What is logged or warned of becomes a
    :func:`plain` line on stderr, and is said once.
    """
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w"))
        if sys.stdout is None:
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        if sys.stderr is None:
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        for stream in (sys.stdout, sys.stderr):
            if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        stack.callback(setattr, warnings, "formatwarning", warnings.formatwarning)
        warnings.formatwarning = lambda message, *_: f"{plain(str(message))}\n"
        if not logging.root.handlers:  # what is logged goes to stderr then, as it is
            logging.root.addHandler(handler := _Plain())
            stack.callback(logging.root.removeHandler, handler)
        yield


class _Plain(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = plain(record.getMessage())
        if text not in self._said:
            self._said.add(text)
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr)


def one_line(error: OSError | ValueError) -> str:
    """Return an error as one :func:`plain` line; for a file its reason, then its name."""
    if isinstance(error, OSError) and error.filename:
        return plain(f"{error.strerror}: {error.filename}")
    return plain(str(error))


class Once:
    """Warnings in the log of this package, given once a cause."""

    def __init__(self) -> None:
        self._causes: set[Hashable] = set()

    def warn(self, cause: Hashable, text: str, *values) -> None:
        """Warn with a text of whole sentences, into which the logger puts the values."""
        if cause not in self._causes:
            self._causes.add(cause)
            logging.getLogger("fspo_verl").warning(f"{text} Said once.", *values)

    def lost(self, error: Exception, what: str) -> None:
        """Warn of what an error costs. With another text it has the same cause if the same line raised it."""
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        cause = type(error), getattr(error, "errno", None), frame.f_code.co_filename, line
        self.warn(cause, "%s: %s: %s.", what, type(error).__name__, error)


ONCE = Once()
"""The warnings of this process, for whatever has no longer-lived object of its own to keep them."""


def write_whole(files: Iterable[tuple[Path, bytes]]) -> None:
    """Write files (path and content), in this order, once all of them are on the disk; make missing folders.

    Raises:
        OSError: the disk is full, or a folder cannot be written; no file has changed then.
    """
    written: list[tuple[Path, Path]] = []
    try:
        for path, content in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".unfinished.{uuid.uuid4().hex}")
            unfinished.touch(exist_ok=False)  # no link leads from there
            written.append((unfinished, path))
            unfinished.write_bytes(content)
        for unfinished, path in written:
            unfinished.replace(path)
    finally:
        for unfinished, _ in written:
            unfinished.unlink(missing_ok=True)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)
