# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How the sequence log-ratio S of a real language model spreads with the length of a response: the measurement.

At each temperature the model answers prompts of three kinds (prompts.py). Steps of AdamW are taken on a part of the
responses, on GRPO's advantages or on random ones. Before and after, the token log-probabilities of the others are
measured: held-out prompts of the same kinds, sampled alike. Neither Ray nor verl runs.

The work is done in cells of minutes. What is finished is kept: the same command goes on where it was stopped.
--temperatures takes one of them to a process of its own.
"""

import argparse
import functools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import measure
import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from prompts import KINDS, Prompt, draw
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoTokenizer

from fspo_verl_cpu.decode import Sampling, eos_token_ids, sample

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))
from studies.cells import Cells  # noqa: E402

SETTINGS = "settings.json"
STEPS = 4  # optimiser steps of a direction, one per mini-batch
PROBABILITIES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
"""Edges of the bins of a token's old probability; the last bin holds 1."""


class State(NamedTuple):
    """A policy that measures: after so many steps of a direction."""

    direction: str
    steps: int


STATES = (State("grpo", 4), State("random", 4), State("grpo", 1))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder (or name) of a chat model that transformers reads")
    add("--output", type=Path, default=Path("runs/law"), help="weights (default: %(default)s)")
    add("--records", type=Path, default=HERE / "records", help="responses and measurements (default: the study's)")
    add("--temperatures", type=float, nargs="+", default=[1.0, 0.7], help="default: %(default)s")
    add("--prompts", type=int, default=100, help="to measure, of each kind (default: %(default)s)")
    add("--group", type=int, default=4, help="responses to each of them (default: %(default)s)")
    add("--train-prompts", type=int, default=4, help="of each kind per optimiser step (default: %(default)s)")
    add("--train-group", type=int, default=6, help="responses to each of them (default: %(default)s)")
    add("--shortest-cut", type=int, default=16, help="fewest tokens at which a text is cut (default: %(default)s)")
    add("--max-tokens", type=int, default=1024, help="of a response (default: %(default)s)")
    add("--lr", type=float, default=5e-6, help="learning rate of AdamW (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--engine", choices=("transformers", "vllm"), default="transformers", help="samples (default: %(default)s)")
    add("--threads", type=int, default=1, help="of a CPU (default: %(default)s)")
    return parser.parse_args(argv)


def claim(args) -> None:
    """Note the settings beside responses and records; what lies there belongs to them.

    Raises:
        SystemExit: a folder holds a measurement with others.
    """
    names = "engine prompts group train_prompts train_group shortest_cut max_tokens lr seed".split()
    settings = {"model": Path(args.model).name} | {name: getattr(args, name) for name in names}
    for folder in (args.output, args.records):
        file = folder / SETTINGS
        if file.exists() and (found := json.loads(file.read_text())) != settings:
            raise SystemExit(f"{folder} was measured with {found}, not with {settings}; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings, indent=1) + "\n")


# --- cells: responses, weights, records ------------------------------------------------------------------------------


def responses(args, temperature: float, kind: str, role: str) -> pd.DataFrame:
    """Responses to the prompts of a kind that are ``measured`` or ``trained`` on, sampled unless they have been.

    Columns prompt, step (the one that trains on it), prompt_ids, ids, reward, and advantage (GRPO's).
    """
    stored = Cells(args.records / "responses.parquet", ("temperature", "role", "kind"))
    cell = dict(zip(stored.key, (temperature, role, kind), strict=True))
    if tuple(cell.values()) not in stored.done():
        prompts = draw(kind, args.prompts + STEPS * args.train_prompts, args.seed)
        chosen = prompts[: args.prompts] if role == "measured" else prompts[args.prompts :]
        torch.manual_seed(args.seed)
        sampled = _sample(args, chosen, temperature, args.group if role == "measured" else args.train_group)
        stored.add(pa.Table.from_pandas(sampled.assign(**cell), preserve_index=False))
    table = stored.table(**cell).to_pandas()
    rewards = table.groupby("prompt").reward
    table["advantage"] = ((table.reward - rewards.transform("mean")) / (rewards.transform("std") + 1e-6)).fillna(0.0)
    return table


def _sample(args, prompts: Sequence[Prompt], temperature: float, group: int) -> pd.DataFrame:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows, limits = [], []
    for number, prompt in enumerate(prompts):
        longest, row = args.max_tokens, {"prompt": prompt.text, "target": prompt.target, "step": number % STEPS}
        if KINDS[prompt.kind].is_chat:
            chat = [{"role": "user", "content": prompt.text}]
            row["prompt_ids"] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        else:
            row["prompt_ids"] = tokenizer(prompt.text).input_ids
        for _ in range(group):
            if not KINDS[prompt.kind].is_chat:  # by chance: a cut changes nothing in the law of the tokens before it
                shortest = args.shortest_cut
                longest = round(shortest * (args.max_tokens / shortest) ** torch.rand(()).item())
            limits.append(Sampling(longest, temperature))
            rows.append(dict(row))
    prompt_ids, ends = [row["prompt_ids"] for row in rows], tokenizer.all_special_ids
    if args.engine == "vllm":
        found = _by_vllm(args.model, prompt_ids, limits, ends)
    else:
        model = measure.load(args.model, torch.bfloat16, args.device)
        ends = sorted({*eos_token_ids(model, tokenizer), *ends})
        with torch.device(args.device):
            found = [one.token_ids for one in sample(model, prompt_ids, limits, ends, len(tokenizer))]
    for row, ids in zip(rows, found, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        row |= {"ids": ids, "reward": KINDS[prompts[0].kind].reward(text, row.pop("target"))}
    return pd.DataFrame(rows)


def _by_vllm(model: str, prompts: list[list[int]], limits: list[Sampling], ends: list[int]) -> list[list[int]]:
    """The tokens of a response to each prompt."""
    from vllm import SamplingParams  # not installed everywhere

    settings = [
        SamplingParams(temperature=one.temperature, max_tokens=one.max_tokens, stop_token_ids=ends, detokenize=False)
        for one in limits
    ]
    found = _vllm(model).generate([{"prompt_token_ids": prompt} for prompt in prompts], settings)
    return [list(one.outputs[0].token_ids) for one in found]


@functools.cache
def _vllm(model: str):
    """vLLM's engine; it takes a minute to start, and stays beside the model that is trained and measured."""
    from vllm import LLM

    return LLM(model, dtype="bfloat16", gpu_memory_utilization=0.15, enable_prefix_caching=False, seed=0)


def train(args, temperature: float, direction: str) -> None:
    """Take the steps of a direction, on prompts of all kinds in each, and keep the weights that are measured."""
    kept = {state.steps: _weights(args, temperature, state) for state in STATES if state.direction == direction}
    if all(file.exists() for file in kept.values()):
        return
    rng, steps = random.Random(args.seed), [[] for _ in range(STEPS)]
    for kind in KINDS:
        for _, part in responses(args, temperature, kind, "trained").groupby("prompt", sort=False):
            advantages = part.advantage.tolist()
            if direction == "random":
                signs = [rng.choice((-1.0, 1.0)) for _ in advantages]
                advantages = [sign - sum(signs) / len(signs) for sign in signs]
            steps[part.step.iloc[0]].append(_group(part, advantages))
    model = measure.load(args.model, torch.float32, args.device)
    for step in measure.train(model, steps, args.lr, temperature):
        if step in kept:
            unfinished = kept[step].with_suffix(".unfinished")
            save_file({name: value.detach().clone() for name, value in model.named_parameters()}, unfinished)
            unfinished.replace(kept[step])


def _weights(args, temperature: float, state: State) -> Path:
    return args.output / f"t{temperature}-{state.direction}-{state.steps}.safetensors"


def load_state(args, temperature: float, state: State | None):
    """The model in float32 at a state; None is the policy that sampled."""
    model = measure.load(args.model, torch.float32, args.device)
    if state is not None:
        weights = load_file(_weights(args, temperature, state), device=args.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    return model


def log_probs(args, temperature: float, state: State | None, table: pd.DataFrame) -> pd.Series:
    """Token log-probabilities ``[L]`` of responses under a state."""
    model, found = load_state(args, temperature, state), {}
    for _, part in table.groupby("prompt"):
        found |= dict(zip(part.index, measure.measure(model, _group(part), temperature), strict=True))
    return pd.Series(found)


def old_log_probs(args, temperature: float, kind: str) -> pd.Series:
    """Those of the held-out responses of a kind under the policy that sampled, measured unless they have been."""
    file = args.output / f"t{temperature}-old-{kind}.parquet"
    if not file.exists():
        table = responses(args, temperature, kind, "measured")
        unfinished = file.with_suffix(".unfinished")
        log_probs(args, temperature, None, table).to_frame("log_probs").to_parquet(unfinished)
        unfinished.replace(file)
    return pd.read_parquet(file).log_probs


def record(args, temperature: float, state: State, kind: str) -> None:
    """Write what a state does to the held-out responses of a kind: a row each, see :func:`sums`."""
    table = responses(args, temperature, kind, "measured")
    old, new = old_log_probs(args, temperature, kind), log_probs(args, temperature, state, table)
    rows = [
        {"prompt": row.prompt, "length": len(row.ids), "advantage": row.advantage, "distinct": distinct(row.ids)}
        | sums(old[row.Index], new[row.Index])
        for row in table.itertuples()
    ]
    columns = {"temperature": temperature, "direction": state.direction, "mini_batch": state.steps, "kind": kind}
    records = pd.DataFrame(rows).assign(**columns).astype({"advantage": "float32", "distinct": "float32"})
    recorded(args.records).add(pa.Table.from_pandas(records, preserve_index=False))


def recorded(folder: Path) -> Cells:
    """What states did to held-out responses, among the records of a study."""
    return Cells(folder / "log_ratios.parquet", ("temperature", "direction", "mini_batch", "kind"))


def distinct(ids: Sequence[int]) -> float:
    """Number of different 4-grams of a response over the number of all; 1 where it has none."""
    grams = list(zip(*(ids[start:] for start in range(4)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def sums(old: np.ndarray, new: np.ndarray) -> dict[str, np.ndarray]:
    """Sums over the tokens of a response, from token log-probabilities ``[L]`` (nats).

    ``s`` and ``q``: the log-ratios and their squares at positions 2^k to 2^(k+1) − 1, from 1. ``tokens_by_probability``
    and ``q_by_probability``: tokens and squares by the old probability, in the bins of :data:`PROBABILITIES`.
    """
    ratio = np.asarray(new, np.float64) - np.asarray(old, np.float64)
    starts = 2 ** np.arange(len(ratio).bit_length()) - 1
    place = np.digitize(np.exp(old), PROBABILITIES[1:-1])
    tokens, squares = (np.bincount(place, of, len(PROBABILITIES) - 1) for of in (None, ratio**2))
    return {
        "s": np.add.reduceat(ratio, starts).astype(np.float32),
        "q": np.add.reduceat(ratio**2, starts).astype(np.float32),
        "tokens_by_probability": tokens.astype(np.int16),
        "q_by_probability": squares.astype(np.float32),
    }


def _group(part: pd.DataFrame, advantages: list[float] | None = None) -> measure.Group:
    """The responses to one prompt."""
    return measure.Group(list(part.prompt_ids.iloc[0]), [list(ids) for ids in part.ids], advantages)


def cells(args) -> Iterator[tuple]:
    """What is to be done, in this order: a name, a function, and its arguments behind ``args``."""
    done = recorded(args.records).done()
    for temperature in args.temperatures:
        for state in STATES:
            missing = [kind for kind in KINDS if (temperature, *state, kind) not in done]
            if missing:
                for kind in KINDS:
                    yield f"t{temperature} responses to train on, {kind}", responses, temperature, kind, "trained"
                yield f"t{temperature} {state.direction}, steps", train, temperature, state.direction
            for kind in missing:
                yield f"t{temperature} {kind}, responses", responses, temperature, kind, "measured"
                yield f"t{temperature} {kind}, old log-probs", old_log_probs, temperature, kind
                yield f"t{temperature} {state.direction}-{state.steps} {kind}", record, temperature, state, kind


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    claim(args)
    bar = tqdm(list(cells(args)), unit="cell")
    for name, work, *rest in bar:
        bar.set_description(name)
        work(args, *rest)


if __name__ == "__main__":
    main()
