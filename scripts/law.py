# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The law of the sequence log-ratio S on a real language model: how it spreads with the length of a response.

Responses of 2 to some thousands of tokens are sampled from the model, each with a reward that a
program checks. Steps of AdamW are taken on some of them, in three directions: on GRPO's advantages (grpo), on random
ones (random), and on GRPO's with Adam's moments warmed up by a few tens of steps (warm). Then the log-probabilities of
the other responses are measured again, and S and Q of each are written as records of fspo-verl, a folder per cell
(direction, steps taken, number format): fspo-verl report and calibrate read them.

Neither Ray nor verl runs: a model, torch and transformers are enough. Everything is kept as it comes: the same command
goes on where it was stopped, and more --responses or cells only add to what is there.
"""

import argparse
import hashlib
import math
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent / "law"))

EXAMPLES = """examples:
  python scripts/law.py --model DIR                      everything; hours on one core, resumable
  python scripts/law.py --model DIR --minutes 30         what 30 minutes give, in the order of --cells
  python scripts/law.py --model DIR --device cuda --responses 8000 --usual-tokens 2048 --max-tokens 8192
  python scripts/law.py --publish docs/law               the records so far, thinned, to a folder
  python scripts/law.py --redraw                         docs/law.md and its figure from the records in docs/law
  fspo-verl calibrate docs/law/grpo-4-float32            what the package makes of a cell

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
DIRECTIONS = ("grpo", "random", "warm")
_STEPS = 4  # optimiser steps of a direction, one per mini-batch
_WARMUP = 24  # steps that warm Adam's moments up
_LONG = 0.25  # share of the responses that may be as long as --max-tokens
_WARMUP_GROUPS = 2  # prompts in each of them
QUARTERS = 4
_FLUSH = 30  # seconds after which results are written
_MICRO_TOKENS = {"train": 1024, "measure": 4096}  # per forward pass on a CPU, with padding
_OTHER_ROWS = 3  # of a micro-batch where log-probabilities are to come from other micro-batches than the old ones


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="folder (or name) of a chat model that transformers reads")
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
    add("--share", type=_share, default=(0, 1), metavar="I/N", help="of N processes that work on one folder, this is I")
    add("--minutes", type=float, default=math.inf, help="stop after so long, to be continued")
    add("--publish", type=Path, metavar="DIR", help="only write the records of what was measured below DIR")
    add("--redraw", action="store_true", help="only draw the figure and write the tables of the page, from --records")
    add("--records", type=Path, default=Path("docs/law"), help="published records (default: %(default)s)")
    add("--page", type=Path, default=Path("docs/law.md"), help="page to write tables into (default: %(default)s)")
    args = parser.parse_args(argv)
    if not (args.redraw or args.publish or args.model):
        parser.error("--model DIR is needed, or --redraw or --publish DIR")
    try:
        args.cells = [Cell.parse(cell) for cell in args.cells]
    except ValueError as error:
        parser.error(str(error))
    return args


def _share(text: str) -> tuple[int, int]:
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"{text} is not I/N with I from 0 to N - 1")
    return index, count


class Cell(NamedTuple):
    """What is measured: the policy after ``steps`` of a direction, in a number format, on some of the responses."""

    direction: str  # or "still": no step was taken
    steps: int | None  # None: quarter k after k steps
    dtype: str
    quarters: tuple[int, ...]  # of the responses that were not trained on; none: those that were

    @classmethod
    def parse(cls, text: str) -> "Cell":
        name, _, which = text.partition(":")
        try:
            direction, steps, dtype = name.split("-")
            steps = None if steps == "rollout" else int(steps)
            quarters = () if which == "trained" else tuple(map(int, which or "0123"))
        except ValueError:
            raise ValueError(f"{text!r} is no cell such as grpo-4-float32 or random-1-bfloat16:01") from None
        if direction not in (*DIRECTIONS, "still") or dtype not in ("float32", "bfloat16"):
            raise ValueError(f"{text!r}: directions are {', '.join(DIRECTIONS)}, still; formats float32, bfloat16")
        if not (steps is None or 0 <= steps <= _STEPS) or not set(quarters) <= set(range(QUARTERS)):
            raise ValueError(f"{text!r}: there are steps 0 to {_STEPS}, and quarters 0 to {QUARTERS - 1}")
        if (direction == "still") != (steps == 0):
            raise ValueError(f"{text!r}: still is the policy after 0 steps, and only that")
        return cls(direction, steps, dtype, quarters)

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


def plan(args) -> list[tuple[str, object, int]]:
    """The prompts: (role, prompt, quarter). Roles are measured, trained (in the mini-batches) and warmup."""
    from prompts import KINDS, draw

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
    from prompts import KINDS

    return max(1, args.group // 4) if KINDS[kind].long else args.group


def _batches(args) -> list[tuple[bool, Path, list]]:
    """Whether a batch is measured (or trained on), the file of its responses, and its part of the plan."""
    batches = []
    for measured in (False, True):
        items = [item for item in plan(args) if (item[0] == "measured") == measured]
        # Batches with responses of all lengths: when the long ones are still sampled the others have left the batch.
        shares = math.ceil(sum(responses_per_prompt(args, prompt.kind) for _, prompt, _ in items) / args.rows)
        for share in range(shares):
            part = items[share::shares]
            digest = hashlib.sha1("\n".join(f"{role} {p.text}" for role, p, _ in part).encode()).hexdigest()[:12]
            file = args.output / "responses" / f"{'measured' if measured else 'trained'}-{digest}.parquet"
            batches.append((measured, file, part))
    return batches


def sample_all(args, clock) -> None:
    """Sample the responses that are not there yet, one file per batch."""
    import measure
    import pandas as pd
    import torch
    from prompts import KINDS
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from fspo_verl.cpu.decode import Sampling, eos_token_ids, sample

    pending = [job for job in _batches(args)[args.share[0] :: args.share[1]] if not job[1].exists()]
    if not pending:
        return
    (args.output / "responses").mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = measure.load(args.model, torch.bfloat16, args.device)
    eos = eos_token_ids(model, tokenizer)
    for measured, file, part in tqdm(pending, desc="sampling", unit="batch"):
        clock.check()
        requests = []
        for role, prompt, quarter in part:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt.text}], add_generation_prompt=True, return_dict=False
            )
            requests += [(role, prompt, quarter, ids)] * responses_per_prompt(args, prompt.kind)
        # A long response costs as much to sample as hundreds of short ones, so few may be very long. Chance decides,
        # and not what they say: a cut changes nothing in the law of the tokens before it.
        rng = random.Random(file.name)
        longest = [args.max_tokens if rng.random() < _LONG else args.usual_tokens for _ in requests]
        limits = [Sampling(limit if measured else args.train_tokens, args.temperature) for limit in longest]
        torch.manual_seed(int(hashlib.sha1(f"{args.seed} {file.name}".encode()).hexdigest()[:8], 16))
        with torch.device(args.device):
            responses = sample(model, [ids for *_, ids in requests], limits, eos, len(tokenizer))
        rows = [
            {
                "role": role,
                "prompt": f"{role} {prompt.name}",
                "kind": prompt.kind,
                "quarter": quarter,
                "prompt_ids": ids,
                "ids": response.token_ids,
                "reward": KINDS[prompt.kind].reward(
                    tokenizer.decode(response.token_ids, skip_special_tokens=True), prompt.target
                ),
                "ended": response.token_ids[-1] in eos,
            }
            for (role, prompt, quarter, ids), response in zip(requests, responses, strict=True)
        ]
        _write(pd.DataFrame(rows), file)


def read_responses(args):
    """All responses sampled so far, indexed by a key that later ones do not change; with GRPO's advantages."""
    import pandas as pd

    files = sorted((args.output / "responses").glob("*.parquet"))
    if not files:
        raise SystemExit(f"{args.output} holds no responses")
    table = pd.concat([pd.read_parquet(file).rename(index=(file.stem + " {}").format) for file in files])
    rewards = table.groupby("prompt").reward
    table["advantage"] = ((table.reward - rewards.transform("mean")) / (rewards.transform("std") + 1e-6)).fillna(0.0)
    # By the key alone, so that responses that come later change nothing.
    signs = pd.Series([1.0 - 2.0 * (zlib.crc32(f"{args.seed} {key}".encode()) % 2) for key in table.index], table.index)
    table["random"] = signs - signs.groupby(table.prompt).transform("mean")
    table["length"] = table.ids.map(len)
    return table


# --- training and measuring ------------------------------------------------------------------------------------------


def update(args, direction: str, responses, clock) -> None:
    """Take the steps of a direction and keep the weights after each."""
    import measure
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm

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
        clock.check()

    measure.train(model, steps, warmup, args.lr, args.temperature, _MICRO_TOKENS["train"], done)
    bar.close()


def load_state(args, state: str, dtype: str):
    """The model at a state. Weights are rounded to the number format last, as in mixed-precision training."""
    import measure
    import torch
    from safetensors.torch import load_file

    model = measure.load(args.model, torch.float32, args.device)
    if state not in UNMOVED:
        weights = load_file(args.output / "weights" / f"{state}.safetensors", device=args.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    return model.to(getattr(torch, dtype))


def log_probs(args, state: str, dtype: str) -> dict:
    """Token log-probabilities measured so far, by response."""
    import pandas as pd

    found = {}
    for file in sorted((args.output / "log_probs" / f"{state}-{dtype}").glob("*.parquet")):
        part = pd.read_parquet(file)
        found |= dict(zip(part.response, part.log_probs, strict=True))
    return found


def measure_state(args, state: str, dtype: str, responses, clock) -> None:
    """Measure the responses that have not been measured under a state yet."""
    import measure
    import pandas as pd
    from tqdm import tqdm

    known = log_probs(args, state, dtype)
    index, count = args.share
    unknown = responses[~responses.index.isin(known)].groupby("prompt", sort=True)
    groups = [part for prompt, part in unknown if zlib.crc32(prompt.encode()) % count == index]
    if not groups:
        return
    if state not in UNMOVED and not (args.output / "weights" / f"{state}.safetensors").exists():
        print(f"{state} waits for its weights, which another process makes; run this again for it")
        return
    random.Random(args.seed).shuffle(groups)  # so that a part is a sample of all kinds
    folder = args.output / "log_probs" / f"{state}-{dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    model = load_state(args, state, dtype)
    # In float32 micro-batches make no difference; in bfloat16 they are part of what is measured.
    rows = _OTHER_ROWS if dtype == "bfloat16" and state != START else args.rows
    found, since = [], time.monotonic()

    def flush():
        if found:
            _write(pd.DataFrame(found), folder / f"{found[0]['response']}.parquet")
            found.clear()

    tokens = int(sum(part.length.sum() for part in groups))
    bar = tqdm(total=tokens, desc=f"{state} {dtype}", unit="token", unit_scale=True)
    try:
        for part in groups:
            clock.check()
            values = measure.measure(model, _group(part), args.temperature, rows, _MICRO_TOKENS["measure"])
            found += [{"response": key, "log_probs": value} for key, value in zip(part.index, values, strict=True)]
            bar.update(int(part.length.sum()))
            if time.monotonic() - since > _FLUSH:
                flush()
                since = time.monotonic()
    finally:
        flush()
        bar.close()


def measure_cells(args) -> None:
    import torch

    torch.set_num_threads(args.threads)
    clock = Clock(args.minutes)
    sample_all(args, clock)
    responses = read_responses(args)
    measured = responses[responses.role == "measured"]
    print(
        f"{len(measured):,} responses of {measured.length.min()} to {measured.length.max()} tokens to measure, "
        f"{measured.length.sum():,} tokens in all; {(responses.role == 'trained').sum():,} to train on"
    )
    for place, direction in enumerate(dict.fromkeys(cell.direction for cell in args.cells if cell.steps != 0)):
        if place % args.share[1] == args.share[0]:
            update(args, direction, responses, clock)
    for cell in args.cells:
        for quarter, state in cell.states().items():
            chosen = responses[responses.role == "trained"] if quarter < 0 else measured[measured.quarter == quarter]
            measure_state(args, START, cell.dtype, chosen, clock)
            measure_state(args, state, cell.dtype, chosen, clock)
        print(f"{cell.folder} is measured", flush=True)


# --- publishing ------------------------------------------------------------------------------------------------------


def publish(args) -> None:
    """Write the records of every cell that was measured, each below a folder of its name, and law.json."""
    from publish import write_cell, write_settings

    responses = read_responses(args)
    folders: dict[str, dict[int, str]] = {}
    for cell in args.cells:
        folders.setdefault(cell.folder, {}).update(cell.states())
    for folder, states in folders.items():
        dtype = folder.split("-")[2]
        old = log_probs(args, START, dtype)
        new = {state: log_probs(args, state, dtype) for state in set(states.values())}
        rows = []
        for key, row in responses[responses.role != "warmup"].iterrows():
            state = states.get(row.quarter)
            if key in old and state and key in new[state]:
                steps = 0 if state in UNMOVED else int(state.split("-")[1])
                rows.append((row.prompt, float(row.advantage), steps, old[key], new[state][key]))
        if any(row[2] for row in rows) or (rows and folder.startswith("still")):
            print(f"{folder}: {len(rows):,} responses, {write_cell(args.publish / folder, rows) / 1e6:.2f} MB")
    keep = "responses group max_tokens usual_tokens train_tokens mini_batch temperature lr seed".split()
    own = {"steps": _STEPS, "warmup": _WARMUP, "warmup_prompts": _WARMUP_GROUPS}
    write_settings(args.publish, {name: getattr(args, name) for name in keep} | own, responses)


class Clock:
    """Ends the run when its minutes are over; everything finished is on disk by then."""

    def __init__(self, minutes: float):
        self.end = time.monotonic() + 60 * minutes

    def check(self) -> None:
        if time.monotonic() > self.end:
            raise SystemExit("the minutes are over; the same command goes on from here")


def _group(part, advantages: list[float] | None = None):
    """The responses to one prompt."""
    import measure

    return measure.Group(list(part.prompt_ids.iloc[0]), [list(ids) for ids in part.ids], advantages)


def _write(frame, file: Path) -> None:
    unfinished = file.with_name(f".{file.name}")
    frame.to_parquet(unfinished)
    unfinished.replace(file)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.redraw:
        from page import redraw

        redraw(args.records, args.page)
    elif args.publish:
        publish(args)
    else:
        measure_cells(args)


if __name__ == "__main__":
    main()
