# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of the study; those that the records hold are left out, so that a run can be stopped at any time.

python scripts/studies/shape/run.py a d --jobs 2             experiments, of 40 seeds
python scripts/studies/shape/run.py a --seeds 1000 1002      pilot seeds, which never count
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from lab import ARMS, KEY, Cell, train
from qwen import Qwen
from stairs import Policy, warm_start
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))
from studies.cells import Cells  # noqa: E402

RECORDS = HERE / "records"
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


def stored(experiment: str, folder: Path = RECORDS) -> Cells:
    """What has been run of an experiment."""
    return Cells(folder / f"{experiment}.parquet", KEY)


def run_seed(experiment: str, seed: int, folder: Path) -> None:
    """Train what is missing of one seed, from one warm start."""
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():  # the clip rates of a step are summed over a group of one
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    records = stored(experiment, folder)
    done = records.done()
    missing = [cell for cell in cells(experiment, seed) if cell.key not in done]
    warm = warm_start(seed, Qwen if experiment == "qwen" else Policy) if missing else None
    for cell in missing:
        leader = records.table(arm="sqrt", seed=seed) if cell.arm == "random" else None
        records.add([train(cell, warm, leader and leader["clip_rate"][0].as_py())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=["a", "d", "e-25%", "e-epochs", "qwen"])
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, SEEDS), metavar=("FIRST", "END"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--folder", type=Path, default=RECORDS)
    args = parser.parse_args()
    todo = [(name, seed, args.folder) for name in args.experiments for seed in range(*args.seeds)]
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run_seed, *one) for one in todo]
        for future in tqdm(as_completed(futures), total=len(todo), unit="seed"):
            future.result()


if __name__ == "__main__":
    main()
