# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A cell of the comparison: one arm at one clip range, trained from the warm start of one seed.

``python cells.py JSON`` trains the cell that the JSON describes, or makes its seed's warm start.
"""

import ctypes
import dataclasses
import json
import operator
import os
import signal
import sys
import time
from importlib import resources
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "quickstart")]
import ledger  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from arms import ACTOR, BOUNDS, SIZES, Arm  # noqa: E402
from ledger_experiment import LedgerExperiment, launch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

import fspo_verl.configs  # noqa: E402
from fspo_verl.files import write_whole  # noqa: E402
from fspo_verl.preflight.overrides import override  # noqa: E402

POOL, TRAIN_PROBLEMS = 32_768, 4_096
CANDIDATES, TRIES = 16, 16  # per solvable problem, as many at a time, and per candidate


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all cells of a comparison have in common.

    Attributes:
        solvable: train on so many problems only, see :func:`solvable_problems`, and the temperature for that. Or empty.
    """

    steps: int
    prompts: int
    responses: int
    mini_batch: int
    validate_every: int
    overrides: tuple[str, ...] = ()
    solvable: tuple[int, float] | tuple[()] = ()


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training run. Two cells with the same fields give the same numbers, bit for bit, on one machine.

    Attributes:
        output: folder of warm starts and data sets, which the cells of a seed share.
        folder: where the finished run goes; it exists only once the run has finished.
        arm, seed, sizes: what is trained; the seed is that of the prompts, their order and the sampling.
        start_seed: of the warm start.
        factor: its clip range, as a multiple of the arm's.
    """

    output: Path
    folder: Path
    arm: Arm
    seed: int
    start_seed: int
    factor: float
    sizes: Sizes

    def settings(self) -> dict:
        """What decides the result."""
        return {name: value for name, value in self.to_json().items() if name not in ("output", "folder")}

    def to_json(self) -> dict:
        """Plain values."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    @staticmethod
    def from_json(data: dict) -> "Cell":
        """The inverse of :meth:`to_json`."""
        sizes = Sizes(**{key: tuple(v) if isinstance(v, list) else v for key, v in data["sizes"].items()})
        name, trains, changes = data["arm"]
        places = {place: Path(data[place]) for place in ("output", "folder")}
        return Cell(**data | places | {"arm": Arm(name, trains, tuple(changes)), "sizes": sizes})


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


def training_problems(cell: Cell) -> Path:
    """The training problems of the cell's seed, written if missing.

    Their number of operations k is drawn with a chance that falls like 1/k, so that every octave of response lengths
    is about as frequent as the next. (Validation has the quickstart's problems, uniform in k.)
    """
    solvable, start = cell.sizes.solvable, cell.output / f"warm-start-seed{cell.start_seed}"
    kind = f"-solvable{solvable[0]}-at{solvable[1]:g}-of-{start.name}" if solvable else ""
    file = cell.output / f"train-seed{cell.seed}{kind}.parquet"
    if not file.exists():
        pool = ledger.data_set(POOL, 2_000 + cell.seed)
        chance = 1 / pool.extra_info.map(operator.itemgetter("operations"))
        sample = pool.sample(TRAIN_PROBLEMS, weights=chance, random_state=cell.seed)
        if solvable:
            sample = solvable_problems(sample, start / "model", *solvable)
        write_whole([(file, sample.to_parquet())])  # another loss of the seed may be starting, too
    return file


def solvable_problems(problems: pd.DataFrame, model: Path, number: int, temperature: float) -> pd.DataFrame:
    """The first problems of which a model solves 20 to 80% of the tries at this temperature.

    What it solves sometimes it can learn to solve always: a loss that does not come to 95% on these has failed (the
    sanity test of arXiv 2510.26788).

    Raises:
        Failure: there are too few.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from warm_start import respond

    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    found = problems[:0]
    for begin in range(0, len(problems), CANDIDATES * number):
        candidates = problems[begin : begin + CANDIDATES * number]
        prompts = [prompt[0]["content"] for prompt in candidates.prompt]
        answers = [problem["ground_truth"] for problem in candidates.reward_model]
        solved = np.zeros(len(candidates))
        for _ in range(TRIES):
            texts = respond(policy, prompts, temperature)
            solved += [ledger.compute_score("", *pair) for pair in zip(texts, answers, strict=True)]
        found = pd.concat([found, candidates[(solved >= 0.2 * TRIES) & (solved <= 0.8 * TRIES)]])
        if len(found) >= number:
            return found[:number]
    raise launch.Failure(
        f"the start solves 20 to 80% of the tries of {len(found)} of {len(problems)} problems, fewer than {number}"
    )


def warm_start(cell: Cell) -> None:
    """The model that the cell starts from, unless it is there."""
    LedgerExperiment(cell.output, seed=cell.start_seed).prepare()


def train(cell: Cell) -> None:
    """Train the cell from the beginning; its folder appears when all is done.

    An attempt that was interrupted is thrown away: the state of the sampler is in no checkpoint, so going on from one
    would give other numbers than an uninterrupted run.
    """
    # In a folder of its own: the processes of an attempt that was just killed may take seconds to end.
    attempt = cell.output / "unfinished" / f"{cell.folder.parent.name}-{cell.folder.name}-{os.getpid()}"
    attempt.mkdir(parents=True)
    sizes = cell.sizes
    overrides = [
        *overrides_of(cell.arm, cell.factor),
        override("data.train_files", training_problems(cell)),
        *(f"{key}={getattr(sizes, name)}" for name, key in SIZES.items()),
        "trainer.save_freq=-1",
        "trainer.project_name=compare",
        *sizes.overrides,
    ]
    common = (cell.output, cell.arm.trains, "hf", cell.seed, sizes.steps, tuple(overrides))
    experiment = _Experiment(*common, run_folder=attempt, start_seed=cell.start_seed)
    begin = time.monotonic()
    launch.train(experiment)
    seconds = round(time.monotonic() - begin, 1)
    (attempt / "cell.json").write_text(json.dumps({"settings": cell.settings(), "seconds": seconds}))
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    attempt.rename(cell.folder)


@dataclasses.dataclass(frozen=True)
class _Experiment(LedgerExperiment):
    """The quickstart's experiment, with a folder and a warm start of one's own choice."""

    run_folder: Path | None = None
    start_seed: int = 0

    @property
    def run(self) -> Path:
        return self.run_folder

    @property
    def start(self) -> Path:
        return self.output / f"warm-start-seed{self.start_seed}"


def _end_with_parent() -> None:
    """Have the kernel interrupt this process when the one that started it ends, however it ends (Linux)."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an exception, so that the trainer is stopped
    _end_with_parent()
    data = json.loads(sys.argv[1])
    cell = Cell.from_json(data["cell"])
    try:
        {"warm start": warm_start, "train": train}[data["phase"]](cell)
    except launch.Failure as failure:
        sys.exit(str(failure))
    except KeyboardInterrupt:
        sys.exit(1)


if __name__ == "__main__":
    main()
