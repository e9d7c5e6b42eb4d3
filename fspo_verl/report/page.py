# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One page of figures and numbers on length fairness, from one or several runs of verl.

A RUN is the folder of a training run, or one metrics file of verl's file logger. The page needs no network and no other
file; DIR also gets every figure as PNG and SVG (figures/) and every number as CSV and JSON (tables/, report.json).
A run may still go on: with --watch the page is made anew whenever a run has written something, until Ctrl-C.
"""

import argparse
import base64
import contextlib
import dataclasses
import json
import math
import platform
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from fspo_verl import terminal
from fspo_verl.analysis.clip_rates import length_edges
from fspo_verl.analysis.counterfactuals import Counterfactuals
from fspo_verl.analysis.law import LawOfS
from fspo_verl.analysis.runs import RECORDS_DIR, Run, config_differences, read_runs, written
from fspo_verl.clips import CLIPS, MATCHED_RATE
from fspo_verl.files import to_csv, write_whole
from fspo_verl.observe import noise
from fspo_verl.observe.metrics import NAMES
from fspo_verl.observe.noise import Noise
from fspo_verl.observe.settings import RunSettings
from fspo_verl.report import figures
from fspo_verl.report.figures import Series
from fspo_verl.report.numbers import Analysis, analyse, clip_of, live_rates, live_steps, noise_of, steps, tables
from fspo_verl.report.style import HEADLINE, STYLES, Style
from fspo_verl.versions import installed

_MADE_BY = "fspo-verl report"
_OWN_FILE = re.compile(r"report\.(html|json)|(figures|tables)/\w+\.(svg|png|csv)")
_POINTS = 4000  # of a scatter plot
_DASH = "–"

# Panels of the training curves: title, and metrics with their units, of which the first counts that all runs log.
_CURVES = {
    "reward": dict.fromkeys((*NAMES["reward"], "critic/rewards/mean"), "mean"),
    "response length": dict.fromkeys(NAMES["response_length"], "mean (tokens)"),
    "entropy": dict.fromkeys(NAMES["entropy"], "nats, aggregated as the loss"),
    "clipped": {
        "fspo/clip_rate/all": "share of responses, A ≠ 0",
        "actor/fspo/clip_fraction": "share of all responses",
        "actor/pg_clipfrac": "share of tokens",
    },
    "gradient norm": dict.fromkeys(NAMES["grad_norm"], "aggregated loss, before clipping"),
}


@dataclass
class Part:
    """What a section of the page shows; its prose is in the template."""

    numbers: Sequence[str] = ()
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)  # texts, by caption
    panels: Sequence[tuple] = ()  # as figures.of_panels takes them
    height: float = 0.0  # of a panel, inches
    columns: int = 2
    one_legend: bool = True
    wide: str = ""  # the figure as data URI
    narrow: str = ""  # for a narrow screen

    def draw(self, columns: int) -> Figure:
        """The figure with so many panels in a row."""
        return figures.of_panels(self.panels, columns, self.height, self.one_legend)


def main(args: argparse.Namespace) -> int:
    if args.bins < 2 or args.max_rows < len(args.runs):
        raise ValueError(f"--bins={args.bins} has to be 2 or more, --max-rows={args.max_rows} one per run or more")
    if args.output.resolve() in {run.resolve() for run in args.runs}:
        raise ValueError(f"{args.output} is a run itself; choose another folder, such as {args.output / 'report'}")
    if args.watch is not None and not args.watch > 0:
        raise ValueError(f"--watch={args.watch:g} has to be more than 0 seconds")
    _refuse_foreign(args.output, ["report.html", "report.json"])  # before minutes of work
    if args.watch is None:
        report(args)
    else:
        watch(args)
    return 0


def report(args: argparse.Namespace) -> None:
    """Read the runs, write their report, and print its verdict."""
    runs = list(tqdm(read_runs(args.runs, args.names, args.max_rows), "runs", len(args.runs), delay=2))
    files = build(runs, args.bins, args.seed)
    write(args.output, files)
    terminal.show([tuple(line) for line in json.loads(files["report.json"])["verdict"]], widths=(8,))
    print(args.output / "report.html", flush=True)


def watch(args: argparse.Namespace) -> None:
    """:func:`report` whenever a run has written something, until Ctrl-C; a run need not be there yet."""
    seen = said = None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            # Before the runs are read, so that what they write meanwhile counts as new.
            now = set().union(*map(written, args.runs))
            if now != seen:
                try:
                    report(args)
                    seen = now
                except FileNotFoundError as error:
                    if said != (said := str(error)):
                        print(f"waiting: {error}", flush=True)
            time.sleep(args.watch)


def build(runs: Sequence[Run], bins: int = 8, seed: int = 0) -> dict[str, bytes]:
    """All files of a report: name, relative to its folder, to content. The same for the same input."""
    # One set of bins for all runs, so that they can be compared.
    edges = length_edges(np.concatenate([run.records.length for run in runs]), bins)
    analyses = [
        found
        for i, run in enumerate(tqdm(runs, "numbers", delay=2))
        if (found := analyse(run, edges, np.random.default_rng([seed, i]))) is not None
    ]
    clips = [clip_of(run.settings) for run in runs]
    styles = {run.name: style for run, style in zip(runs, figures.run_styles(clips), strict=True)}
    rng = np.random.default_rng(seed)
    recorded = {a.run.name for a in analyses}
    live = {run.name: live_rates(run, rng) for run in runs if run.name not in recorded}
    parts = {
        "clip_rate_by_length": clip_rates(analyses, live, styles),
        "counterfactuals": counterfactuals(analyses),
        "log_ratio_by_length": log_ratios(analyses, styles, rng),
        "quantiles": quantiles(analyses, styles),
        "over_steps": over_steps(runs, analyses, styles),
        "law_by_length": law(analyses, styles),
        "curves": curves(runs, styles),
        "config": config(runs),
    }
    files = {}
    for name, part in tqdm(parts.items(), "figures", delay=2):
        if part.panels:
            svg, png = figures.render(part.draw, part.columns, "svg", "png")
            files |= {f"figures/{name}.svg": svg, f"figures/{name}.png": png}
            part.wide, part.narrow = map(_data_uri, (svg, *figures.render(part.draw, 1, "svg")))
    numbers = tables(runs, analyses, live)
    files |= {f"tables/{name}.csv": to_csv(t) for name, t in numbers.items() if len(t)}
    summary = numbers["summary"].replace([np.inf, -np.inf], np.nan).astype(object)
    facts = {
        "made_by": _MADE_BY,
        "versions": versions(),
        "seed": seed,
        "length_edges": edges.tolist(),
        "matched_rate": MATCHED_RATE,
        "missing": missing(runs, analyses),
        "runs": summary.where(summary.notna(), None).to_dict("records"),
        "verdict": verdict(runs, analyses),
    }
    files["report.html"] = _page(runs, analyses, parts, facts)
    files["report.json"] = _json(facts | {"files": sorted([*files, "report.json"])})
    return files


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of a report, all of them or none; remove those of an earlier report that it lacks.

    Raises:
        ValueError: a file of that name is there, and no report has written it.
        OSError: the disk is full, or the folder cannot be written; what is there stays.
    """
    manifest = folder / "report.json"
    own = _listed(manifest)
    _refuse_foreign(folder, files)
    # The list of files goes first, so that a report that was interrupted can be made again.
    of_both = _json(json.loads(files["report.json"]) | {"files": sorted(own | set(files))})
    write_whole([(manifest, of_both), *((folder / name, content) for name, content in files.items())])
    for name in own - set(files):
        (folder / name).unlink(missing_ok=True)


def _refuse_foreign(folder: Path, names: Iterable[str]) -> None:
    own = _listed(folder / "report.json")
    foreign = sorted(name for name in names if (folder / name).exists() and name not in own)
    if foreign:
        raise ValueError(f"{folder} holds {', '.join(foreign)}, which no report has written; choose another folder")


def _listed(manifest: Path) -> set[str]:
    """The files of the report that wrote this manifest; none where another program wrote it, or nothing is there."""
    try:
        match json.loads(manifest.read_bytes()):
            case {"made_by": made_by, "files": list(names)} if made_by == _MADE_BY:
                return {name for name in names if _OWN_FILE.fullmatch(name)}
    except (FileNotFoundError, ValueError):
        pass
    return set()


def verdict(runs: Sequence[Run], analyses: Sequence[Analysis]) -> list[tuple[str, str]]:
    """What the report says, in three lines: a label and a sentence each."""
    if not analyses:
        names = ", ".join(run.name for run in runs)
        return [
            ("clipped", f"no records of responses with an advantage ({names}): set records_dir, train, and come back")
        ]
    judged = [a for a in analyses if not math.isnan(a.lre.value)]
    lengths = [
        f"{a.run.name} depends on length, LRE {_interval(*a.lre)} where chance gives up to {_number(a.floor.upper)}"
        for a in judged
        if _beyond_chance(a)
    ]
    if rest := [a.run.name for a in judged if not _beyond_chance(a)]:
        lengths.append(f"no dependence beyond chance can be told in {', '.join(rest)}")
    lengths += [f"{a.run.name} cannot be judged" for a in analyses if math.isnan(a.lre.value)]
    clipped = [f"{a.run.name} {_rate(a.total)} of {a.total.n:,.0f} responses" for a in analyses]
    lines = [("clipped", ", ".join(clipped)), ("lengths", "; ".join(lengths))]
    if (reference := _reference(analyses)) is not None:
        of_all = reference.matched.overall.summary
        shapes = [f"{CLIPS[name].label} {_number(of_all.lre[name])}" for name in HEADLINE if name in of_all.index]
        same = f"LRE on the responses of {reference.run.name}, {MATCHED_RATE:.0%} clipped by each: {', '.join(shapes)}"
        lines.append(("shapes", f"{same}; by chance up to {_number(of_all.floor_upper.mean())}"))
    return lines


def _beyond_chance(a: Analysis) -> bool:
    """Whether the LRE is more than chance gives, and its interval, which knows of chance as well, lies above 0."""
    return a.lre.value > a.floor.upper and a.lre.lower > 0


def _reference(analyses: Sequence[Analysis]) -> Analysis | None:
    """The run on whose responses clips are compared: the first of fspo, or else the first."""
    matched = [a for a in analyses if a.matched is not None]
    return next((a for a in matched if a.run.settings.loss == "fspo"), matched[0] if matched else None)


# --- sections --------------------------------------------------------------------------------------------------------


def clip_rates(analyses: Sequence[Analysis], live: dict[str, pd.DataFrame], styles: dict[str, Style]) -> Part:
    series = [Series(f"{a.run.name}: LRE {_interval(*a.lre)}", styles[a.run.name], a.rates) for a in analyses]
    numbers = [_clip_sentence(a) for a in analyses]
    for name, table in live.items():
        if len(table):
            series.append(Series(f"{name} (live metrics)", styles[name], table))
            numbers.append(
                f"{name}: rates of its live metrics over {table.steps.max()} steps; bars resample the steps."
            )
    if not series:
        return Part()
    panels = [(figures.headline_rates, "As trained:\neach run with its own clip", series)]
    if (reference := _reference(analyses)) is not None:
        title = f"The same responses ({reference.run.name}),\nevery clip re-scaled to take {MATCHED_RATE:.0%}"
        shapes = _clip_series(reference.matched, headline=True)
        chance = reference.matched.overall.summary.floor.mean()
        panels.append((figures.headline_rates, title, shapes, MATCHED_RATE, f"LRE by chance: {_number(chance)}"))
    return Part(numbers, panels=panels, height=4.1, one_legend=False)


def counterfactuals(analyses: Sequence[Analysis]) -> Part:
    tables, panels = {}, []
    for a in analyses:
        tables[f"{a.run.name}: every clip on its {a.total.n:,.0f} responses with an advantage"] = _clip_table(a)
        panels.append((figures.clip_rates, f"{a.run.name}: usual constants", _clip_series(a.stock)))
        if a.matched is not None:
            title = f"{a.run.name}: re-scaled to {MATCHED_RATE:.0%}"
            panels.append((figures.clip_rates, title, _clip_series(a.matched), MATCHED_RATE))
    notes = [f"{clip.label}: {clip.note}." for clip in CLIPS.values() if clip.note and analyses]
    return Part(notes, tables, panels, height=2.7)


def log_ratios(analyses: Sequence[Analysis], styles: dict[str, Style], rng) -> Part:
    panels, numbers = [], []
    for a in analyses:
        name, drawable = a.run.name, a.run.records.query("quadratic_variation > 0 and advantage != 0")
        if drawable.empty:
            continue
        points = drawable.sample(min(_POINTS, len(drawable)), random_state=rng)[["length", "log_ratio", "clipped"]]
        limit = 1.1 * float(drawable.log_ratio.abs().quantile(0.995)) or 1.0
        bands = _bands(a.run.settings, drawable.length, a.law.sigma.value)
        title = f"{name}, n = {len(points):,}"
        panels.append((figures.log_ratio_by_length, title, styles[name], points, bands, limit))
        beyond = (points.log_ratio.abs() > limit).sum()
        numbers.append(
            f"{name}: {len(points):,} of {len(drawable):,} moved responses with an advantage are drawn, "
            f"{(points.clipped > 0).sum():,} of them clipped; {beyond} lie beyond the vertical axis."
        )
    return Part(numbers, panels=panels, height=3.7, columns=3, one_legend=False)


def quantiles(analyses: Sequence[Analysis], styles: dict[str, Style]) -> Part:
    moved = {a.run.name: a for a in analyses if len(a.quantiles)}
    labels = {name: f"{name}, n = {a.law.responses:,}" for name, a in moved.items()}
    panels = []
    for title, column in (("(S + Q/2) / √Q", "z"), ("S / (σ √L)", "per_sqrt_length")) if moved else ():
        series = [(labels[name], styles[name], a.quantiles.normal, a.quantiles[column]) for name, a in moved.items()]
        panels.append((figures.quantiles, title, series))
    numbers = [
        f"{name}: |S + Q/2| exceeds 1.96 √Q in {_rate(a.outliers)} of {a.outliers.n:,.0f} moved "
        "responses (normal law: 5%)."
        for name, a in moved.items()
    ]
    return Part(numbers, panels=panels, height=3.9)


def over_steps(runs: Sequence[Run], analyses: Sequence[Analysis], styles: dict[str, Style]) -> Part:
    recorded = {a.run.name: a.windows for a in analyses}
    by_run = {run.name: recorded[run.name] if run.name in recorded else live_steps(run) for run in runs}
    panels = []
    for title, label, column in (
        ("spread of a token's log-ratio", "σ (nats)", "sigma"),
        ("drift (dotted: −σ²/2)", "mean of S/L (nats per token)", "drift"),
        ("fairness (dotted: by chance)", "length reweighting error", "lre"),
    ):
        known = {name: table for name, table in by_run.items() if column in table and table[column].notna().any()}
        if series := [(name, styles[name], table) for name, table in known.items()]:
            panels.append((figures.over_steps, title, label, series, column))
    numbers = []
    for name, windows in recorded.items():
        last = windows.iloc[-1]
        numbers.append(
            f"{name}: in its last window (steps {last.first_step:.0f} to {last.last_step:.0f}, {last.n:,.0f} responses "
            f"with an advantage) σ is {_interval(last.sigma, last.sigma_lower, last.sigma_upper)} and LRE "
            f"{_interval(last.lre, last.lre_lower, last.lre_upper)}, by chance {_number(last.lre_expected)}."
        )
    numbers += [_noise_sentence(run, found) for run in runs if (found := noise_of(run)) is not None]
    return Part(numbers, panels=panels, height=3.2, columns=3)


def law(analyses: Sequence[Analysis], styles: dict[str, Style]) -> Part:
    laws = {a.run.name: a.law for a in analyses if a.law.responses}
    if not laws:
        return Part()
    slopes = {name: f"slope {_interval(*law.std_slope)}" for name, law in laws.items()}
    sigma = [Series(name, styles[name], law.sigma_by_length, "value") for name, law in laws.items()]
    spread = [Series(f"{name}: {slopes[name]}", styles[name], law.std_by_length, "value") for name, law in laws.items()]
    fitted = [law.std_slope.value for law in laws.values()]
    numbers = [
        f"{name}: σ = {_interval(*law.sigma)}, {slopes[name]} ({law.responses:,} moved responses)."
        for name, law in laws.items()
    ]
    tables = {"The law of S: estimate [95% interval]": _law_table(laws)}
    panels = [(figures.sigma_by_length, sigma), (figures.spread_by_length, spread, fitted)]
    return Part(numbers, tables, panels, height=4.0, one_legend=False)


def curves(runs: Sequence[Run], styles: dict[str, Style]) -> Part:
    logged = [run for run in runs if len(run.metrics)]
    accuracies = sorted({name for run in logged for name in run.metrics if re.match("val-core/.+/acc/", name)})
    validation = [(f"validation, {name.split('/', 1)[1].split('/acc/')[0]}", {name: "accuracy"}) for name in accuracies]
    panels, numbers = [], []
    reward, *others = _CURVES.items()
    for title, units in (reward, *validation, *others) if logged else ():
        having = {name: [run for run in logged if name in run.metrics] for name in units}
        common = [name for name in units if len(having[name]) == len(logged)]
        present = [name for name in reversed(units) if having[name]]
        for name in (common or present)[:1]:
            series = [(run.name, styles[run.name], run.metrics[name].dropna()) for run in having[name]]
            shown = name.split("/acc/")[1] if name in accuracies else name
            panels.append((figures.curves, f"{title}\n{shown}", units[name], series))
            if name in accuracies:
                numbers += [_accuracy_sentence(run, name, values) for run, _, values in series]
    return Part(numbers, panels=panels, height=2.6, columns=3)


def config(runs: Sequence[Run]) -> Part:
    if sum(run.config is not None for run in runs) < 2:
        return Part(numbers=["Fewer than two runs come with their config: nothing to compare."])
    differences = config_differences(runs)
    if differences.empty:
        return Part(numbers=["No value differs, apart from names and output folders."])
    return Part(tables={"Config values that differ": differences.reset_index()})


def missing(runs: Sequence[Run], analyses: Sequence[Analysis]) -> list[str]:
    """What the page lacks of each run, why, and what brings it."""
    unmatched = {a.run.name for a in analyses if a.matched is None}
    return [f"{run.name}: {text}." for run in runs for text in _lacking(run, run.name in unmatched)]


def _lacking(run: Run, unmatched: bool) -> Iterator[str]:
    records = run.records
    if records.empty:
        how = f"Train with {RECORDS_DIR}=DIR"
        if run.settings is None or run.settings.loss != "fspo":
            how += " and +algorithm.policy_loss=observed (algorithm.policy_loss=gspo and grpo include it)"
        without = "no clip rates with their numbers of responses, no comparison of clips and no law of S"
        yield f"no records, so {without}. {how}"
    elif not (records.advantage != 0).any():
        yield "no response has an advantage, so there is no gradient that a clip could take"
    elif not (records.quadratic_variation > 0).any():
        yield (
            "no response has moved (Q = 0). With one optimiser step per rollout the ratio is 1 and no clip can act. "
            "Lower actor_rollout_ref.actor.ppo_mini_batch_size"
        )
    elif not (records.clipped > 0).any():
        yield "nothing was clipped, so its LRE is 0 at any length"
    elif (records.clipped[records.advantage != 0] == 1).all():
        yield "everything was clipped, so there is no acceptance to compare between lengths"
    if (rows := records.attrs["rows"]) > len(records):
        yield f"a random {len(records):,} of its {rows:,} records are used (--max-rows)"
    steps, responses = records.attrs.get("lost", (0, 0))
    if responses:
        yield f"the records of {responses:,} responses in {steps:,} steps were lost while it trained"
    if absent := [clip.label for clip in CLIPS.values() if clip.lacks(records)]:
        yield f"its records are of an earlier version, without what {', '.join(absent)} needs"
    if unmatched:
        yield f"too few responses have moved to let any clip take {MATCHED_RATE:.0%} of them"
    if run.metrics.empty:
        yield "no metrics, so no training curves. Train with trainer.logger=[console,file]"
    if run.config is None:
        yield (
            "no .hydra/config.yaml, so its config is not compared. Keep Hydra's folder with the run "
            "(hydra.run.dir=RUN/hydra)"
        )


# --- texts -----------------------------------------------------------------------------------------------------------


def _settings_table(runs: Sequence[Run]) -> pd.DataFrame:
    rows = []
    for run in runs:
        settings, length = run.settings, run.records.length
        versions = settings.versions.items() if settings else ()
        lengths = f"{length.min():,}, {length.median():,.0f}, {length.max():,} tokens" if len(length) else _DASH
        rows.append(
            {
                "run": run.name,
                "loss": settings.loss if settings else _DASH,
                "clip": (settings and settings.clip) or _DASH,
                "versions": ", ".join(f"{name} {version}" for name, version in versions) or _DASH,
                "steps": f"{steps(run):,}",
                "responses": f"{run.records.attrs['rows']:,}",
                "shortest, median, longest": lengths,
            }
        )
    return pd.DataFrame(rows)


def _results_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "run": a.run.name,
            "responses with an advantage": f"{a.total.n:,.0f}",
            "clip rate [95%]": _rate(a.total),
            "length reweighting error [95%]": _interval(*a.lre),
            "by chance": _number(a.floor.value),
            "by chance up to": _number(a.floor.upper),
        }
        for a in analyses
    )


def _clip_series(counterfactuals: Counterfactuals, headline: bool = False) -> list[Series]:
    """The clips that a figure shows, or the few of the headline with their LRE; the tables have the others."""
    tables, summary = counterfactuals.overall
    series = []
    for clip in CLIPS.values():
        if clip.name in summary.index and clip.name in (HEADLINE if headline else STYLES):
            lre = summary.loc[clip.name, ["lre", "lre_lower", "lre_upper"]]
            label = f"{clip.label}: LRE {_interval(*lre)}" if headline else clip.label
            series.append(Series(label, STYLES[clip.name], tables.loc[[clip.name]]))
    return series


def _clip_table(a: Analysis) -> pd.DataFrame:
    table = _clip_texts(a.stock)
    rescaled = _clip_texts(a.matched).reindex(table.index, fill_value=_DASH)[["LRE", "by chance up to"]]
    table.insert(0, "clip", [CLIPS[name].title for name in table.index])
    return table.join(rescaled.add_suffix(f" at {MATCHED_RATE:.0%}"))


def _clip_texts(found: Counterfactuals | None) -> pd.DataFrame:
    """Columns eps, rate, LRE, by chance up to; index method."""
    texts = {
        row.Index: [
            ", ".join(f"{eps:.2g}" for eps in (row.eps_low, row.eps_high) if not pd.isna(eps)) or _DASH,
            _rate(row),
            _interval(row.lre, row.lre_lower, row.lre_upper),
            _number(row.floor_upper),
        ]
        for row in (() if found is None else found.overall.summary.itertuples())
    }
    return pd.DataFrame(texts, index=["eps", "rate", "LRE", "by chance up to"]).T.astype(object)


def _law_table(laws: dict[str, LawOfS]) -> pd.DataFrame:
    texts = {
        name: {
            "moved responses": f"{law.responses:,}",
            "σ, spread of a token's log-ratio": _interval(*law.sigma),
            "slope of log std(S) against log L": _interval(*law.std_slope),
            "κ = mean S / mean(−Q/2)": _interval(*law.kappa),
            "share of Q in the last 4 tokens": _interval(*law.last_share, "%"),
            "share of Q in the largest 1% of the tokens": _interval(*law.top_share, "%"),
            "a of Var(S) = a + bL + cL²": _interval(*law.variance_law.constant),
            "b": _interval(*law.variance_law.linear),
            "c": _interval(*law.variance_law.quadratic),
        }
        for name, law in laws.items()
    }
    return pd.DataFrame(texts).rename_axis("quantity").reset_index()


def _bands(settings: RunSettings | None, lengths: pd.Series, sigma: float) -> list[tuple[str, str, pd.DataFrame]]:
    """Label, line style and edges of the run's band and, for a √L band, of that with the other centre; at Q = σ²L."""
    band = settings and settings.trained_band
    if band is None:
        return []
    bands = [("its band", "-", band)]
    if band.length_power == 0.5 and not band.is_studentized:
        others = {"plain": ("drift_corrected", "centre −Q/2"), "drift_corrected": ("plain", "centre 0")}
        other, label = others[band.normalization]
        bands.append((label, "--", dataclasses.replace(band, normalization=other)))
    length = torch.as_tensor(np.linspace(lengths.min() ** 0.5, lengths.max() ** 0.5, 100) ** 2)
    drawn = []
    for label, line, band in bands:
        low, high, _ = band.edges(length, sigma**2 * length)
        drawn.append((label, line, pd.DataFrame({"length": length, "low": low, "high": high})))
    return drawn


def _clip_sentence(a: Analysis) -> str:
    left_out = f" ({a.lre_excluded:,} responses in bins with too few of them or of their prompts left out)"
    verdict = f": {'above' if _beyond_chance(a) else 'not above'} chance"
    return (
        f"{a.run.name}: {_rate(a.total)} of {a.total.n:,.0f} responses with an advantage were clipped; LRE "
        f"{_interval(*a.lre)}{left_out if a.lre_excluded else ''}, by chance {_number(a.floor.value)}, up to "
        f"{_number(a.floor.upper)}{'' if math.isnan(a.lre.value) else verdict}."
    )


def _noise_sentence(run: Run, found: Noise) -> str:
    band = run.settings and run.settings.trained_band
    outside = "" if math.isnan(found.outside) else f", {found.outside:.1%} of them outside its band"
    warning = None if band is None else noise.warning(found, band)
    return (
        f"{run.name}: numerical noise of σ = {_number(found.sigma)}, from {found.responses:,} responses of first "
        f"mini-batches, which have not moved{outside}.{f' {warning}.' if warning else ''}"
    )


def _accuracy_sentence(run: str, name: str, values: pd.Series) -> str:
    return (
        f"{run}: {name} went from {values.iloc[0]:.3g} at step {values.index[0]} to {values.iloc[-1]:.3g} at step "
        f"{values.index[-1]} ({len(values)} validations; the number of problems in one is not logged)."
    )


def _number(value: float) -> str:
    return _DASH if math.isnan(value) else f"{value:.2g}"


def _interval(value: float, lower: float, upper: float, unit: str = "") -> str:
    """``value [lower, upper]``, in no more digits than the interval is wide; shares with the unit %."""
    if math.isnan(value):
        return _DASH
    value, lower, upper = (number * (100 if unit == "%" else 1) for number in (value, lower, upper))
    if not upper > lower:
        return f"{value:.2g}{unit}"
    decimals = max(0, math.ceil(-math.log10((upper - lower) / 6)))
    largest = max(-lower, upper)
    form = f".{decimals}f" if largest >= 1e-3 else f".{max(1, decimals + math.floor(math.log10(largest)) + 1)}g"
    return f"{value:{form}}{unit} [{lower:{form}}, {upper:{form}}]"


def _rate(row) -> str:
    return _interval(row.rate, row.lower, row.upper, "%")


# --- files -----------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Of what made the page; the records say what trained."""
    packages = ("fspo-verl", "numpy", "scipy", "pandas", "matplotlib")
    return {name: installed(name) or "(not installed)" for name in packages} | {"Python": platform.python_version()}


def _page(runs: Sequence[Run], analyses: Sequence[Analysis], parts: dict[str, Part], facts: dict) -> bytes:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fspo_verl.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    summary = {"What trained": _settings_table(runs)}
    if analyses:
        summary["What its clip did"] = _results_table(analyses)
    template = environment.get_template("page.html.jinja")
    return template.render(runs=runs, summary=summary, parts=parts, facts=facts).encode()


def _data_uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _json(value: dict) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
