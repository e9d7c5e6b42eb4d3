# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of the study; those that have a file already are left out, so that a run can be stopped at any time.

python scripts/studies/shape/run.py a d --jobs 2             experiments, of 40 seeds
python scripts/studies/shape/run.py a --seeds 1000 1002      pilot seeds, which never count
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from lab import ARMS, Cell, train
from qwen import Qwen
from stairs import Policy, warm_start
from tqdm import tqdm

from fspo_verl.output import write_whole

HERE = Path(__file__).resolve().parent
SUM, SEEDS = "seq-mean-token-sum", 40
AGGREGATIONS = SUM, "token-mean", "seq-mean-token-mean"


def cells(experiment: str, seed: int) -> list[Cell]:
    """The cells of an experiment with one seed; ``sqrt`` comes before ``random``, which follows its clip rates."""
    if experiment == "d":
        return [Cell("d", "sqrt", seed, aggregation) for aggregation in AGGREGATIONS]
    if experiment == "qwen":
        return [Cell(experiment, arm, seed) for arm in ("sqrt", "none")]
    settings = {"a": {}, "e-25%": {"rate": 0.25}, "e-epochs": {"epochs": 4}}[experiment]
    return [Cell(experiment, arm, seed, **settings) for arm in sorted(ARMS, key=lambda arm: arm != "sqrt")]


def run_seed(experiment: str, seed: int, folder: Path) -> None:
    """Train what is missing of one seed, from one warm start."""
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():  # the clip rates of a step are summed over a group of one
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    files = {cell: folder / f"{cell.name}.json" for cell in cells(experiment, seed)}
    missing = [cell for cell, file in files.items() if not file.exists()]
    warm = warm_start(seed, Qwen if experiment == "qwen" else Policy) if missing else None
    for cell in missing:
        leader = files.get(cell._replace(arm="sqrt"))
        shares = json.loads(leader.read_text())["clip_rate"] if cell.arm == "random" else None
        write_whole([(files[cell], json.dumps(train(cell, warm, shares)).encode())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=["a", "d", "e-25%", "e-epochs", "qwen"])
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, SEEDS), metavar=("FIRST", "END"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--folder", type=Path, default=HERE / "cells")
    args = parser.parse_args()
    todo = [(name, seed, args.folder) for name in args.experiments for seed in range(*args.seeds)]
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run_seed, *one) for one in todo]
        for future in tqdm(as_completed(futures), total=len(todo), unit="seed"):
            future.result()


if __name__ == "__main__":
    main()
