# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One page on length fairness: who is clipped, how sure that is, and what to do, from one or several runs of verl.

A RUN is the folder of a training run, or a log: verl's console output or file logger, TensorBoard's events, W&B's CSV,
history or run folder, TRL's trainer_state.json. The page needs no network and no other file; DIR also gets every figure
as PNG and SVG (figures/) and the numbers as JSON (report.json).
"""

import argparse
import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from tqdm import tqdm

from fspo_verl import __version__
from fspo_verl.analysis.clip_rates import Estimate, length_edges, number, sides
from fspo_verl.analysis.mismatch import Mismatch
from fspo_verl.analysis.overrides import pasted
from fspo_verl.analysis.runs import Run, read_runs
from fspo_verl.clips import CLIPS, MATCHED_RATE, BandClip, of_run, unjudged
from fspo_verl.output import show, write_whole
from fspo_verl.report import figures
from fspo_verl.report.figures import STYLES, Series, Style
from fspo_verl.report.numbers import Analysis, Counterfactuals, analyse, steps, summary

_FIGURES = ("clip_rate_by_length", "counterfactuals")
_DASH = "–"
FILES = ("report.json", "report.html", *(f"figures/{name}.{kind}" for name in _FIGURES for kind in ("svg", "png")))
"""What a report may consist of, by its place in the folder."""


@dataclass
class Part:
    """What a section of the page shows; its prose is in the template."""

    sentences: Sequence[str] = ()
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)  # texts, by caption
    panels: Sequence[tuple] = ()  # as figures.of_panels takes them
    height: float = 0.0  # of a panel, inches
    wide: str = ""  # the figure as data URI
    narrow: str = ""  # for a narrow screen

    def draw(self, columns: int) -> Figure:
        """The figure with so many panels in a row."""
        return figures.of_panels(self.panels, columns, self.height)


def main(args: argparse.Namespace) -> int:
    """Read the runs and write their report; print the verdicts, the place of the page, and what to do next."""
    if args.max_rows < len(args.runs):
        raise ValueError(f"--max-rows={args.max_rows} has to be one per run or more")
    if args.output is None:
        if len(args.runs) > 1:
            raise ValueError(f"a report on {len(args.runs)} runs needs a folder of its own: -o DIR")
        (run,) = args.runs
        args.output = run.with_name(f"{run.stem}-report") if run.is_file() else run / "report"
    refuse_foreign(args.output)
    runs = list(tqdm(read_runs(args.runs, args.names, args.max_rows), "runs", len(args.runs), delay=2, disable=None))
    files = build(runs)
    write(args.output, files)
    if args.json:
        print(files["report.json"].decode(), end="")
        return 0
    verdicts = json.loads(files["report.json"])["verdicts"]
    rows = []
    for run, one in zip(runs, verdicts, strict=True):
        rows.append((named(one["run"], one["loss"]), one["sentence"]))
        if run.records.empty:  # there is no picture to look at
            rows += [("", note) for note in one["notes"]]
    rows.append(("page", str(args.output / "report.html")))
    for one in verdicts:
        advice = " ".join([one["advice"], *one["overrides"]])
        rows.append(("next", f"{one['run']}: {advice}" if len(verdicts) > 1 else advice))
    show(rows, widths=(8,))
    return 0


def named(run: str, loss: str | None) -> str:
    """Whose verdict or curve it is: the run, and its loss if that is known."""
    return f"{run} ({loss})" if loss else run


def build(runs: Sequence[Run]) -> dict[str, bytes]:
    """All files of a report: name, relative to its folder, to content. The same for the same input."""
    # One set of bins for all runs, so that they can be compared.
    edges = length_edges(np.concatenate([run.records.length for run in runs]))
    analyses = [analyse(run, edges) for run in tqdm(runs, "numbers", delay=2, disable=None)]
    clips = [of_run(run.settings.loss, run.settings.trained_band) if run.settings else None for run in runs]
    styles = {run.name: style for run, style in zip(runs, figures.run_styles(clips), strict=True)}
    parts = {
        "clip_rate_by_length": rates_part(analyses, styles),
        "trained": trained_part(analyses),
        "counterfactuals": others_part(analyses),
        "mismatch": mismatch_part(analyses),
    }
    files: dict[str, bytes] = {}
    for name, part in tqdm(parts.items(), "figures", delay=2, disable=None):
        if part.panels:
            svg, png = figures.render(part.draw, 2, "svg", "png")
            files |= {f"figures/{name}.svg": svg, f"figures/{name}.png": png}
            images = [base64.b64encode(image).decode() for image in (svg, *figures.render(part.draw, 1, "svg"))]
            part.wide, part.narrow = (f"data:image/svg+xml;base64,{image}" for image in images)
    facts = {
        "version": __version__,
        "length_edges": edges.tolist(),
        "runs": _rows(pd.DataFrame(map(summary, analyses))),
        "clip_rate_by_length": {a.run.name: _rows(a.rates) for a in analyses},
        "counterfactuals": {
            a.run.name: _rows(a.others.summary.reset_index()) for a in analyses if a.others is not None
        },
        "mismatch": {
            a.run.name: _rows(pd.DataFrame([_numbers(a.mismatch)]))[0]
            | {"dropped": _rows(a.mismatch.dropped.reset_index())}
            for a in analyses
            if a.mismatch is not None
        },
        "verdicts": [
            {
                "run": a.run.name,
                "loss": a.run.settings.loss if a.run.settings else None,
                "cause": a.verdict.cause,
                "action": a.verdict.action,
                "sentence": a.verdict.sentence,
                "advice": a.verdict.advice,
                "overrides": pasted(a.verdict.overrides),
                "notes": a.verdict.notes,
            }
            for a in analyses
        ],
    }
    text = json.dumps(facts, indent=1, allow_nan=False) + "\n"
    return {"report.json": text.encode(), "report.html": _page(runs, parts, facts)} | files


def refuse_foreign(folder: Path) -> None:
    """Let a report into a folder only where it replaces nothing but an earlier report.

    Raises:
        ValueError: a file of the user's has the name of one of ours.
    """
    there = [name for name in FILES if (folder / name).exists()]
    try:
        ours = {"version", "length_edges", "verdicts"} <= set(json.loads((folder / "report.json").read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        ours = False
    if there and not ours:
        raise ValueError(
            f"{folder / there[0]} is there and not of a report of fspo-verl: name another folder by -o DIR"
        )


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of a report, all of them or none; remove those of an earlier report that it lacks.

    Raises:
        OSError: the disk is full, or the folder cannot be written; what is there stays.
    """
    write_whole((folder / name, content) for name, content in files.items())
    for name in set(FILES) - set(files):
        (folder / name).unlink(missing_ok=True)


# --- sections --------------------------------------------------------------------------------------------------------


def rates_part(analyses: Sequence[Analysis], styles: dict[str, Style]) -> Part:
    series = []
    for a in analyses:
        label = named(a.run.name, a.run.settings.loss if a.run.settings else None)
        label += "" if a.overall is not None else ", live metrics"
        series += [Series(label, styles[a.run.name], a.rates)] if len(a.rates) else []
    return Part(panels=[(figures.clip_rates, "clip rate by response length", series)] if series else [], height=2.9)


def trained_part(analyses: Sequence[Analysis]) -> Part:
    tables = {"What trained": pd.DataFrame([_settings(a.run) for a in analyses])}
    if rows := [{"run": a.run.name} | _measures(a.overall) for a in analyses if a.overall is not None]:
        tables["What its clip did [95% intervals]"] = pd.DataFrame(rows)
    if rows := [row for a in analyses if a.overall is not None for row in _sides(a.run)]:
        tables["Clip rate (%) of the responses better and worse than their group, by thirds of the length"] = (
            pd.DataFrame(rows)
        )
    return Part(tables=tables)


def others_part(analyses: Sequence[Analysis]) -> Part:
    tables, panels, notes = {}, [], [f"{clip.label}: {clip.note}." for clip in CLIPS.values() if clip.note]
    for a in analyses:
        if a.others is not None:
            notes += [f"{a.run.name}: {missing}"] if (missing := unjudged(a.run.records)) else []
            tables[f"{a.run.name}: each clip scaled to {MATCHED_RATE:.0%}"] = _clip_table(a.others)
            if series := _clip_series(a.others):
                panels.append((figures.clip_rates, a.run.name, series, MATCHED_RATE))
    return Part(notes, tables, panels, height=2.7)


def mismatch_part(analyses: Sequence[Analysis]) -> Part:
    tables = {}
    for name, mismatch in ((a.run.name, a.mismatch) for a in analyses if a.mismatch is not None):
        row = {
            "responses": f"{mismatch.responses:,}",
            "σ of a token": f"{mismatch.sigma:.2g}",
            "mean of a token": f"{mismatch.mean:.2g}",
            "−σ²/2": f"{-(mismatch.sigma**2) / 2:.2g}",
            "KL (k3)": number(mismatch.kl, ".2g"),
            "p of spread ~ L^p": f"{mismatch.exponent:.2f}",
            "steps of staleness": number(mismatch.staleness, ".2g"),
            "rejected (%)": f"{100 * mismatch.rejected:.3g}",
        }
        tables[f"{name}: log-probs of the trainer minus those of the rollout engine"] = pd.DataFrame([row])
        shares = mismatch.dropped.map(lambda share: number(100 * share, ".3g")).add_suffix(" (%)")
        tables[f"{name}: what rules take of all responses and of each third by length"] = shares.reset_index()
    return Part(tables=tables)


# --- texts -----------------------------------------------------------------------------------------------------------


def _settings(run: Run) -> dict[str, str]:
    settings, length = run.settings, run.records.length
    versions = settings.versions.items() if settings else ()
    return {
        "run": run.name,
        "loss": settings.loss if settings else _DASH,
        "clip": (settings and settings.clip) or _DASH,
        "steps": f"{steps(run):,}",
        "responses": f"{run.records.attrs['rows']:,}",
        "shortest to longest": f"{length.min():,} to {length.max():,} tokens" if len(length) else _DASH,
        "versions": ", ".join(f"{name} {version}" for name, version in versions) or _DASH,
    }


def _sides(run: Run) -> list[dict[str, str]]:
    """A row for either sign of the advantage."""
    records, masks = run.records, sides(run.records)
    third = np.digitize(records["length"], np.quantile(records["length"][masks["all"]], [1 / 3, 2 / 3]))
    rows = []
    for name, side in (("better", "upper"), ("worse", "lower")):
        clipped = records["clipped"][masks[side]].to_numpy(np.float64)
        parts = {"all": np.full(len(clipped), True)} | {
            part: third[masks[side]] == place for place, part in enumerate(("shortest", "middle", "longest"))
        }
        rates = {part: clipped[chosen].mean() if chosen.any() else math.nan for part, chosen in parts.items()}
        shown = {part: number(100 * rate, ".3g") for part, rate in rates.items()}
        rows.append({"run": run.name, "responses": name} | shown)
    return rows


def _measures(row: pd.Series) -> dict[str, str]:
    """Texts of one row of :attr:`Counterfactuals.summary`."""
    return {
        "responses with an advantage": f"{row.n:,.0f}",
        "clip rate (%)": f"{Estimate(100 * row.rate, 100 * row.lower, 100 * row.upper):.3g}",
        "exponent k": f"{Estimate(row.exponent, row.exponent_lower, row.exponent_upper):.2f}",
        "p of no dependence": number(row.p, ".2g"),
        "LRE": number(row.lre, ".2g"),
        "LRE if one length were never clipped": number(row.lre_unclipped, ".2g"),
    }


def _numbers(mismatch: Mismatch) -> dict[str, float]:
    numbers = mismatch._asdict()
    del numbers["dropped"]
    exponent = numbers.pop("exponent")
    return numbers | dict(zip(("exponent", "exponent_lower", "exponent_upper"), exponent, strict=True))


def _clip_series(others: Counterfactuals) -> list[Series]:
    """The scaled clips that a figure shows; the table has the others."""
    shown = [name for name in others.summary.index if name in STYLES and isinstance(CLIPS[name], BandClip)]
    return [Series(CLIPS[name].label, STYLES[name], others.by_length.loc[[name]]) for name in shown]


def _clip_table(others: Counterfactuals) -> pd.DataFrame:
    rows = []
    for name, row in others.summary.iterrows():
        eps = ", ".join(f"{value:.2g}" for value in row[["eps_low", "eps_high"]].dropna()) or CLIPS[name].range
        rows.append({"clip": CLIPS[name].label, "eps": eps} | _measures(row))
    return pd.DataFrame(rows)


def _rows(table: pd.DataFrame) -> list[dict]:
    """The rows of a table for JSON; None for what is not known, or has no bound."""
    table = table.replace([np.inf, -np.inf], np.nan).astype(object)
    return table.where(table.notna(), None).to_dict("records")


def _page(runs: Sequence[Run], parts: dict[str, Part], facts: dict) -> bytes:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fspo_verl.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(runs=runs, parts=parts, facts=facts).encode()
