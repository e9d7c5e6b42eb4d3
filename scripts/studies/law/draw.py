# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the records of the law say: law.png, widths.png, numbers.csv and fairness.csv, from the records alone.

  python scripts/studies/law/draw.py [RECORDS] [--output FOLDER]

numbers.csv has a row per state, kind of prompt, part and quantity, with a 95% interval clustered by prompt. The part
"loops" are the responses of whose 4-grams fewer than 80% are different, "plain" the others. fairness.csv says how four
widths clip at one rate overall: k in clip rate ~ length^k, and how far the weight of a length, or of a kind, moves.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from estimates import UNKNOWN, exponent, interval, root_mean
from law import PROBABILITIES, recorded
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pictures import small_png
from prompts import KINDS
from studies.fitted import fitted_power

from fspo_verl.analysis import clip_rates
from fspo_verl.analysis.clip_rates import Estimate, length_edges, prompts_of, rate_by_length
from fspo_verl.analysis.length_effect import length_effect
from fspo_verl.band import Band
from fspo_verl.clips import MATCHED_RATE, BandClip
from fspo_verl.output import write_whole
from fspo_verl.report import figures
from fspo_verl.report.figures import AMBER, BLACK, BROWN, GREY, STYLES, Series, Style

HERE = Path(__file__).resolve().parent
STATE = ["temperature", "direction", "mini_batch"]
ALL = "all"
LOOP = 0.8  # of a response whose 4-grams are less distinct than this
PREFIXES = 127, 511, 2047  # tokens that a response needs where its prefixes are compared, and up to which they are
_FIRST = 3  # the shortest prefix has 2^3 − 1 tokens
_BINS = 6  # of length
WIDTHS: dict[str, Callable[[pd.DataFrame], Band]] = {
    "sqrt(L)": lambda other: Band(),
    "fitted": lambda other: Band(length_power=fitted_power(other, MATCHED_RATE)),
    "fixed": lambda other: Band(length_power=0.0),
    "L": lambda other: Band(length_power=1.0),
}
"""Band whose width is judged on some prompts, from the records of the others."""
_KIND_STYLES = {"text": Style(AMBER, "o"), "chat": Style(GREY, "s"), "steps": Style(BROWN, "^")}
_WIDTH_STYLES = {
    "sqrt(L)": ("√L (fspo)", STYLES["fspo"]),
    "fitted": ("a fitted power", Style(BLACK, "*")),
    "fixed": ("fixed", STYLES["fixed_band"]),
    "L": ("L (GSPO's shape)", STYLES["gspo"]),
}
"""What a width is called in a figure, and how it is drawn: as the loss whose shape it has."""


def read(folder: Path) -> pd.DataFrame:
    """The records in a folder, a row per response and state, with S, Q and is_loop.

    Raises:
        SystemExit: there is none.
    """
    records = recorded(folder).table().to_pandas()
    if records.empty:
        raise SystemExit(f"{folder} holds no records; python scripts/studies/law/law.py writes them")
    totals = {"log_ratio": records.s.map(np.sum), "quadratic_variation": records.q.map(np.sum)}
    return records.assign(step=1, is_loop=records.distinct < LOOP, **totals)


def by_kind(records: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The responses of every kind, and all of them."""
    for kind in KINDS:
        yield kind, records[records.kind == kind]
    yield ALL, records


# --- the spread of S -------------------------------------------------------------------------------------------------


def _block(column: pd.Series, block: int) -> np.ndarray:
    return np.array([values[block] for values in column], np.float64)


def exponent_within(records: pd.DataFrame, last: int) -> Estimate:
    """p over the prefixes of 7, 15, ..., ``last`` tokens of the responses with so many: content cannot explain it."""
    long = records[records.length >= last]
    if long.empty:
        return UNKNOWN
    blocks = last.bit_length()
    sums = np.cumsum([_block(long.s, block) for block in range(blocks)], axis=0)[_FIRST - 1 :]
    tokens = 2 ** np.arange(_FIRST, blocks + 1) - 1
    return exponent(sums.ravel(), np.repeat(tokens, len(long)), np.tile(prompts_of(long), len(tokens)))


def by_position(records: pd.DataFrame, last: int) -> pd.DataFrame:
    """Spread of a token by its position, in the responses with ``last`` tokens: low, high, value, lower, upper."""
    long, rows = records[records.length >= last], []
    for block in range(last.bit_length() if len(long) else 0):
        size = np.full(len(long), 2**block)
        rows.append((2**block, 2 ** (block + 1) - 1, *root_mean(_block(long.q, block), size, prompts_of(long))))
    return pd.DataFrame(rows, columns=["low", "high", "value", "lower", "upper"])


def by_probability(records: pd.DataFrame) -> pd.DataFrame:
    """Spread of a token by its old probability: low, high, value, lower, upper, and its shares of tokens and of Q."""
    tokens, squares = (np.stack(records[name]) for name in ("tokens_by_probability", "q_by_probability"))
    rows = []
    for cell, (low, high) in enumerate(zip(PROBABILITIES, PROBABILITIES[1:], strict=False)):
        count, q = tokens[:, cell], squares[:, cell]
        shares = (count.sum() / tokens.sum(), q.sum() / squares.sum() if squares.any() else math.nan)
        rows.append((low, high, *root_mean(q, count, prompts_of(records)), *shares))
    return pd.DataFrame(rows, columns=["low", "high", "value", "lower", "upper", "of_tokens", "of_q"])


def by_length(records: pd.DataFrame) -> pd.DataFrame:
    """Root mean square of S by length: low, high, n, value, lower, upper."""
    edges, rows = length_edges(records.length, _BINS), []
    for low, high in zip(edges, edges[1:], strict=False):
        part = records[records.length.between(low, high - 1)]
        found = root_mean(np.square(part.log_ratio), np.ones(len(part)), prompts_of(part)) if len(part) else UNKNOWN
        rows.append((low, high - 1, len(part), *found))
    return pd.DataFrame(rows, columns=["low", "high", "n", "value", "lower", "upper"])


def quantities(records: pd.DataFrame) -> Iterator[tuple[str, Estimate]]:
    """Every quantity of some responses by its name."""
    yield "responses", UNKNOWN._replace(value=len(records))
    if records.empty:
        return
    yield "p by length", exponent(records.log_ratio, records.length, prompts_of(records))
    for last in (tokens for tokens in PREFIXES if tokens <= records.length.max()):
        yield f"p within responses, to {last} tokens", exponent_within(records, last)
        for row in by_position(records, last).itertuples():
            name = f"sigma of tokens {row.low} to {row.high} of at least {last}"
            yield name, Estimate(row.value, row.lower, row.upper)
    for row in by_probability(records).itertuples():
        name = f"old probability {row.low} to {row.high}"
        yield f"sigma at {name}", Estimate(row.value, row.lower, row.upper)
        yield f"share of tokens at {name}", UNKNOWN._replace(value=row.of_tokens)
        yield f"share of Q at {name}", UNKNOWN._replace(value=row.of_q)


def numbers(records: pd.DataFrame) -> pd.DataFrame:
    """numbers.csv."""
    rows = []
    for state, of_state in records.groupby(STATE):
        for kind, part in by_kind(of_state):
            share = part.is_loop.mean()
            influence = (part.is_loop - share) / len(part)
            rows.append((*state, kind, ALL, "share of loops", *interval(share, influence, prompts_of(part))))
            for name, responses in (("plain", part[~part.is_loop]), ("loops", part[part.is_loop])):
                rows += [(*state, kind, name, *found[:1], *found[1]) for found in quantities(responses)]
    return pd.DataFrame(rows, columns=[*STATE, "kind", "part", "quantity", "value", "lower", "upper"])


# --- who is clipped --------------------------------------------------------------------------------------------------


def clipped(records: pd.DataFrame, width: str) -> np.ndarray:
    """What a width clips, 0 or 1 ``[rows]``, at one rate on each half of the prompts; a power is fitted on the other.

    Raises:
        ValueError: too few responses are where they can be clipped.
    """
    first, found = prompts_of(records) % 2 == 0, np.zeros(len(records))
    for half in (first, ~first):
        band = WIDTHS[width](records[~half])
        found[half] = BandClip("", "", band).matched(records[half], MATCHED_RATE).clipped(records[half])
    return found


def weight_moved(table: pd.DataFrame) -> tuple[float, float]:
    """abs(acceptance of a bin / acceptance overall − 1): the mean over responses, and the largest (LRE)."""
    used = table[clip_rates.has_enough_data(table)]
    overall = 1 - np.average(table.rate.fillna(0), weights=table.n)
    moved = (1 - used.rate) / overall - 1
    mean = np.average(moved.abs(), weights=used.n) if len(used) > 1 else math.nan
    return float(mean), clip_rates.length_reweighting_error(table)


def judge(records: pd.DataFrame, clips: np.ndarray) -> dict[str, float]:
    """Numbers of a clip: its rate, k with its interval and p, and the weight moved between lengths and kinds."""
    counted, effect = (records.advantage != 0).to_numpy(), length_effect(records, clips)
    records, clips = records[counted], clips[counted]
    found = {"n": len(records), "rate": clips.mean()}
    names = ("k", "k_lower", "k_upper", "p")
    found |= dict(zip(names, effect[:4] if effect else [math.nan] * 4, strict=True))
    by = rate_by_length(records.length, clips, length_edges(records.length, _BINS), prompts_of(records))
    found |= dict(zip(("lengths_mean", "lengths_largest"), weight_moved(by), strict=True))
    kind = records.kind.map(list(KINDS).index)
    by = rate_by_length(kind, clips, range(len(KINDS) + 1), prompts_of(records))
    found |= dict(zip(("kinds_mean", "kinds_largest"), weight_moved(by), strict=True))
    for name, row in zip(KINDS, by.itertuples(), strict=True):
        found |= {name: row.rate, f"{name}_lower": row.lower, f"{name}_upper": row.upper}
    return found


def fairness(records: pd.DataFrame) -> pd.DataFrame:
    """fairness.csv: a row per state, kind, part and width; a width that cannot be judged is left out."""
    rows = []
    for state, of_state in records.groupby(STATE):
        for kind, of_kind in by_kind(of_state):
            for part, responses in (("plain", of_kind[~of_kind.is_loop]), (ALL, of_kind)):
                for width in WIDTHS:
                    try:
                        found = judge(responses, clipped(responses, width))
                    except ValueError:
                        continue
                    key = dict(zip(STATE, state, strict=True))
                    rows.append(key | {"kind": kind, "part": part, "width": width} | found)
    return pd.DataFrame(rows)


# --- figure ----------------------------------------------------------------------------------------------------------


def draw(records: pd.DataFrame, columns: int) -> Figure:
    """Four panels for each temperature, of the last state of GRPO and without loops."""
    states = _drawn(records)
    figure, axes = figures.grid(4 * len(states), columns, height=3.0)
    for number, (temperature, part) in enumerate(states.items()):
        spread, position, probability, rates = axes[4 * number : 4 * number + 4]
        kinds = _draw_spread(spread, part, f"temperature {temperature:g}: ")
        _draw_kinds(position, kinds, lambda of: by_position(of, PREFIXES[0]), "spread of a token", "sigma (nats)")
        position.set(xlabel="position in the response (tokens)", ylim=(0, None))
        _draw_probabilities(probability, kinds)
        _draw_rates(rates, part)
    return figure


def draw_widths(records: pd.DataFrame) -> Figure:
    """For a page that a phone shows too: of the highest temperature the spread of S, and below it the clip rates."""
    figure, (spread, rates) = figures.grid(2, 1, height=2.7)
    part = next(iter(_drawn(records).values()))
    _draw_spread(spread, part)
    _draw_rates(rates, part)
    return figure


def _drawn(records: pd.DataFrame) -> dict[float, pd.DataFrame]:
    """What figures show, by temperature, from the highest: the last state of GRPO, without loops."""
    grpo = records[(records.direction == "grpo") & ~records.is_loop]
    grpo = grpo[grpo.mini_batch == grpo.mini_batch.max()]
    return dict(sorted(grpo.groupby("temperature"), reverse=True))


def _draw_spread(axes: Axes, records: pd.DataFrame, title: str = "") -> dict[str, pd.DataFrame]:
    """Draws S by length, a line per kind; returns the responses of each kind."""
    kinds = {kind: of_kind for kind, of_kind in by_kind(records) if kind != ALL and len(of_kind)}
    _draw_kinds(axes, kinds, by_length, f"{title}spread of S", "rms of S (nats)")
    axes.set_yscale("log")
    figures.round_ticks(axes.yaxis)
    axes.legend(loc="lower right")
    return kinds


def _draw_kinds(axes: Axes, kinds: dict, table: Callable, title: str, label: str) -> None:
    figures.by_length(axes, [Series(kind, _KIND_STYLES[kind], table(part), "value") for kind, part in kinds.items()])
    axes.set(title=title, ylabel=label)


def _draw_probabilities(axes: Axes, kinds: dict) -> None:
    names = [f"{low:g}–{high:g}" for low, high in zip(PROBABILITIES, PROBABILITIES[1:], strict=False)]
    for kind, part in kinds.items():
        axes.plot(names, by_probability(part).value, **_KIND_STYLES[kind].line_kwargs())
    axes.set(title="spread of a token", xlabel="old probability", ylabel="sigma (nats)", ylim=(0, None))


def _draw_rates(axes: Axes, records: pd.DataFrame) -> None:
    series, edges = [], length_edges(records.length, _BINS)
    counted = (records.advantage != 0).to_numpy()
    for width, (label, style) in _WIDTH_STYLES.items():
        try:
            clips = clipped(records, width)[counted]
        except ValueError:
            continue
        part = records[counted]
        series.append(Series(label, style, rate_by_length(part.length, clips, edges, prompts_of(part))))
    if series:
        figures.clip_rates(axes, f"clip rate of four widths, each at {MATCHED_RATE:.0%} overall", series, MATCHED_RATE)
        axes.legend(loc="upper center", ncols=2)
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="?", type=Path, default=HERE / "records", help="default: the published ones")
    parser.add_argument("--output", type=Path, default=HERE, metavar="FOLDER", help="default: the study's folder")
    args = parser.parse_args(argv)
    records = read(args.records)
    tables = {"numbers.csv": numbers(records), "fairness.csv": fairness(records)}
    files = {name: table.to_csv(index=False, float_format="%.4g").encode() for name, table in tables.items()}
    for name, picture, columns in (("law", draw, 2), ("widths", lambda records, _: draw_widths(records), 1)):
        (image,) = figures.render(lambda columns, picture=picture: picture(records, columns), columns, "png")
        files[f"{name}.png"] = small_png(image)
    write_whole((args.output / name, content) for name, content in files.items())
    print("\n".join(str(args.output / name) for name in files))


if __name__ == "__main__":
    main()
