# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Time of a whole call of verl's ``ppo_loss`` with fspo, metrics included, as a multiple of its call with gspo.

    python scripts/bench/ppo_loss.py
    python scripts/bench/ppo_loss.py --sizes 8x256 8x1024 --rounds 400

A call is what verl's engines do with a micro-batch: its tensors are padded, the loss and its gradient are taken, and
its metrics are made. The worker has sent its weights to the rollout engines, as before every update. With `rollout`,
the batch has the rollout engine's log-probs, whose mismatch fspo measures. Every round calls each once, in turn, in one
thread; the time is that of the processor, and the table has medians.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from verl.utils import tensordict_utils as tu
from verl.workers import engine_workers
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.observe import microbatch
from fspo_verl.output import markdown_table

CALLS = ("gspo", "fspo", "fspo, rollout")
PROMPT = 32


def micro_batch(rows: int, width: int, rollout: bool):
    """The model's output, and a micro-batch of verl's trainers, for responses of up to ``width`` tokens."""
    generator = torch.Generator().manual_seed(0)

    def nest(tensors):
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)

    lengths = torch.randint(width // 2, width + 1, (rows,), generator=generator).tolist()
    old = [-torch.rand(length, generator=generator) for length in lengths]
    new = [x + 0.02 * torch.randn(len(x), generator=generator) for x in old]
    masks = [torch.ones(length, dtype=torch.long) for length in lengths]
    advantages = torch.randn(rows, generator=generator)
    output = nest(torch.cat([torch.zeros(PROMPT - 1), x, torch.zeros(1)]) for x in new).requires_grad_()
    tensors = {
        "prompts": nest(torch.zeros(PROMPT, dtype=torch.long) for _ in lengths),
        "responses": nest(masks),
        "response_mask": nest(masks),
        "old_log_probs": nest(old),
        "advantages": nest(advantages[i].expand(length).clone() for i, length in enumerate(lengths)),
    }
    if rollout:
        tensors["loss_mask"] = nest(masks)
        tensors["rollout_log_probs"] = nest(x + 0.01 * torch.randn(len(x), generator=generator) for x in old)
    totals = {"dp_size": 1, "batch_num_tokens": sum(lengths), "global_batch_size": rows}
    data = tu.get_tensordict(tensors, totals)
    tu.assign_non_tensor_stack(data, "global_steps", [1] * rows)
    tu.assign_non_tensor_stack(data, "uid", [str(row // 4) for row in range(rows)])
    return output, data


def call(name: str, rows: int, width: int) -> Callable[[], None]:
    """Forward and backward of one micro-batch; fspo as a worker calls it, gspo as it is called without this package."""
    output, data = micro_batch(rows, width, rollout="rollout" in name)
    loss = FSPOPolicyLossConfig() if name.startswith("fspo") else PolicyLossConfig(loss_mode=name)
    aggregation = "seq-mean-token-sum-norm" if name.startswith("fspo") else "seq-mean-token-mean"
    config = FSDPActorConfig(
        rollout_n=4, ppo_micro_batch_size_per_gpu=rows, policy_loss=loss, loss_agg_mode=aggregation
    )
    function = engine_workers.ppo_loss if name.startswith("fspo") else ppo_loss

    def forward_and_backward() -> None:
        output.grad = None
        function(config, {"log_probs": output}, data)[0].backward()

    return forward_and_backward


def medians(rows: int, width: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the processor."""
    calls = {name: call(name, rows, width) for name in CALLS}
    taken: dict[str, list[float]] = {name: [] for name in CALLS}
    for _ in range(rounds + 20):
        for name, function in calls.items():
            start = time.process_time()
            function()
            taken[name].append(1000 * (time.process_time() - start))
    return {name: float(np.median(times[20:])) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["8x256", "8x1024"], help="rows x tokens; %(default)s by default")
    parser.add_argument("--rounds", type=int, default=300, help="%(default)s by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    microbatch.synced(0)
    lines = []
    for size in args.sizes:
        rows, width = map(int, size.split("x"))
        taken = medians(rows, width, args.rounds)
        ratios = [f"{taken[name]:.2f} ms, x {taken[name] / taken['gspo']:.2f}" for name in CALLS[1:]]
        lines.append([f"{rows} x {width}", f"{taken['gspo']:.2f} ms", *ratios])
    print(markdown_table(["rows x tokens", *CALLS], lines))


if __name__ == "__main__":
    main()
