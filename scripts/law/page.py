# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The page on the law of S: tables and figure from the published records, and nothing else."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter
from publish import POSITIONS, SETTINGS
from tqdm import tqdm

from fspo_verl.analysis import clip_rates, resampling
from fspo_verl.analysis.counterfactuals import Counterfactuals, counterfactuals
from fspo_verl.analysis.law import LawOfS, law_of_s
from fspo_verl.analysis.resampling import Estimate
from fspo_verl.clips import CLIPS, MATCHED_RATE, BandClip, Style
from fspo_verl.files import between, markdown_table
from fspo_verl.observe.records import read_records
from fspo_verl.report import figures
from fspo_verl.report.figures import GREY, Series

SHAPES = {
    "fspo": "√L (FSPO)",
    "fspo_centered": "√L, centre −Q/2",
    "fixed_band": "fixed",
    "gspo": "L (GSPO)",
    "fspo_width": "√Q",
    "fspo_studentized": "√Q, centre −Q/2",
}
_STYLES = {"grpo": Style("#0072B2", "o"), "random": Style("#D55E00", "s", "--"), "warm": Style("#009E73", "^", ":")}
_DRAWS = 400
_BEGIN = "<!-- begin of what `python scripts/law.py --redraw` writes: {} -->"
_END = "<!-- end of {} -->"
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


def rms_of_ratio(records: pd.DataFrame, edges) -> pd.DataFrame:
    """sqrt(mean S²/Q) of the responses that moved, by length bin: columns low, high, n, value, lower, upper."""
    moved = records[records.quadratic_variation > 0]
    squares = (moved.log_ratio.astype(float) ** 2 / moved.quadratic_variation).to_numpy()
    place = np.searchsorted(edges, moved.length, side="right") - 1
    rows = []
    for place_of_bin, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        inside = place == place_of_bin
        rows.append((low, high - 1, inside.sum(), *_root_mean(squares[inside], resampling.clusters(moved[inside]))))
    return pd.DataFrame(rows, columns=["low", "high", "n", "value", "lower", "upper"])


def _root_mean(squares: np.ndarray, cluster: np.ndarray) -> Estimate:
    if not len(squares):
        return Estimate(math.nan, math.nan, math.nan)
    columns = np.column_stack([np.ones(len(squares)), squares])
    return Estimate(
        *(
            x.item()
            for x in resampling.clustered_bootstrap(
                cluster, columns, lambda t: np.sqrt(t[..., 1:] / t[..., :1]), _rng(), _DRAWS
            )
        )
    )


def by_position(positions: pd.DataFrame, shortest: int = _SAME_RESPONSES) -> pd.DataFrame:
    """Spread sqrt(ΣQ/Σtokens) of a token's log-ratio by its position, within the same responses.

    Of the responses with at least ``shortest`` tokens, up to that position. Columns low, high, n, value, lower, upper.
    """
    same = positions[(positions.length >= shortest) & (2 * positions.low - 1 <= shortest)]
    rows = []
    for low, part in same.groupby("low"):
        cluster = part.groupby("prompt", observed=True, sort=False).ngroup().to_numpy()
        estimate = resampling.clustered_bootstrap(
            cluster,
            part[["tokens", "quadratic_variation"]].to_numpy(float),
            lambda totals: np.sqrt(totals[..., 1:] / totals[..., :1]),
            _rng(),
            _DRAWS,
        )
        rows.append((low, 2 * low - 1, len(part), *(x.item() for x in estimate)))
    return pd.DataFrame(rows, columns=["low", "high", "n", "value", "lower", "upper"])


def exponent_within(positions: pd.DataFrame, first: int = 8, last: int = _SAME_RESPONSES) -> Estimate:
    """p in std(S of the first l tokens) ~ l^p, over the prefixes l = first, 2·first, ..., last of the same responses.

    Other than the exponent over responses of different lengths it is not mixed with what distinguishes prompts with
    short answers from those with long ones. Least-squares slope; NaN without responses as long as ``last``.
    """
    same = positions[(positions.length >= last) & (positions.low < last)]
    if same.empty:
        return Estimate(math.nan, math.nan, math.nan)
    table = same.pivot(index="response", columns="low", values="log_ratio").cumsum(axis=1)
    prefixes = [low for low in table if first <= 2 * low <= last]  # the sum through 2·low − 1 tokens
    prompt = same.drop_duplicates("response").set_index("response").prompt[table.index]
    cluster = pd.factorize(prompt)[0]
    s = table[prefixes].to_numpy(float)
    columns = np.column_stack([np.ones(len(s)), s, s**2])
    x = np.log([2 * low - 1 for low in prefixes])
    x = x - x.mean()

    def slope(totals):
        n, mean, square = totals[..., :1], totals[..., 1 : 1 + len(x)], totals[..., 1 + len(x) :]
        y = np.log(np.maximum(square / n - (mean / n) ** 2, 1e-30)) / 2
        return (y @ x / (x @ x))[..., None]

    estimate = resampling.clustered_bootstrap(cluster, columns, slope, _rng(), _DRAWS)
    return Estimate(*(value.item() for value in estimate))


def over_mini_batches(records: pd.DataFrame) -> pd.DataFrame:
    """Records whose "length" is the number of the mini-batch, and whose "tokens" are their length.

    What the package asks of lengths is then asked of mini-batches, with :data:`OVER_MINI_BATCHES` as the clips.
    Mini-batch 0 has not moved and is left out: no clip can take anything from it.
    """
    records = records[records.mini_batch > 0]
    return records.assign(length=records.mini_batch, tokens=records.length)


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
    for mini_batch, part in records[records.quadratic_variation > 0].groupby("mini_batch"):
        s, cluster = part.log_ratio.to_numpy(float), resampling.clusters(part)
        per_length = _root_mean(s**2 / part.length.to_numpy(), cluster)
        per_variation = _root_mean(s**2 / part.quadratic_variation.to_numpy(float), cluster)
        rows.append((mini_batch, len(part), *per_length, *per_variation))
    names = ["mini_batch", "n", "per_length", "per_length_lower", "per_length_upper"]
    names += ["per_variation", "per_variation_lower", "per_variation_upper"]
    return pd.DataFrame(rows, columns=names)


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


def _markdown(frame: pd.DataFrame) -> str:
    return markdown_table(list(frame.columns), frame.astype(str).to_numpy().tolist())


def _interval(estimate: Sequence[float], form: str = ".2f") -> str:
    value, lower, upper = (float(number) for number in estimate)
    if math.isnan(value):
        return "–"
    ends = "" if math.isnan(lower) else f" [{lower:{form}}, {upper:{form}}]"
    return f"{value:{form}}{ends}".replace("-", "−")


def _range(low: int, high: int) -> str:
    return f"{low:,}–{high:,}"


def kinds_table(settings: dict) -> str:
    frame = pd.DataFrame(settings["kinds"])
    tokens = [
        f"{row.tokens_shortest:.0f} / {row.tokens_median:.0f} / {row.tokens_longest:.0f}" for row in frame.itertuples()
    ]
    return _markdown(
        pd.DataFrame(
            {
                "prompts": frame.kind,
                "number": frame.prompts,
                "responses": frame.responses,
                "tokens, least / median / most": tokens,
                "mean reward": frame.reward.map("{:.2f}".format),
                "ended by themselves": frame.ended.map("{:.0%}".format),
            }
        )
    )


def law_table(cells: Sequence[Measured]) -> str:
    rows = []
    for cell in cells:
        law, moved = cell.law(), cell.records[cell.records.quadratic_variation > 0]
        ratio = _root_mean(
            (moved.log_ratio.astype(float) ** 2 / moved.quadratic_variation).to_numpy(), resampling.clusters(moved)
        )
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
                "rms S/√Q": _interval(ratio),
            }
        )
    return _markdown(pd.DataFrame(rows))


def lengths_table(cells: Sequence[Measured]) -> str:
    rows = []
    for cell in cells:
        law, ratio = cell.law(), rms_of_ratio(cell.records, cell.edges)
        for sigma, std, q in zip(
            law.sigma_by_length.itertuples(), law.std_by_length.itertuples(), ratio.itertuples(), strict=True
        ):
            if sigma.n:
                rows.append(
                    {
                        "cell": f"`{cell.name}`",
                        "tokens": _range(sigma.low, sigma.high),
                        "responses": sigma.n,
                        "σ of a token": _interval((sigma.value, sigma.lower, sigma.upper), ".4f"),
                        "std of S": _interval((std.value, std.lower, std.upper), ".3f"),
                        "rms S/√Q": _interval((q.value, q.lower, q.upper)),
                    }
                )
    return _markdown(pd.DataFrame(rows))


def lre_table(cells: Sequence[Measured], catalogue=CLIPS) -> str:
    """Rows are cells, columns clips: LRE, and in brackets what chance stays below in 97.5% of permutations."""
    rows = []
    for cell in cells:
        summary = matched(cell.records, cell.edges, catalogue).summary
        summary = summary[summary.side == "all"].set_index("method")
        row = {"cell": f"`{cell.name}`"}
        for key, label in SHAPES.items():
            if key in summary.index and math.isfinite(summary.lre[key]):
                above = summary.lre[key] > summary.floor_upper[key]
                text = f"{summary.lre[key]:.3f} ({summary.floor_upper[key]:.3f})"
                row[label] = f"**{text}**" if above else text
            else:
                row[label] = "–"
        rows.append(row)
    return _markdown(pd.DataFrame(rows))


def rates_table(cell: Measured) -> str:
    table = matched(cell.records, cell.edges).by_length
    table = table[(table.side == "all") & (table.n > 0)]
    rows = []
    for (low, high), part in table.groupby(["low", "high"]):
        part = part.set_index("method")
        row = {"tokens": _range(low, high), "responses": part.n.iloc[0]}
        rows.append(row | {label: f"{part.rate[key]:.1%}" for key, label in SHAPES.items() if key in part.index})
    return _markdown(pd.DataFrame(rows))


def mini_batch_table(cell: Measured) -> str:
    records = over_mini_batches(cell.records)
    edges = np.arange(1, records.length.max() + 2)
    rates = matched(records, edges, OVER_MINI_BATCHES).by_length
    rates = rates[rates.side == "all"]
    spread = spread_by_mini_batch(cell.records).set_index("mini_batch")
    rows = []
    for mini_batch, part in rates.groupby("low"):
        part, row = part.set_index("method"), {"mini-batch": mini_batch, "with an advantage": part.n.iloc[0]}
        for name, label, form in (("per_length", "rms S/√L", ".4f"), ("per_variation", "rms S/√Q", ".2f")):
            row[label] = _interval(spread.loc[mini_batch, [name, f"{name}_lower", f"{name}_upper"]], form)
        rows.append(row | {label: f"{part.rate[key]:.1%}" for key, label in SHAPES.items() if key in part.index})
    return _markdown(pd.DataFrame(rows))


def positions_table(cells: Sequence[Measured]) -> str:
    columns, numbers = {}, {}
    for cell in cells:
        for row in by_position(cell.positions).itertuples():
            columns.setdefault(f"`{cell.name}`", {})[row.low, row.high] = _interval(
                (row.value, row.lower, row.upper), ".4f"
            )
            numbers[f"`{cell.name}`"] = row.n
    frame = pd.DataFrame(columns).fillna("–")
    frame.columns = [f"{name} ({numbers[name]} responses)" for name in frame.columns]
    frame.insert(0, "tokens at", [str(low) if low == high else _range(low, high) for low, high in frame.index])
    return _markdown(frame)


def outside_table(cells: Sequence[Measured]) -> str:
    """Share of responses outside FSPO's default band and outside other usual ones, whatever their advantage."""
    rows = []
    for cell in cells:
        law = cell.law()
        row = {"cell": f"`{cell.name}`", "σ of a token": f"{law.sigma.value:.2g}"}
        for key, label in (("fspo", "±0.03·√L"), ("gspo", "GSPO, 3e-4 and 4e-4"), ("fixed_band", "ratio 1 ± 0.2")):
            row[f"outside {label}"] = f"{CLIPS[key].outside(cell.records).mean():.0%}"
        rows.append(row)
    return _markdown(pd.DataFrame(rows))


def trained_table(cells: Sequence[Measured]) -> str:
    rows = []
    for cell in cells:
        moved = cell.records[cell.records.quadratic_variation > 0]
        z = moved.log_ratio / np.sqrt(moved.quadratic_variation)
        row = {"cell": f"`{cell.name}`", "responses": len(moved)}
        for name, side in (("A > 0", moved.advantage > 0), ("A < 0", moved.advantage < 0)):
            row[f"mean S/√Q, {name}"] = f"{z[side].mean():.2f}".replace("-", "−")
        for low, high in ((1, 15), (16, 63), (64, 10**9)):
            part = moved.length.between(low, high)
            label = f"{low}–{high} tokens" if high < 10**9 else f"{low} tokens or more"
            row[f"rms S/√Q, {label}"] = f"{np.sqrt((z[part] ** 2).mean()):.2f}" if part.sum() >= 20 else "–"
        rows.append(row)
    return _markdown(pd.DataFrame(rows))


# --- figure ----------------------------------------------------------------------------------------------------------


def draw(cells: dict[str, Measured], columns: int):
    """Four panels: spread of S by length, of a token by position, clip rates by length, and over mini-batches."""
    figure, (spread, position, rates, rollout) = figures.grid(4, columns, height=3.9)
    strong = [cell for name, cell in cells.items() if re.fullmatch(r"(grpo|random|warm)-4-float32", name)]
    main = strong[0]
    slopes = [cell.law().std_slope.value for cell in strong]
    figures.by_length(
        spread,
        [
            Series(
                f"{cell.direction}, p = {slope:.2f}",
                _STYLES[cell.direction],
                _usable(cell.law().std_by_length),
                "value",
            )
            for cell, slope in zip(strong, slopes, strict=True)
        ],
    )
    spread.set_yscale("log")
    table = _usable(main.law().std_by_length)
    place = np.sqrt(table.low * table.high)
    middle = np.log(table.value).mean() - 0.5 * np.log(place).mean()
    spread.plot(place, np.exp(middle) * np.sqrt(place), color=GREY, lw=1, label="√L")
    figures.round_ticks(spread.yaxis, *spread.get_ylim())
    low, high = min(slopes), max(slopes)
    exponents = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    spread.set(ylabel="standard deviation of S (nats)", title=f"S spreads like L to the power {exponents}")
    spread.legend()

    profiles = [by_position(cell.positions) for cell in strong]
    figures.by_length(
        position,
        [
            Series(cell.direction, _STYLES[cell.direction], table, "value")
            for cell, table in zip(strong, profiles, strict=True)
        ],
    )
    falls = [table.value.iloc[0] / table.value.iloc[-1] for table in profiles if len(table)] or [math.nan]
    position.set(
        xlabel="position in the response (tokens)", ylabel="spread of a token's log-ratio (nats)", ylim=(0, None)
    )
    least, most = (f"{number:.0f}" for number in (min(falls), max(falls)))
    position.set_title(
        f"A first token moves {least if least == most else f'{least} to {most}'} times as far as a late one"
    )

    table = matched(main.records, main.edges).by_length
    table = table[(table.side == "all") & (table.n >= clip_rates.MIN_COUNT)]
    keys = [key for key in ("fspo", "fixed_band", "gspo", "fspo_studentized") if key in set(table.method)]
    figures.by_length(rates, [Series(SHAPES[key], CLIPS[key].style, table[table.method == key]) for key in keys])
    rates.axhline(MATCHED_RATE, color=GREY, lw=0.8)
    rates.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    rates.set(ylim=(0, None), ylabel="clip rate", title=f"Clip rates, each clip scaled to {MATCHED_RATE:.0%} (grpo)")
    if keys:
        rates.set_ylim(0, 1.2 * rates.get_ylim()[1])  # room for the legend
        rates.legend(ncols=2)

    cell = cells.get("grpo-rollout-float32")
    if cell is None:
        rollout.remove()
        return figure
    table = spread_by_mini_batch(cell.records)
    for name, label, style in (
        ("per_length", "S/√L", CLIPS["fspo"].style),
        ("per_variation", "S/√Q", CLIPS["fspo_studentized"].style),
    ):
        first = table[name].iloc[0]
        bars = np.abs(table[[f"{name}_lower", f"{name}_upper"]].to_numpy().T - table[name].to_numpy()) / first
        rollout.errorbar(table.mini_batch, table[name] / first, bars, label=label, capsize=2, **style.line_kwargs())
    growth = table.per_length.iloc[-1] / table.per_length.iloc[0]
    rollout.set(xlabel="mini-batch of the rollout", ylabel="rms, first that moved = 1", ylim=(0, None))
    rollout.set_xticks(table.mini_batch)
    rollout.set_title(f"S/√L spreads {growth:.1f} times as far in the last mini-batch")
    rollout.legend()
    return figure


def _usable(table: pd.DataFrame) -> pd.DataFrame:
    return table[table.n >= clip_rates.MIN_COUNT]


# --- page ------------------------------------------------------------------------------------------------------------


def tables(folder: Path) -> dict[str, str]:
    """Every block of the page by its name."""
    cells = read(folder)
    held_out = [cell for name, cell in cells.items() if "trained" not in name]
    moved = [cell for cell in held_out if cell.direction != "still" and "rollout" not in cell.name]
    main = [cell for cell in moved if cell.name.endswith("-4-float32")]
    rollouts = [cell for cell in held_out if "rollout" in cell.name]
    steps: dict[str, Callable[[], str]] = {
        "prompts": lambda: kinds_table(json.loads((folder / SETTINGS).read_text())),
        "law": lambda: law_table(held_out),
        "lengths": lambda: lengths_table(main),
        "positions": lambda: positions_table(main),
        "fairness": lambda: lre_table(moved),
        "rates": lambda: rates_table(main[0]),
        "mini-batches": lambda: "\n\n".join(mini_batch_table(cell) for cell in rollouts) or "Not measured.",
        "fairness over mini-batches": lambda: (
            lre_table(
                [
                    Measured(cell.name, records, cell.positions, np.arange(1, records.length.max() + 2))
                    for cell in rollouts
                    for records in [over_mini_batches(cell.records)]
                ],
                OVER_MINI_BATCHES,
            )
            if rollouts
            else "Not measured."
        ),
        "outside": lambda: outside_table(held_out),
        "trained": lambda: (
            trained_table([cell for name, cell in cells.items() if "trained" in name])
            if any("trained" in name for name in cells)
            else "Not measured."
        ),
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
