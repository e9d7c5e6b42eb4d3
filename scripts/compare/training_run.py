# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A training run of the comparison: one arm at one clip range, from the warm start of one seed.

``python training_run.py JSON`` trains the run that the JSON describes, or makes its seed's warm start.
"""

import ctypes
import dataclasses
import json
import operator
import os
import signal
import sys
from importlib import resources
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / name) for name in ("compare", "quickstart", "training")]
import ledger  # noqa: E402
import loss_probe  # noqa: E402
from arms import ACTOR, BOUNDS, Arm  # noqa: E402
from ledger_experiment import LedgerExperiment, launch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

import fspo_verl.configs  # noqa: E402
from fspo_verl.launch import override  # noqa: E402
from fspo_verl.output import write_whole  # noqa: E402

POOL, TRAIN_PROBLEMS = 32_768, 4_096


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """Two runs with the same fields give the same numbers, bit for bit, on one machine.

    Attributes:
        output: folder of warm starts and data sets, which the runs of a seed share.
        folder: where the finished run goes; it exists only once the run has finished.
        arm, steps: what is trained, and how long.
        seed: of the warm start, the prompts, their order and the sampling.
        factor: its clip range, as a multiple of the arm's.
        overrides: Hydra overrides that all runs of a comparison have in common.
        probed: whether what its loss gets and gives is written down, see :mod:`loss_probe`.
    """

    output: Path
    folder: Path
    arm: Arm
    seed: int
    factor: float
    steps: int
    overrides: tuple[str, ...] = ()
    probed: bool = False

    @property
    def settings(self) -> dict:
        """The settings that decide the result, as plain values."""
        return {name: value for name, value in self.to_json().items() if name not in ("output", "folder")}

    def to_json(self) -> dict:
        """Plain values."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    @staticmethod
    def from_json(data: dict) -> "TrainingRun":
        """The inverse of :meth:`to_json`."""
        name, trains, changes = data["arm"]
        places = {place: Path(data[place]) for place in ("output", "folder")}
        return TrainingRun(
            **data | places | {"arm": Arm(name, trains, tuple(changes)), "overrides": tuple(data["overrides"])}
        )


def overrides_of(arm: Arm, factor: float) -> list[str]:
    """Hydra overrides: every bound of an arm's clip range, packaged or its own, times ``factor``; its other changes."""
    config = OmegaConf.load(resources.files(fspo_verl.configs) / f"algorithm.policy_loss/{arm.trains}.yaml")
    packaged = {key: OmegaConf.select(config, key) for key in BOUNDS}
    values = {key: value for key, value in packaged.items() if value is not None}
    values |= dict(change.split("=", 1) for change in arm.changes)
    bounds = {key: f"{float(values[key]) * factor:.6g}" for key in BOUNDS if values.get(key, "null") != "null"}
    eps = f"{ACTOR}.policy_loss.eps"
    if {eps, f"{eps}_low", f"{eps}_high"} <= bounds.keys():
        bounds[eps] = "null"  # it has no effect beside the two
    return [f"{key}={value}" for key, value in (values | bounds).items()]


def training_problems(run: TrainingRun) -> Path:
    """The training problems of the run's seed, written if missing.

    Their number of operations k is drawn with a chance that falls like 1/k, so that every octave of response lengths
    is about as frequent as the next. (Validation has the quickstart's problems, uniform in k.)
    """
    file = run.output / f"train-seed{run.seed}.parquet"
    if not file.exists():
        pool = ledger.data_set(POOL, 2_000 + run.seed)
        chance = 1 / pool.extra_info.map(operator.itemgetter("operations"))
        sample = pool.sample(TRAIN_PROBLEMS, weights=chance, random_state=run.seed)
        write_whole([(file, sample.to_parquet())])  # another loss of the seed may be starting, too
    return file


def warm_start(run: TrainingRun) -> None:
    """The model that the run starts from, unless it is there."""
    LedgerExperiment(run.output, seed=run.seed).prepare()


def train(run: TrainingRun) -> None:
    """Train from the beginning; the run's folder appears when all is done.

    An attempt that was interrupted is thrown away: the state of the sampler is in no checkpoint, so going on from one
    would give other numbers than an uninterrupted run.
    """
    # In a folder of its own: the processes of an attempt that was just killed may take seconds to end.
    attempt = run.output / "unfinished" / f"{run.folder.parent.name}-{run.folder.name}-{os.getpid()}"
    attempt.mkdir(parents=True)
    overrides = [
        *overrides_of(run.arm, run.factor),
        override("data.train_files", training_problems(run)),
        "trainer.save_freq=-1",
        "trainer.test_freq=4",
        "trainer.project_name=compare",
        *run.overrides,
    ]
    common = (run.output, run.arm.trains, "hf", run.seed, run.steps, tuple(overrides))
    experiment = _Experiment(*common, run_folder=attempt)
    if run.probed:
        os.environ |= loss_probe.environment(attempt)
    launch.train(experiment)
    (attempt / "run.json").write_text(json.dumps({"settings": run.settings}))
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    attempt.rename(run.folder)


@dataclasses.dataclass(frozen=True)
class _Experiment(LedgerExperiment):
    """The quickstart's experiment, in a folder of one's own choice."""

    run_folder: Path | None = None

    @property
    def run(self) -> Path:
        return self.run_folder


def _end_with_parent() -> None:
    """Have the kernel interrupt this process when the one that started it ends, however it ends (Linux)."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an exception, so that the trainer is stopped
    _end_with_parent()
    data = json.loads(sys.argv[1])
    try:
        {"warm start": warm_start, "train": train}[data["phase"]](TrainingRun.from_json(data["run"]))
    except launch.Failure as failure:
        sys.exit(str(failure))
    except KeyboardInterrupt:
        sys.exit(1)


if __name__ == "__main__":
    main()
