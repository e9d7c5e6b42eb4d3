# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the arms of the study's regimes; arms that the records hold already are left out, so that it can be stopped.

python scripts/studies/tasks/run.py                        every regime, in the order of PREDICTIONS.md
python scripts/studies/tasks/run.py many-30 few-30         of these alone
"""

import argparse
import sys
from pathlib import Path

import torch
from lab import Regime, arms_of, train
from policy import Tasks
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from cells import Cells  # noqa: E402

SEEDS = range(12)
REGIMES = {
    regime.name: regime
    for regime in (
        Regime("many-30", 0.3, 2e-4),
        Regime("reuse-30", 0.3, 5e-4, mini_batches=2, epochs=24),
        Regime("few-30", 0.3, 1e-3, mini_batches=8),
        Regime("published", None, 2e-4),
        Regime("many-10", 0.1, 2e-4),
        Regime("shared-30", 0.3, 2e-4, tasks=Tasks(shared=True)),
        Regime("by-task", 0.3, 1e-3, mini_batches=8, tasks=Tasks((8, 64, 64, 512), speeds=(1.0, 1.0, 3.5, 1.0))),
        Regime("few-10", 0.1, 1e-3, mini_batches=8),
        Regime("hot-30", 0.3, 4e-3, mini_batches=8),
        Regime("reuse-10", 0.1, 5e-4, mini_batches=2, epochs=24),
        Regime("shared-few-30", 0.3, 1e-3, mini_batches=8, tasks=Tasks(shared=True)),
    )
}
PRIMARY = tuple(REGIMES)[:6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("regimes", nargs="*", metavar="REGIME")
    parser.add_argument("--arms", nargs="+", help="default: all of the regime")
    parser.add_argument("--folder", type=Path, default=HERE / "records")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in tqdm(args.regimes or REGIMES, unit="regime"):
        regime = REGIMES[name]
        cells = Cells(args.folder / f"{name}.parquet", ("arm", "seed"))
        for arm in tqdm(args.arms or arms_of(regime), unit="arm", desc=name):
            missing = [seed for seed in SEEDS if (arm, seed) not in cells.done()]
            if missing:
                table = train(regime, arm, SEEDS)
                cells.add([row for row in table.to_dict("records") if row["seed"] in missing])


if __name__ == "__main__":
    main()
