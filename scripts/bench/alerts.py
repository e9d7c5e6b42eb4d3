# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the alerts of a run cost per step, beside the live series, on the metrics of a step as verl logs them.

  python scripts/bench/alerts.py [--rounds 2000]

Each round takes both, in turn, so that the difference is paired. Prints medians and the 95% interval of the alerts.
"""

import argparse
import time

import numpy as np

from fspo_verl import alerts, live
from fspo_verl.observe.metrics import LENGTH_BINS, row_values

_OTHERS = 120  # metrics that verl logs besides


def metrics_of_a_step(rng: np.random.Generator) -> dict[str, float]:
    rows = 512
    length = rng.integers(1, 20_000, rows).astype(float)
    columns = {
        "length": length,
        "log_ratio": 0.02 * np.sqrt(length) * rng.standard_normal(rows),
        "quadratic_variation": 4e-4 * length,
        "advantage": rng.standard_normal(rows),
        "finite": np.ones(rows),
        **{name: rng.random(rows) < 0.1 for name in ("clipped_upper", "clipped_lower", "clipped_dual", "outside")},
        "truncated": rng.random(rows) < 0.1,
    }
    values = row_values(columns, LENGTH_BINS, rows, 1, on_policy=True)
    found = {f"actor/fspo/{name}": float(value.mean()) for name, value in values.items()}
    return found | {f"timing_s/{place}": rng.random() for place in range(_OTHERS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    args = parser.parse_args()
    rng, run = np.random.default_rng(0), alerts.Alerts()
    taken: dict[str, list[float]] = {"live series": [], "alerts": []}
    for _ in range(args.rounds):
        step = metrics_of_a_step(rng)
        for name, act in (("live series", live.series), ("alerts", run.of_step)):
            start = time.perf_counter()
            act(step)
            taken[name].append(1000 * (time.perf_counter() - start))
    for name, values in taken.items():
        low, median, high = np.quantile(values, [0.025, 0.5, 0.975])
        print(f"{name}: {median:.2f} ms per step [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
