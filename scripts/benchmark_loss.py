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
import platform

import pandas as pd
import torch
import verl

from fspo_verl.gpu.cost import measure, verl_call

SIZES = ["8x512", "64x1024", "256x2048", "128x8192", "512x8192", "64x32768"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="ROWSxLENGTH")
    parser.add_argument(
        "--losses", nargs="+", default=["fspo", "gspo", "vanilla"], help="the first is the unit of ratios"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    machine = torch.cuda.get_device_name() if args.device == "cuda" else cpu
    print(f"verl {verl.__version__}, torch {torch.__version__}, {args.rounds} rounds, {machine}")
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    results = []
    for rows, width in sizes:
        calls = {name: verl_call(name, rows, width) for name in args.losses}
        results += measure(rows, width, calls, args.rounds, args.device, "time")
    print(pd.DataFrame(results).to_string(index=False, float_format=lambda x: f"{x:.3g}"))


if __name__ == "__main__":
    main()
