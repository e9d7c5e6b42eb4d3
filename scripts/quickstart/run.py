# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Watch FSPO train: a small Qwen3 model learns arithmetic through stock verl, on a machine without a GPU.

The task is a running total: the prompt `c+7d-8e+4?` asks for `c+7=07d-8=99e+4=03`, whose last two digits are the
answer. Responses have 5 to 81 tokens, so one batch holds short and long ones. The model is first taught by a
demonstrator that mostly forgets to borrow, and starts at an accuracy of about 0.3. Then verl's own trainer (Ray, FSDP
workers, rollouts, four optimiser steps per batch of 32 prompts x 8 responses) trains it on right and wrong answers.

A second run skips what is done; a run that was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations  # so that a Python too old to train with can still say what is wrong with a call

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import options  # noqa: E402

EXAMPLES = """examples:
  bash scripts/quickstart.sh                          a few minutes on two cores, installation included
  bash scripts/quickstart.sh --loss gspo --seed 1     a baseline, from the warm start that fspo's seed 1 has
  bash scripts/quickstart.sh --rollout vllm           rollouts from vLLM on the CPU
  bash scripts/quickstart.sh --name wide -- actor_rollout_ref.actor.policy_loss.eps=0.04
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    return options.parser("quickstart.sh", __doc__, EXAMPLES, Path("runs/quickstart"), steps=30).parse_args(argv)


def main() -> None:
    args = parse_args()
    if args.parse_only:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as long as there is nothing to stop
    from ledger_experiment import LedgerExperiment, launch  # not at the top: --help must work before an installation

    experiment = LedgerExperiment(
        args.output.resolve(), args.loss, args.rollout, args.seed, args.steps, tuple(args.overrides), name=args.name
    )
    launch.main(experiment, "quickstart", {"installation": args.install_seconds})


if __name__ == "__main__":
    main()
