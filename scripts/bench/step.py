# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The price of FSPO, of measuring another loss and of records in a training step of stock verl.

    python scripts/bench/step.py [--blocks 40] [--output runs/bench-step]     # half an hour on two cores

One run of verl's trainer on the quickstart's model and task. Each step is trained by another loss (by_turns.py): stock
gspo, fspo without and with records, and gspo under `observed` without and with records. A block of five steps has all
of them, in a random order, and a difference is taken within its block. So a slow minute of the machine meets all alike.

The table has the median difference from gspo with its 95% interval (order statistics): of a call of verl's `ppo_loss`
on the host, of `update_actor`, and of the whole step with its logging.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from by_turns import ARMS, CALL_MS, GSPO, LOG, arm_of
from scipy.stats import binom

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "quickstart"), str(HERE.parent / "training")]
import launch  # noqa: E402
from ledger_experiment import LedgerExperiment  # noqa: E402

OUTPUT = HERE.parents[1] / "runs/bench-step"
WARM_UP = 1  # blocks that do not count: processes still import, and allocate


def train(output: Path, blocks: int) -> pd.DataFrame:
    """Train, or take the run that is there; milliseconds of each step, by block and arm."""
    experiment = LedgerExperiment(
        output,
        steps=len(ARMS) * (WARM_UP + blocks),
        overrides=("trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.val_before_train=False"),
    )
    logged = experiment.run / "log.jsonl"
    if not (experiment.run / "finished").exists():
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        os.environ |= {"VERL_USE_EXTERNAL_MODULES": "by_turns", "PYTHONPATH": path, LOG: str(logged)}
        launch.check_place(output)
        launch.claim(experiment)
        logged.unlink(missing_ok=True)
        for file in experiment.run.glob("metrics-*.jsonl"):
            file.unlink()
        experiment.prepare()
        launch.train(experiment)
        (experiment.run / "finished").touch()
    logging = {line["step"]: line["seconds"] for line in map(json.loads, logged.read_text().splitlines())}
    rows = []
    for line in (experiment.run / "metrics-1.jsonl").read_text().splitlines():
        step, data = (json.loads(line)[name] for name in ("step", "data"))
        if step > WARM_UP * len(ARMS):
            row = {"block": (step - 1) // len(ARMS), "arm": arm_of(step), "call": data[f"actor/{CALL_MS}"]}
            row |= {"update": 1e3 * data["timing_s/update_actor"]}
            rows.append(row | {"step": 1e3 * (data["timing_s/step"] + logging[step])})
    return pd.DataFrame(rows)


def median_and_interval(values: np.ndarray) -> tuple[float, float, float]:
    """The median, and the order statistics between which that of the population lies at 95%."""
    place = int(binom.ppf(0.025, len(values), 0.5))
    ranked = np.sort(values)
    return float(np.median(values)), ranked[place], ranked[-1 - place]


def table(blocks: int = 40, output: Path = OUTPUT) -> pd.DataFrame:
    """The table of scripts/bench/README.md."""
    steps = train(output, blocks).set_index(["block", "arm"])
    rows = {}
    for arm in ARMS:
        row = {}
        for name, unit in (("call", 1), ("update", 0), ("step", 0)):
            times = steps[name].unstack()
            middle, low, high = median_and_interval((times[arm] - times[GSPO] * (arm != GSPO)).to_numpy())
            sign = "" if arm == GSPO else "+"
            row[name] = f"{middle:{sign},.{unit}f} ms [{low:{sign},.{unit}f}, {high:{sign},.{unit}f}]"
        rows[arm] = row
    names = {"call": "a call of ppo_loss", "update": "update_actor", "step": "the whole step"}
    return pd.DataFrame.from_dict(rows, orient="index").rename(columns=names).rename_axis("trained by")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40, help="of five steps each (default: %(default)s)")
    parser.add_argument("--output", type=lambda text: Path(text).resolve(), default=OUTPUT)
    args = parser.parse_args()
    print(table(args.blocks, args.output).to_string())


if __name__ == "__main__":
    main()
