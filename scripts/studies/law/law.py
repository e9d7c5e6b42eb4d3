# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How the sequence log-ratio S of a real language model spreads with the length of a response: the measurement.

Responses of 2 to some thousands of tokens are sampled from the model, each with a reward that a program checks. Steps
of AdamW are taken on some of them, in three directions: on GRPO's advantages (grpo), on random ones (random), and on
GRPO's with Adam's moments warmed up by a few tens of steps (warm). Then the log-probabilities of the other responses
are measured again, and S and Q of each are written as records of fspo-verl, a folder per cell (direction, steps taken,
number format): fspo-verl report and calibrate read them.

Neither Ray nor verl runs: a model, torch and transformers are enough. What is finished is kept: the same command goes
on where it was stopped, and may name more cells.
"""

import argparse
import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import measure
import pandas as pd
import torch
from prompts import KINDS, Prompt, draw
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoTokenizer
from write_records import SETTINGS, Row, write_cell

from fspo_verl.cpu.decode import Sampling, eos_token_ids, sample

EXAMPLES = """examples:
  python scripts/studies/law/law.py --model DIR          everything; hours on one core, resumable
  python scripts/studies/law/law.py --model DIR --device cuda --responses 8000 --usual-tokens 2048 --max-tokens 8192
  fspo-verl calibrate runs/law/records/grpo-4-float32    what the package makes of a cell

A cell is DIRECTION-STEPS-DTYPE[:WHICH]. STEPS are optimiser steps from the policy that sampled. WHICH says on which
responses: all that were not trained on (default), one or more of their four quarters (:0, :12), or :trained for those
that were. rollout in place of steps measures quarter k after k steps, as the mini-batches of a rollout meet their
policy. still-0-bfloat16 measures the unmoved policy again in other micro-batches: numerical noise.
"""
CELLS = (
    "grpo-4-float32 grpo-1-float32 still-0-bfloat16:0 grpo-4-bfloat16 random-4-float32 warm-4-float32 "
    "grpo-rollout-float32 grpo-4-float32:trained random-1-float32 warm-1-float32 random-4-float32:trained "
    "warm-rollout-float32"
)
_CELL = re.compile(
    r"(?P<direction>grpo|random|warm|still)-(?P<steps>[0-4]|rollout)-(?P<dtype>float32|bfloat16)"
    r"(:(?P<which>[0-3]+|trained))?"
)
_STEPS = 4  # optimiser steps of a direction, one per mini-batch
_WARMUP = 24  # steps that warm Adam's moments up
_LONG = 0.25  # share of the responses that may be as long as --max-tokens
_WARMUP_GROUPS = 2  # prompts in each of them
QUARTERS = 4
_MICRO_TOKENS = {"train": 1024, "measure": 4096}  # per forward pass on a CPU, with padding
_OTHER_ROWS = 3  # of a micro-batch where log-probabilities are to come from other micro-batches than the old ones


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="folder (or name) of a chat model that transformers reads")
    add("--output", type=Path, default=Path("runs/law"), help="working folder (default: %(default)s)")
    add("--responses", type=int, default=2000, help="about so many to measure (default: %(default)s)")
    add("--group", type=int, default=8, help="per prompt, a quarter of it to long ones (default: %(default)s)")
    add("--max-tokens", type=int, default=2048, help="where the others are cut (default: %(default)s)")
    add("--usual-tokens", type=int, default=384, help="where three of four responses are cut (default: %(default)s)")
    add("--train-tokens", type=int, default=256, help="longest response trained on (default: %(default)s)")
    add("--mini-batch", type=int, default=8, help="prompts per optimiser step (default: %(default)s)")
    add("--temperature", type=float, default=0.7, help="of sampling and log-probabilities (default: %(default)s)")
    add("--lr", type=float, default=1.5e-6, help="learning rate of AdamW (default: %(default)s)")
    add("--cells", nargs="+", default=CELLS.split(), help="what to measure, in this order (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--threads", type=int, default=1, help="of a CPU (default: %(default)s)")
    add("--rows", type=int, default=1024, help="responses sampled at a time (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        args.cells = [Cell.parse(cell) for cell in args.cells]
    except ValueError as error:
        parser.error(str(error))
    return args


def claim(args) -> None:
    """Note the settings in the working folder; what is in it belongs to them.

    Raises:
        SystemExit: the folder holds a measurement with others.
    """
    names = "model responses group max_tokens usual_tokens train_tokens mini_batch temperature lr seed rows".split()
    settings = {name: getattr(args, name) for name in names}
    settings |= {"steps": _STEPS, "warmup": _WARMUP, "warmup_prompts": _WARMUP_GROUPS, "torch": torch.__version__}
    file = args.output / SETTINGS
    if file.exists() and (found := json.loads(file.read_text())) != settings:
        raise SystemExit(f"{args.output} was measured with {found}, not with {settings}; choose another --output")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1) + "\n")


class Cell(NamedTuple):
    """What is measured: the policy after ``steps`` of a direction, in a number format, on some of the responses."""

    direction: str  # or "still": no step was taken
    steps: int | None  # None: quarter k after k steps
    dtype: str
    quarters: tuple[int, ...]  # of the responses that were not trained on; none: those that were

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """The cell of that name.

        Raises:
            ValueError: there is none.
        """
        found = _CELL.fullmatch(text)
        if not found or (found["direction"] == "still") != (found["steps"] == "0"):
            raise ValueError(f"{text!r} is no cell such as grpo-4-float32, random-1-bfloat16:01 or still-0-bfloat16")
        steps = None if found["steps"] == "rollout" else int(found["steps"])
        quarters = () if found["which"] == "trained" else tuple(map(int, found["which"] or "0123"))
        return cls(found["direction"], steps, found["dtype"], quarters)

    @property
    def folder(self) -> str:
        """Name of its records; cells that differ in their quarters share them."""
        steps = "rollout" if self.steps is None else self.steps
        return f"{self.direction}-{steps}-{self.dtype}" + ("" if self.quarters else "-trained")

    def states(self) -> dict[int, str]:
        """For each quarter (-1: trained on) the policy that measures it."""
        if not self.quarters:
            return {-1: f"{self.direction}-{self.steps}"}
        if self.steps is not None:
            return {quarter: f"{self.direction}-{self.steps}" for quarter in self.quarters}
        return {quarter: f"{self.direction}-{quarter}" if quarter else START for quarter in self.quarters}


START = "start"  # the policy that sampled, measured in the micro-batches of old log-probabilities
UNMOVED = (START, "still-0")


# --- sampling --------------------------------------------------------------------------------------------------------


def plan(args) -> list[tuple[str, Prompt, int]]:
    """The prompts: (role, prompt, quarter). Roles are measured, trained (in the mini-batches) and warmup."""
    per_prompt = {kind: responses_per_prompt(args, kind) for kind in KINDS}
    weight = sum(k.weight for k in KINDS.values())
    mean = sum(k.weight * per_prompt[name] for name, k in KINDS.items()) / weight
    trained, warm = _STEPS * args.mini_batch, _WARMUP * _WARMUP_GROUPS
    short = [name for name, kind in KINDS.items() if not kind.long]
    spare = draw(trained + warm, args.seed + 1, short)
    random.Random(args.seed).shuffle(spare)
    texts = {prompt.text for prompt in spare}
    chosen = [("trained" if i < trained else "warmup", prompt, -1) for i, prompt in enumerate(spare)]
    seen = Counter()
    for prompt in draw(math.ceil(args.responses / mean), args.seed):
        if prompt.text not in texts:
            chosen.append(("measured", prompt, seen[prompt.kind] % QUARTERS))
            seen[prompt.kind] += 1
    return chosen


def responses_per_prompt(args, kind: str) -> int:

    return max(1, args.group // 4) if KINDS[kind].long else args.group


def sample_all(args) -> pd.DataFrame:
    """Sample the responses, a file per batch, but for batches that are there; all of them with their advantages.

    Columns role, prompt, kind, quarter, prompt_ids, ids, reward, ended, length, advantage (GRPO's) and random.
    """
    folder = args.output / "responses"
    folder.mkdir(parents=True, exist_ok=True)
    items = plan(args)
    # Batches with responses of all lengths: when the long ones are still sampled the others have left the batch.
    count = math.ceil(sum(responses_per_prompt(args, prompt.kind) for _, prompt, _ in items) / args.rows)
    files = [folder / f"{batch:04d}.parquet" for batch in range(count)]
    pending = [batch for batch, file in enumerate(files) if not file.exists()]
    if pending:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = measure.load(args.model, torch.bfloat16, args.device)
    for batch in tqdm(pending, desc="sampling", unit="batch"):
        torch.manual_seed(1_000_000 * args.seed + batch)
        _write(_sample(args, model, tokenizer, items[batch::count]), files[batch])

    table = pd.concat(map(pd.read_parquet, files), ignore_index=True)
    rewards = table.groupby("prompt").reward
    table["advantage"] = ((table.reward - rewards.transform("mean")) / (rewards.transform("std") + 1e-6)).fillna(0.0)
    rng = random.Random(args.seed)
    signs = pd.Series([rng.choice((-1.0, 1.0)) for _ in table.index], table.index)
    table["random"] = signs - signs.groupby(table.prompt).transform("mean")
    return table.assign(length=table.ids.map(len))


def _sample(args, model, tokenizer, items: Sequence[tuple[str, Prompt, int]]) -> pd.DataFrame:
    """The responses to a part of the plan, a row each."""
    eos, rows, limits = eos_token_ids(model, tokenizer), [], []
    for role, prompt, quarter in items:
        chat = [{"role": "user", "content": prompt.text}]
        row = {"role": role, "prompt": f"{role} {prompt.name}", "kind": prompt.kind, "quarter": quarter}
        row["prompt_ids"] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for _ in range(responses_per_prompt(args, prompt.kind)):
            # A long response costs as much to sample as hundreds of short ones, so few may be very long. Chance
            # decides, and not what they say: a cut changes nothing in the law of the tokens before it.
            longest = args.max_tokens if torch.rand(()) < _LONG else args.usual_tokens
            limits.append(Sampling(longest if role == "measured" else args.train_tokens, args.temperature))
            rows.append(row | {"target": prompt.target})
    with torch.device(args.device):
        responses = sample(model, [row["prompt_ids"] for row in rows], limits, eos, len(tokenizer))
    for row, response in zip(rows, responses, strict=True):
        text = tokenizer.decode(response.token_ids, skip_special_tokens=True)
        row["ids"], row["ended"] = response.token_ids, response.token_ids[-1] in eos
        row["reward"] = KINDS[row["kind"]].reward(text, row.pop("target"))
    return pd.DataFrame(rows)


# --- training and measuring ------------------------------------------------------------------------------------------


def update(args, direction: str, responses) -> None:
    """Take the steps of a direction and keep the weights after each."""
    folder = args.output / "weights"
    if (folder / f"{direction}-{_STEPS}.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    column = "random" if direction == "random" else "advantage"

    def batches(role: str, size: int) -> list[list]:
        of_role = responses[responses.role == role].groupby("prompt", sort=True)
        groups = [_group(rows, rows[column].astype(float).tolist()) for _, rows in of_role]
        random.Random(args.seed).shuffle(groups)
        return [groups[start : start + size] for start in range(0, len(groups), size)]

    warmup = batches("warmup", _WARMUP_GROUPS) if direction == "warm" else []
    steps = batches("trained", args.mini_batch)
    model = measure.load(args.model, torch.float32, args.device)
    bar = tqdm(total=len(warmup) + len(steps), desc=f"training {direction}", unit="step")

    def done(step: int, model) -> None:
        if step > 0:
            unfinished = folder / ".unfinished"
            save_file({name: value.detach().clone() for name, value in model.named_parameters()}, unfinished)
            unfinished.replace(folder / f"{direction}-{step}.safetensors")
        bar.update()

    measure.train(model, steps, warmup, args.lr, args.temperature, _MICRO_TOKENS["train"], done)
    bar.close()


def load_state(args, state: str, dtype: str):
    """The model at a state. Weights are rounded to the number format last, as in mixed-precision training."""
    model = measure.load(args.model, torch.float32, args.device)
    if state not in UNMOVED:
        weights = load_file(args.output / "weights" / f"{state}.safetensors", device=args.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    return model.to(getattr(torch, dtype))


def log_probs(args, state: str, dtype: str, which: str, responses) -> pd.Series:
    """Token log-probabilities ``[L]`` (float32) of responses under a state, measured unless they have been."""
    file = args.output / f"log_probs/{state}-{dtype}-{which}.parquet"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        model, found = load_state(args, state, dtype), {}
        # In float32 micro-batches make no difference; in bfloat16 they are part of what is measured.
        rows = _OTHER_ROWS if dtype == "bfloat16" and state != START else args.rows
        for _, part in tqdm(responses.groupby("prompt"), desc=f"{state} {dtype} {which}", unit="prompt"):
            values = measure.measure(model, _group(part), args.temperature, rows, _MICRO_TOKENS["measure"])
            found |= dict(zip(part.index, values, strict=True))
        _write(pd.Series(found, name="log_probs").to_frame(), file)
    return pd.read_parquet(file).log_probs


def measure_cell(args, cell: Cell, responses) -> list[Row]:
    """What the records of a cell are made of."""
    rows = []
    for quarter, state in cell.states().items():
        part = responses[(responses.quarter == quarter) & (responses.role != "warmup")]
        which = "trained" if quarter < 0 else str(quarter)
        old, new = (log_probs(args, policy, cell.dtype, which, part) for policy in (START, state))
        steps = 0 if state in UNMOVED else int(state.split("-")[1])
        rows += [(row.prompt, row.advantage, steps, old[row.Index], new[row.Index]) for row in part.itertuples()]
    return rows


def _group(part, advantages: list[float] | None = None):
    """The responses to one prompt."""
    return measure.Group(list(part.prompt_ids.iloc[0]), [list(ids) for ids in part.ids], advantages)


def _write(frame, file: Path) -> None:
    unfinished = file.with_name(f".{file.name}")
    frame.to_parquet(unfinished)
    unfinished.replace(file)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    claim(args)
    responses = sample_all(args)
    for direction in dict.fromkeys(cell.direction for cell in args.cells if cell.steps != 0):
        update(args, direction, responses)
    rows: dict[str, list[Row]] = {}
    for cell in args.cells:
        rows[cell.folder] = rows.get(cell.folder, []) + measure_cell(args, cell, responses)
        write_cell(args.output / "records" / cell.folder, rows[cell.folder])
        print(f"{cell.folder}: {len(rows[cell.folder]):,} responses", flush=True)


if __name__ == "__main__":
    main()
