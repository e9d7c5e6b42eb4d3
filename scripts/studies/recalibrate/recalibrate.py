# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Does a run that trains with a calibrated eps clip what was asked for? Once calibrated, and again from its records.

  python scripts/studies/recalibrate/recalibrate.py

Trains the policies of ``scripts/studies/tasks`` with FSPO at several eps, calibrates each run for a clip rate of 10% as
``fspo-verl calibrate`` does, trains anew from the same weights on other responses, and does so again. Writes the table
of README.md, and prints it.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tasks"))

from mixture import Arm, Run, warm  # noqa: E402
from regimes import RECORDED, SEEDS, Regime  # noqa: E402

from fspo_verl.analysis.calibration import calibrate  # noqa: E402
from fspo_verl.band import Band  # noqa: E402
from fspo_verl.observe.settings import RunSettings  # noqa: E402
from fspo_verl.output import between, markdown_table, write_whole  # noqa: E402

TARGET, TIMES = 0.1, 3
EPOCHS, STARTS = (1, 4), (0.01, 0.03, 0.1)  # passes over a rollout, eps of the first run
BEGIN, END = "<!-- recalibrate.py -->", "<!-- end -->"


def recorded(regime: Regime, bands: list[Band], attempt: int) -> list[pd.DataFrame]:
    """The records of a run of each seed under its band; attempts differ in their responses."""
    policies = warm(regime.tasks, tuple(SEEDS)).copy()
    for _ in range(attempt):
        policies.roll_out(1)
    run = Run(regime, Arm(0.5), policies, SEEDS)
    run.set_bands(bands)
    for _ in range(regime.rollouts):
        run.rollout(recorded=True)
    records = pd.concat(run.records, ignore_index=True).assign(decision="kept")
    found = []
    for (_, own), band in zip(records.groupby("seed"), bands, strict=True):
        own.attrs = {"settings": RunSettings("fspo", band), "rows": len(own), "lost": 0}
        found.append(own.reset_index(drop=True))
    return found


def clip_rates(epochs: int, eps: float) -> np.ndarray:
    """Clip rate ``[attempts, seeds]`` of the responses with an advantage, first of the runs at this eps."""
    regime = Regime("recalibrate", None, 1e-3, mini_batches=8, epochs=epochs, rollouts=RECORDED)
    bands, rates = [Band(eps)] * len(SEEDS), []
    for attempt in tqdm(range(TIMES + 1), unit="runs of each seed", desc=f"{epochs} epochs, eps {eps:g}"):
        runs = recorded(regime, bands, attempt)
        rates.append([own.clipped[own.advantage != 0].mean() for own in runs])
        bands = [calibrate(own, TARGET, every=False).fits[0].band for own in runs]
    return np.array(rates)


def table(found: dict[tuple[int, float], np.ndarray]) -> str:
    """The table of the page: mean over the seeds, and the least and the most of a seed."""
    rows = []
    for (epochs, eps), rates in found.items():
        cells = [f"{each.mean():.1%} ({each.min():.0%} to {each.max():.0%})" for each in rates]
        rows.append([f"{epochs}", f"{eps:g}", *cells])
    return markdown_table(["epochs", "first eps", "first run", "calibrated once", "twice", "three times"], rows)


def main() -> None:
    torch.set_num_threads(1)
    found = table({(epochs, eps): clip_rates(epochs, eps) for epochs in EPOCHS for eps in STARTS})
    page = HERE / "README.md"
    write_whole([(page, between(page.read_text(), BEGIN, END, found).encode())])
    print(found)


if __name__ == "__main__":
    main()
