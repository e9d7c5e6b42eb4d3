# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The study through verl's own trainer (Ray, FSDP, rollouts): the quickstart's ledger, mixed of short and long answers.

python scripts/studies/tasks/through_verl.py                          the arms of 12 seeds, hours of two cores
python scripts/studies/tasks/through_verl.py --seeds 1000 1001 --steps 3 --recorded 2 --folder /tmp/runs    a try

Half of the problems have 1 to 3 operations (5 to 13 tokens), half 14 to 20 (57 to 81); they are two data sets to verl,
which validates each by itself. The warm start is the quickstart's; a seed whose warm start fails has no arm. Every arm
is held at a clip rate of 30% by ``target_clip_rate``, and its records are on. The arm that acts on its records is
calibrated as a user would do it, after STEPS_RECORDED steps, and goes on from its checkpoint there with what
``fspo-verl calibrate`` prints:

    fspo-verl calibrate RUN --target-clip-rate 0.3

Cells go to records/verl.parquet; a run goes on where it was stopped. Needs what scripts/quickstart.sh installs.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), *(str(HERE.parents[1] / name) for name in ("training", "quickstart"))]
import launch  # noqa: E402
import ledger  # noqa: E402
from cells import Cells  # noqa: E402
from ledger_experiment import LedgerExperiment  # noqa: E402

from fspo_verl.analysis import runs  # noqa: E402
from fspo_verl.launch import override  # noqa: E402
from fspo_verl.observe.metrics import NAMES  # noqa: E402
from fspo_verl.output import write_whole  # noqa: E402

SEEDS, STEPS, STEPS_RECORDED, RATE = range(12), 30, 10, 0.3
POWERS = {"linear": 1.0, "sqrt": 0.5, "fixed": 0.0}
ARMS = ("linear", "fixed", "sqrt", "none", "linear, then measured")
OPERATIONS = {"short": (1, 3), "long": (14, 20)}
TRAINED, VALIDATED = 2048, 256  # problems of each kind
EPOCHS, EPS, EPS_LENGTH = 4, 0.1, 30  # passes over a rollout; all widths start equal at this length
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"


def data_set(size: int, seed: str) -> pd.DataFrame:
    """So many problems of either kind, in verl's format."""
    tables = []
    for kind, operations in OPERATIONS.items():
        rng = random.Random(f"{seed} {kind}")
        problems = [ledger.draw_problem(rng, rng.randint(*operations)) for _ in range(size)]
        tables.append(
            pd.DataFrame(
                {
                    "data_source": f"ledger_{kind}",
                    "prompt": [{"role": "user", "content": problem.prompt}],
                    "ability": "arithmetic",
                    "reward_model": {"style": "rule", "ground_truth": problem.answer},
                    "extra_info": {"index": index, "operations": problem.operations},
                }
                for index, problem in enumerate(problems)
            )
        )
    return pd.concat(tables, ignore_index=True)


@dataclasses.dataclass(frozen=True)
class Mixed(LedgerExperiment):
    """One run; the arms of a seed share its warm start and its problems."""

    def prepare(self) -> None:
        super().prepare()
        for name, (size, seed) in {"mixed": (TRAINED, str(self.seed)), "mixed-validation": (VALIDATED, "all")}.items():
            if not (file := self.start / f"{name}.parquet").exists():
                write_whole([(file, data_set(size, seed).to_parquet())])

    def task(self) -> list[str]:
        return [
            *(text for text in super().task() if not text.startswith(f"{POLICY_LOSS}.eps=")),
            override("data.train_files", self.start / "mixed.parquet"),
            override("data.val_files", self.start / "mixed-validation.parquet"),
            f"actor_rollout_ref.actor.ppo_epochs={EPOCHS}",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1",
            f"{POLICY_LOSS}.length_bins=[20]",
            "trainer.project_name=tasks",
            "trainer.save_freq=10",
        ]


def band_of(arm: str) -> tuple[str, list[str]]:
    """The loss of an arm, and its overrides."""
    power = POWERS.get(arm.split(",")[0])
    if power is None:
        return "no_clip", []
    eps = EPS * EPS_LENGTH ** (0.5 - power)
    band = {"length_power": power, "eps": eps, "target_clip_rate": RATE, "eps_max": 100 * eps}
    return "fspo", [f"{POLICY_LOSS}.{name}={value}" for name, value in band.items()]


def experiment_of(arm: str, seed: int, steps: int, output: Path) -> Mixed:
    loss, overrides = band_of(arm)
    return Mixed(
        output, loss, seed=seed, steps=steps, name=arm.replace(", ", "-").replace(" ", "-"), overrides=tuple(overrides)
    )


def calibrated(run: Path) -> list[str]:
    """What ``fspo-verl calibrate`` advises for this run, as overrides that are held at the same clip rate."""
    advice = run / "calibrate.json"
    command = ["-m", "fspo_verl.cli", "calibrate", run, "--target-clip-rate", RATE, "--json", advice]
    subprocess.run([sys.executable, *map(str, command)], check=True)
    band = json.loads(advice.read_text())["fits"][0]["band"]  # that to take comes first
    kept = {
        name: value
        for name, value in band.items()
        if name in ("eps_low", "eps_high", "length_power", "shape") and value
    }
    held = {"eps": "null", "target_clip_rate": RATE, "eps_max": 1e3}
    return [f"{POLICY_LOSS}.{name}={str(value).replace(' ', '')}" for name, value in (kept | held).items()]


def train(arm: str, seed: int, steps: int, recorded: int, output: Path) -> Path:
    """Train an arm; returns the folder of the run."""
    experiment = experiment_of(arm, seed, steps, output)
    shutil.rmtree(experiment.run, ignore_errors=True)  # an attempt that was interrupted
    experiment.run.mkdir(parents=True)
    if ", then" in arm:
        launch.train(dataclasses.replace(experiment, steps=recorded))
        experiment = dataclasses.replace(experiment, overrides=tuple(calibrated(experiment.run)))
        for eps in experiment.run.glob("checkpoints/global_step_*/actor/fspo_eps.json"):
            eps.unlink()  # in units of the width that was left: the run goes on from the eps that was measured
    launch.train(experiment)
    return experiment.run


def rows_of(arm: str, seed: int, run: Path) -> list[dict]:
    """A row per kind of problem and training step: accuracy where verl validated, and what was clipped."""
    metrics = runs.read_metrics(runs.metric_files(run))
    records = pd.concat([pd.read_parquet(file) for file in sorted((run / "records").rglob("*.parquet"))])
    records = records[records.advantage != 0]
    records["kind"] = records.length.le(20).map({True: "short", False: "long"})
    clips = records.groupby(["step", "kind"]).clipped.agg(["sum", "count"])
    rows = []
    for step, row in metrics.iterrows():
        for kind in OPERATIONS:
            accuracy = [row[name] for name in row.index if name.startswith(f"val-core/ledger_{kind}/acc/mean@1")]
            clipped, live = clips.loc[(step, kind)] if (step, kind) in clips.index else (0.0, 0)
            found = {"arm": arm, "seed": seed, "step": int(step), "kind": kind, "reward": float(row[NAMES["reward"]])}
            rows.append(found | {"accuracy": float(accuracy[0]), "clipped": float(clipped), "live": int(live)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--seeds", nargs=2, type=int, default=(SEEDS.start, SEEDS.stop), metavar=("FIRST", "END"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--recorded", type=int, default=STEPS_RECORDED, help="steps before an arm is calibrated")
    parser.add_argument("--output", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--folder", type=Path, default=HERE / "records")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
    cells = Cells(args.folder / "verl.parquet", ("arm", "seed"))
    for seed in range(*args.seeds):
        try:
            experiment_of(args.arms[0], seed, args.steps, args.output.resolve()).prepare()
        except launch.Failure:
            print(f"seed {seed}: its warm start has failed, so that it has no arm", flush=True)
            continue
        for arm in args.arms:
            if (arm, seed) not in cells.done():
                cells.add(rows_of(arm, seed, train(arm, seed, args.steps, args.recorded, args.output.resolve())))
                print(f"{arm}, seed {seed}: done", flush=True)


if __name__ == "__main__":
    main()
