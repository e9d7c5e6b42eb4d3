# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The cells of a study: what was added is in the file, whoever adds at the same time and whoever is killed."""

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from studies.cells import Cells

KEY = ("arm", "seed")
NUMBERS = st.none() | st.floats(allow_nan=False)
VALUES = st.fixed_dictionaries(
    {}, optional={"reward": NUMBERS, "length": st.lists(NUMBERS), "shape": st.none() | st.lists(st.lists(NUMBERS))}
)
CELLS = st.dictionaries(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), VALUES, min_size=1, max_size=4)


def rows_of(cells):
    return [dict(zip(KEY, key, strict=True)) | values for key, values in cells.items()]


@given(earlier=CELLS, later=CELLS, data=st.data())
def test_a_file_holds_the_last_of_each_cell_and_the_same_bytes_in_whatever_order_they_come(earlier, later, data):
    with tempfile.TemporaryDirectory() as folder:
        cells, one_by_one = (Cells(Path(folder, name), KEY) for name in ("new/cells.parquet", "one_by_one.parquet"))
        assert not cells.done()
        for added in (earlier, later):
            cells.add(rows_of(added))
        expected = earlier | later
        assert cells.done() == expected.keys()
        found = {tuple(row.pop(name) for name in KEY): row for row in cells.table().to_pylist()}
        columns = set().union(*(row.keys() for row in found.values()))
        assert found == {key: dict.fromkeys(columns) | values for key, values in expected.items()}
        cells.file.unlink()
        cells.add(rows_of(expected))
        for row in data.draw(st.permutations(rows_of(expected))):
            one_by_one.add([row])
        assert cells.file.read_bytes() == one_by_one.file.read_bytes()


def add(file, arm, seeds, pipe=None):
    cells = Cells(file, KEY)
    for seed in seeds:
        cells.add([{"arm": arm, "seed": seed, "reward": [0.1] * 1000}])
        if pipe:
            pipe.send(seed)


def test_a_process_that_is_killed_leaves_what_it_added_and_no_lock(tmp_path):
    file, context = tmp_path / "cells.parquet", multiprocessing.get_context("fork")
    for arm in "abc":
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=add, args=(file, arm, range(10_000), there))
        process.start()
        added = {here.recv() for _ in range(5)}
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        while here.poll():
            added.add(here.recv())
        found = {seed for name, seed in Cells(file, KEY).done() if name == arm}
        assert added <= found and len(found) - len(added) <= 1
    add(file, "d", [0])
    assert ("d", 0) in Cells(file, KEY).done()
