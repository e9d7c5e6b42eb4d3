# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the records of the law say: law.png, numbers.csv and rates.csv, from the records alone.

  python scripts/studies/law/draw.py [RECORDS] [--output FOLDER]

numbers.csv has a row per cell and quantity, with a 95% interval clustered by prompt; k is that of clip rate ~ length^k
of a clip scaled to the common rate. rates.csv has the clip rate of every clip by length and by mini-batch.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from bootstrap import UNKNOWN, clustered_bootstrap
from matplotlib.axes import Axes
from spread import law_of_s
from tqdm import tqdm
from write_records import POSITIONS

from fspo_verl.analysis import clip_rates
from fspo_verl.analysis.clip_rates import Estimate
from fspo_verl.clips import CLIPS, MATCHED_RATE
from fspo_verl.observe.records import read_records
from fspo_verl.output import write_whole
from fspo_verl.report import Counterfactuals, at_one_rate, counterfactuals, figures
from fspo_verl.report.figures import STYLES, Series, Style

HERE = Path(__file__).resolve().parent
SHAPES = {
    "fspo": "√L (FSPO)",
    "fspo_drift_corrected": "√L, centre −Q/2",
    "fixed_band": "fixed",
    "gspo": "L (GSPO)",
    "fspo_studentized": "√Q, centre −Q/2",
}
_STYLES = {"grpo": Style("#0072B2", "o"), "warm": Style("#009E73", "^", ":"), "random": Style("#D55E00", "s", "--")}
_DRAWS = 400
_SAME_RESPONSES = 128  # tokens: positions are compared within responses of at least so many


class Measured(NamedTuple):
    """The records of one cell, the sums by position of its responses, and its bins of length."""

    name: str
    records: pd.DataFrame
    positions: pd.DataFrame
    edges: np.ndarray


def read(folder: Path) -> dict[str, Measured]:
    """Every cell below a folder, by name.

    Raises:
        SystemExit: there is none.
    """
    cells = {}
    for file in sorted(folder.glob(f"*/{POSITIONS}")):
        records = read_records(file.parent)
        # Fewer bins for fewer responses: a bin needs 50 to take part.
        edges = clip_rates.length_edges(records.length, int(np.clip(len(records) // 100, 3, 7)))
        cells[file.parent.name] = Measured(file.parent.name, records, pd.read_parquet(file), edges)
    if not cells:
        raise SystemExit(f"{folder} holds no records; python scripts/studies/law/law.py writes them")
    return cells


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


# --- estimates that only this study needs ----------------------------------------------------------------------------


def _estimate(cluster, columns: Sequence, statistic: Callable) -> Estimate:
    if not len(cluster):
        return UNKNOWN
    estimate = clustered_bootstrap(cluster, np.column_stack(columns), statistic, _rng(), _DRAWS)
    return Estimate(*(value.item() for value in estimate))


def _root_of_ratio(totals: np.ndarray) -> np.ndarray:
    return np.sqrt(totals[..., 1:] / totals[..., :1])


def rms(records: pd.DataFrame, over: str) -> Estimate:
    """Root mean square, over the responses that moved, of S/√L (``over`` length) or S/√Q (quadratic_variation)."""
    moved = records[records.quadratic_variation > 0]
    squares = moved.log_ratio.to_numpy(float) ** 2 / moved[over].to_numpy(float)
    return _estimate(clip_rates.prompts_of(moved), [np.ones(len(moved)), squares], _root_of_ratio)


def by_position(positions: pd.DataFrame, shortest: int = _SAME_RESPONSES) -> pd.DataFrame:
    """Spread sqrt(ΣQ/Σtokens) of a token's log-ratio by its position, within the same responses.

    Of the responses with at least ``shortest`` tokens, up to that position. Columns low, high, n, value, lower, upper.
    """
    same = positions[(positions.length >= shortest) & (2 * positions.low - 1 <= shortest)]
    rows = []
    for low, part in same.groupby("low"):
        cluster = pd.factorize(part.prompt)[0]
        estimate = _estimate(cluster, [part.tokens, part.quadratic_variation.astype(float)], _root_of_ratio)
        rows.append((low, 2 * low - 1, len(part), *estimate))
    return pd.DataFrame(rows, columns=["low", "high", "n", "value", "lower", "upper"])


def exponent_within(positions: pd.DataFrame, first: int = 8, last: int = _SAME_RESPONSES) -> Estimate:
    """p in std(S of the first l tokens) ~ l^p, over the prefixes l = first, 2·first, ..., last of the same responses.

    Other than the exponent over responses of different lengths it is not mixed with what distinguishes prompts with
    short answers from those with long ones. Least-squares slope; NaN without responses as long as ``last``, and where
    none has moved in the first prefix.
    """
    same = positions[(positions.length >= last) & (positions.low < last)]
    if same.empty:
        return UNKNOWN
    table = same.pivot(index="response", columns="low", values="log_ratio").cumsum(axis=1)
    prefixes = [low for low in table if first <= 2 * low <= last]  # the sum through 2·low − 1 tokens
    prompt = same.drop_duplicates("response").set_index("response").prompt[table.index]
    s = table[prefixes].to_numpy(float)
    if not s[:, 0].any():
        return UNKNOWN
    x = np.log([2 * low - 1 for low in prefixes])
    x = x - x.mean()

    def slope(totals):
        n, mean, square = totals[..., :1], totals[..., 1 : 1 + len(x)], totals[..., 1 + len(x) :]
        y = np.log(np.maximum(square / n - (mean / n) ** 2, 1e-30)) / 2
        return (y @ x / (x @ x))[..., None]

    return _estimate(pd.factorize(prompt)[0], [np.ones(len(s)), s, s**2], slope)


# --- numbers ---------------------------------------------------------------------------------------------------------


def _scaled_clips(records: pd.DataFrame) -> dict:
    return at_one_rate(records, {name: CLIPS[name] for name in SHAPES})


def _rates(cell: Measured, edges: np.ndarray) -> Counterfactuals | None:
    """Clip rates by length and LRE at one rate overall; None where no clip can be scaled to it."""
    clips = _scaled_clips(cell.records)
    return counterfactuals(cell.records, edges, clips) if clips else None


def numbers(cell: Measured) -> Iterator[tuple[str, Estimate]]:
    """Every quantity of a cell by its name."""
    records = cell.records
    law = law_of_s(records, cell.edges, _rng(), _DRAWS)
    yield "sigma of a token", law.sigma
    yield "exponent by length", law.std_slope
    yield "exponent within responses", exponent_within(cell.positions)
    yield "kappa", law.kappa
    yield "rms S/sqrt(Q)", rms(records, "quadratic_variation")
    for row in law.std_by_length[law.std_by_length.n > 0].itertuples():
        yield f"std of S, L {row.low} to {row.high}", Estimate(row.value, row.lower, row.upper)
        part = records[records.length.between(row.low, row.high)]
        yield f"rms S/sqrt(Q), L {row.low} to {row.high}", rms(part, "quadratic_variation")
    for name in ("fspo", "gspo", "fixed_band"):
        yield f"outside the usual {name}", UNKNOWN._replace(value=CLIPS[name].outside(records).mean())
    if records.mini_batch.nunique() > 1:
        for mini_batch, part in records[records.mini_batch > 0].groupby("mini_batch"):
            yield f"rms S/sqrt(L), mini-batch {mini_batch}", rms(part, "length")
            yield f"rms S/sqrt(Q), mini-batch {mini_batch}", rms(part, "quadratic_variation")
    elif found := _rates(cell, cell.edges):
        for row in found.summary.itertuples():
            yield f"k of {row.Index}", Estimate(row.exponent, row.exponent_lower, row.exponent_upper)


def rates(cell: Measured) -> pd.DataFrame:
    """Clip rates at one rate overall: columns clip, of (length or mini_batch), low, high, n, rate."""
    columns, tables = ["clip", "of", "low", "high", "n", "rate"], []
    if found := _rates(cell, cell.edges):
        by_length = found.by_length.query("n > 0").rename_axis("clip").reset_index()
        tables.append(by_length.assign(of="length")[columns])
    counted = cell.records[(cell.records.advantage != 0) & (cell.records.mini_batch > 0)]
    if counted.mini_batch.nunique() > 1:  # mini-batch 0 has not moved: no clip takes anything from it
        for name, clip in _scaled_clips(counted).items():
            clipped = pd.Series(clip.clipped(counted)).groupby(counted.mini_batch.to_numpy()).agg(["size", "mean"])
            bins = {"low": clipped.index, "high": clipped.index, "n": clipped["size"], "rate": clipped["mean"]}
            tables.append(pd.DataFrame({"clip": name, "of": "mini_batch"} | bins))
    return pd.concat(tables) if tables else pd.DataFrame(columns=columns)


def tables(cells: dict[str, Measured]) -> dict[str, pd.DataFrame]:
    """numbers.csv and rates.csv."""
    found, by_bin = [], []
    for name, cell in tqdm(cells.items(), desc="cells", leave=False):
        found += [(name, quantity, *estimate) for quantity, estimate in numbers(cell)]
        by_bin.append(rates(cell).assign(cell=name).set_index("cell").reset_index())
    columns = ["cell", "quantity", "value", "lower", "upper"]
    return {"numbers.csv": pd.DataFrame(found, columns=columns), "rates.csv": pd.concat(by_bin, ignore_index=True)}


# --- figure ----------------------------------------------------------------------------------------------------------


def draw(cells: dict[str, Measured], columns: int):
    """Three panels, of the cells after four steps: spread of S by length, of a token by position, and clip rates.

    Raises:
        SystemExit: there is no such cell.
    """
    strong = {d: cell for d in _STYLES if (cell := cells.get(f"{d}-4-float32"))}
    if not strong:
        raise SystemExit(f"the figure shows {', '.join(f'{name}-4-float32' for name in _STYLES)}; none is measured")
    figure, (spread, position, clipped) = figures.grid(3, columns, height=3.9)
    laws = {direction: law_of_s(cell.records, cell.edges, _rng(), _DRAWS) for direction, cell in strong.items()}
    series = [
        Series(f"{direction}, p = {law.std_slope.value:.2f}", _STYLES[direction], law.std_by_length, "value")
        for direction, law in laws.items()
    ]
    _draw_spread(spread, series, [law.std_slope.value for law in laws.values()])
    _draw_positions(position, strong)
    direction, cell = next(iter(strong.items()))
    if found := _rates(cell, cell.edges):
        table = found.by_length
        names = [name for name in ("fspo", "fixed_band", "gspo", "fspo_studentized") if name in table.index]
        shown = [Series(SHAPES[name], STYLES[name], table.loc[[name]]) for name in names]
        figures.clip_rates(clipped, f"clip rates, scaled ({direction})", shown, MATCHED_RATE)
        _legend_below(clipped)
    return figure


def _legend_below(axes: Axes) -> None:
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.19), "borderaxespad": 0.0}
    axes.legend(alignment="left", **place)


def _draw_spread(axes: Axes, series: Sequence[Series], slopes: Sequence[float]) -> None:
    """The spread of S by length with the fitted power of L, and √L through the same points."""
    figures.by_length(axes, [one._replace(style=one.style._replace(line="none")) for one in series])
    axes.set(ylabel="standard deviation of S (nats)", title="spread of a response's log-ratio S")
    points = [one.table[one.table[one.column] > 0] for one in series]
    logs = [(np.log(t.low * t.high) / 2, np.log(t[one.column]), t.n) for t, one in zip(points, series, strict=True)]
    if any(map(len, points)):
        axes.set_yscale("log")
        figures.round_ticks(axes.yaxis)
    for log, one, slope in zip(logs, series, slopes, strict=True):
        if math.isfinite(slope):
            _power(axes, *log, slope, color=one.style.color, ls="--")
    _power(axes, *map(np.concatenate, zip(*logs, strict=True)), 0.5, color=figures.GREY, ls="-", label="√L")
    _legend_below(axes)


def _power(axes: Axes, length, level, weight, power: float, **kwargs) -> None:
    """A power of the length through the centre of points that are given by their logarithms."""
    if len(length):
        ends = np.array([length.min(), length.max()])
        line = np.average(level, weights=weight) + power * (ends - np.average(length, weights=weight))
        axes.plot(np.exp(ends), np.exp(line), lw=1, **kwargs)


def _draw_positions(axes: Axes, cells: dict[str, Measured]) -> None:
    profiles = {direction: by_position(cell.positions) for direction, cell in cells.items()}
    figures.by_length(axes, [Series(name, _STYLES[name], table, "value") for name, table in profiles.items()])
    axes.set(xlabel="position in the response (tokens)", ylabel="spread of a token's log-ratio (nats)", ylim=(0, None))
    axes.set_title("spread of a token by its position")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="?", type=Path, default=HERE / "records", help="default: the published ones")
    parser.add_argument("--output", type=Path, default=HERE, metavar="FOLDER", help="default: the study's folder")
    args = parser.parse_args(argv)
    cells = read(args.records)
    files = {name: table.to_csv(index=False, float_format="%.4g").encode() for name, table in tables(cells).items()}
    (files["law.png"],) = figures.render(lambda columns: draw(cells, columns), 3, "png")
    write_whole((args.output / name, content) for name, content in files.items())
    print("\n".join(str(args.output / name) for name in files))


if __name__ == "__main__":
    main()
