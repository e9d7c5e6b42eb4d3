# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Compare policy losses on stock verl: paired seeds, one clip-range budget for all, a table with intervals.

For every seed a small Qwen3 model is warm-started on the quickstart's running totals. From it each loss is trained
with verl's own trainer, on the same prompts in the same order. First every loss tries the same multiples of its
packaged clip range on the tuning seeds; the one with the highest mean training reward is used on the other seeds.

A finished training run is never run again; one that was interrupted is started afresh, as only then the result is that
of an uninterrupted one. Results: OUTPUT/comparison.md, .json and .png, and a folder per run in OUTPUT/runs;
OUTPUT/setup.json says how they were made.
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
sys.path[:0] = [str(HERE), str(HERE.parent / "training")]
from arms import ACTOR, BOUNDS, Arm, own_arm, packaged_arms  # noqa: E402
from options import LOSSES, Failure, hydra_override, positive  # noqa: E402

ON = "a warm-started Qwen3 model of 100,000 weights and the quickstart's running totals"
SEEDS, STEPS = [10, 11, 12, 13, 14, 15], 12
FACTORS, TUNING_STEPS = (1 / 3, 1.0, 3.0, 10.0), 8
CHECKED_LOSSES, CHECKED_STEPS = ("fspo", "no_clip", "gspo", "grpo"), 3
NARROW = {"eps": "null", "eps_low": "0.0075", "eps_high": "0.01", "eps_dual": "0.015"}
"""FSPO's range where it is checked: responses pass each of its edges, and no two edges are at one distance."""
CHECKED = {"fspo": Arm("fspo", "fspo", tuple(f"{ACTOR}.policy_loss.{key}={value}" for key, value in NARROW.items()))}
NOT_VALIDATED = ("trainer.test_freq=-1", "trainer.val_before_train=False")
KEYS = {
    "epochs": f"{ACTOR}.ppo_epochs",
    "temperature": "actor_rollout_ref.rollout.temperature",
    "learning_rate": f"{ACTOR}.optim.lr",
}
"""Keys of verl that options set in every run."""
OF_A_RUN = ("algorithm.policy_loss", "data.seed", "actor_rollout_ref.rollout.seed", "trainer.total_training_steps")
"""Keys that differ between runs, or end them."""

EXAMPLES = r"""examples:
  bash scripts/compare_baselines.sh                                    everything, a hundred minutes on two cores
  bash scripts/compare_baselines.sh --losses fspo,gspo --arm fspo_mean=fspo,loss_agg_mode=seq-mean-token-mean \
      --output runs/compare-mean                                       fspo with gspo's aggregation, too
  bash scripts/compare_baselines.sh --check --output runs/check       three steps of each, and whether each trains what
                                                                       it is called: a few minutes, for CI
  python scripts/compare/check.py --help                               how to check a launch of your own
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
    add("--losses", type=packaged_arms, help=f"default: those of --factors, or {','.join(LOSSES)}")
    own = "a loss with settings of its own (keys of actor_rollout_ref.actor), besides --losses; may be repeated"
    add("--arm", type=own_arm, action="append", default=[], metavar="NAME=LOSS,KEY=VALUE,...", help=own)
    add("--seeds", type=integers, help="default: 10,11,12,13,14,15; one of them with --check")
    add("--steps", type=positive, help=f"training steps of a run (default: {STEPS}; {CHECKED_STEPS} with --check)")
    add("--temperature", type=float, default=1.5, help="of sampling (default: %(default)s)")
    add("--learning-rate", type=float, default=5e-4, help="default: %(default)s")
    add("--epochs", type=positive, default=1, help="passes over a rollout (default: %(default)s)")
    add("--factors", type=_factors, help="clip range per loss as a multiple of its own, instead of tuning")
    add("--tuning-seeds", type=integers, default=[100, 101], help="default: 100,101")
    whole = "check that each loss trains what it is called, to the last response; nothing is tuned or validated"
    add("--check", action="store_true", help=whole)
    add("--jobs", type=positive, default=2, help="runs at a time, each with one thread (default: %(default)s)")
    add("--output", type=Path, default=Path("runs/compare"), help="folder for results (default: %(default)s)")
    add("--venv", help="virtual environment (default: .venv)")
    add("--parse-only", action="store_true", help=argparse.SUPPRESS)
    more = "more Hydra overrides for verl, for every run"
    add("overrides", nargs="*", type=hydra_override, metavar="-- override", help=more)
    args = parser.parse_args(argv)
    args.seeds = args.seeds or (SEEDS[:1] if args.check else SEEDS)
    args.steps = args.steps or (CHECKED_STEPS if args.check else STEPS)
    if args.check:
        if args.arm or args.factors:
            parser.error("--check has arms and ranges of its own; --losses leaves some out")
        args.losses = [CHECKED.get(arm.name, arm) for arm in args.losses or packaged_arms(",".join(CHECKED_LOSSES))]
        args.factors = {arm.name: 1.0 for arm in args.losses}
        args.overrides = [*NOT_VALIDATED, *args.overrides]
    if not args.factors and (both := set(args.seeds) & set(args.tuning_seeds)):
        parser.error(f"seeds that are tuned on are not compared: {', '.join(map(str, sorted(both)))}")
    _refuse_contradictions(args, parser)
    packaged = [Arm(loss, loss) for loss in LOSSES if loss in (args.factors or LOSSES)]
    args.arms = (args.losses or packaged) + args.arm
    names = [arm.name for arm in args.arms]
    if len(set(names)) < len(names):
        parser.error(f"each may be compared once: {', '.join(names)}")
    if args.factors and (other := args.factors.keys() ^ set(names)):
        parser.error(f"--factors has to name what is compared, {', '.join(names)}; not so: {', '.join(sorted(other))}")
    return args


def _refuse_contradictions(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse an override that an option sets: one would win without a word, and results would name the option's."""

    def is_set(changes: Sequence[str], key: str) -> bool:  # the key itself, or a group that holds it
        return any(f"{key}.".startswith(f"{change.partition('=')[0].lstrip('+~')}.") for change in changes)

    for name, key in KEYS.items():
        if is_set([*args.overrides, *itertools.chain.from_iterable(arm.changes for arm in args.arm)], key):
            parser.error(f"{key} is what --{name.replace('_', '-')} sets")
    for key in (*BOUNDS, *OF_A_RUN):
        if is_set(args.overrides, key):
            parser.error(f"{key} is set for each run: see --losses, --seeds, --steps, or give it to an --arm")


def integers(text: str) -> list[int]:
    """Parse seeds, for example 10,11."""
    found = [int(number) for number in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text} names a number twice")
    return found


def _factors(text: str) -> dict[str, float]:
    return {loss: float(factor) for loss, _, factor in (pair.partition("=") for pair in text.split(","))}


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
        print("interrupted; the same command goes on with the runs that are not finished", file=sys.stderr)
        sys.exit(128 + signalled.args[0])


def run(args: argparse.Namespace) -> int:
    """Run what is missing, write the comparison; returns the exit code, which is 1 where a check fails."""
    import compare

    factors, scores = args.factors, None
    final = [training_run(args, arm, seed, 1.0) for seed in args.seeds for arm in args.arms]
    if args.check:
        run_all(args, final)
        return _check(args)
    refuse_others(final)  # before hours are spent on tuning
    if not factors:
        tuned = [arm for arm in args.arms if arm.tuned]
        of_tuning = itertools.product(tuned, args.tuning_seeds, FACTORS)
        run_all(args, [training_run(args, *of, tuning=True) for of in of_tuning])
        factors, scores = choose_factors(args)
    final = [training_run(args, arm, seed, factors[arm.name]) for seed in args.seeds for arm in args.arms]
    run_all(args, final)
    setup = describe(final) | {"clip range of each, as a multiple of its own": factors, "tuning": scores}
    (args.output / "setup.json").write_text(json.dumps(setup, indent=1))
    options = [args.output / "runs", "--output", args.output, "--baseline", args.arms[0].name, "--on", ON]
    return compare.main([*map(str, options)])


def _check(args: argparse.Namespace) -> int:
    import check
    from method import Method

    low, high, dual = (float(NARROW[side]) for side in ("eps_low", "eps_high", "eps_dual"))
    asked, all_kept = check.PACKAGED | {"fspo": Method(low, high, dual)}, True
    for seed in args.seeds:
        folders = {arm.name: training_run(args, arm, seed, 1.0).folder for arm in args.arms}
        text, kept = check.report(check.judge(folders, asked), complete=True)
        print(f"seed {seed}: {text}", flush=True)
        all_kept &= kept
    return 0 if all_kept else 1


def training_run(args: argparse.Namespace, arm: Arm, seed: int, factor: float, tuning: bool = False):
    """The run of an arm and a seed with so many times its clip range; if it is for tuning, in a folder per factor."""
    from training_run import TrainingRun

    parent = args.output / (f"tuning-x{factor:.3g}" if tuning else "runs")
    steps = TUNING_STEPS if tuning else args.steps
    overrides = (*(f"{key}={getattr(args, name)}" for name, key in KEYS.items()), *args.overrides)
    name = f"{arm.name}-seed{seed}"
    return TrainingRun(args.output, parent / name, arm, seed, factor, steps, overrides, args.check)


def refuse_others(runs: Sequence) -> None:
    """Results are of all runs in a folder: refuse one with others than these.

    Raises:
        Failure: names them.
    """
    for parent in {run.folder.parent for run in runs}:
        wanted = {run.folder.name for run in runs if run.folder.parent == parent}
        found = {path.name for path in parent.iterdir() if path.is_dir()} if parent.exists() else set()
        if others := sorted(found - wanted):
            raise Failure(f"{parent} holds other runs, {', '.join(others)}: name them, too, or choose another --output")


def run_all(args: argparse.Namespace, runs: Sequence) -> None:
    """Make the warm starts that these runs need, and train what has not finished; says how long the rest will take.

    Raises:
        Failure: a run failed twice, or a finished one has other settings.
    """
    missing = [run for run in runs if not _finished(run)]
    if len(missing) < len(runs):
        print(f"{len(runs) - len(missing)} runs finished before", flush=True)
    starts = {run.seed: run for run in missing if not (run.output / f"warm-start-seed{run.seed}/model").exists()}
    _run_phase(args, "warm start", list(starts.values()))
    _run_phase(args, "train", missing)


def _finished(run) -> bool:
    if not run.folder.exists():
        return False
    found = json.loads((run.folder / "run.json").read_text())["settings"]
    if found != run.settings:
        raise Failure(f"{run.folder} holds a run with {found}, not {run.settings}; choose another --output")
    return True


def _run_phase(args: argparse.Namespace, phase: str, runs: Sequence) -> None:
    """Each run in a process of its own, several at a time. One that fails is run once more: on a busy machine Ray does
    not always start in time."""
    import report

    waiting, running, failed, ended, begin = list(runs), {}, set(), 0, time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < args.jobs:
                run = waiting.pop(0)
                running[_start(phase, run)] = run
            time.sleep(0.5)
            for process in [process for process in running if process.poll() is not None]:
                run = running.pop(process)
                what = f"[{phase}] {run.arm.name} x {run.factor:.3g}, seed {run.seed}"
                if process.returncode:
                    log = _log(phase, run)
                    if run.folder in failed:
                        raise Failure(f"{phase} of {run.folder}:\n{log.read_text()[-3000:]}")
                    failed.add(run.folder)
                    waiting.append(run)
                    print(f"{what} failed, is run once more; {log.replace(log.with_suffix('.failed.log'))}", flush=True)
                    continue
                ended += 1
                left = (time.monotonic() - begin) * (len(runs) - ended) / ended / 60
                if phase == "train":
                    reached = report.summarize(run.folder)
                    what += f": accuracy {reached['accuracy_before']:.2f} -> {reached['accuracy_after']:.2f}"
                print(f"{what}, {ended} of {len(runs)}, about {left:.0f} min left", flush=True)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _log(phase: str, run) -> Path:
    return run.output / "logs" / f"{phase.replace(' ', '-')}-{run.folder.parent.name}-{run.folder.name}.log"


def _start(phase: str, run) -> subprocess.Popen:
    log = _log(phase, run)
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, HERE / "training_run.py", json.dumps({"phase": phase, "run": run.to_json()})]
    # One thread per run: on matrices this small a second one brings little, and another run much. The limit holds where
    # a library asks for more.
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
    with log.open("w") as file:
        # A session of its own: Ctrl-C in a terminal is for this process, which then ends the runs in turn.
        return subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)


def choose_factors(args: argparse.Namespace) -> tuple[dict[str, float], dict[str, list[dict]]]:
    """The multiple per loss with the highest mean training reward over the tuning seeds, and what each reached."""
    from measures import measure
    from trials import read_trials

    scores = {arm.name: [] for arm in args.arms if arm.tuned}
    for factor in FACTORS:
        values = measure(read_trials(args.output / f"tuning-x{factor:.3g}"))
        values = values[values.seed.isin(args.tuning_seeds) & values.loss.isin(scores)]
        for loss, means in values.groupby("loss")[["reward", "clip_rate", "accuracy"]].mean().iterrows():
            scores[loss].append({"factor": factor, **means.round(4)})
    chosen = {loss: max(tried, key=lambda score: score["reward"])["factor"] for loss, tried in scores.items()}
    return {arm.name: 1.0 for arm in args.arms} | chosen, scores


def describe(runs: Sequence) -> dict[str, str]:
    """How a comparison was run."""
    from fspo_verl.versions import installed

    versions = [f"{name} {installed(name)}" for name in ("verl", "torch", "transformers", "ray")]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "all runs": " ".join(runs[0].overrides),
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
    }


def main() -> None:
    args = parse_args()
    if not args.parse_only:
        guarded(args, run)


if __name__ == "__main__":
    main()
