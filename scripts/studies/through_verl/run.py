# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains FSPO and verl's own GSPO on walks through verl's own trainer; what gspo.parquet holds is left out.

python scripts/studies/through_verl/run.py                               all, some 90 cells; after scripts/quickstart.sh
python scripts/studies/through_verl/run.py --arms GSPO FSPO --seeds 100    some, and the pilots that they need

A cell takes 10 to 15 minutes of a core. The arms of a seed share its warm start, its problems and their order.
"""

import argparse
import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), *(str(HERE.parents[1] / name) for name in ("training", "quickstart"))]
import analyse  # noqa: E402
import launch  # noqa: E402
import task  # noqa: E402
from cells import Cells  # noqa: E402

from fspo_verl.analysis import runs  # noqa: E402
from fspo_verl.launch import override  # noqa: E402
from fspo_verl.output import write_whole  # noqa: E402

LEARNING_RATES, STEPS, RATE = (5e-5, 1e-4, 2e-4), 40, 0.1
ALLOWED, PILOTS = (0.07, 0.13), range(1000, 1003)  # of the rate over a pilot run; the first pilot clips nothing
PROMPTS, RESPONSES, UPDATES, PASSES, VALIDATED = 12, 8, 16, 4, 256  # prompts and validation prompts of each task
ACTOR = "actor_rollout_ref.actor"


class Arm(NamedTuple):
    loss: str  # of the group algorithm.policy_loss
    power: float | None = None  # in range ∝ L^power; None clips nothing
    held: bool = False  # by target_clip_rate, from the eps of the arm that is not held


ARMS = {
    "none": Arm("no_clip"),
    "GSPO": Arm("gspo", 1.0),
    "FSPO": Arm("fspo", 0.5),
    "fixed": Arm("fspo", 0.0),
    "FSPO, held": Arm("fspo", 0.5, held=True),
}


@dataclasses.dataclass(frozen=True)
class Walks(launch.Experiment):
    """One run."""

    learning_rate: float = 0.0

    @property
    def start(self) -> Path:
        """Folder of the warm-started model and the data sets of the seed."""
        return self.output / f"warm-start-seed{self.seed}"

    def prepare(self) -> None:
        for name, (blocks, prompts) in {"train": (STEPS, PROMPTS), "validation": (1, VALIDATED)}.items():
            if not (file := self.start / f"{name}.parquet").exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole([(file, task.data_set(self.seed, blocks, prompts).to_parquet())])
        if not (self.start / "model").exists():
            unfinished = self.start / "model.unfinished"
            path = os.pathsep.join([str(HERE.parents[1] / "quickstart"), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, HERE / "task.py", unfinished, f"--seed={self.seed}"]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
            unfinished.rename(self.start / "model")

    def task(self) -> list[str]:
        longest = task.PROMPT_TOKENS + task.RESPONSE_TOKENS
        return [
            f"{ACTOR}.policy_loss.length_bins=[{','.join(str(each + 2) for each in list(task.LENGTHS.values())[:-1])}]",
            override("data.train_files", self.start / "train.parquet"),
            override("data.val_files", self.start / "validation.parquet"),
            "data.shuffle=false",  # a batch has as many problems of each task
            f"data.max_prompt_length={task.PROMPT_TOKENS}",
            f"data.max_response_length={task.RESPONSE_TOKENS}",
            override("reward.custom_reward_function.path", HERE / "task.py"),
            override("actor_rollout_ref.model.path", self.start / "model"),
            f"data.train_batch_size={PROMPTS * len(task.LENGTHS)}",
            f"actor_rollout_ref.rollout.n={RESPONSES}",
            f"{ACTOR}.ppo_mini_batch_size={PROMPTS * len(task.LENGTHS) * PASSES // UPDATES}",
            f"{ACTOR}.ppo_epochs={PASSES}",
            f"actor_rollout_ref.rollout.max_model_len={longest}",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1",
            f"{ACTOR}.optim.lr={self.learning_rate}",
            "trainer.project_name=walks",
            "trainer.test_freq=2",
            f"trainer.save_freq={STEPS // 2}",
        ]


def experiment_of(name: str, learning_rate: float, seed: int, output: Path, eps: tuple[float, float] | None) -> Walks:
    """``eps``: below and above, in nats per token to the arm's power."""
    arm, overrides = ARMS[name], []
    if eps and arm.loss == "gspo":  # its range is one of the ratio e^(S/L)
        low, high = -np.expm1(-eps[0]), np.expm1(eps[1])
        overrides = [f"{ACTOR}.clip_ratio_low={low:.6g}", f"{ACTOR}.clip_ratio_high={high:.6g}"]
    elif eps:
        band = {"length_power": arm.power, "eps": "null", "eps_low": eps[0], "eps_high": eps[1]}
        band |= {"target_clip_rate": RATE, "eps_max": 100 * max(eps)} if arm.held else {}
        overrides = [f"{ACTOR}.policy_loss.{key}={value}" for key, value in band.items()]
    name = f"{name.replace(', ', '-')}-lr{learning_rate:g}"
    return Walks(output, arm.loss, "hf", seed, STEPS, tuple(overrides), name=name, learning_rate=learning_rate)


def rows_of(run: Path) -> pd.DataFrame:
    """A row per task and step: accuracy where verl validated, what was clipped; and the eps that clip RATE in all."""
    metrics = runs.read_metrics(runs.metric_files(run))
    records = pd.concat([pd.read_parquet(file) for file in sorted((run / "records").rglob("*.parquet"))])
    records, rows = records[records.advantage != 0], []
    eps = {}
    for power, (side, sign) in itertools.product((0.0, 0.5, 1.0), {"low": -1, "high": 1}.items()):
        reach = np.sign(records.advantage) * records.log_ratio / records.length**power
        eps[f"{side}_{power:g}"] = max(float(reach[records.advantage * sign > 0].quantile(1 - RATE)), 1e-6)
    longest = np.searchsorted([length + 2 for length in task.LENGTHS.values()], records.length)
    clips = records.clipped.groupby([records.step, longest]).agg(["sum", "count"])
    for (step, row), (place, length) in itertools.product(metrics.iterrows(), enumerate(task.LENGTHS.values())):
        accuracy = [row[name] for name in row.index if name.startswith(f"val-core/walk_{length}/acc/mean@1")]
        clipped, live = clips.loc[(step, place)] if (step, place) in clips.index else (0.0, 0)
        found = {"step": int(step), "length": length, "accuracy": float(accuracy[0]) if accuracy else np.nan}
        rows.append(found | {"clipped": float(clipped), "live": int(live), "norm": float(row["actor/grad_norm"])} | eps)
    return pd.DataFrame(rows)


class Study:
    """The cells, each trained when it is first asked for."""

    def __init__(self, records: Path, output: Path):
        self.cells, self.output = Cells(records, analyse.KEY), output

    def cell(self, arm: str, learning_rate: float, seed: int) -> pd.DataFrame:
        key = (arm, learning_rate, seed)
        if key not in self.cells.done():
            experiment = experiment_of(*key, self.output, self.eps(arm, learning_rate, seed))
            experiment.prepare()
            shutil.rmtree(experiment.run, ignore_errors=True)  # an attempt that was interrupted
            experiment.run.mkdir(parents=True)
            launch.train(experiment)
            self.cells.add(
                rows_of(experiment.run).assign(**dict(zip(analyse.KEY, key, strict=True))).to_dict("records")
            )
            print(*key, "done", flush=True)
        return self.cells.table().to_pandas().set_index(analyse.KEY).loc[key]

    def eps(self, arm: str, learning_rate: float, seed: int) -> tuple[float, float] | None:
        """Run pilots from the last one on, until one has clipped what is allowed; the first pilot clips nothing."""
        if (power := ARMS[arm].power) is None:
            return None
        arm, pilot = ("FSPO" if ARMS[arm].held else arm), self.cell("none", learning_rate, PILOTS[0])
        eps = tuple(float(f"{pilot[f'{side}_{power:g}'].iloc[0]:.3g}") for side in ("low", "high"))
        for number in PILOTS[1:]:
            if number == seed:
                break
            pilot = self.cell(arm, learning_rate, number)
            if ALLOWED[0] <= pilot.clipped.sum() / pilot.live.sum() <= ALLOWED[1]:
                break
            eps = tuple(float(f"{pilot[f'{side}_{power:g}'].iloc[0]:.3g}") for side in ("low", "high"))
        return eps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--learning-rates", nargs="+", type=float, default=LEARNING_RATES)
    parser.add_argument("--seeds", nargs="+", type=int, help="default: those that choose, then the others")
    parser.add_argument("--output", type=Path, default=Path("runs/through_verl"))
    parser.add_argument("--records", type=Path, default=HERE / "gspo.parquet")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
    study = Study(args.records, args.output.resolve())
    for seed, rate, arm in itertools.product(args.seeds or analyse.CHOOSING, args.learning_rates, args.arms):
        study.cell(arm, rate, seed)
    for seed, arm in () if args.seeds else itertools.product(analyse.COMPARED, args.arms):
        study.cell(arm, analyse.best_rate(study.cells.table().to_pandas(), arm), seed)


if __name__ == "__main__":
    main()
