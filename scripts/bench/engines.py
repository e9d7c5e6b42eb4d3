# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Rules that drop responses by the mismatch of trainer and rollout engine, in a quickstart with rollouts by vLLM.

bash scripts/quickstart.sh --rollout vllm --steps 8 --name vllm_bf16 -- \\
    actor_rollout_ref.rollout.dtype=bfloat16 actor_rollout_ref.rollout.calculate_log_probs=True
python scripts/bench/engines.py
"""

from pathlib import Path

import pandas as pd

from fspo_verl.analysis.mismatch import mismatch
from fspo_verl.clips import MATCHED_RATE
from fspo_verl.observe.records import read_records

RUN = Path(__file__).parents[2] / "runs/quickstart/vllm_bf16-vllm-seed0"
SCALED = f"scaled to {MATCHED_RATE:.0%}"
RULES = {
    "width √L, at 10%": ("width √L", SCALED),
    "bound on the sum of the tokens, at 10%": ("verl, sum of tokens", SCALED),
    "bound on the mean of the tokens, at 10%": ("verl, mean of tokens", SCALED),
}


def table() -> pd.DataFrame:
    """The numbers of the run, as texts."""
    records = read_records(RUN / "records", rejected=True)
    found, length = mismatch(records), records.rollout_length
    if found is None:
        raise SystemExit(f"{RUN} has recorded no mismatch: it needs rollout.calculate_log_probs=True")
    texts = {
        "responses": f"{found.responses:,} of {length.min():.0f} to {length.max():.0f} tokens",
        "σ of a token": f"{found.sigma:.2g}",
    }
    for name, rule in RULES.items():
        texts[name] = ", ".join(f"{share:.0%}" for share in found.dropped.loc[rule].drop("all"))
    return pd.DataFrame({"rollouts by vLLM": texts}).rename_axis("shares of the thirds by length")


if __name__ == "__main__":
    print(table().to_string())
