# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Cells that a study computes, one by one, in one Parquet file.

A cell is what is computed at once, minutes to hours of work: one training run, say. It is a row, or several, and the
values of some columns name it. A study leaves out what its file holds, so that it can be stopped at any time.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock
from tqdm import tqdm

from fspo_verl.output import write_whole

# Hardly a number comes twice: a dictionary costs more than it spares. The schema of Arrow tells how a table was made.
_SMALL = {"compression": "zstd", "compression_level": 15, "use_dictionary": False, "store_schema": False}


class Cells:
    """The cells of an experiment; the same cells make the same bytes, whatever order they came in.

    Any number of processes may add to a file at the same time: each rewrites it as a whole, under a lock. A reader sees
    the file of before or after, as does whoever comes after a process that was killed.

    Args:
        file: made, with its folder, when the first cell is added.
        key: the columns whose values name a cell; rows are sorted by them.
    """

    def __init__(self, file: Path, key: Sequence[str]):
        self.file, self.key = file, list(key)

    def done(self) -> set[tuple]:
        """The names of the cells in the file, each a tuple of the key's values."""
        return set(_names(self.table().select(self.key))) if self.file.exists() else set()

    def table(self) -> pa.Table:
        """All rows; columns that a cell lacks are null."""
        return pq.read_table(self.file) if self.file.exists() else pa.table({})

    def add(self, rows: pa.Table | Sequence[Mapping]) -> None:
        """Write the rows of a cell, or of several, in place of those that the file has of the same cells.

        The file has them when this returns. Rows of a cell keep their order.

        Raises:
            OSError: the disk is full; the file is what it was.
        """
        if not isinstance(rows, pa.Table):
            rows = pa.Table.from_struct_array(pa.array(rows))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.file}.lock"):
            old, new = self.table(), set(_names(rows.select(self.key)))
            if self.file.exists():
                old = old.filter(pa.array([name not in new for name in _names(old.select(self.key))], pa.bool_()))
            table = pa.concat_tables([old, rows], promote_options="permissive")
            others = sorted({*table.column_names} - {*self.key})
            table = table.select([*self.key, *others]).sort_by([(name, "ascending") for name in self.key])
            table, sink = table.replace_schema_metadata().combine_chunks(), pa.BufferOutputStream()
            pq.write_table(table, sink, **_SMALL)
            write_whole([(self.file, sink.getvalue().to_pybytes())])


def command(
    doc: str, records: Path, cells: Sequence[dict], compute: Callable[..., pd.DataFrame], show: Callable[[], None]
) -> None:
    """The command of a study: shows what its records say, or computes those of its cells that they lack.

    Args:
        doc: the text of ``--help``.
        cells: the names of all, in the order of computing; a cell has all seeds.
        compute: from a name to the rows of the cell, with their seeds.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    values = "compute the cells that the records lack, or those of them that have these values in their name"
    parser.add_argument("--compute", nargs="*", metavar="VALUE", help=values)
    parser.add_argument("--records", type=Path, default=records, help="file that gets them")
    args = parser.parse_args()
    if args.compute is None:
        return show()
    stored = Cells(args.records, (*cells[0], "seed"))
    for cell in tqdm([cell for cell in cells if {*args.compute} <= {*map(str, cell.values())}], unit="cell"):
        if tuple(cell.values()) not in {done[:-1] for done in stored.done()}:
            stored.add(pa.Table.from_pandas(compute(**cell).assign(**cell), preserve_index=False))


def _names(columns: pa.Table) -> list[tuple]:
    """The values of each row."""
    return list(zip(*columns.to_pydict().values(), strict=True))
