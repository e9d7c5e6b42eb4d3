# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains walks through verl's own trainer (Ray, FSDP, rollouts); what records.parquet holds is left out.

python scripts/studies/through_verl/run.py                         L, fixed and none, 8 seeds: 10 minutes of a core each
python scripts/studies/through_verl/run.py --arms "L at 10%" √L    more arms; also --learning-rate 2.5e-5
python scripts/studies/through_verl/run.py --arms none √L --seeds 1000 1001 --learning-rate 5e-5    scouting

The arms of a seed share its warm start, its problems and their order. An arm with a clip rate is held at it by
``target_clip_rate``, from the eps that has the rate in three steps without a clip. eps follows late where a run slows
down. So a pilot of another seed says how much of the rate is lacking, and the target is raised by it.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), *(str(HERE.parents[1] / name) for name in ("training", "quickstart"))]
import launch  # noqa: E402
import task  # noqa: E402
from cells import Cells  # noqa: E402

from fspo_verl.analysis import runs  # noqa: E402
from fspo_verl.launch import override  # noqa: E402
from fspo_verl.output import write_whole  # noqa: E402

SEEDS, STEPS, DRY_STEPS, PILOT = range(8), 30, 3, 1000  # seeds from 1000 on are not compared
BEST = 1e-4  # the learning rate that scouting chose
PROMPTS, RESPONSES, UPDATES, PASSES, VALIDATED = 12, 8, 16, 4, 512  # prompts and validation prompts of each task
LOSS = "actor_rollout_ref.actor.policy_loss"
KEY = ("arm", "learning_rate", "seed")


class Arm(NamedTuple):
    power: float
    rate: float


ARMS = {
    "L": Arm(1.0, 0.3),
    "fixed": Arm(0.0, 0.3),
    "none": None,
    "√L": Arm(0.5, 0.3),
    "L at 10%": Arm(1.0, 0.1),
}
LEAST = ("L", "fixed", "none")
SHORT = {("fixed", BEST): 0.023, ("√L", BEST): 0.025}  # what an arm lacks of its clip rate in spite of its pilot


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
            f"{LOSS}.length_bins=[{','.join(str(length + 2) for length in list(task.LENGTHS.values())[:-1])}]",
            override("data.train_files", self.start / "train.parquet"),
            override("data.val_files", self.start / "validation.parquet"),
            "data.shuffle=false",  # a batch has as many problems of each task
            f"data.max_prompt_length={task.PROMPT_TOKENS}",
            f"data.max_response_length={task.RESPONSE_TOKENS}",
            override("reward.custom_reward_function.path", HERE / "task.py"),
            override("actor_rollout_ref.model.path", self.start / "model"),
            f"data.train_batch_size={PROMPTS * len(task.LENGTHS)}",
            f"actor_rollout_ref.rollout.n={RESPONSES}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS * len(task.LENGTHS) * PASSES // UPDATES}",
            f"actor_rollout_ref.actor.ppo_epochs={PASSES}",
            f"actor_rollout_ref.rollout.max_model_len={longest}",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1",
            f"actor_rollout_ref.actor.optim.lr={self.learning_rate}",
            "trainer.project_name=walks",
            "trainer.test_freq=5",
            "trainer.save_freq=15",
        ]


def experiment_of(name: str, learning_rate: float, seed: int, steps: int, output: Path, missed: float = 0.0) -> Walks:
    """``missed``: how far above its target the arm's clip rate stays."""
    arm, overrides = ARMS[name], []
    if arm:
        low, high = first_eps(arm, learning_rate, output)
        band = {"length_power": arm.power, "eps": "null", "eps_low": low, "eps_high": high}
        band |= {"target_clip_rate": round(arm.rate - missed, 4), "eps_max": 100 * max(low, high)}
        overrides = [f"{LOSS}.{key}={value}" for key, value in band.items()]
    return Walks(
        output,
        "fspo" if arm else "no_clip",
        seed=seed,
        steps=steps,
        name=f"{name.replace('√', 'sqrt ').replace(' at ', '-').replace('%', '').replace(' ', '')}-lr{learning_rate:g}",
        overrides=tuple(overrides),
        learning_rate=learning_rate,
    )


def first_eps(arm: Arm, learning_rate: float, output: Path) -> tuple[float, float]:
    """Below and above: what clips the arm's rate in some steps without a clip, of a seed that is not compared."""
    dry = experiment_of("none", learning_rate, PILOT, DRY_STEPS, output / "dry")
    if not (dry.run / "done").exists():
        train(dry)
        (dry.run / "done").touch()
    records = read_records(dry.run)
    reach = np.sign(records.advantage) * records.log_ratio / records.length**arm.power
    sides = (reach[records.advantage * sign > 0].quantile(1 - arm.rate) for sign in (-1, 1))
    return tuple(float(f"{max(side, 1e-6):.3g}") for side in sides)


def read_records(run: Path) -> pd.DataFrame:
    """Responses with an advantage."""
    records = pd.concat([pd.read_parquet(file) for file in sorted((run / "records").rglob("*.parquet"))])
    return records[records.advantage != 0]


def train(experiment: Walks) -> None:
    experiment.prepare()
    shutil.rmtree(experiment.run, ignore_errors=True)  # an attempt that was interrupted
    experiment.run.mkdir(parents=True)
    launch.train(experiment)


def rows_of(run: Path) -> pd.DataFrame:
    """A row per task and step: accuracy where verl validated, what was clipped, the norm of the gradient."""
    metrics = runs.read_metrics(runs.metric_files(run))
    records, rows = read_records(run), []
    longest = np.searchsorted([length + 2 for length in task.LENGTHS.values()], records.length)
    clips = records.clipped.groupby([records.step, longest]).agg(["sum", "count"])
    for step, row in metrics.iterrows():
        for place, length in enumerate(task.LENGTHS.values()):
            accuracy = [row[name] for name in row.index if name.startswith(f"val-core/walk_{length}/acc/mean@1")]
            clipped, live = clips.loc[(step, place)] if (step, place) in clips.index else (0.0, 0)
            found = {"step": int(step), "length": length, "accuracy": float(accuracy[0]) if accuracy else np.nan}
            rows.append(found | {"clipped": float(clipped), "live": int(live), "norm": float(row["actor/grad_norm"])})
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=LEAST, choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="default: all eight")
    parser.add_argument("--learning-rate", type=float, default=BEST, help="default: %(default)g")
    parser.add_argument("--output", type=Path, default=Path("runs/through_verl"))
    parser.add_argument("--records", type=Path, default=HERE / "records.parquet")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
    learning_rate, cells, output = args.learning_rate, Cells(args.records, KEY), args.output.resolve()
    pilots = [(PILOT, arm) for arm in args.arms if ARMS[arm] and min(args.seeds) < PILOT]
    for seed, arm in [*pilots, *((seed, arm) for seed in args.seeds for arm in args.arms)]:
        if (arm, learning_rate, seed) in cells.done():
            continue
        missed = 0.0
        if seed < PILOT and ARMS[arm]:
            pilot = cells.table().to_pandas().set_index(list(KEY)).loc[(arm, learning_rate, PILOT)]
            missed = pilot.clipped.sum() / pilot.live.sum() - ARMS[arm].rate - SHORT.get((arm, learning_rate), 0.0)
        experiment = experiment_of(arm, learning_rate, seed, STEPS, output, missed)
        train(experiment)
        rows = rows_of(experiment.run).assign(arm=arm, learning_rate=learning_rate, seed=seed)
        cells.add(rows.to_dict("records"))
        print(f"{arm}, learning rate {learning_rate:g}, seed {seed}: done", flush=True)


if __name__ == "__main__":
    main()
