# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Watch FSPO train: a small Qwen3 model learns arithmetic through stock verl, on a machine without a GPU.

The task is a running total: the prompt `c+7d-8e+4?` asks for `c+7=07d-8=99e+4=03`, whose last two digits are the
answer. Responses have 5 to 81 tokens, so one batch holds short and long ones. The model is first taught by a
demonstrator that mostly forgets to borrow, and starts at an accuracy of about 0.3. Then verl's own trainer (Ray, FSDP
workers, rollouts, four optimiser steps per batch of 32 prompts x 8 responses) trains it on right and wrong answers.

A second run skips what is done; a run that was interrupted goes on from its last checkpoint.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

EXAMPLES = """examples:
  bash scripts/quickstart.sh                          a few minutes on two cores, installation included
  bash scripts/quickstart.sh --loss gspo --seed 1     a baseline, from the warm start that fspo's seed 1 has
  bash scripts/quickstart.sh --rollout vllm           rollouts from vLLM on the CPU
  bash scripts/quickstart.sh --output runs/wide -- actor_rollout_ref.actor.policy_loss.eps_high=0.04
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash scripts/quickstart.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("--loss", choices=("fspo", "gspo", "grpo", "rloo"), default="fspo", help="policy loss (default: %(default)s)")
    add("--seed", type=int, default=0, help="of warm start, data and sampling (default: %(default)s)")
    add("--steps", type=int, default=30, help="training steps (default: %(default)s)")
    add("--rollout", choices=("hf", "vllm"), default="hf", help="rollout engine (default: %(default)s)")
    add("--output", type=Path, default=Path("runs/quickstart"), help="folder for results (default: %(default)s)")
    add("--venv", help="virtual environment (default: .venv, or .venv-vllm for vllm)")
    add("--install-seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    add("overrides", nargs="*", metavar="-- override", help="more Hydra overrides for verl")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: an exception, so the trainer is stopped
    import launch  # not at the top: --help must work before anything is installed

    experiment = launch.Experiment(
        args.output.resolve(), args.loss, args.rollout, args.seed, args.steps, tuple(args.overrides)
    )
    seconds = {"installation": args.install_seconds}
    try:
        claim(experiment)
        begin = time.monotonic()
        print(f"[warm start] {experiment.start / 'model'}", flush=True)
        launch.warm_start(experiment)
        seconds["warm start"] = time.monotonic() - begin

        summary_file = experiment.run / "summary.json"
        if summary_file.exists():
            print(f"[train] finished before: {experiment.run}")
        else:
            train(experiment, seconds, summary_file)
        print_summary(json.loads(summary_file.read_text()), experiment.run)
    except launch.Failure as failure:
        sys.exit(f"quickstart failed: {failure}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from the last checkpoint")


def claim(experiment) -> None:
    """Refuse a folder that holds a run with other settings: its results are not this experiment's."""
    import launch

    settings = {"steps": experiment.steps, "overrides": list(experiment.overrides)}
    file = experiment.run / "settings.json"
    if file.exists() and (found := json.loads(file.read_text())) != settings:
        raise launch.Failure(
            f"{experiment.run} holds a run with {found}, not {settings}; remove it, or choose another --output"
        )
    experiment.run.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))


def train(experiment, seconds: dict[str, float], summary_file: Path) -> None:
    """Train, draw the picture and write the summary."""
    import launch
    import report

    print(f"[train] {experiment.loss}, {experiment.steps} steps (verl needs a minute to start)", flush=True)
    begin = time.monotonic()
    peak_bytes = launch.train(experiment)
    seconds["training"] = time.monotonic() - begin
    report.draw(experiment.run, f"{experiment.loss}, seed {experiment.seed}")
    summary = report.summarize(experiment.run) | {"seconds": seconds, "peak_memory_gb": peak_bytes / 1e9}
    summary_file.write_text(json.dumps(summary, indent=1))


def print_summary(summary: dict, run: Path) -> None:
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["seconds"].items())
    print(
        f"\nvalidation accuracy  {summary['accuracy_before']:.2f} before, {summary['accuracy_after']:.2f} after\n"
        f"clip fraction        {summary['clip_fraction_median']:.1%} (median over the steps)\n"
        f"response lengths     {summary['shortest']:.0f} to {summary['longest']:.0f} tokens\n"
        f"time                 {times} ({summary['seconds_per_step']:.1f} s per step)\n"
        f"peak memory          {summary['peak_memory_gb']:.1f} GB, all processes\n"
        f"picture              {run / 'progress.png'}\n"
        f"metrics and log      {run / 'metrics-*.jsonl'}, {run / 'train.log'}\n"
        f"trained model        {next(run.glob('checkpoints/global_step_*/actor/huggingface'), 'none')}"
    )


if __name__ == "__main__":
    main()
