# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One page on length fairness: who is clipped, how sure that is, and what to do, from one or several runs of verl.

A RUN is the folder of a training run, or a log: verl's console output or file logger, TensorBoard's events, W&B's CSV,
history or run folder. The page needs no network and no other file; DIR also gets every figure as PNG and SVG (figures/)
and the numbers as JSON (report.json).
"""

import argparse
import base64
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from tqdm import tqdm

from fspo_verl import __version__, findings
from fspo_verl.analysis.clip_rates import Estimate, length_edges, number, third_of
from fspo_verl.analysis.judgement import comparison_notes, comparison_rows, share, show_comparison
from fspo_verl.analysis.length_effect import LengthEffect, slopes_of_steps
from fspo_verl.analysis.runs import Run, read_runs, setting
from fspo_verl.clips import CLIPS, MATCHED_RATE, BandClip, of_run
from fspo_verl.findings import FIX
from fspo_verl.keys import ACTOR
from fspo_verl.output import plain, show, write_whole
from fspo_verl.report import figures
from fspo_verl.report.figures import STYLES, Series, Style
from fspo_verl.report.numbers import Analysis, Measured, analyse

_FIGURES = ("clip_rate_by_length", "over_steps", "counterfactuals")
_DASH = "–"
FILES = ("report.json", "report.html", *(f"figures/{name}.{kind}" for name in _FIGURES for kind in ("svg", "png")))
"""The files that a report may consist of, by its place in the folder."""

NAMED = {
    "aggregation": f"{ACTOR}.loss_agg_mode",
    "prompts": "data.train_batch_size",
    "mini-batch": f"{ACTOR}.ppo_mini_batch_size",
    "responses each": "actor_rollout_ref.rollout.n",
    "learning rate": f"{ACTOR}.optim.lr",
}
"""Settings that the page shows, and nothing else of a config: others may hold a key or a password."""


@dataclass
class Part:
    """The content of a section of the page; its prose is in the template."""

    tables: dict[str, pd.DataFrame]  # texts, by caption
    draw: Callable[[], Figure] | None = None  # its figure
    sentences: Sequence[str] = ()
    image: str = ""  # the figure as data URI


def main(args: argparse.Namespace) -> int:
    """Read the runs and write their report; print findings, the place of the page, and what to do next."""
    if args.max_rows < len(args.runs):
        raise ValueError(f"--max-rows={args.max_rows} has to be one per run or more")
    if args.output is None:
        if len(args.runs) > 1:
            raise ValueError(f"a report on {len(args.runs)} runs needs a folder of its own: -o DIR")
        (run,) = args.runs
        args.output = run.with_name(f"{run.stem}-report") if run.is_file() else run / "report"
    refuse_foreign(args.output)
    runs = list(tqdm(read_runs(args.runs, args.names, args.max_rows), "runs", len(args.runs), delay=2, disable=None))
    analyses = analyses_of(runs)
    files = build(analyses)
    write(args.output, files)
    if args.json:
        print(files["report.json"].decode(), end="")
        return 0
    for one in analyses:
        show([("run", named(one.run.name, one.loss))], widths=(8,))
        findings.show(one.judgement.findings)
        show_comparison(one.judgement.compared)
    show([("page", str(args.output / "report.html"))], widths=(8,))
    for one in analyses:
        if len(one.run.records) and one.judgement.findings[0].action != FIX:
            show([("next:", f"fspo-verl calibrate {shlex.quote(str(one.run.folder))}")], widths=(8,))
    return 0


def named(run: str, loss: str | None) -> str:
    """Name whose findings or curve it is: the run, and its loss if that is known."""
    return f"{run} ({loss})" if loss else run


def analyses_of(runs: Sequence[Run]) -> list[Analysis]:
    """The numbers of each run, with one set of length bins for all, so that they can be compared."""
    edges = length_edges(np.concatenate([run.records.length for run in runs]))
    return [analyse(run, edges) for run in tqdm(runs, "numbers", delay=2, disable=None)]


def build(analyses: Sequence[Analysis]) -> dict[str, bytes]:
    """All files of a report: name, relative to its folder, to content. The same for the same input."""
    settings = [one.run.settings for one in analyses]
    clips = [of_run(one.loss, one.trained_band) if one else None for one in settings]
    styles = {one.run.name: style for one, style in zip(analyses, figures.run_styles(clips), strict=True)}
    parts = {
        "clip_rate_by_length": rates_part(analyses, styles),
        "ranges": ranges_part(analyses),
        "over_steps": steps_part(analyses, styles),
        "trained": trained_part(analyses),
        "counterfactuals": others_part(analyses),
        "mismatch": mismatch_part(analyses),
    }
    files: dict[str, bytes] = {}
    for name, part in tqdm(parts.items(), "figures", delay=2, disable=None):
        if part.draw:
            svg, png = figures.render(part.draw, "svg", "png")
            files |= {f"figures/{name}.svg": svg, f"figures/{name}.png": png}
            part.image = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    facts = {"version": __version__, "runs": [one.to_json() for one in analyses]}
    text = json.dumps(facts, indent=1, allow_nan=False) + "\n"
    return {"report.json": text.encode(), "report.html": _page(analyses, parts)} | files


def refuse_foreign(folder: Path) -> None:
    """Let a report into a folder only where it replaces nothing but an earlier report.

    Raises:
        ValueError: a file of the user's has the name of one of ours.
    """
    there = [name for name in FILES if (folder / name).exists()]
    try:
        ours = {"version", "runs"} <= set(json.loads((folder / "report.json").read_bytes()))
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
        if len(a.rates):
            label = named(a.run.name, a.loss) + ("" if a.own else ", live metrics")
            series.append(Series(label, styles[a.run.name], a.rates))
    panels = [(figures.clip_rates, "clip rate by response length", series)]
    return Part({}, partial(figures.of_panels, panels, height=2.9) if series else None)


def ranges_part(analyses: Sequence[Analysis]) -> Part:
    """The ranges that were tried, of each run in which they were."""
    tables, notes = {}, []
    for a in analyses:
        if rows := comparison_rows(a.judgement.compared):
            table = pd.DataFrame(rows)
            for name in ("uneven", "smallest"):
                table[name] = [share(row[name]) for row in rows]
            caption = f"{a.run.name}: " * (len(analyses) > 1) + "How even each range clips"
            tables[caption] = table.rename(columns={"smallest": "smallest that would show"})
            notes += [note for note in comparison_notes(a.judgement.compared) if note not in notes]
    return Part(tables, None, notes)


def steps_part(analyses: Sequence[Analysis], styles: dict[str, Style]) -> Part:
    """How clip rate and slope went over the steps of recorded runs."""
    courses = [(a.run.name, styles[a.run.name], slopes_of_steps(a.run.records)) for a in analyses if a.own]
    courses = [one for one in courses if len(one[2]) > 1]
    panels = [(figures.over_steps, "clip rate", courses, "rate"), (figures.over_steps, "slope k", courses, "slope")]
    return Part({}, partial(figures.of_panels, panels, height=2.3) if courses else None)


def trained_part(analyses: Sequence[Analysis]) -> Part:
    tables = {"What trained": pd.DataFrame([_settings(a) for a in analyses])}
    if recorded := [a for a in analyses if a.own]:
        rows = [{"run": a.run.name} | _texts(a.own) for a in recorded if a.own]
        tables["What its clip did [95% intervals]"] = pd.DataFrame(rows)
        caption = "Clip rate (%) of the responses better and worse than their group, by thirds of the length"
        tables[caption] = pd.concat([_sides(a.run) for a in recorded])
    return Part(tables)


def others_part(analyses: Sequence[Analysis]) -> Part:
    tables, panels, notes = {}, [], [f"{clip.label}: {clip.note}." for clip in CLIPS.values() if clip.note]
    for a in analyses:
        if a.own is None:
            continue
        rows, series = [], []
        for clip, found in a.others:
            eps = [f"{clip.eps[side]:.2g}" for side in ("eps_low", "eps_high") if clip.eps[side] is not None]
            rows.append({"clip": clip.label, "eps": ", ".join(eps) or clip.range} | _texts(found, other=True))
            if clip.name in STYLES and isinstance(clip, BandClip):  # the table has the others
                series.append(Series(clip.label, STYLES[clip.name], found.by_length))
        tables[f"{a.run.name}: each clip scaled to {MATCHED_RATE:.0%}"] = pd.DataFrame(rows)
        if series:
            panels.append((figures.clip_rates, a.run.name, series, MATCHED_RATE))
    return Part(tables, partial(figures.of_panels, panels, height=2.7) if panels else None, notes)


def mismatch_part(analyses: Sequence[Analysis]) -> Part:
    tables = {}
    for name, mismatch in ((a.run.name, a.mismatch) for a in analyses if a.mismatch is not None):
        row = {
            "responses": f"{mismatch.responses:,}",
            "σ of a token": f"{mismatch.sigma:.2g}",
            "mean of a token": f"{mismatch.mean:.2g}",
            "−σ²/2": f"{-(mismatch.sigma**2) / 2:.2g}",
            "KL (k3)": number(mismatch.kl, ".2g"),
            "steps of staleness": number(mismatch.staleness, ".2g"),
            "rejected (%)": f"{100 * mismatch.rejected:.3g}",
        }
        tables[f"{name}: log-probs of the trainer minus those of the rollout engine"] = pd.DataFrame([row])
        shares = mismatch.dropped.map(lambda share: number(100 * share, ".3g")).add_suffix(" (%)")
        tables[f"{name}: what rules take of all responses and of each third by length"] = shares.reset_index()
    return Part(tables)


# --- texts -----------------------------------------------------------------------------------------------------------


def _settings(one: Analysis) -> dict[str, str]:
    run, settings, length = one.run, one.run.settings, one.run.records.length
    versions = settings.versions.items() if settings else ()
    band = settings.band if settings else None
    return {
        "run": run.name,
        "loss": one.loss or _DASH,
        "clip": (settings and settings.clip) or _DASH,
        "as ratios, for the longest": (band and len(length) and band.ratios_at(int(length.max()))) or _DASH,
        **{
            name: _DASH if (value := setting(run.config, key)) is None else plain(f"{value}")
            for name, key in NAMED.items()
        },
        "steps": f"{one.steps:,}",
        "responses": f"{run.recorded.rows:,}",
        "shortest to longest": f"{length.min():,} to {length.max():,} tokens" if len(length) else _DASH,
        "versions": ", ".join(f"{name} {version}" for name, version in versions) or _DASH,
    }


def _sides(run: Run) -> pd.DataFrame:
    """A row for either sign of the advantage: all of its responses, and the thirds by length."""
    counted = run.records[run.records["advantage"] != 0]
    side = np.where(counted["advantage"] > 0, "better", "worse")
    third = np.array(["shortest", "middle", "longest"])[third_of(counted["length"].to_numpy())]
    rates = counted.groupby([side, third])["clipped"].mean().unstack()
    rates = rates.reindex(columns=["shortest", "middle", "longest"])
    rates.insert(0, "all", counted.groupby(side)["clipped"].mean())
    table = rates.map(lambda rate: number(100 * rate, ".3g")).rename_axis("responses").reset_index()
    table.insert(0, "run", run.name)
    return table


def _texts(found: Measured, other: bool = False) -> dict[str, str]:
    """Return the cells of a table on a clip: the run's own, or another one."""
    overall = found.overall
    rate = Estimate(*(100 * overall[name] for name in ("rate", "lower", "upper")))
    last = {"LRE": number(overall["lre"], ".2g")}
    if other:
        last = {
            "uneven": number(100 * found.uneven, ".2g") + "%",
            "smallest": number(100 * found.smallest, ".2g") + "%",
        }
    return {
        "responses with an advantage": f"{overall['n']:,.0f}",
        "clip rate (%)": f"{rate:.3g}",
        "clipped more": _dependence(found.effect),
        "p of no dependence": number(overall["p"], ".2g"),
    } | last


def _dependence(effect: LengthEffect | None) -> str:
    """Who is clipped more, with k where a power of the length describes it; or how much may be there unseen."""
    if effect is None:
        return _DASH
    if not effect.depends:
        return f"none shown, up to {effect.factor:.2g} times" if effect.factor < 100 else "none shown"
    line = f", k {Estimate(effect.exponent, effect.lower, effect.upper):.2f}" if effect.is_line else ""
    return f"{effect.who}{line}"


def _page(analyses: Sequence[Analysis], parts: dict[str, Part]) -> bytes:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fspo_verl.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(runs=analyses, parts=parts, version=__version__).encode()
