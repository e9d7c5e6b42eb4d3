# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The page on the law of S: tables and figure from the published records, and nothing else."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from publish import POSITIONS, SETTINGS
from tqdm import tqdm

from fspo_verl.analysis import clip_rates, resampling
from fspo_verl.analysis.counterfactuals import Counterfactuals, counterfactuals
from fspo_verl.analysis.law import LawOfS, law_of_s
from fspo_verl.analysis.resampling import Estimate
from fspo_verl.clips import CLIPS, MATCHED_RATE, BandClip
from fspo_verl.files import between, markdown_table
from fspo_verl.observe.records import read_records
from fspo_verl.report import figures
from fspo_verl.report.figures import GREY, Series
from fspo_verl.report.style import STYLES, Style

SHAPES = {
    "fspo": "√L (FSPO)",
    "fspo_drift_corrected": "√L, centre −Q/2",
    "fixed_band": "fixed",
    "gspo": "L (GSPO)",
    "fspo_studentized": "√Q, centre −Q/2",
}
_STYLES = {"grpo": Style("#0072B2", "o"), "random": Style("#D55E00", "s", "--"), "warm": Style("#009E73", "^", ":")}
_DRAWS = 400
_BEGIN = "<!-- begin of what `python scripts/law.py --redraw` writes: {} -->"
_END = "<!-- end of {} -->"
_NOTHING = Estimate(math.nan, math.nan, math.nan)
_BINS = (3, 5, 7)  # of lengths: what an LRE says depends on them
_SAME_RESPONSES = 128  # tokens: positions are compared within responses of at least so many


@dataclass
class Measured:
    """The records of one cell and what they say."""

    name: str
    records: pd.DataFrame
    positions: pd.DataFrame
    edges: np.ndarray

    @property
    def direction(self) -> str:
        return self.name.split("-")[0]

    def law(self) -> LawOfS:
        return law_of_s(self.records, self.edges, _rng(), _DRAWS)


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def read(folder: Path) -> dict[str, Measured]:
    """Every cell below a folder, by name, those of one direction together."""
    cells = {}
    for file in sorted(folder.glob(f"*/{POSITIONS}")):
        records = read_records(file.parent)
        # Fewer bins for fewer responses: a bin needs 50 to take part.
        bins = int(np.clip(len(records) // 100, 3, 7))
        edges = clip_rates.length_edges(records.length, bins)
        cells[file.parent.name] = Measured(file.parent.name, records, pd.read_parquet(file), edges)
    if not cells:
        raise SystemExit(f"{folder} holds no records: python scripts/law.py --publish {folder} writes them")
    order = ["grpo", "warm", "random", "still"]
    return dict(sorted(cells.items(), key=lambda item: (order.index(item[1].direction), item[0])))


# --- estimates that only this page needs -----------------------------------------------------------------------------


def _moved(records: pd.DataFrame) -> pd.DataFrame:
    return records[records.quadratic_variation > 0]


def _estimate(cluster, columns: Sequence, statistic: Callable) -> Estimate:
    """A number from column totals, see :func:`fspo_verl.analysis.resampling.clustered_bootstrap`; NaN without rows."""
    if not len(cluster):
        return _NOTHING
    estimate = resampling.clustered_bootstrap(cluster, np.column_stack(columns), statistic, _rng(), _DRAWS)
    return Estimate(*(value.item() for value in estimate))


def _root_of_ratio(totals: np.ndarray) -> np.ndarray:
    return np.sqrt(totals[..., 1:] / totals[..., :1])


def _rms(moved: pd.DataFrame, over: str) -> Estimate:
    """Root mean square of S/√L (``over`` length) or S/√Q (``over`` quadratic_variation)."""
    squares = moved.log_ratio.to_numpy(float) ** 2 / moved[over].to_numpy(float)
    return _estimate(resampling.clusters(moved), [np.ones(len(moved)), squares], _root_of_ratio)


def rms_of_ratio(records: pd.DataFrame, edges) -> pd.DataFrame:
    """sqrt(mean S²/Q) of the responses that moved, by length bin: columns low, high, n, value, lower, upper."""
    moved = _moved(records)
    cell, cells = clip_rates.length_cells(moved.length, edges)
    estimates = pd.DataFrame([_rms(moved[cell == i], "quadratic_variation") for i in range(cells)])
    return clip_rates.length_table(edges, n=np.bincount(cell, minlength=cells), **estimates)


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
        return _NOTHING
    table = same.pivot(index="response", columns="low", values="log_ratio").cumsum(axis=1)
    prefixes = [low for low in table if first <= 2 * low <= last]  # the sum through 2·low − 1 tokens
    prompt = same.drop_duplicates("response").set_index("response").prompt[table.index]
    s = table[prefixes].to_numpy(float)
    if not s[:, 0].any():
        return _NOTHING
    x = np.log([2 * low - 1 for low in prefixes])
    x = x - x.mean()

    def slope(totals):
        n, mean, square = totals[..., :1], totals[..., 1 : 1 + len(x)], totals[..., 1 + len(x) :]
        y = np.log(np.maximum(square / n - (mean / n) ** 2, 1e-30)) / 2
        return (y @ x / (x @ x))[..., None]

    return _estimate(pd.factorize(prompt)[0], [np.ones(len(s)), s, s**2], slope)


def over_mini_batches(records: pd.DataFrame) -> pd.DataFrame:
    """Records whose "length" is the number of the mini-batch, and whose "tokens" are their length.

    What the package asks of lengths is then asked of mini-batches, with :data:`OVER_MINI_BATCHES` as the clips.
    Mini-batch 0 has not moved and is left out: no clip can take anything from it.
    """
    records = records[records.mini_batch > 0]
    return records.assign(length=records.mini_batch, tokens=records.length)


def _over_mini_batches(cell: Measured) -> Measured:
    records = over_mini_batches(cell.records)
    return Measured(cell.name, records, cell.positions, np.arange(1, records.length.max() + 2))


class _OverMiniBatches(BandClip):
    """A clip that decides by "tokens", where "length" is something else."""

    def clipped(self, records):
        return super().clipped(records.assign(length=records.tokens))

    def outside(self, records):
        return super().outside(records.assign(length=records.tokens))

    def matched(self, records, rate):
        return super().matched(records.assign(length=records.tokens), rate)


OVER_MINI_BATCHES = {name: _OverMiniBatches(name, CLIPS[name].label, CLIPS[name].band) for name in SHAPES}


def spread_by_mini_batch(records: pd.DataFrame) -> pd.DataFrame:
    """Root mean squares of S/√L and of S/√Q per mini-batch, over the responses that moved."""
    rows = []
    for mini_batch, part in _moved(records).groupby("mini_batch"):
        row = {"mini_batch": mini_batch}
        for name, over in (("per_length", "length"), ("per_variation", "quadratic_variation")):
            row |= zip((name, f"{name}_lower", f"{name}_upper"), _rms(part, over), strict=True)
        rows.append(row)
    return pd.DataFrame(rows)


def matched(records: pd.DataFrame, edges, catalogue=CLIPS) -> Counterfactuals:
    """Every catalogued band scaled to :data:`fspo_verl.clips.MATCHED_RATE`, where it can be."""
    methods = {}
    for key in SHAPES:
        try:
            catalogue[key].matched(records, MATCHED_RATE)
        except ValueError:
            continue
        methods[key] = catalogue[key]
    return counterfactuals(records, edges, _rng(), MATCHED_RATE, methods, _DRAWS)


# --- tables ----------------------------------------------------------------------------------------------------------


def _markdown(rows: Sequence[dict]) -> str:
    if not len(rows):
        return "Not measured."
    frame = pd.DataFrame(rows)
    return markdown_table(list(frame.columns), frame.astype(str).to_numpy().tolist())


def _interval(estimate, form: str = ".2f") -> str:
    """Of an :class:`Estimate`, or of a row with its columns."""
    if math.isnan(estimate.value):
        return "–"
    ends = "" if math.isnan(estimate.lower) else f" [{estimate.lower:{form}}, {estimate.upper:{form}}]"
    return f"{estimate.value:{form}}{ends}".replace("-", "−")


def _range(low: int, high: int) -> str:
    return f"{low:,}–{high:,}"


def kinds_table(settings: dict) -> str:
    return _markdown(
        [
            {
                "prompts": kind["kind"],
                "number": kind["prompts"],
                "responses": kind["responses"],
                "tokens, least / median / most": " / ".join(
                    f"{kind[f'tokens_{name}']:.0f}" for name in ("shortest", "median", "longest")
                ),
                "mean reward": f"{kind['reward']:.2f}",
                "ended by themselves": f"{kind['ended']:.0%}",
            }
            for kind in settings["kinds"]
        ]
    )


def law_table(cells: Sequence[Measured]) -> str:
    rows = []
    for cell in cells:
        law = cell.law()
        rows.append(
            {
                "cell": f"`{cell.name}`",
                "responses": f"{len(cell.records):,}",
                "prompts": cell.records.prompt.nunique(),
                "tokens": f"{cell.records.length.sum():,}",
                "longest": f"{cell.records.length.max():,}",
                "σ of a token": f"{law.sigma.value:.2g}",
                "p, by length": _interval(law.std_slope),
                "p, within responses": _interval(exponent_within(cell.positions)),
                "κ": _interval(law.kappa),
                "rms S/√Q": _interval(_rms(_moved(cell.records), "quadratic_variation")),
            }
        )
    return _markdown(rows)


def lengths_table(cells: Sequence[Measured]) -> str:
    rows = []
    for cell in cells:
        law = cell.law()
        by_bin = (law.sigma_by_length, law.std_by_length, rms_of_ratio(cell.records, cell.edges))
        for sigma, std, ratio in zip(*(table.itertuples() for table in by_bin), strict=True):
            if sigma.n:
                rows.append(
                    {
                        "cell": f"`{cell.name}`",
                        "tokens": _range(sigma.low, sigma.high),
                        "responses": sigma.n,
                        "σ of a token": _interval(sigma, ".4f"),
                        "std of S": _interval(std, ".3f"),
                        "rms S/√Q": _interval(ratio),
                    }
                )
    return _markdown(rows)


def lre_table(cells: Sequence[Measured], catalogue=CLIPS) -> str:
    """Rows are cells, columns clips: LRE, and in brackets what chance stays below in 97.5% of permutations."""
    rows = []
    for cell in cells:
        summary = matched(cell.records, cell.edges, catalogue).overall.summary
        row = {"cell": f"`{cell.name}`", "bins": len(cell.edges) - 1}
        for key, label in SHAPES.items():
            lre, chance = (summary[name].get(key, math.nan) for name in ("lre", "floor_upper"))
            text = f"{lre:.3f} ({chance:.3f})"
            row[label] = "–" if not math.isfinite(lre) else f"**{text}**" if lre > chance else text
        rows.append(row)
    return _markdown(rows)


def _with_bins(cell: Measured, bins: int) -> Measured:
    return replace(cell, edges=clip_rates.length_edges(cell.records.length, bins))


def _rates(part: pd.DataFrame) -> dict[str, str]:
    """The clip rates of one bin, by the name of the clip."""
    return {label: f"{part.rate[key]:.1%}" for key, label in SHAPES.items() if key in part.index}


def rates_table(cell: Measured) -> str:
    rates = matched(cell.records, cell.edges).overall.by_length.query("n > 0")
    return _markdown(
        [
            {"tokens": _range(*bin_), "responses": part.n.iloc[0]} | _rates(part)
            for bin_, part in rates.groupby(["low", "high"])
        ]
    )


def mini_batch_table(cell: Measured) -> str:
    over = _over_mini_batches(cell)
    rates = matched(over.records, over.edges, OVER_MINI_BATCHES).overall.by_length
    spread = spread_by_mini_batch(cell.records).set_index("mini_batch")
    rows = []
    for mini_batch, part in rates.groupby("low"):
        row = {"mini-batch": mini_batch, "with an advantage": part.n.iloc[0]}
        for name, label, form in (("per_length", "rms S/√L", ".4f"), ("per_variation", "rms S/√Q", ".2f")):
            row[label] = _interval(Estimate(*spread.loc[mini_batch, [name, f"{name}_lower", f"{name}_upper"]]), form)
        rows.append(row | _rates(part))
    return _markdown(rows)


def positions_table(cells: Sequence[Measured]) -> str:
    columns = {}
    for cell in cells:
        table = by_position(cell.positions)
        if len(table):
            name = f"`{cell.name}` ({table.n.iloc[-1]} responses)"
            columns[name] = {(row.low, row.high): _interval(row, ".4f") for row in table.itertuples()}
    frame = pd.DataFrame(columns).fillna("–")
    frame.insert(0, "tokens at", [str(low) if low == high else _range(low, high) for low, high in frame.index])
    return _markdown(frame)


def outside_table(cells: Sequence[Measured]) -> str:
    """Share of responses outside FSPO's default band and outside other usual ones, whatever their advantage."""
    rows = []
    for cell in cells:
        row = {"cell": f"`{cell.name}`", "σ of a token": f"{cell.law().sigma.value:.2g}"}
        for key, label in (("fspo", "±0.03·√L"), ("gspo", "GSPO, 3e-4 and 4e-4"), ("fixed_band", "ratio 1 ± 0.2")):
            row[f"outside {label}"] = f"{CLIPS[key].outside(cell.records).mean():.0%}"
        rows.append(row)
    return _markdown(rows)


def trained_table(cells: Sequence[Measured]) -> str:
    rows = []
    for cell in cells:
        moved = _moved(cell.records)
        z = moved.log_ratio / np.sqrt(moved.quadratic_variation)
        row = {"cell": f"`{cell.name}`", "responses": len(moved)}
        for name, side in (("A > 0", moved.advantage > 0), ("A < 0", moved.advantage < 0)):
            row[f"mean S/√Q, {name}"] = f"{z[side].mean():.2f}".replace("-", "−")
        for low, high, label in ((1, 15, "1–15 tokens"), (16, 63, "16–63 tokens"), (64, math.inf, "64 tokens or more")):
            part = moved.length.between(low, high)
            row[f"rms S/√Q, {label}"] = f"{np.sqrt((z[part] ** 2).mean()):.2f}" if part.sum() >= 20 else "–"
        rows.append(row)
    return _markdown(rows)


# --- figure ----------------------------------------------------------------------------------------------------------


def draw(cells: dict[str, Measured], columns: int):
    """Four panels: spread of S by length, of a token by position, clip rates by length, and over mini-batches."""
    figure, (spread, position, rates, rollout) = figures.grid(4, columns, height=3.9)
    strong = [cell for name, cell in cells.items() if re.fullmatch(r"(grpo|random|warm)-4-float32", name)]
    _draw_spread(spread, strong)
    _draw_positions(position, strong)
    _draw_rates(rates, strong[0])
    if cell := cells.get("grpo-rollout-float32"):
        _draw_rollout(rollout, spread_by_mini_batch(cell.records))
    else:
        rollout.remove()
    return figure


def _draw_spread(axes: Axes, cells: Sequence[Measured]) -> None:
    laws = [cell.law() for cell in cells]
    slopes = [law.std_slope.value for law in laws]
    used = [law.std_by_length[law.std_by_length.n >= clip_rates.MIN_COUNT] for law in laws]
    figures.by_length(
        axes,
        [
            Series(f"{cell.direction}, p = {slope:.2f}", _STYLES[cell.direction], table, "value")
            for cell, slope, table in zip(cells, slopes, used, strict=True)
        ],
    )
    axes.set_yscale("log")
    place = np.sqrt(used[0].low * used[0].high)
    middle = np.log(used[0].value).mean() - 0.5 * np.log(place).mean()
    axes.plot(place, np.exp(middle) * np.sqrt(place), color=GREY, lw=1, label="√L")
    figures.round_ticks(axes.yaxis, *axes.get_ylim())
    title = f"S spreads like L to the power {_from_to(slopes, '.2f')}"
    axes.set(ylabel="standard deviation of S (nats)", title=title)
    axes.legend()


def _draw_positions(axes: Axes, cells: Sequence[Measured]) -> None:
    profiles = {cell.direction: by_position(cell.positions) for cell in cells}
    figures.by_length(axes, [Series(name, _STYLES[name], table, "value") for name, table in profiles.items()])
    falls = [table.value.iloc[0] / table.value.iloc[-1] for table in profiles.values() if len(table)] or [math.nan]
    axes.set(xlabel="position in the response (tokens)", ylabel="spread of a token's log-ratio (nats)", ylim=(0, None))
    axes.set_title(f"First tokens move {_from_to(falls, '.0f')} times as far as late ones")


def _draw_rates(axes: Axes, cell: Measured) -> None:
    table = matched(cell.records, cell.edges).overall.by_length
    table = table[table.n >= clip_rates.MIN_COUNT]
    keys = [key for key in ("fspo", "fixed_band", "gspo", "fspo_studentized") if key in table.index]
    figures.by_length(axes, [Series(SHAPES[key], STYLES[key], table.loc[[key]]) for key in keys])
    axes.axhline(MATCHED_RATE, color=GREY, lw=0.8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    axes.set(ylim=(0, None), ylabel="clip rate", title=f"Clip rates, each clip scaled to {MATCHED_RATE:.0%} (grpo)")
    if keys:
        axes.set_ylim(0, 1.2 * axes.get_ylim()[1])  # room for the legend
        axes.legend(ncols=2)


def _draw_rollout(axes: Axes, table: pd.DataFrame) -> None:
    for name, label, clip in (("per_length", "S/√L", "fspo"), ("per_variation", "S/√Q", "fspo_studentized")):
        first = table[name].iloc[0]
        bars = np.abs(table[[f"{name}_lower", f"{name}_upper"]].to_numpy().T - table[name].to_numpy()) / first
        style = STYLES[clip].line_kwargs()
        axes.errorbar(table.mini_batch, table[name] / first, bars, label=label, capsize=2, **style)
    growth = table.per_length.iloc[-1] / table.per_length.iloc[0]
    axes.set(xlabel="mini-batch of the rollout", ylabel="rms, first that moved = 1", ylim=(0, None))
    axes.set_xticks(table.mini_batch)
    axes.set_title(f"S/√L spreads {growth:.1f} times as far in the last mini-batch")
    axes.legend()


def _from_to(numbers: Sequence[float], form: str) -> str:
    return " to ".join(dict.fromkeys(f"{end:{form}}" for end in (min(numbers), max(numbers))))


# --- page ------------------------------------------------------------------------------------------------------------


def tables(folder: Path) -> dict[str, str]:
    """Every block of the page by its name."""
    cells = read(folder).values()
    trained = [cell for cell in cells if "trained" in cell.name]
    held_out = [cell for cell in cells if "trained" not in cell.name]
    rollouts = [cell for cell in held_out if "rollout" in cell.name]
    moved = [cell for cell in held_out if cell.direction != "still" and "rollout" not in cell.name]
    main = [cell for cell in moved if cell.name.endswith("-4-float32")]
    steps: dict[str, Callable[[], str]] = {
        "prompts": lambda: kinds_table(json.loads((folder / SETTINGS).read_text())),
        "law": lambda: law_table(held_out),
        "lengths": lambda: lengths_table(main),
        "positions": lambda: positions_table(main),
        "fairness": lambda: lre_table([_with_bins(cell, bins) for cell in moved for bins in _BINS]),
        "rates": lambda: rates_table(main[0]),
        "mini-batches": lambda: "\n\n".join(mini_batch_table(cell) for cell in rollouts) or "Not measured.",
        "fairness over mini-batches": lambda: lre_table(list(map(_over_mini_batches, rollouts)), OVER_MINI_BATCHES),
        "outside": lambda: outside_table(held_out),
        "trained": lambda: trained_table(trained),
    }
    return {name: make() for name, make in tqdm(steps.items(), desc="tables", leave=False)}


def filled(page: str, blocks: dict[str, str]) -> str:
    """The page with the text between the marks of each block replaced.

    Raises:
        ValueError: a block has no marks, or marks have no block.
    """
    named = set(re.findall(re.escape(_BEGIN).replace(re.escape("{}"), "(.+?)"), page))
    if named != set(blocks):
        raise ValueError(f"the page has marks for {sorted(named)}, the tables are {sorted(blocks)}")
    for name, text in blocks.items():
        page = between(page, _BEGIN.format(name), _END.format(name), text)
    return page


def redraw(folder: Path, page: Path) -> None:
    """Write the figure beside the page, and the tables between the marks of the page."""
    cells = read(folder)
    (image,) = figures.render(lambda columns: draw(cells, columns), 2, "png")
    page.with_suffix(".png").write_bytes(image)
    page.write_text(filled(page.read_text(), tables(folder)))
    print(f"{page} and {page.with_suffix('.png')} show the records in {folder}")
