# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of the fspo policy loss beside verl's own gspo and vanilla, forward and backward.

    python scripts/benchmark_loss.py                  # CPU, or CUDA where there is one
    python scripts/benchmark_loss.py --sizes 8x512 512x2048 --rounds 5

On a CPU set MALLOC_MMAP_THRESHOLD_=1048576, so that freed memory goes back to the system and peaks can be seen.

Every round runs each loss once, in turn, so that a slow moment of the machine meets all of them. Reported per loss:
median time with its interquartile range; peak extra memory over the inputs, including the gradient that every loss must
write; and the ratio to a floor. The floor is the time in which this machine, in the same round, copies as many bytes as
a fused loss must move: log_prob, old_log_prob, advantages and mask read once forward, advantages and mask read once
backward, and the gradient written.
"""

import argparse
import gc
import platform
import sys
import threading
import time

import pandas as pd
import psutil
import torch
import verl
from tqdm import tqdm
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from fspo_verl.config import FSPOPolicyLossConfig

SIZES = ["8x512", "64x1024", "256x2048", "128x8192", "512x8192", "64x32768"]
AGG_MODE = {"fspo": "seq-mean-token-sum-norm", "gspo": "seq-mean-token-mean", "vanilla": "token-mean"}


def make_batch(rows: int, width: int, device: str, seed: int = 0) -> dict:
    """Inputs as verl's ``ppo_loss`` hands them to a loss: float32, bool mask, constant advantages, mixed lengths."""
    generator = torch.Generator(device).manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator, device=device)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator, device=device)
    return {
        "old_log_prob": old,
        "log_prob": (old + 0.02 * torch.randn(rows, width, generator=generator, device=device)).requires_grad_(),
        "advantages": torch.randn(rows, 1, generator=generator, device=device).expand(rows, width).contiguous(),
        "response_mask": torch.arange(width, device=device) < lengths,
    }


def actor_config(loss_mode: str, tokens: int, rows: int, width: int) -> FSDPActorConfig:
    policy_loss = FSPOPolicyLossConfig() if loss_mode == "fspo" else PolicyLossConfig(loss_mode=loss_mode)
    config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss)
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=tokens,
        global_batch_size=rows,
        loss_scale_factor=width if loss_mode == "fspo" else None,
    )
    return config


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(function, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


class PeakMemory:
    """Bytes above the start at the highest point of the block; on a CPU the resident set, sampled every 0.2 ms."""

    def __init__(self, device: str):
        self.device, self.process = device, psutil.Process()

    def __enter__(self):
        gc.collect()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
            return self
        self.start = self.peak = self.process.memory_info().rss
        self.running = True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        while self.running:
            self.peak = max(self.peak, self.process.memory_info().rss)
            time.sleep(0.0002)

    def __exit__(self, *_):
        if self.device == "cuda":
            self.bytes = torch.cuda.max_memory_allocated() - self.start
            return
        self.running = False
        self.thread.join()
        self.bytes = self.peak - self.start


def measure(rows: int, width: int, losses: list[str], rounds: int, device: str, progress: tqdm) -> list[dict]:
    batch = make_batch(rows, width, device)
    tokens = int(batch["response_mask"].sum())
    configs = {name: actor_config(name, tokens, rows, width) for name in losses}
    # What a fused loss must move: three float32 and one bool read forward, one float32 and one bool read backward and
    # one float32 written. A copy of n bytes moves 2n.
    must_move = rows * width * ((3 * 4 + 1) + (4 + 1) + 4)
    source = torch.ones(must_move // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def step(name):
        loss, _ = get_policy_loss_fn(name)(**batch, loss_agg_mode=AGG_MODE[name], config=configs[name])
        loss.backward()
        batch["log_prob"].grad = None

    times = {name: [] for name in [*losses, "floor"]}
    memory = {}
    for name in losses:  # warms up, too
        step(name)
        with PeakMemory(device) as peak:
            step(name)
        memory[name] = peak.bytes
    target.copy_(source)
    for _ in range(rounds):
        times["floor"].append(seconds(lambda: target.copy_(source), device))
        for name in losses:
            times[name].append(seconds(lambda name=name: step(name), device))
            progress.update()

    times = {name: pd.Series(values) for name, values in times.items()}
    return [
        {
            "rows x length": f"{rows} x {width}",
            "Mtokens": rows * width / 1e6,
            "loss": name,
            "ms": times[name].median() * 1e3,
            "ms q25-q75": "-".join(f"{times[name].quantile(q) * 1e3:.3g}" for q in (0.25, 0.75)),
            "time / fspo": times[name].median() / times[losses[0]].median(),
            "time / floor": times[name].median() / times["floor"].median(),
            "extra MB": memory[name] / 1e6,
            "memory / fspo": memory[name] / memory[losses[0]] if memory[losses[0]] else float("nan"),
        }
        for name in losses
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="ROWSxLENGTH")
    parser.add_argument(
        "--losses", nargs="+", default=["fspo", "gspo", "vanilla"], help="the first is the unit of ratios"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    print(
        f"verl {verl.__version__}, torch {torch.__version__}, {args.rounds} rounds, "
        + (
            torch.cuda.get_device_name()
            if args.device == "cuda"
            else f"{platform.machine()}, {torch.get_num_threads()} threads"
        )
    )
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    with tqdm(total=len(sizes) * args.rounds * len(args.losses), file=sys.stderr) as progress:
        results = [row for size in sizes for row in measure(*size, args.losses, args.rounds, args.device, progress)]
    print(pd.DataFrame(results).to_string(index=False, float_format=lambda x: f"{x:.3g}"))


if __name__ == "__main__":
    main()
