# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Records of a cluster: files, bytes a row, seconds to write and to open, with the package's own writer.

    python scripts/bench/records.py --ranks 512 --steps 1000 --output DIR
    python scripts/bench/records.py --ranks 4 --steps 60 --output DIR --rows 128

Each rank appends the rows of each step, as a worker does at the end of its update; two ranks do at once. The
rows are those of a real run in all that costs bytes: each prompt has an id of verl's (a UUID), 8 responses to a prompt
lie on as many ranks, and all columns are there but those of a band that adapts. Then `fspo-verl report` opens the
folder, in a process of its own.
"""

import argparse
import resource
import subprocess
import sys
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from fspo_verl import clips
from fspo_verl.band import Band
from fspo_verl.observe.columns import MISMATCH, TRUNCATED
from fspo_verl.observe.records import RecordWriter
from fspo_verl.observe.settings import RunSettings
from fspo_verl.output import markdown_table

BAND = Band(eps=0.03)
RESPONSES = 8  # to a prompt


def columns(rng: np.random.Generator, rows: int, mini_batch: int) -> dict[str, np.ndarray]:
    """Return what a worker has of a micro-batch: log-normal lengths, and log-ratios that spread as sqrt(L)."""
    length = np.clip(rng.lognormal(6.5, 0.9, rows), 1, 8192).astype(int).astype(float)
    sigma = 0.004 + 0.01 * mini_batch
    log_ratio = rng.normal(scale=sigma * np.sqrt(length))
    advantage = rng.choice([-1.0, 0.0, 1.0], rows) * rng.random(rows)
    above, below = log_ratio > BAND.high * np.sqrt(length), log_ratio < -BAND.low * np.sqrt(length)
    values = {
        "length": length,
        "log_ratio": log_ratio,
        "quadratic_variation": sigma**2 * length * rng.gamma(20, 1 / 20, rows),
        "advantage": advantage,
        "finite": np.ones(rows),
        "clipped_upper": (above & (advantage > 0)).astype(float),
        "clipped_lower": (below & (advantage < 0)).astype(float),
        "clipped_dual": np.zeros(rows),
        TRUNCATED: (length == 8192).astype(float),
    }
    values |= {name: rng.binomial(8, 0.1, rows).astype(float) for name in clips.COLUMNS}
    engine = rng.normal(scale=0.01 * np.sqrt(length))
    squares = 1e-4 * length * rng.gamma(20, 1 / 20, rows)
    sums = (length, engine, squares, squares * rng.normal(0.5, 0.01, rows), np.zeros(rows))
    return values | dict(zip(MISMATCH, sums, strict=True))


def write(rank: int, folder: Path, ranks: int, steps: int, rows: int, every: int) -> float:
    """Append every step of a rank, and write its file after so many; returns the seconds."""
    start, half = time.perf_counter(), max(rows // 2, 1)
    writer = RecordWriter(folder, RunSettings("fspo", BAND), began=1, last_step=steps)
    rng = np.random.default_rng(rank)
    prompts = np.random.default_rng((rank // RESPONSES, 1))  # ranks of a group have responses to the same prompts
    for step in range(1, steps + 1):
        ids = [str(uuid.UUID(bytes=prompts.bytes(16))) for _ in range(rows)]
        texts = [f"problem {number}" for number in prompts.integers(0, 10_000, rows)]
        for mini_batch in range(2):
            part = slice(mini_batch * half, (mini_batch + 1) * half)
            place = {"step": step, "mini_batch": mini_batch, "rank": rank, "ranks": ranks}
            rows_of = SimpleNamespace(**place, prompts=ids[part], texts=texts[part], staleness=[0.0] * half)
            writer.add(columns(rng, half, mini_batch), rows_of)
        if step % every == 0:
            writer.flush()
    writer.close()
    return time.perf_counter() - start


def opened(folder: Path, page: Path) -> tuple[float, float, float]:
    """Seconds, seconds of processors and peak GiB of resident memory of `fspo-verl report`."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "fspo_verl.cli", "report", folder, "--output", page], check=True)
    seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, used.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 4), ("steps", 60), ("rows", 16)):
        parser.add_argument(f"--{name}", type=int, default=default, help="%(default)s by default")
    text = (
        "appends between two writes; 1, the default, is what a worker does, and the files are the same with any other"
    )
    parser.add_argument("--every", type=int, default=1, help=text)
    parser.add_argument("--processes", type=int, default=2, help="in which ranks are written; %(default)s by default")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    args = parser.parse_args()
    folder = args.output / "records"
    folder.mkdir(parents=True)
    rank = partial(write, folder=folder, ranks=args.ranks, steps=args.steps, rows=args.rows, every=args.every)
    with ProcessPoolExecutor(args.processes) as processes:
        seconds = sum(processes.map(rank, range(args.ranks)))
    files = [file for file in folder.iterdir() if file.suffix == ".parquet"]
    rows = args.ranks * args.steps * 2 * max(args.rows // 2, 1)
    a_row = sum(file.stat().st_size for file in files) / rows
    to_open, of_processors, memory = opened(folder, args.output / "report")
    table = {
        "ranks x steps x rows": f"{args.ranks} x {args.steps} x {args.rows}",
        "files": f"{len(files):,}",
        "bytes a row": f"{a_row:.0f}",
        f"to append a step, written every {args.every}": f"{1000 * seconds / args.ranks / args.steps:.1f} ms",
        "`report` opens it in": f"{to_open:.0f} s ({of_processors:.0f} s of processors)",
        "peak memory": f"{memory:.1f} GiB",
    }
    print(markdown_table([*table], [[*table.values()]]))


if __name__ == "__main__":
    main()
