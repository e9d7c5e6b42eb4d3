# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Made-up training runs in the files that verl and the records leave, with the traits of real log-ratios.

Most of Q lies in a few tokens and, in short responses, in the last ones (so Var(S) = a + bL), responses differ in σ, S
drifts down by about Q/2 and has heavier tails than a normal law, and the first mini-batch of a step has not moved.
"""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fspo_verl.clips import CLIPS
from fspo_verl.observe.columns import OPTIONAL
from fspo_verl.observe.records import CLIP_COLUMNS, COLUMNS

RANGES = {
    "fspo": {
        "band": {"eps_low": 0.03, "eps_high": 0.03, "eps_dual": 0.03},
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
    },
    "gspo": {"band": None, "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    "vanilla": {"band": None, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
}


def settings(loss: str) -> dict:
    return {"loss": loss, "clip_ratio_c": 3.0, **RANGES[loss]}


def records(
    rng: np.random.Generator,
    loss: str = "fspo",
    steps: int = 30,
    prompts: int = 32,
    group: int = 8,
    mini_batches: int = 4,
    lengths: tuple[int, int] = (5, 80),
    sigma: float = 0.02,
) -> pd.DataFrame:
    """Records of a run with rollouts of ``prompts`` x ``group`` responses, cut into mini-batches."""
    groups = steps * prompts
    rows = groups * group
    low, high = np.log(lengths)
    spread = (high - low) / 5
    center = rng.normal((low + high) / 2, spread, groups)
    log_length = np.repeat(center, group) + rng.normal(0, spread / 2, rows)
    length = np.exp(np.clip(log_length, low, high)).round().astype(np.int32)
    reward = rng.random(rows) < np.repeat(rng.beta(1, 1, groups), group)
    grouped = reward.reshape(groups, group)
    advantage = ((grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()

    mini_batch = np.tile(np.repeat(np.arange(prompts) * mini_batches // prompts, group), steps)
    own = sigma * np.sqrt(mini_batch) * rng.lognormal(0, 0.35, rows)
    last = own**2 * 6 * rng.gamma(2, 0.5, rows)  # the last four tokens
    top = 0.65 * own**2 * length * rng.gamma(np.sqrt(length), 1 / np.sqrt(length))
    variation = last + top + 0.35 * own**2 * length
    noise = rng.standard_t(6, rows) / math.sqrt(1.5)
    table = pd.DataFrame(
        {
            "step": np.repeat(np.arange(1, steps + 1), prompts * group),
            "mini_batch": mini_batch,
            "prompt": np.repeat(np.char.add("prompt-", np.arange(groups).astype(str)), group),
            "prompt_text_hash": np.repeat(np.arange(groups), group),
            "length": length,
            "log_ratio": np.sqrt(variation) * (noise + np.sign(advantage) * 0.1) - 0.9 * variation / 2,
            "quadratic_variation": variation,
            "advantage": advantage,
        }
    )
    numbers = {name: dtype.to_pandas_dtype() for name, dtype in COLUMNS.items() if not pa.types.is_dictionary(dtype)}
    table = table.astype({name: dtype for name, dtype in numbers.items() if name in table})
    for name in CLIP_COLUMNS:
        table[name] = rng.binomial(length, np.clip(own * 0.08 * (advantage != 0), 0, 1)).astype(np.int32)
    clipped = CLIPS["grpo" if loss == "vanilla" else loss].clipped(table)
    table["clipped"] = clipped.astype(np.float32)
    sides = [clipped == 0, advantage > 0, table.log_ratio < 0]
    table["decision"] = np.select(sides, ["kept", "upper", "lower"], "dual")
    return table[[*COLUMNS, *CLIP_COLUMNS]]


def write_records(folder: Path, table: pd.DataFrame, loss: str) -> None:
    """The files that a run with one rank leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = COLUMNS | CLIP_COLUMNS | {name: pa.float32() for name in OPTIONAL if name in table}
    schema = pa.schema(kinds).with_metadata({b"fspo_verl": json.dumps(settings(loss)).encode()})
    for step, rows in table.groupby("step"):
        arrays = [pa.array(rows[name], kind) for name, kind in kinds.items()]
        pq.write_table(pa.Table.from_arrays(arrays, schema=schema), folder / f"step-{step:06d}-rank-0000.parquet")


def write_metrics(file: Path, rng: np.random.Generator, loss: str, steps: int) -> None:
    """A file of verl's file logger: a validation before training, then every five steps."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(steps + 1):
        solved, data = 0.3 + 0.6 * step / (step + 10), {}
        if step > 0:
            data = {
                "training/global_step": step,
                "critic/score/mean": solved - 0.05 + rng.normal(0, 0.02),
                "response_length/mean": 40 + 0.2 * step + rng.normal(0, 1),
                "response_length/max": 80,
                "actor/grad_norm": 0.08 * rng.lognormal(0, 0.3),
                "actor/pg_clipfrac": {"fspo": 0.05, "gspo": 0.3, "vanilla": 0.003}[loss] * rng.lognormal(0, 0.2),
            }
            counts = {"len_00001_00015": 100, "len_00016_00063": 250, "len_00064_up": 100}
            rates = {name: 0.05 * rng.lognormal(0, 0.2) for name in counts}
            data |= {f"fspo/step_responses/{name}": count for name, count in counts.items()}
            data |= {f"fspo/clip_rate/{name}": rate for name, rate in rates.items()}
            data["fspo/clip_rate/all"] = sum(rates[name] * count for name, count in counts.items()) / 450
        if step % 5 == 0:
            data["val-core/ledger/acc/mean@1"] = solved + rng.normal(0, 0.01)
        lines.append(json.dumps({"step": step, "data": data}) + "\n")
    file.write_text("".join(lines))


def write_config(run: Path, loss: str) -> None:
    """The config of a run, where Hydra leaves it."""
    sides = {name: RANGES[loss][name] for name in ("clip_ratio_low", "clip_ratio_high")}
    actor = sides | {"policy_loss": {"loss_mode": loss} | (RANGES[loss]["band"] or {})}
    file = run / "hydra/.hydra/config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"actor_rollout_ref": {"actor": actor}}))
    file.with_name("overrides.yaml").write_text(f"- actor_rollout_ref.actor.policy_loss.loss_mode={loss}\n")


def write_run(run: Path, loss: str, seed: int = 0, steps: int = 30, **kwargs) -> Path:
    """A whole run: metrics, records, config."""
    rng = np.random.default_rng(seed)
    write_records(run / "records", records(rng, loss, steps, **kwargs), loss)
    write_metrics(run / "metrics-1.jsonl", rng, loss, steps)
    write_config(run, loss)
    return run
