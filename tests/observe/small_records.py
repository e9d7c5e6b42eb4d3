# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Records of a few made-up responses, without verl: also as a process of its own, ``small_records.py HOW FOLDER``."""

import io
import itertools
import os
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq

from fspo_verl import clips
from fspo_verl.observe.records import RecordWriter
from fspo_verl.observe.settings import RunSettings

SETTINGS = RunSettings("fspo")


def problem(number):
    """Chat messages of a prompt."""
    return [{"role": "user", "content": f"What is {number} + ½?"}]


def columns(rows=4, seed=0):
    generator = np.random.default_rng(seed)
    names = ("length", "log_ratio", "quadratic_variation", "advantage", "finite")
    values = {name: np.ones(rows) for name in (*names, *clips.COLUMNS)}
    values |= {f"clipped_{side}": np.zeros(rows) for side in ("upper", "lower", "dual")}
    return values | {"log_ratio": generator.standard_normal(rows), "length": np.arange(1.0, rows + 1)}


def add(writer, step, mini_batch=0, rank=0, ranks=1, rows=4, seed=0, values=None):
    """A micro-batch with two responses to each prompt."""
    prompts, texts = [f"prompt {step}-{row // 2}" for row in range(rows)], [problem(row // 2) for row in range(rows)]
    place = {"step": step, "mini_batch": mini_batch, "rank": rank, "ranks": ranks}
    writer.add(
        values or columns(rows, seed), SimpleNamespace(**place, prompts=prompts, texts=texts, staleness=[0.0] * rows)
    )


def attempt(folder, run):
    """The folder of a training, named so that later ones sort later."""
    made = sorted(Path(folder).glob("attempt-*"))
    own = (one for one in made if one.name.endswith(f"-{run}"))
    return next(own, Path(folder) / f"attempt-{len(made) + 1:04d}-{run}")


def opened(folder, run="run", began=1, settings=SETTINGS, **kwargs):
    return RecordWriter(attempt(folder, run), settings, began, **kwargs)


def write(folder, steps, run=None, settings=SETTINGS, last_step=None, **kwargs):
    """Write the records of a training of its own, or of a rank of ``run``."""
    writer = opened(folder, run or uuid.uuid4().hex, steps[0], settings, last_step=last_step)
    for step in steps:
        add(writer, step, **kwargs)
        writer.flush()


def end_in_a_step(folder):
    """A trainer that does not say when an update ends."""
    writer = opened(folder)
    add(writer, 1)
    add(writer, 2)


def hang_in_the_third_step(folder):
    """A disk that takes the records of two steps, and then nothing."""
    writer, fsync = opened(folder), os.fsync
    for step in (1, 2, 3, 4):
        if step == 3:
            os.fsync = lambda _: time.sleep(1000)
        add(writer, step)
        writer.flush()
        if step < 3:
            writer._thread.join()
    os.fsync = fsync


def die_in_the_third_write(folder, part):
    """The process ends when this part of the third version of a file has been written."""
    writer, write_table = opened(folder), pq.write_table

    def write_a_part(table, file, **options):
        write_table(table, whole := io.BytesIO(), **options)
        file.write(whole.getvalue()[: round(part * len(whole.getvalue()))])
        file.flush()
        os._exit(0)

    for step in (1, 2, 3):
        add(writer, step)
        if step == 3:
            pq.write_table = write_a_part
        writer.flush()


def fork_in_a_step(folder, how):
    """A copy of the process ends, or records, after the original has written the whole step."""
    writer = opened(folder, last_step=1)
    add(writer, 1)
    if how == "written":
        writer.flush()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.read(read, 1)  # until the original has written
        if how == "records":
            add(writer, 2)
        elif how == "flushes":
            writer.flush()
        sys.exit(0)  # which runs what atexit was given
    add(writer, 1, mini_batch=1)
    writer.flush()
    os.write(write, b"0")
    os.waitpid(child, 0)


def train_for_ever(folder):
    writer = opened(folder, began=0)
    for step in itertools.count():
        add(writer, step, rows=500)
        writer.flush()


if __name__ == "__main__":
    how, folder = sys.argv[1:]
    if how.startswith("fork"):
        fork_in_a_step(folder, how.split()[1])
    elif how.startswith("die"):
        die_in_the_third_write(folder, float(how.split()[1]))
    else:
        {"end": end_in_a_step, "train": train_for_ever, "hang": hang_in_the_third_step}[how](folder)
