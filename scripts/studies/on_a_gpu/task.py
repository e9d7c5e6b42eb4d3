# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Two kinds of prompts of the law's study as a task of verl: chat answers of a wanted length, and sums in steps.

    python scripts/studies/on_a_gpu/task.py FOLDER     # writes train.parquet and test.parquet

Responses have from a few to some thousand tokens. This file is also verl's reward function.
"""

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "law"))
from prompts import KINDS, draw  # noqa: E402

SIZES = {"train": 512, "test": 16}  # prompts of a kind


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """verl's reward function: that of the kind of prompt, 0 to 1."""
    return KINDS[data_source].reward(solution_str, ground_truth)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [prompt for kind in ("chat", "steps") for prompt in draw(kind, sum(SIZES.values()), seed=0)]
    rows = pd.DataFrame(
        {
            "data_source": [prompt.kind for prompt in prompts],
            "prompt": [[{"role": "user", "content": prompt.text}] for prompt in prompts],
            "reward_model": [{"style": "rule", "ground_truth": prompt.target} for prompt in prompts],
            "extra_info": [{"index": index} for index in range(len(prompts))],
        }
    )
    by_kind = rows.groupby("data_source")
    by_kind.head(SIZES["train"]).to_parquet(folder / "train.parquet")
    by_kind.tail(SIZES["test"]).to_parquet(folder / "test.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
