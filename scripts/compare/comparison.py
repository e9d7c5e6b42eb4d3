# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Compare policy losses on stock verl: paired seeds, one clip-range budget for all, a table with intervals.

For every seed a small Qwen3 model is warm-started on the quickstart's running totals. From it each loss is trained
with verl's own trainer, on the same prompts in the same order. First every loss tries the same multiples of its
packaged clip range on the tuning seeds; the one with the highest mean training reward is used on the other seeds.
Those of `calibrated` are multiples of the band that `fspo-verl calibrate` recommends to fspo's first tuning run.

A cell is one training run. A finished cell is never run again; one that was interrupted is started afresh, as only then
the result is that of an uninterrupted one. Results: OUTPUT/comparison.md, .json and .png, and a folder per cell.
"""

from __future__ import annotations  # so that a Python too old to train with can still say what is wrong with a call

import argparse
import fcntl
import itertools
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "training"))  # the trainer, its metrics and checks of arguments
import arms  # noqa: E402
from options import LOSSES, Failure, hydra_override, positive  # noqa: E402

FACTORS = (1 / 3, 1.0, 3.0, 10.0)
KEYS = {
    "temperature": "actor_rollout_ref.rollout.temperature",
    "learning_rate": "actor_rollout_ref.actor.optim.lr",
    "epochs": "actor_rollout_ref.actor.ppo_epochs",
}
"""What options set in verl, besides :data:`arms.SIZES`."""
OF_A_CELL = ("algorithm.policy_loss", "data.seed", "actor_rollout_ref.rollout.seed", "trainer.total_training_steps")
"""What differs between cells, or ends them."""
# What starting verl costs, in training steps; for the estimate of the remaining time only.
STARTUP_STEPS = 12

EXAMPLES = """examples:
  bash scripts/compare_baselines.sh                                    everything, a hundred minutes on two cores
  bash scripts/compare_baselines.sh --factors fspo=1,gspo=1,grpo=1,fixed_band=1,no_clip=1 --seeds 10,11,12 \
      --output runs/compare-untuned                                    without tuning
  bash scripts/compare_baselines.sh --losses fspo,gspo --arm fspo_mean=fspo,loss_agg_mode=seq-mean-token-mean \
      --output runs/compare-mean                                       fspo with gspo's aggregation, too
  bash scripts/compare_baselines.sh --solvable 64 --temperature 1 --steps 40 --seeds 10,11,12 --factors ... \
      --output runs/compare-solvable                                   sanity: does each loss learn what it can?
  bash scripts/compare_baselines.sh --check tests/comparison_thresholds.json --output runs/compare-check
                                                                       the small comparison that CI runs
"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash scripts/compare_baselines.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
        allow_abbrev=False,
    )
    add = parser.add_argument
    losses = [*LOSSES, arms.CALIBRATED]
    add("--losses", type=arms.names, help=f"default: those of --factors, or {','.join(losses)}")
    add(
        "--arm",
        type=arms.arm,
        action="append",
        default=[],
        metavar="NAME=LOSS,KEY=VALUE,...",
        help="a loss with settings of its own (keys of actor_rollout_ref.actor), besides --losses; may be repeated",
    )
    add("--seeds", type=integers, default=[10, 11, 12, 13, 14, 15], help="default: 10,11,12,13,14,15")
    add("--start-seed", type=int, help="one warm start, of this seed, for all seeds (default: each seed has its own)")
    add("--steps", type=positive, default=12, help="training steps of a cell (default: %(default)s)")
    add("--prompts", type=positive, default=32, help="per step (default: %(default)s)")
    add("--responses", type=positive, default=8, help="per prompt (default: %(default)s)")
    add("--mini-batch", type=positive, default=8, help="prompts per optimiser step (default: %(default)s)")
    add("--temperature", type=float, default=1.5, help="of sampling (default: %(default)s)")
    add("--learning-rate", type=float, default=5e-4, help="default: %(default)s")
    add("--epochs", type=positive, default=1, help="passes over a rollout (default: %(default)s)")
    learnable = "train only on N problems of which the start solves 20 to 80%% of the tries: does each loss learn them?"
    add("--solvable", type=positive, metavar="N", help=learnable)
    add("--validate-every", type=positive, default=4, help="steps (default: %(default)s)")
    add("--factors", type=_factors, help="clip range per loss as a multiple of its own, instead of tuning")
    add("--tuning-seeds", type=integers, default=[100, 101], help="default: 100,101")
    add("--tuning-steps", type=positive, default=8, help="default: %(default)s")
    add("--target", type=float, default=0.5, help="the accuracy to which steps are counted (default: %(default)s)")
    add("--check", type=Path, metavar="JSON", help="run the small comparison of these thresholds, and check it")
    add("--jobs", type=positive, default=2, help="cells at a time, each with one thread (default: %(default)s)")
    add("--output", type=Path, default=Path("runs/compare"), help="folder for results (default: %(default)s)")
    add("--venv", help="virtual environment (default: .venv)")
    add("--parse-only", action="store_true", help=argparse.SUPPRESS)
    more = "more Hydra overrides for verl, for every cell"
    add("overrides", nargs="*", type=hydra_override, metavar="-- override", help=more)
    args = parser.parse_args(argv)
    if args.check:
        try:
            setup = json.loads(args.check.read_text())["setup"]
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--check {args.check} names no file of thresholds: {error}")
        if given := [f"--{name}" for name in setup if getattr(args, name) != parser.get_default(name)]:
            parser.error(f"--check {args.check} has its own {', '.join(given)}")
        vars(args).update(setup)
    if not args.factors and (both := set(args.seeds) & set(args.tuning_seeds)):
        parser.error(f"seeds that are tuned on are not compared: {', '.join(map(str, sorted(both)))}")
    if args.mini_batch > args.prompts:
        parser.error(f"--mini-batch {args.mini_batch} is more than all of --prompts {args.prompts}")
    if args.solvable and args.solvable < args.prompts:
        parser.error(f"--solvable {args.solvable} is less than the --prompts {args.prompts} of a step")
    # One of the two would win without a word, and results would name the option's.
    changes = list(itertools.chain(args.overrides, *(arm.changes for arm in args.arm)))
    for name, key in (KEYS | arms.SIZES).items():
        if _sets(changes, key):
            parser.error(f"{key} is what --{name.replace('_', '-')} sets")
    for key in arms.BOUNDS:
        if _sets(args.overrides, key):
            parser.error(f"{key} is of a clip range, which --factors or tuning multiplies: give it to an --arm")
    for key in OF_A_CELL:
        if _sets(args.overrides, key):
            parser.error(f"{key} is set for each cell; see --losses, --seeds, --steps")
    more = {arm.name for arm in args.arm}
    args.losses = args.losses or [loss for loss in losses if loss not in more and loss in (args.factors or losses)]
    args.arms = arms.chosen(args.losses, args.arm)
    found = [arm.name for arm in args.arms]
    if len(set(found)) < len(found):
        parser.error(f"each may be compared once: {', '.join(found)}")
    if args.factors and (other := args.factors.keys() ^ set(found)):
        parser.error(f"--factors has to name what is compared, {', '.join(found)}; not so: {', '.join(sorted(other))}")
    return args


def _sets(changes: Sequence[str], key: str) -> bool:
    """Whether an override is of the key, or of a group that holds it."""
    return any(f"{key}.".startswith(f"{change.partition('=')[0].lstrip('+~')}.") for change in changes)


def integers(text: str) -> list[int]:
    """For example 10,11."""
    found = [int(number) for number in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text} names a number twice")
    return found


def _factors(text: str) -> dict[str, float]:
    return {loss: float(factor) for loss, _, factor in (pair.partition("=") for pair in text.split(","))}


def main() -> None:
    args = parse_args()
    if not args.parse_only:
        guarded(args, compare)


def guarded(args: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> None:
    """Have one process at a time train in the output folder, and leave nothing running when it is stopped."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as long as there is nothing to stop
    import launch  # not at the top: --help must work before anything is installed

    launch.stop_on_signals()
    args.output = args.output.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        with (args.output / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Failure(f"another comparison is running in {args.output}") from None
            launch.check_place(args.output)
            shutil.rmtree(args.output / "unfinished", ignore_errors=True)
            sys.exit(run(args))
    except (Failure, ValueError) as failure:
        sys.exit(f"comparison failed: {failure}")
    except KeyboardInterrupt as signalled:
        print("interrupted; the same command goes on with the cells that are not finished", file=sys.stderr)
        sys.exit(128 + signalled.args[0])


def compare(args: argparse.Namespace) -> int:
    """Run what is missing, write the comparison; returns the exit code."""
    from fspo_verl import cli

    if arms.CALIBRATED in args.losses and (args.factors or "fspo" not in args.losses):
        raise Failure(f"{arms.CALIBRATED} takes its band from the tuning of fspo: --losses with it, and no --factors")
    # Rough numbers suffice before bands and factors are known: what counts is how many cells there are.
    final = [_cell(args, arm, seed, 1.0) for seed in args.seeds for arm in args.arms]
    refuse_others(final)
    tuning = [] if args.factors else _tuning(args, args.arms)
    progress = Progress(args, [*tuning, *final])
    progress.run("warm start", one_per_start([*tuning, *final]))
    if not args.factors:
        progress.run("train", _tuning(args, [arm for arm in args.arms if arm.name != arms.CALIBRATED]))
        if arms.CALIBRATED in args.losses:
            found = arms.calibrated(_folder(args, 1.0) / f"fspo-seed{args.tuning_seeds[0]}")
            args.arms = [found if arm.name == arms.CALIBRATED else arm for arm in args.arms]
            progress.run("train", _tuning(args, [found]))
    factors, table = (args.factors, None) if args.factors else choose_factors(args)
    final = [_cell(args, arm, seed, factors[arm.name]) for seed in args.seeds for arm in args.arms]
    progress.run("train", final)

    cells = args.output / "cells"
    (cells / "setup.json").write_text(json.dumps(describe(args, factors, table, final), indent=1))
    options = [cells, "--output", args.output, "--baseline", args.arms[0].name, "--target", args.target]
    options += ["--check", args.check] if args.check else []
    return cli.main(["compare", *map(str, options)])


def refuse_others(cells: Sequence) -> None:
    """Results are of all runs in a folder: refuse one with others than these cells.

    Raises:
        Failure: names them.
    """
    for parent in {cell.folder.parent for cell in cells}:
        wanted = {cell.folder.name for cell in cells if cell.folder.parent == parent}
        found = {path.name for path in parent.iterdir() if path.is_dir()} if parent.exists() else set()
        if others := sorted(found - wanted):
            raise Failure(f"{parent} holds other runs, {', '.join(others)}: name them, too, or choose another --output")


def _tuning(args: argparse.Namespace, of: Sequence[arms.Arm]) -> list:
    """The cells that tune these arms."""
    return [
        _cell(args, arm, seed, factor, tuning=True)
        for arm in of
        if arm.tuned
        for seed in args.tuning_seeds
        for factor in FACTORS
    ]


def _folder(args: argparse.Namespace, factor: float) -> Path:
    """Of the tuning runs with this multiple."""
    return args.output / f"tuning-x{factor:.3g}"


def _cell(args: argparse.Namespace, arm: arms.Arm, seed: int, factor: float, tuning: bool = False):
    from cells import Cell, Sizes

    overrides = (*(f"{key}={getattr(args, name)}" for name, key in KEYS.items()), *args.overrides)
    steps = args.tuning_steps if tuning else args.steps
    solvable = (args.solvable, args.temperature) if args.solvable else ()
    sizes = Sizes(steps, args.prompts, args.responses, args.mini_batch, args.validate_every, overrides, solvable)
    parent = _folder(args, factor) if tuning else args.output / "cells"
    start_seed = seed if args.start_seed is None else args.start_seed
    return Cell(args.output, parent / f"{arm.name}-seed{seed}", arm, seed, start_seed, factor, sizes)


def one_per_start(cells: Sequence) -> list:
    """A cell for each warm start that these need."""
    return list({cell.start_seed: cell for cell in cells}.values())


class Progress:
    """Runs cells in processes of their own, several at a time, and says how long the rest will take."""

    def __init__(self, args: argparse.Namespace, cells: Sequence):
        self.args = args
        missing = [cell for cell in cells if not cell.folder.exists()]
        self.total, self.ended = len(missing), 0
        self.left = sum(map(_cost, missing))
        self.done, self.begin = 0.0, time.monotonic()
        self.failed: set[Path] = set()
        if already := len(cells) - self.total:
            print(f"{already} cells finished before", flush=True)

    def run(self, phase: str, cells: Sequence) -> None:
        """Run a phase (``warm start`` or ``train``) of all cells that are not finished.

        A cell that fails is run once more: on a busy machine Ray does not always start in time.

        Raises:
            Failure: a cell failed twice, or a finished one has other settings.
        """
        waiting, running = [cell for cell in cells if not self._finished(phase, cell)], {}
        try:
            while waiting or running:
                while waiting and len(running) < self.args.jobs:
                    cell = waiting.pop(0)
                    running[self._start(phase, cell)] = (cell, time.monotonic())
                time.sleep(0.5)
                for process in [process for process in running if process.poll() is not None]:
                    cell, begin = running.pop(process)
                    if process.returncode:
                        self._fail(phase, cell)
                        waiting.append(cell)
                    else:
                        self._end(phase, cell, begin)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()

    def _finished(self, phase: str, cell) -> bool:
        if phase == "warm start":
            return (self.args.output / f"warm-start-seed{cell.start_seed}/model").exists()
        if not cell.folder.exists():
            return False
        found = json.loads((cell.folder / "cell.json").read_text())["settings"]
        # As a cell, so that one of before an option existed counts as one with its default.
        if type(cell).from_json(cell.to_json() | found) != cell:
            raise Failure(f"{cell.folder} holds a run with {found}, not {cell.settings()}; choose another --output")
        return True

    def _log(self, phase: str, cell) -> Path:
        return self.args.output / "logs" / f"{phase.replace(' ', '-')}-{cell.folder.parent.name}-{cell.folder.name}.log"

    def _start(self, phase: str, cell) -> subprocess.Popen:
        log = self._log(phase, cell)
        log.parent.mkdir(exist_ok=True)
        command = [sys.executable, HERE / "cells.py", json.dumps({"phase": phase, "cell": cell.to_json()})]
        # One thread per cell: on matrices this small a second one brings little, and another cell much. The limit holds
        # where a library asks for more.
        env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
        with log.open("w") as file:
            # A session of its own: Ctrl-C in a terminal is for this process, which then ends the cells in turn.
            return subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)

    def _fail(self, phase: str, cell) -> None:
        log = self._log(phase, cell)
        if cell.folder in self.failed:
            raise Failure(f"{phase} of {cell.folder}:\n{log.read_text()[-3000:]}")
        self.failed.add(cell.folder)
        kept = log.replace(log.with_suffix(".failed.log"))
        print(
            f"[{phase}] {cell.arm.name} x {cell.factor:.3g}, seed {cell.seed} failed, is run once more; {kept}",
            flush=True,
        )

    def _end(self, phase: str, cell, begin: float) -> None:
        import report

        seconds = time.monotonic() - begin
        if phase == "warm start":
            print(f"[warm start] seed {cell.start_seed}: {seconds:.0f} s", flush=True)
            self.begin = time.monotonic()  # the estimate is one of training
            return
        self.ended += 1
        self.done += _cost(cell)
        left = (time.monotonic() - self.begin) * (self.left - self.done) / self.done
        reached = report.summarize(cell.folder)
        print(
            f"[{self.ended}/{self.total}] {cell.arm.name} x {cell.factor:.3g}, seed {cell.seed}: "
            f"accuracy {reached['accuracy_before']:.2f} -> {reached['accuracy_after']:.2f}, {seconds:.0f} s; "
            f"about {left / 60:.0f} min left",
            flush=True,
        )


def _cost(cell) -> int:
    return STARTUP_STEPS + cell.sizes.steps


def choose_factors(args: argparse.Namespace) -> tuple[dict[str, float], dict]:
    """The multiple per loss with the highest mean training reward over the tuning seeds, and the table of all."""
    from fspo_verl.compare.measures import measure
    from fspo_verl.compare.trials import read_trials

    columns = ["reward", "clip_rate", "accuracy"]
    scores = {arm.name: [] for arm in args.arms if arm.tuned}
    for factor in FACTORS:
        values = measure(read_trials(_folder(args, factor)), target=1.0)
        values = values[values.seed.isin(args.tuning_seeds) & values.loss.isin(scores)]
        for loss, means in values.groupby("loss")[columns].mean().iterrows():
            scores[loss].append(means.round(4).to_dict())
    chosen = {
        loss: max(zip(FACTORS, means, strict=True), key=lambda pair: pair[1]["reward"])[0]
        for loss, means in scores.items()
    }
    table = {
        "what": f"{len(FACTORS)} multiples of its packaged clip range, chosen by mean training reward",
        "seeds": args.tuning_seeds,
        "steps": args.tuning_steps,
        "factors": FACTORS,
        "scores": scores,
        "chosen": chosen,
    }
    return {arm.name: 1.0 for arm in args.arms} | chosen, table


def describe(args: argparse.Namespace, factors: dict[str, float], tuning: dict | None, final: Sequence) -> dict:
    """How the comparison was run, for its report."""
    import cells

    from fspo_verl.versions import installed

    by_arm: dict[str, list[float]] = {}
    for cell in final:
        by_arm.setdefault(cell.arm.name, []).append(json.loads((cell.folder / "cell.json").read_text())["seconds"])
    seconds = [second for of_arm in by_arm.values() for second in of_arm]
    ranges = (f"{arm.name} {' '.join(cells.overrides_of(arm, factors[arm.name]))}" for arm in args.arms)
    packages = ("verl", "torch", "transformers", "ray")
    return {
        "command": f"bash scripts/compare_baselines.sh {shlex.join(sys.argv[1:])}".strip(),
        "clip ranges": "; ".join(text.replace(arms.ACTOR + ".", "") for text in ranges),
        "rollouts": f"{rollout(args)}, in {args.epochs * (args.prompts // args.mini_batch)} optimiser steps with "
        f"learning rate {args.learning_rate:g}",
        "versions": ", ".join(f"{name} {installed(name)}" for name in packages)
        + f", Python {platform.python_version()}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores; {args.jobs} cells at a time, one thread each",
        "wall time of a cell": f"{sum(seconds) / len(seconds):.0f} s ({min(seconds):.0f} to {max(seconds):.0f} s), "
        f"{len(seconds)} cells",
        "seconds": {name: sum(of_arm) / len(of_arm) for name, of_arm in by_arm.items()},
        **({"solvable problems": args.solvable} if args.solvable else {}),
        **({"tuning": tuning} if tuning else {}),
    }


def rollout(args: argparse.Namespace) -> str:
    """What a step samples, in words."""
    return f"{args.prompts} prompts x {args.responses} responses at temperature {args.temperature:g}"


if __name__ == "__main__":
    main()
