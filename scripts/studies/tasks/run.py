# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the arms of the study's regimes; arms that the records hold already are left out, so that it can be stopped.

python scripts/studies/tasks/run.py                        every regime of the table, in the order of PREDICTIONS.md
python scripts/studies/tasks/run.py many-30 few-30         of these alone
python scripts/studies/tasks/run.py transformer-many transformer-reuse transformer-long         on a GPU
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import torch
from mixture import TOGETHER, arms_of, train, train_together
from regimes import REGIMES, SEEDS, TRANSFORMERS
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from cells import Cells  # noqa: E402


def small(table: pd.DataFrame) -> pa.Table:
    """The rows in 32 bits."""
    dtypes = {"i": "int32", "u": "int32", "f": "float32"}
    kinds = {name: dtypes[column.dtype.kind] for name, column in table.items() if column.dtype.kind in dtypes}
    return pa.Table.from_pandas(table.astype(kinds), preserve_index=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("regimes", nargs="*", metavar="REGIME")
    parser.add_argument("--arms", nargs="+", help="default: all of the regime")
    parser.add_argument("--folder", type=Path, default=HERE / "records")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in tqdm(args.regimes or [name for name in REGIMES if name not in TRANSFORMERS], unit="regime"):
        regime = REGIMES[name]
        if name in TRANSFORMERS:
            cells = Cells(args.folder / regime.file, ("regime", "arm", "seed"))
            arms = [arm for arm in args.arms or TOGETHER if (name, arm, SEEDS[-1]) not in cells.done()]
            if arms:
                cells.add(small(train_together(regime, arms, SEEDS).assign(regime=name)))
            continue
        cells = Cells(args.folder / regime.file, ("arm", "seed"))
        for arm in tqdm(args.arms or arms_of(regime), unit="arm", desc=name):
            missing = [seed for seed in SEEDS if (arm, seed) not in cells.done()]
            if missing:
                table = train(regime, arm, SEEDS)
                cells.add(small(table[table.seed.isin(missing)]))


if __name__ == "__main__":
    main()
