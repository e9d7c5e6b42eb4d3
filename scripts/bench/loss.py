# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of the fspo policy loss beside verl's own gspo and vanilla, forward and backward.

    python scripts/bench/loss.py                  # CPU, or CUDA where there is one
    python scripts/bench/loss.py --sizes 8x512 512x2048 --rounds 5 --losses fspo gspo
    python scripts/bench/loss.py --losses fspo gspo observed copy

`observed` is gspo with this package's metrics, and `copy` a copy of what a loss reads.

On a CPU set MALLOC_MMAP_THRESHOLD_=1048576, so that freed memory goes back to the system and peaks can be seen.

Every round runs each loss once, in turn, so that a slow moment of the machine meets all of them. Reported per loss:
median time with its interquartile range, peak extra memory over the inputs, including the gradient that every loss
must write, and how many operations of torch a call and its backward pass are. On CUDA also how many kernels they
launch, and how long the GPU is busy with them: in the rest of the time it waits for the host.
"""

import argparse
import gc
import platform
import threading
from collections.abc import Callable
from functools import partial

import pandas as pd
import psutil
import torch
import verl
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer
from tqdm import trange
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig

SIZES = ["8x512", "64x1024", "256x2048", "128x8192", "512x8192", "64x32768"]
LOSSES, ROUNDS = ["fspo", "gspo", "vanilla"], 15
# Of fspo: that of :func:`call`.
AGG_MODE = {"gspo": "seq-mean-token-mean", "observed": "seq-mean-token-mean", "vanilla": "token-mean"}


def make_batch(rows: int, width: int, device: str) -> dict[str, Tensor]:
    """Inputs as verl's ``ppo_loss`` hands them to a loss: float32, bool mask, constant advantages, mixed lengths."""
    generator = torch.Generator(device).manual_seed(0)
    old = -torch.rand(rows, width, generator=generator, device=device)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator, device=device)
    noise = torch.randn(rows, width, generator=generator, device=device)
    return {
        "old_log_prob": old,
        "log_prob": (old + 0.02 * noise).requires_grad_(),
        "advantages": torch.randn(rows, 1, generator=generator, device=device).expand(rows, width).contiguous(),
        "response_mask": torch.arange(width, device=device) < lengths,
    }


def call(name: str, batch: dict[str, Tensor]) -> Callable[[], None]:
    """Forward and backward of a loss that verl has registered, under its contract."""
    if name == "copy":
        return lambda: [tensor.clone() for tensor in batch.values()]
    rows, width = batch["log_prob"].shape
    schemas = {"fspo": FSPOPolicyLossConfig, "observed": partial(ObservedPolicyLossConfig, loss_mode="gspo")}
    policy_loss = schemas.get(name, partial(PolicyLossConfig, loss_mode=name))()
    config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss)
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=rows * width // 2,
        global_batch_size=rows,
        loss_scale_factor=width if name == "fspo" else None,
    )
    function = get_policy_loss_fn(name)

    def forward_and_backward() -> None:
        batch["log_prob"].grad = None
        loss, _ = function(**batch, loss_agg_mode=AGG_MODE.get(name, "seq-mean-token-sum-norm"), config=config)
        loss.backward()

    return forward_and_backward


class Operations(TorchDispatchMode):
    """Counts operations that compute or copy; a view or an empty tensor is none."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += not (operation.is_view or "empty" in str(operation))
        return operation(*args, **(kwargs or {}))


def on_gpu(function: Callable[[], None]) -> dict[str, float]:
    """Kernels that a call launches on CUDA, and milliseconds that the GPU is busy with it."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        function()
        torch.cuda.synchronize()
    events = profiled.key_averages()
    kernels = sum(event.count for event in events if "LaunchKernel" in event.key)
    busy = sum(event.self_device_time_total for event in events if event.device_type == DeviceType.CUDA)
    return {"launches": kernels, "GPU ms": busy / 1e3}


def extra_memory(function: Callable[[], None], device: str) -> int:
    """Bytes above the start at the highest point of a call; on a CPU the resident set, sampled every 0.2 ms."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - start
    process, ended = psutil.Process(), threading.Event()
    resident = [process.memory_info().rss]

    def watch():
        while not ended.wait(0.0002):
            resident.append(process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        function()
    finally:
        ended.set()
        thread.join()
    return max(resident) - resident[0]


def measure(rows: int, width: int, losses: list[str], rounds: int, device: str) -> pd.DataFrame:
    """A row per loss; the first loss is the unit of the ratios."""
    batch = make_batch(rows, width, device)
    calls = {name: call(name, batch) for name in losses}
    memory, operations, gpu = {}, {}, dict.fromkeys(losses, {})
    for name, function in calls.items():
        with Operations() as counted:
            function()  # warms up
        operations[name] = counted.count
        if device == "cuda":
            gpu[name] = on_gpu(function)
        batch["log_prob"].grad = None
        memory[name] = extra_memory(function, device) / 1e6
    timers = {name: Timer("f()", globals={"f": f}, num_threads=torch.get_num_threads()) for name, f in calls.items()}
    bar = trange(rounds, desc=f"{rows} x {width}", leave=False)
    times = pd.DataFrame([{name: timer.timeit(1).median for name, timer in timers.items()} for _ in bar]) * 1e3
    low, median, high = (times.quantile(q) for q in (0.25, 0.5, 0.75))
    return pd.DataFrame(
        {
            "rows x length": f"{rows} x {width}",
            "loss": name,
            "ms": median[name],
            "ms q25-q75": f"{low[name]:.3g}-{high[name]:.3g}",
            f"time / {losses[0]}": median[name] / median[losses[0]],
            "operations": operations[name],
            "extra MB": memory[name],
            f"memory / {losses[0]}": memory[name] / memory[losses[0]] if memory[losses[0]] else float("nan"),
        }
        | gpu[name]
        for name in losses
    )


def table(sizes=("8x512", "128x8192", "64x32768", "512x8192"), rounds: int = ROUNDS) -> pd.DataFrame:
    """The table of scripts/bench/README.md: fspo with the quartiles of its time, verl's losses as multiples of it."""
    rows = {}
    for size in sizes:
        found = measure(*map(int, size.split("x")), LOSSES, rounds, "cpu").set_index("loss")
        fspo, *others = (row for _, row in found.iterrows())
        seen = fspo["extra MB"] >= 1  # less is lost in what a process takes in steps
        own = f"{fspo.ms:.2g} ms [{fspo['ms q25-q75'].replace('-', ', ')}]" + f", {fspo['extra MB']:.0f} MB" * seen
        ratios = {row.name: f"x {row['time / fspo']:.2g}" + f", x {row['memory / fspo']:.2g}" * seen for row in others}
        rows[fspo["rows x length"]] = {"fspo: time [quartiles], memory": own} | ratios
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("rows x length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="ROWSxLENGTH")
    parser.add_argument("--losses", nargs="+", default=LOSSES, help="the first is the unit")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    machine = torch.cuda.get_device_name() if args.device == "cuda" else cpu
    print(f"verl {verl.__version__}, torch {torch.__version__}, {args.rounds} rounds, {machine}")
    sizes = [map(int, size.split("x")) for size in args.sizes]
    found = pd.concat([measure(*size, args.losses, args.rounds, args.device) for size in sizes])
    print(found.to_string(index=False, float_format=lambda x: f"{x:.3g}"))


if __name__ == "__main__":
    main()
