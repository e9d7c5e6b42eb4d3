# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How often the sentence and the advice of a report are right, on simulated runs whose truth is known.

  python tests/truth_table.py [--runs 200] [--only WORD]

Prints the table, in per cent of the runs, a line for each cell as soon as its runs are done. Cells whose slopes persist
get twice as many runs. A second table has policies that break, and healthy ones, by their metrics.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from scipy.stats import norm

from fspo_verl.analysis import causes as c
from fspo_verl.analysis.breaks import find_break
from fspo_verl.analysis.judgement import Judgement, Verdict, judge_records
from fspo_verl.analysis.length_effect import BY_SIDE, ENDS, LONGER, MIDDLE, SHORTER
from fspo_verl.clips import BandClip, ratio_band
from fspo_verl.findings import FIX, KEEP, RECORD, TAKE
from fspo_verl.observe.settings import RunSettings

OUTCOMES = RIGHT, WRONG, WITHHELD, CHANGED = ("right", "wrong", "withheld", "slopes changed")
_CENTER = math.exp(5)  # tokens, the typical length


def simulate(
    rng: np.random.Generator,
    steps: int = 15,
    prompts: int = 32,
    group: int = 8,
    mini_batches: int = 4,
    rate: float = 0.1,
    *,
    size: float = 1.0,
    power: float = 0.5,
    bend: float = 0.0,
    own: float = 0.5,
    by_step: float = 0.0,
    by_mini_batch: float = 0.0,
    by_prompt: float = 0.0,
    moves: float = 0.0,
    trend: float = 0.0,
    epochs: int = 1,
    shared: float = 0.2,
    freedom: float = 1e9,
    noise: float = 1e-5,
    still: bool = False,
    bypass: bool = False,
    truncated: float = 0.0,
    broken: float = 0.0,
    sides: float = 1.0,
    apart: float = 0.0,
    bends_apart: float = 0.0,
    persists: float = 0.0,
    drift: float = 0.0,
    widen: float = 0.0,
    lengths: tuple[int, ...] = (),
    limit: float = 0.0,
    rejected: float = 0.0,
    worse: float = 0.0,
    scores: bool = False,
    tokens: float = 0.0,
    pull: float = 0.0,
) -> pd.DataFrame:
    """Records of a run whose S spreads like L^power · exp(bend · x²), with x = log length less its centre.

    Args:
        rate: share of the responses that the clip of the run takes: a band on S of width L^own.
        size: factor of the spread.
        by_step, by_mini_batch, by_prompt: standard deviation of the power between steps, mini-batches, prompts.
        moves: of the log of the spread between steps.
        trend: rise of the log of the spread, and of the log length, from the first to the last step.
        epochs: how often each prompt comes back.
        shared: share of the variance that the responses to a prompt share.
        freedom: of Student's t that S follows.
        noise: spread of a token's log-ratio where nothing has moved.
        still: no update moves anything.
        bypass: settings say so.
        truncated: share of the responses that are cut off, the longest.
        broken: share of the responses that are not finite.
        sides: ratio of the spread at A > 0 to that at A < 0.
        apart: half of what the power at A > 0 is above that at A < 0.
        bends_apart: the same of the bend.
        persists: standard deviation of the power between steps that resemble each other, by an autocorrelation of 0.8.
        drift: rise of the power from the first to the last step.
        widen: rise of the log of the spread alone.
        lengths: the only ones that responses have.
        limit: share of the responses that end at the longest length.
        rejected: share of the responses that a rollout correction takes, those that moved furthest for their length.
        worse: log odds of a negative advantage that a unit of log length adds.
        scores: advantages are those of GRPO, of rewards of 0 or 1.
        tokens: share of the tokens that are clipped, all lengths alike, in place of responses.
        pull: mean of S along its advantage, in units of its spread.
    """
    rows = steps * prompts * group
    step = np.repeat(np.arange(steps), prompts * group)
    slot = np.tile(np.repeat(np.arange(prompts), group), steps)
    pool = steps * prompts // epochs  # an epoch takes each prompt once
    prompt = np.concatenate([rng.permutation(pool) for _ in range(epochs)])[step * prompts + slot]
    mini_batch = slot * mini_batches // prompts
    late = step / max(steps - 1, 1) - 0.5
    x = rng.normal(0, 0.7, pool)[prompt] + rng.normal(0, 0.4, rows) + trend * late
    length = np.exp(x) * _CENTER
    length = length.round().clip(2).astype(int)
    if lengths:
        length = np.array(lengths)[np.digitize(length, [_CENTER] * (len(lengths) - 1))]
    if limit:
        length = np.minimum(length, int(np.quantile(length, 1 - limit)))
    x = np.log(length / _CENTER)
    slope = (persists * _persistent(rng, steps)[step] if persists else 0.0) + drift * late
    slope += by_step * rng.standard_normal(steps)[step] + by_prompt * rng.standard_normal(pool)[prompt]
    slope += by_mini_batch * rng.standard_normal(steps * mini_batches)[step * mini_batches + mini_batch]
    advantage = rng.choice([-1.0, 1.0], rows)
    if worse:
        advantage = np.where(rng.random(rows) < 1 / (1 + np.exp(-worse * x)), -1.0, 1.0)
    if scores:
        by_prompt_of_step = advantage.reshape(-1, group)
        spread = by_prompt_of_step.std(1, keepdims=True)
        of_group = by_prompt_of_step - by_prompt_of_step.mean(1, keepdims=True)
        advantage = np.divide(of_group, spread, out=np.zeros_like(of_group), where=spread > 0).ravel()
    log_spread = power * np.log(length) + bend * np.square(x) + slope * x + trend * late
    log_spread += np.sign(advantage) * (apart * x + bends_apart * (np.square(x) - 0.65))
    log_spread += (
        widen * late + moves * rng.standard_normal(steps)[step] + np.where(advantage > 0, math.log(sides), 0.0)
    )
    update = 0.02 * size * np.exp(log_spread) * np.sqrt(mini_batch) * (not still)
    own_part, of_prompt = (rng.standard_t(freedom, size) for size in (rows, steps * prompts))
    moved = math.sqrt(1 - shared) * own_part + math.sqrt(shared) * of_prompt[step * prompts + slot]
    moved *= update
    moved += pull * update * advantage
    s = moved + noise * np.sqrt(length) * rng.standard_normal(rows)
    records = pd.DataFrame(
        {
            "step": step,
            "mini_batch": mini_batch,
            "prompt": prompt,
            "prompt_text_hash": prompt,
            "length": length,
            "log_ratio": s,
            "quadratic_variation": np.square(update) + noise**2 * length,
            "advantage": advantage,
            "decision": np.where(rng.random(rows) < broken, "nonfinite", "kept"),
        }
    )
    if truncated:
        records["truncated"] = (length >= np.quantile(length, 1 - truncated)).astype(float)
    if rejected:
        size = np.abs(s) / np.sqrt(length)
        gone = size > np.quantile(size, 1 - rejected)
        records.loc[gone, ["length", "log_ratio", "quadratic_variation"]] = 0
        records.loc[gone, "decision"] = "rejected"
    band = ratio_band(math.exp(-1), math.exp(1), own)
    band = BandClip("own", "own", band).matched(records[records.length > 0], rate).band if 0 < rate < 1 else band
    records["clipped"] = BandClip("own", "own", band).clipped(records) if rate else 0.0
    if tokens:
        records["clipped"] = rng.binomial(length, tokens * (mini_batch > 0)) / length
        band = None
    settings = RunSettings("fspo" if band else "vanilla", band, old_log_probs_from_rollout=bypass)
    records.attrs = {"settings": settings, "rows": rows, "lost": 0}
    return records


def _persistent(rng: np.random.Generator, steps: int, autocorrelation: float = 0.8) -> np.ndarray:
    """Standard normal values ``[steps]`` of a stationary autoregression."""
    values = rng.standard_normal(steps)
    for step in range(1, steps):
        values[step] = autocorrelation * values[step - 1] + math.sqrt(1 - autocorrelation**2) * values[step]
    return values


@dataclass(frozen=True)
class Cell:
    """Runs of one truth."""

    name: str
    settings: dict = field(default_factory=dict)
    cause: str = c.EVEN
    who: str | None = None
    action: str = KEEP
    seen: bool = True
    """Whether so many responses show this truth: named before any run was simulated."""
    between: str | None = None
    """Why counted rates differ over lengths though the clip does not, where it is said that they do."""

    @property
    def persists(self) -> bool:
        return "persists" in self.settings


UNEVEN = {  # the truths that depend on length, from the run's own width or from the law of S
    name: Cell(name, settings, c.LENGTH, who, action)
    for name, settings, who, action in (
        ("shorter", {"own": 1.0}, SHORTER, TAKE),
        ("longer", {"own": 0.0}, LONGER, TAKE),
        ("both ends", {"bend": 0.3}, ENDS, KEEP),
        ("the middle", {"bend": -0.3}, MIDDLE, KEEP),
        ("opposite slopes of the sides", {"apart": -0.3}, BY_SIDE, KEEP),
    )
}
FACTORS: dict[str, dict] = {
    "10 steps": {"steps": 10},
    "30 steps": {"steps": 30},
    "slopes that differ by step, sd 0.15": {"by_step": 0.15},
    "slopes that differ by step, sd 0.3": {"by_step": 0.3},
    "10 steps, slopes that differ by step, sd 0.3": {"steps": 10, "by_step": 0.3},
    "slopes that differ by mini-batch, sd 0.3": {"by_mini_batch": 0.3},
    "slopes that differ by prompt, sd 0.3": {"by_prompt": 0.3},
    "steps that move further or less": {"moves": 0.5},
    "lengths and moves that rise over training": {"trend": 1.0},
    "prompts of 5 epochs": {"epochs": 5, "shared": 0.5},
    "prompts whose responses move alike": {"shared": 0.8},
    "heavy tails": {"freedom": 3},
}


NULLS: dict[str, dict] = {  # width right within every stratum
    "Gaussian": {},
    "t(3)": {"freedom": 3},
    "t(1.5)": {"freedom": 1.5},
    "prompts alike .9, 8 x 16": {"prompts": 8, "group": 16, "shared": 0.9},
    "lengths x 3, moves / 3": {"trend": math.log(3), "widen": -2 * math.log(3)},
    "lengths x 3, moves x 3": {"trend": math.log(3)},
    "two lengths": {"lengths": (60, 400)},
    "15% at the longest length": {"limit": 0.15},
    "20% rejected by their own size": {"rejected": 0.2},
    "fixed under S ~ L^0": {"own": 0.0, "power": 0.0},
    "L under S ~ L^1": {"own": 1.0, "power": 1.0},
    "GRPO's advantages, longer are worse": {"scores": True, "worse": 1.5},
}


def _cells() -> list[Cell]:
    even, shorter = Cell("even"), UNEVEN["shorter"]
    found = [even, *UNEVEN.values()]
    # Below ten steps no verdict on the run is right.
    found += [_of(cell, "5 steps", {"steps": 5}, action=RECORD) for cell in (even, *UNEVEN.values())]
    differ = "5 steps, slopes that differ by step, sd 0.3"
    found.append(_of(even, differ, {"steps": 5, "by_step": 0.3}, action=RECORD))
    found += [_of(cell, name, settings) for name, settings in FACTORS.items() for cell in (even, shorter)]
    for cell in list(UNEVEN.values())[1:]:
        for name in ("10 steps", "30 steps"):
            found.append(_of(cell, name, FACTORS[name], seen=cell.who == LONGER or name == "30 steps"))
    for rate, name in ((0.01, "1% clipped"), (0.25, "25% clipped")):
        found += [_of(even, name, {"rate": rate}), _of(shorter, name, {"rate": rate}, seen=rate > 0.1)]
    small = Cell("shorter by little", {"own": 0.6}, c.LENGTH, SHORTER, TAKE, seen=False)  # k of about -0.2
    high = Cell("77% clipped", {"rate": 0.77, "mini_batches": 8, "pull": 3.0}, c.LEVEL, None, TAKE)
    return [
        *(*found, small, _of(small, "30 steps", {"steps": 30}), high, _of(high, "5 steps", {"steps": 5})),
        *(Cell(f"null: {name}", settings) for name, settings in NULLS.items()),
        *(
            Cell(f"slopes that persist, sd {sd:g}, {steps} steps", {"persists": sd, "steps": steps})
            for steps in (15, 30, 100)
            for sd in (0.15, 0.3)
        ),
        Cell("a power that drifts by 0.6", {"steps": 20, "drift": 0.6}, c.CHANGE),
        Cell("longer are worse, and worse move thrice as far", {"worse": 1.5, "sides": 1 / 3}, between="side"),
        Cell("opposite bends of the sides", {"bends_apart": -0.3}, c.LENGTH, BY_SIDE),
        Cell("a dependence of the better alone", {"power": 0.65, "apart": 0.15}, c.LENGTH, None, seen=False),
        Cell("0.2% of the tokens are clipped", {"tokens": 0.002}),
        Cell("tokens that move together", {"power": 0.8}, c.LENGTH, LONGER, TAKE),
        Cell("noise only", {"mini_batches": 1, "noise": 0.01}, c.NOISE, None, FIX),
        Cell("noise as large as the moves", {"noise": 0.03}, c.NOISE, None, FIX),
        Cell("cut off", {"truncated": 0.4}, c.CUT_OFF, None, FIX),
        Cell("bypass, mismatch as large as the moves", {"bypass": True, "noise": 0.03}, c.MISMATCH, None, FIX),
        Cell("bypass, hardly any mismatch", {"bypass": True, "noise": 0.002}),
        Cell("nothing moved", {"still": True, "noise": 0.0, "rate": 0.0}, c.LEVEL, None, FIX),
        Cell("nothing clipped", {"rate": 0.0}, c.LEVEL, None, TAKE),
        Cell("not finite", {"broken": 0.05}, c.NOT_FINITE, None, FIX),
        Cell("worse responses move thrice as far", {"sides": 1 / 3}, c.SIDE, None, TAKE),
        Cell("few responses carry the gradient", {"size": 8.0}, c.WEIGHTS, None, FIX),
    ]


def _of(cell: Cell, name: str, settings: dict, **truth) -> Cell:
    """The cell with further settings, and what they change of its truth."""
    return replace(cell, name=f"{cell.name}, {name}", settings=cell.settings | settings, **truth)


def judged(cell: Cell, judgement: Judgement) -> tuple[str, str]:
    """Conclusion and advice, each right, wrong, or withheld."""
    said, effect = judgement.findings[0], judgement.evidence.lengths.effect
    if cell.cause in (c.SIDE, c.WEIGHTS) and said.id == c.EVEN:  # on lengths; it comes first, and is right as well
        said = next((one for one in judgement.findings if one.id == cell.cause), said)
    who = effect.who if effect else None
    if said.id == cell.cause:
        conclusion = RIGHT if cell.cause != c.LENGTH or cell.who in (None, who) else WRONG
        if cell.between and judgement.evidence.lengths.between != cell.between:
            conclusion = WRONG
    elif said.id == c.CHANGE and cell.persists:
        conclusion = CHANGED
    elif said.id == c.UNKNOWN or (cell.cause in (c.LENGTH, c.CHANGE) and said.id == c.EVEN):
        conclusion = WITHHELD
    else:
        conclusion = WRONG
    if cell.action == RECORD:  # no verdict on the run; what is said of the steps alone is a description
        return (RIGHT, RIGHT) if said.action == RECORD else (WRONG, WRONG)
    if judgement.verdict is Verdict.BETTER:
        return conclusion, RIGHT if _is_evener(cell, judgement) else WRONG
    if said.action == cell.action:
        return conclusion, RIGHT
    silent = said.action == RECORD or (cell.action == TAKE and said.action == KEEP)
    return conclusion, WITHHELD if silent else WRONG


def _is_evener(cell: Cell, said: Judgement) -> bool:
    """Whether the width to take follows the law of S more closely than the run's own, over the lengths of the run."""
    assert said.width is not None and said.width.band is not None
    x = 0.8 * norm.ppf((np.arange(99) + 1) / 100)
    width = said.width.band.scale(torch.tensor(_CENTER * np.exp(x))).log().numpy()
    of_better, taken, own = (cell.settings.get(name, 0.5 * (name != "apart")) for name in ("apart", "power", "own"))
    uneven = {"taken": 0.0, "own": 0.0}
    for sign in (-1, 1):
        bend = cell.settings.get("bend", 0.0) + sign * cell.settings.get("bends_apart", 0.0)
        law = (taken + sign * of_better) * x + bend * np.square(x)
        uneven["taken"] += np.var(law - width)
        uneven["own"] += np.var(law - own * x)
    return uneven["taken"] < uneven["own"]


def outcomes(cell: Cell, runs: Iterable[int]) -> Counter:
    """How often each pair of outcomes came in the runs of these numbers."""
    found: Counter = Counter()
    for run in runs:
        rng = np.random.default_rng([run, *cell.name.encode()])
        records = simulate(rng, **cell.settings)
        found[judged(cell, judge_records(records, records.attrs["settings"]))] += 1
    return found


CELLS = {cell.name: cell for cell in _cells()}


def line(cell: Cell, runs: int) -> list[str]:
    """Cells of the row that the table has of a truth."""
    runs *= 1 + cell.persists
    found = outcomes(cell, range(runs))
    shares = [
        sum(count for pair, count in found.items() if pair[place] == outcome) / runs
        for place in (0, 1)
        for outcome in OUTCOMES[: 4 - place]
    ]
    truth = ", ".join(filter(None, [cell.cause, cell.who, cell.action]))
    return [cell.name, truth, "yes" if cell.seen else "no", *(f"{share:.1%}" for share in shares)]


# --- policies that break ----------------------------------------------------------------------------------------------

NO_REWARD = "empty responses, no reward logged"

HEALTHY = (
    *("slow learning", "reward 0 throughout", "a reward now and then", "noise that persists", "a curriculum"),
    *("a warm-up", "reasoning that grows at once", "rewards below 0", "a penalty on length", "a dip that is made good"),
)
BREAKS = ("a slow decay", "repetition to the limit", "random words", "gradients explode", "empty responses", NO_REWARD)


def metrics_of(rng: np.random.Generator, kind: str) -> pd.DataFrame:
    """Metrics of 30 to 200 steps of a run of one of these kinds, as verl logs them; a break leaves a fifth of them."""
    steps = int(rng.integers(30, 200))
    time, number = np.arange(steps) / steps, np.arange(steps)
    middle = rng.uniform(0.2, 0.8)
    rise = lambda center, width: 1 / (1 + np.exp((center - time) / width))  # noqa: E731
    dip = np.exp(-np.square((time - rng.uniform(0.3, 0.6)) / 0.06))
    share = 0.1 + 0.5 * rise(middle, rng.uniform(0.03, 0.2))  # of the responses that are right
    length, entropy = rng.uniform(100, 2000), rng.uniform(0.2, 1) * np.exp(-rng.uniform(0, 1) * time)
    gradient, lowest = rng.uniform(0.05, 2), 0.0
    if kind == "slow learning":
        share = 0.02 + 0.04 * time
    elif kind == "reward 0 throughout":
        share, entropy = 0 * time, entropy * np.exp(-1.5 * time)
        length = length * np.exp(np.cumsum(0.05 * rng.standard_normal(steps)))
    elif kind == "a reward now and then":
        share, entropy = 0.0005 + 0 * time, entropy * np.exp(-1.5 * time)
    elif kind == "noise that persists":
        share = 0.3 + 0.12 * _persistent(rng, steps, 0.9)
    elif kind == "a curriculum":
        stage = (time > middle).astype(int) + (time > (1 + middle) / 2)
        share, length = np.array([0.6, 0.3, 0.1])[stage], length * np.array([1, 1.6, 2.5])[stage]
    elif kind == "a warm-up":
        share = 0.05 + 0.5 * time * np.minimum(number / 10, 1)
        gradient = gradient * (1 + 10 * np.exp(-number / 4))
    elif kind == "reasoning that grows at once":
        length = 150 * (1 + rng.uniform(4, 12) * rise(middle, 0.02))
        share = share * (1 - 0.5 * np.exp(-np.square((time - middle) / 0.04)))
        entropy = entropy * (1 + rise(middle, 0.03))
    elif kind == "rewards below 0":
        lowest = -1.0
    elif kind == "a penalty on length":
        length, entropy = length * np.exp(-1.6 * rise(0.5, 0.1)), entropy * np.exp(-1.5 * time)
    elif kind == "a dip that is made good":
        share, length, entropy = share * (1 - 0.95 * dip), length * np.exp(-1.8 * dip), entropy * np.exp(-1.5 * dip)
    else:
        since = int(rng.integers(steps // 4, steps * 4 // 5))
        gone = np.clip((number - since) / (1 if "empty" in kind or kind == NO_REWARD else 4), 0, 1)
        if kind == "a slow decay":
            gone = np.clip((number - since) / (0.6 * (steps - since)), 0, 1)
        share = (0.15 + 0.45 * np.minimum(2 * time, 1)) * (1 - 0.97 * gone)
        to_length, to_entropy, to_gradient = {
            "a slow decay": (0.08, 0.15, 1.0),
            "repetition to the limit": (8192 / length, 0.02, 1.0),
            "random words": (8192 / length, 10.0, 1.0),
            "gradients explode": (1.0, 1.0, 100.0),
            "empty responses": (2 / length, 1.0, 1.0),
            NO_REWARD: (2 / length, 0.05, 1.0),
        }[kind]
        length, entropy, gradient = length * to_length**gone, entropy * to_entropy**gone, gradient * to_gradient**gone
    responses = int(rng.choice([64, 256, 1024]))
    spread = lambda size: np.exp(size * _persistent(rng, steps))  # noqa: E731
    values = {
        "critic/score/mean": lowest + (1 - lowest) * rng.binomial(responses, share.clip(0, 1)) / responses,
        "response_length/mean": length * spread(0.08),
        "actor/entropy": entropy * spread(0.1),
        "actor/grad_norm": gradient * np.exp(np.clip(0.25 * rng.standard_t(3, steps), -3, 3)),
    }
    table = pd.DataFrame(values, index=pd.RangeIndex(1, steps + 1, name="step"))
    return table.drop(columns="critic/score/mean") if kind == NO_REWARD else table


def called_broken(kind: str, runs: int) -> float:
    """Share of the runs of a kind whose policy is said to have broken."""
    return (
        sum(find_break(metrics_of(np.random.default_rng([n, *kind.encode()]), kind)) is not None for n in range(runs))
        / runs
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="of each cell (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="WORD", help="cells with this in their name")
    args = parser.parse_args()
    heads = [f"{which} {one}" for which, some in (("conclusion", OUTCOMES), ("advice", OUTCOMES[:3])) for one in some]
    heads = ["simulated", "truth", "to be seen", *heads]
    for cells in (heads, ["---"] * len(heads)):
        print(f"| {' | '.join(cells)} |")
    for cell in CELLS.values():
        if args.only in cell.name:
            print(f"| {' | '.join(line(cell, args.runs))} |", flush=True)
    print("\n| policy | truth | called broken |\n| --- | --- | --- |")
    for kind in (*HEALTHY, *BREAKS):
        if args.only in kind:
            print(f"| {kind} | {'healthy' if kind in HEALTHY else 'broken'} | {called_broken(kind, args.runs):.1%} |")


if __name__ == "__main__":
    main()
