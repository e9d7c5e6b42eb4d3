# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Labelled lines on the standard output: in columns and colours on a terminal, as plain lines in a pipe."""

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence

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


@contextlib.contextmanager
def reserved() -> Iterator[None]:
    """Keep the standard output for this package: what others print goes to stderr, and what they warn of nowhere."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
