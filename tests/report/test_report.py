# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The report shows the numbers that the statistics give, loads nothing, and is right where a run lacks something."""

import html.parser
import json
import math
import re
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_run
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fspo_verl import cli
from fspo_verl.analysis import clip_rates, resampling, runs
from fspo_verl.analysis.law import law_of_s
from fspo_verl.band import Band
from fspo_verl.clips import CLIPS, MATCHED_RATE, BandClip, TokenClip
from fspo_verl.observe.settings import RunSettings
from fspo_verl.report import figures, numbers, page
from fspo_verl.report.style import HEADLINE, STYLES

BINS, DRAWS = 5, 20
SMALL = {"steps": 6, "prompts": 16}


@pytest.fixture(scope="module", autouse=True)
def few_draws():
    """Intervals from a few draws: no test here is about their width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbers, "DRAWS", DRAWS)
        patch.setattr(numbers, "_WINDOW_DRAWS", DRAWS)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report on two runs: its folder, the runs as read, and the page parsed."""
    folder = tmp_path_factory.mktemp("runs")
    paths = [synthetic_run.write_run(folder / loss, loss, seed, **SMALL) for seed, loss in enumerate(("fspo", "gspo"))]
    output = folder / "report"
    assert cli.main(["report", *map(str, paths), "-o", str(output), "--bins", str(BINS)]) == 0
    page = Page((output / "report.html").read_text())
    return types.SimpleNamespace(folder=output, paths=paths, runs=list(runs.read_runs(paths)), page=page)


class Page(html.parser.HTMLParser):
    """Attributes, tables and text of a page."""

    def __init__(self, source: str):
        super().__init__()
        self.source, self.tags, self.attributes, self.tables, self.text = source, set(), [], [], ""
        self.in_cell = False
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self.in_cell:
            self.tables[-1][-1][-1] += data

    def table(self, *header: str) -> pd.DataFrame:
        """The first table whose header begins so."""
        rows = next(rows for rows in self.tables if rows[0][: len(header)] == list(header))
        return pd.DataFrame(rows[1:], columns=rows[0]).set_index(header[0])


def agrees(text: str, value: float) -> bool:
    """Whether ``1.2% [1.0, 1.4]`` or ``1.2 [1.0, 1.4]`` shows this value, up to a rounding far below the interval."""
    shown, lower, upper = np.array(re.findall(r"-?\d[\d.]*(?:e[-+]\d+)?", text), dtype=float) / (
        100 if "%" in text else 1
    )
    return abs(shown - value) <= (upper - lower) / 8


def edges_of(found) -> np.ndarray:
    return clip_rates.length_edges(np.concatenate([run.records.length for run in found]), BINS)


def read_table(made, name: str) -> pd.DataFrame:
    return pd.read_csv(made.folder / "tables" / f"{name}.csv")


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_clip_rates_are_those_of_the_records(made):
    written, page = read_table(made, "clip_rate_by_length"), made.page.table("run", "responses with an advantage")
    summary = read_table(made, "summary").set_index("run")
    for run in made.runs:
        counted = run.records[run.records.advantage != 0]
        cluster = resampling.clusters(counted)
        expected = clip_rates.rate_by_length(counted.length, counted.clipped, edges_of(made.runs), clusters=cluster)
        mine = written[written.run == run.name].drop(columns="run").reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, expected, check_dtype=False)
        row = page.loc[run.name]
        assert row["responses with an advantage"] == f"{len(counted):,}"
        assert agrees(row["clip rate [95%]"], clip_rates.clip_rate(run.records))
        assert agrees(row["length reweighting error [95%]"], clip_rates.length_reweighting_error(expected))
        few = (expected.n < clip_rates.MIN_COUNT) | (expected.clusters < clip_rates.MIN_PROMPTS)
        assert summary.lre_excluded_responses[run.name] == expected.n[few].sum()


def test_counterfactuals_are_those_of_the_methods(made):
    written = (
        read_table(made, "counterfactuals_summary").query("side == 'all'").set_index(["run", "constants", "method"])
    )
    tables = [rows for rows in made.page.tables if rows[0][:2] == ["clip", "eps"]]
    for run, rows in zip(made.runs, tables, strict=True):
        counted = run.records[run.records.advantage != 0]
        for (key, method), cells in zip(CLIPS.items(), rows[1:], strict=True):
            rate = method.clipped(counted).mean()
            assert written.rate[run.name, "stock", key] == pytest.approx(rate)
            assert cells[0] == method.title
            assert agrees(cells[2], rate)
            if not isinstance(method, TokenClip):
                matched = written.loc[run.name, "matched", key]
                assert matched.rate == pytest.approx(MATCHED_RATE, abs=1 / len(counted))
                again = method.matched(run.records, MATCHED_RATE).clipped(counted)
                table = clip_rates.rate_by_length(counted.length, again, edges_of(made.runs))
                assert matched.lre == pytest.approx(clip_rates.length_reweighting_error(table))


def test_law_is_that_of_the_moved_responses(made):
    written, page = read_table(made, "law_by_length"), made.page.table("quantity")
    summary = read_table(made, "summary").set_index("run")
    for run in made.runs:
        law = law_of_s(run.records, edges_of(made.runs), np.random.default_rng(0), DRAWS)
        mine = written[(written.run == run.name) & (written.quantity == "std_by_length")]
        np.testing.assert_allclose(mine.value, law.std_by_length.value)
        assert summary.kappa[run.name] == pytest.approx(law.kappa.value)
        assert page[run.name]["moved responses"] == f"{law.responses:,}"
        assert agrees(page[run.name]["σ, spread of a token's log-ratio"], law.sigma.value)


def test_quantiles_and_windows(made):
    written, windows = read_table(made, "quantiles"), read_table(made, "over_steps")
    for run in made.runs:
        moved = run.records[run.records.quadratic_variation > 0]
        z = (moved.log_ratio + moved.quadratic_variation / 2) / moved.quadratic_variation**0.5
        mine = written[written.run == run.name]
        # A quantile of the sample is where the normal law's share of the sample lies below it.
        share = [(z <= value).mean() for value in mine.z]
        np.testing.assert_allclose(share, 0.5 * (1 + np.vectorize(math.erf)(mine.normal / 2**0.5)), atol=2 / len(z))
        part = windows[windows.run == run.name]
        assert part.n.sum() == (run.records.advantage != 0).sum() and part.moved.sum() == len(moved)
        sigma = np.sqrt((moved.quadratic_variation / moved.length).mean())
        np.testing.assert_allclose(np.sqrt((part.sigma**2 * part.moved).sum() / part.moved.sum()), sigma, rtol=1e-5)


def test_json_says_what_the_tables_say(made):
    facts = json.loads((made.folder / "report.json").read_text())
    summary = read_table(made, "summary")
    pd.testing.assert_frame_equal(pd.DataFrame(facts["runs"]), summary, check_dtype=False)
    assert facts["length_edges"] == edges_of(made.runs).tolist()
    assert facts["missing"] == []
    assert sorted(facts["files"]) == sorted(
        str(file.relative_to(made.folder)) for file in made.folder.rglob("*") if file.is_file()
    )


def test_metrics_and_config_are_on_the_page(made):
    metrics = read_table(made, "metrics").set_index(["run", "step"])
    for run in made.runs:
        np.testing.assert_allclose(
            metrics.loc[run.name, "actor/grad_norm"].dropna(), run.metrics["actor/grad_norm"].dropna()
        )
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    assert made.page.table("key").loc[key].to_dict() == {"fspo": "fspo", "gspo": "gspo"}
    assert f"- {key}"[2:] + "=gspo" in made.page.text


# --- page and files --------------------------------------------------------------------------------------------------


def test_page_needs_nothing_else(made):
    assert not made.page.tags & {"script", "link", "iframe", "object", "embed"}
    loads = [value for name, value in made.page.attributes if name in ("src", "href", "srcset", "data", "poster")]
    assert len(loads) == 2 * len(list((made.folder / "figures").glob("*.svg")))
    assert all(value.startswith("data:image/svg+xml;base64,") for value in loads)
    styles = re.search("<style>(.*?)</style>", made.page.source, re.DOTALL)[1]
    assert "url(" not in styles and "@import" not in styles
    assert re.findall(r"https?://", made.page.source) == []


def test_every_figure_is_written_twice(made):
    names = {file.stem for file in (made.folder / "figures").iterdir()}
    assert names == {
        "clip_rate_by_length",
        "counterfactuals",
        "log_ratio_by_length",
        "quantiles",
        "over_steps",
        "law_by_length",
        "curves",
    }
    for name in names:
        assert (made.folder / f"figures/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"</svg>" in (made.folder / f"figures/{name}.svg").read_bytes()


def test_same_input_gives_the_same_bytes(made):
    edges, images = edges_of(made.runs), []
    for _ in range(2):
        found = numbers.analyse(made.runs[0], edges, np.random.default_rng(3))
        part = page.clip_rates([found], {}, {"fspo": STYLES["fspo"]})
        images.append(figures.render(part.draw, 2, "svg", "png"))
    assert images[0] == images[1]


def as_report(*tables: str) -> dict[str, bytes]:
    files = {"report.html": b"page"} | {f"tables/{name}.csv": name.encode() for name in tables}
    listed = {"made_by": "fspo-verl report", "files": [*files, "report.json"]}
    return files | {"report.json": json.dumps(listed).encode()}


def on_disk(folder):
    return {
        str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != "report.json"
    }


def test_a_second_report_replaces_the_first_and_nothing_else(tmp_path):
    page.write(tmp_path, as_report("a", "b"))
    (tmp_path / "notes.txt").write_bytes(b"mine")
    page.write(tmp_path, as_report("a", "c"))
    expected = {"report.html": b"page", "tables/a.csv": b"a", "tables/c.csv": b"c", "notes.txt": b"mine"}
    assert on_disk(tmp_path) == expected


@pytest.mark.parametrize("name", ["../mine.csv", "tables/../mine.csv", "notes.txt"])
def test_a_forged_list_of_files_deletes_nothing(tmp_path, name):
    folder = tmp_path / "report"
    (folder / "tables").mkdir(parents=True)
    (folder / name).write_bytes(b"mine")
    (folder / "report.json").write_text(json.dumps({"made_by": "fspo-verl report", "files": [name, "report.json"]}))
    page.write(folder, as_report())
    assert (folder / name).read_bytes() == b"mine"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"made_by": "x", "files": ["report.html"]}'])
def test_another_programs_report_json_is_not_touched(tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(ValueError, match=r"holds report\.json, which no report has written"):
        page.write(tmp_path, as_report())
    assert (tmp_path / "report.json").read_text() == content


def test_foreign_files_are_not_touched(tmp_path):
    (tmp_path / "report.html").write_bytes(b"mine")
    with pytest.raises(ValueError, match="holds report.html, which no report has written"):
        page.write(tmp_path, as_report())
    assert on_disk(tmp_path) == {"report.html": b"mine"}


@pytest.mark.parametrize("writes", range(4))
def test_an_interrupted_report_can_be_made_again(tmp_path, monkeypatch, writes):
    replace, done = Path.replace, []

    def stop(file, target):
        if len(done) == writes:
            raise KeyboardInterrupt
        done.append(file)
        return replace(file, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", stop)
        page.write(tmp_path, as_report("a", "b"))
    page.write(tmp_path, as_report("a"))
    assert on_disk(tmp_path) == {"report.html": b"page", "tables/a.csv": b"a"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "-o", "RUN"], r"is a run itself; choose another folder, such as .*/report"),
        (["RUN", "-o", "OUT", "--bins", "1"], "--bins=1 has to be 2 or more"),
        (["RUN", "-o", "OUT", "--max-rows", "0"], "--max-rows=0 one per run or more"),
        (["RUN", "-o", "OUT", "--names", "a", "b"], "1 runs need as many different names"),
        (["RUN/absent", "-o", "OUT"], "no such folder or file"),
        (["RUN", "-o", "OUT", "--watch", "0"], "--watch=0 has to be more than 0 seconds"),
    ],
)
def test_what_a_user_can_mend_is_said(made, tmp_path, capsys, arguments, message):
    places = {"RUN": str(made.paths[0]), "OUT": str(tmp_path / "out")}
    arguments = [re.sub("RUN|OUT", lambda match: places[match[0]], argument) for argument in arguments]
    assert cli.main(["report", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


# --- runs that lack something ----------------------------------------------------------------------------------------


@pytest.fixture
def build(monkeypatch):
    """Builds a page with each figure drawn once, as here it matters only that it can be drawn."""

    def once(draw, columns, *kinds):
        return figures_render(draw, 1, "svg") * len(kinds) if columns > 1 else [b""]

    figures_render = figures.render
    monkeypatch.setattr(figures, "render", once)

    def build(*found):
        files = page.build(found, BINS)
        return Page(files["report.html"].decode()), json.loads(files["report.json"]), files

    return build


def run_of(name, records=None, loss="fspo", metrics=None, config=None):
    frame = synthetic_run.records(np.random.default_rng(0), loss, **SMALL) if records is None else records
    settings = RunSettings.from_json(synthetic_run.settings(loss)) if len(frame) else None
    frame.attrs = {"settings": settings, "rows": len(frame)}
    metrics = pd.DataFrame(index=pd.Index([], dtype=int, name="step")) if metrics is None else metrics
    return runs.Run(name, Path(name), metrics, frame, config, [])


def test_everything_that_can_go_wrong_at_once(build, tmp_path):
    base = synthetic_run.records(np.random.default_rng(0), **SMALL)
    unmoved = dict.fromkeys(("log_ratio", "quadratic_variation"), np.float32(0))
    thinned = run_of("thinned")
    thinned.records.attrs["rows"] = 10**7
    synthetic_run.write_metrics(tmp_path / "m.jsonl", np.random.default_rng(0), "fspo", 200)
    live = runs.read_run(tmp_path / "m.jsonl", "only metrics <b>&")
    page, facts, files = build(
        thinned,
        live,
        run_of("kept all", base.assign(clipped=np.float32(0))),
        run_of("clipped all", base.assign(clipped=np.float32(1)), loss="gspo"),
        run_of("unmoved", base.assign(**unmoved)),
        run_of("no advantage", base.assign(advantage=np.float32(0))),
        run_of(
            "one response",
            base[base.advantage != 0].iloc[:1],
            metrics=pd.DataFrame({"actor/grad_norm": [0.1]}, index=[1]),
        ),
        run_of("unknown loss", base.copy(), loss="vanilla"),
    )
    notes = "\n".join(facts["missing"])
    for expected in (
        "thinned: a random 768 of its 10,000,000 records are used (--max-rows).",
        "only metrics <b>&: no records,",
        "Train with actor_rollout_ref.actor.policy_loss.records_dir=DIR and +algorithm.policy_loss=observed",
        "kept all: nothing was clipped",
        "clipped all: everything was clipped",
        "unmoved: no response has moved",
        "unmoved: too few responses have moved to let any clip take 10% of them.",
        "no advantage: no response has an advantage",
        "one response: no .hydra/config.yaml",
        "unmoved: no metrics, so no training curves. Train with trainer.logger=[console,file].",
    ):
        assert expected in notes
        assert expected in page.text
    assert "<b>&" not in page.source.replace("&lt;b&gt;&amp;", "")
    summary = pd.DataFrame(facts["runs"]).set_index("run")
    assert summary.lre["kept all"] == 0 and summary.clip_rate["kept all"] == 0
    assert summary.clip_rate["clipped all"] == 1 and np.isnan(summary.lre["clipped all"])
    assert summary.n["one response"] == 1
    assert "nan" not in page.text.lower().replace("nanmean", "")
    assert "only metrics <b>&: rates of its live metrics over 200 steps" in page.text
    assert b"only metrics <b>&,1," in files["tables/live_clip_rate_by_length.csv"]
    assert {f"figures/{name}.png" for name in ("curves", "over_steps", "clip_rate_by_length")} <= set(files)


def test_clips_that_the_records_of_an_earlier_version_lack_are_named(build):
    base = synthetic_run.records(np.random.default_rng(0), **SMALL)
    page, facts, _ = build(run_of("old", base.drop(columns="tokens_clipped_cispo")))
    lacking = CLIPS["cispo"].label
    assert f"old: its records are of an earlier version, without what {lacking} needs." in facts["missing"]
    (table,) = [rows for rows in page.tables if rows[0][:2] == ["clip", "eps"]]
    assert [row[0] for row in table[1:]] == [clip.title for clip in CLIPS.values() if clip.label != lacking]


def test_one_response_alone(build):
    base = synthetic_run.records(np.random.default_rng(0), **SMALL)
    page, facts, _ = build(run_of("one", base[(base.advantage != 0) & (base.quadratic_variation > 0)].iloc[:1]))
    (summary,) = facts["runs"]
    assert (summary["n"], summary["moved"], summary["lre"]) == (1, 1, None)
    assert "nan" not in page.text.lower()


def test_only_a_config(build, tmp_path):
    synthetic_run.write_config(tmp_path / "fspo", "fspo")
    page, facts, files = build(runs.read_run(tmp_path / "fspo", "fspo"))
    assert not any(name.startswith("figures/") for name in files)
    assert [value for name, value in page.attributes if name == "id"] == ["config"]
    assert len(facts["missing"]) == 2


def test_live_rates_weigh_steps_by_their_responses(tmp_path):
    name = "actor/fspo/length_1_to_15/"
    metrics = pd.DataFrame({f"{name}responses": [0.5, 0.1, 0.0], f"{name}clipped": [0.1, 0.1, 0.0]}, index=[1, 2, 3])
    table = numbers.live_rates(run_of("a", metrics=metrics), np.random.default_rng(0))
    assert table[["low", "high", "steps"]].to_numpy().tolist() == [[1, 15, 2]]
    assert table.rate.item() == pytest.approx(0.2 / 0.6)
    assert (table.lower <= table.rate).all() and (table.rate <= table.upper).all()
    axes = Figure().subplots()
    figures.by_length(axes, [figures.Series("a", *figures.run_styles([None]), table)])
    (drawn,) = axes.containers
    assert len(drawn.lines[0].get_xdata()) == 1  # two steps are enough for a bar


# --- small parts -----------------------------------------------------------------------------------------------------


@given(st.floats(-1e4, 1e4), st.floats(1e-9, 1e3), st.sampled_from(["", "%"]))
def test_interval_is_as_precise_as_it_is_wide(value, half, unit):
    half = max(half, abs(value) * 1e-6)
    expected = np.array([value, value - half, value + half])
    text = page._interval(*expected, unit)
    numbers = np.array(re.findall(r"-?\d[\d.]*(?:e[-+]\d+)?", text), dtype=float) / (100 if unit else 1)
    np.testing.assert_allclose(numbers, expected, rtol=0, atol=half / 2)


def test_interval_without_width():
    assert page._interval(0.0, 0.0, 0.0) == "0"
    assert page._interval(0.25, math.nan, math.nan, "%") == "25%"
    assert page._interval(math.nan, math.nan, math.nan) == "–"


@pytest.mark.parametrize(
    ("settings", "method", "band"),
    [
        (None, None, None),
        ({"loss": "vanilla", "band": None}, "grpo", None),
        ({"loss": "sapo"}, None, None),
        ({"loss": "gspo"}, None, None),  # without the range that it trained with
        ({"loss": "fspo", "band": {"eps_low": 0.02}}, "fspo", Band(eps_low=0.02)),
        ({"loss": "fspo", "band": {"length_power": 0.0}}, "fixed_band", Band(length_power=0.0)),
        (
            {"loss": "fspo", "band": {"normalization": "drift_corrected"}},
            "fspo_drift_corrected",
            Band(normalization="drift_corrected"),
        ),
        ({"loss": "fspo", "band": {"length_power": 0.25}, "of_2030": 1}, None, Band(length_power=0.25)),
    ],
)
def test_method_and_band_of_a_run(settings, method, band):
    settings = settings and RunSettings.from_json(settings)
    assert numbers.clip_of(settings) == method
    assert (settings and settings.trained_band) == band
    assert settings is None or RunSettings.from_json(settings.to_json()).to_json() == settings.to_json()


@pytest.mark.parametrize("low", [3e-4, 1.0, 10.0])
def test_gspo_clips_the_mean_log_ratio(low):
    settings = RunSettings.from_json(synthetic_run.settings("gspo") | {"clip_ratio_low": low})
    records = synthetic_run.records(np.random.default_rng(0), "gspo", **SMALL)
    band = settings.trained_band
    assert numbers.clip_of(settings) == "gspo"
    ratio = np.exp(records.log_ratio / records.length)
    outside = (ratio > 1 + settings.clip_ratio_high) | (ratio < 1 - settings.clip_ratio_low)
    np.testing.assert_array_equal(BandClip("mine", "", band).outside(records), outside)


def test_gspos_empty_range_is_no_band():
    assert RunSettings("gspo", clip_ratio_low=0.0, clip_ratio_high=4e-4).trained_band is None


def test_runs_of_one_loss_share_colour_and_marker():
    styles = figures.run_styles(["fspo", "gspo", "fspo", None, "fspo", "fspo"])
    fspo = [styles[i] for i in (0, 2, 4, 5)]
    assert {(style.color, style.marker) for style in fspo} == {STYLES["fspo"][:2]}
    assert len({(style.line, style.hollow) for style in fspo}) == 4
    alone, beside = figures.run_styles(["no_clip"])[0], figures.run_styles(["mine", "no_clip", "yours"])
    assert beside[1] == alone and len({style.color for style in beside}) == 3
    for part in ("color", "marker"):
        assert len({getattr(style, part) for style in STYLES.values()}) == len(STYLES)
    assert {*HEADLINE} < {*STYLES} and {*STYLES} - {"no_clip"} < {*CLIPS}


def test_the_verdict_opens_the_page_and_is_printed(made, tmp_path, capsys):
    lines = json.loads((made.folder / "report.json").read_text())["verdict"]
    assert [label for label, _ in lines] == ["clipped", "lengths", "shapes"]
    clipped, lengths, shapes = (sentence for _, sentence in lines)
    for run in made.runs:
        counted = run.records[run.records.advantage != 0]
        assert f"{run.name} {100 * counted.clipped.mean():.0f}" in clipped and f"{len(counted):,} responses" in clipped
        assert run.name in lengths
    assert "LRE on the responses of fspo" in shapes
    places = [made.page.text.index(sentence) for _, sentence in lines]
    assert places == sorted(places) and places[-1] < made.page.text.index("Clip rate by response length")
    assert cli.main(["report", str(made.paths[0]), "-o", str(tmp_path / "one"), "--bins", str(BINS)]) == 0
    *printed, page = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["clipped", "lengths", "shapes"] and page.endswith("report.html")


def test_a_watched_run_is_drawn_again_when_it_has_written_and_only_then(tmp_path, capsys, monkeypatch):
    metrics, output, pages = tmp_path / "run/metrics-1.jsonl", tmp_path / "report", []
    lines = [json.dumps({"step": step, "data": {"critic/score/mean": step / 4}}) for step in range(1, 4)]

    def run_goes_on(seconds):
        """Nothing there, two steps, a pause, a third step, Ctrl-C."""
        assert seconds == 5
        page = output / "report.html"
        pages.append(page.stat().st_mtime_ns if page.exists() else None)
        if len(pages) == 1:
            metrics.parent.mkdir()
            metrics.write_text("\n".join(lines[:2]) + "\n")
        elif len(pages) == 3:
            metrics.write_text("\n".join(lines) + "\n")
        elif len(pages) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(page.time, "sleep", run_goes_on)
    assert cli.main(["report", str(metrics.parent), "-o", str(output), "--watch", "5"]) == 0
    assert pages[0] is None and pages[1] == pages[2] and pages[2] < pages[3]
    assert (output / "tables/metrics.csv").read_text().count("\n") == 1 + 3
    said = capsys.readouterr().out
    assert said.startswith("waiting: ") and said.count("waiting") == 1 and said.count("report.html") == 2


def test_what_a_run_has_written_knows_of_records_elsewhere(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "records"
    assert runs.written(run) == set()
    synthetic_run.write_config(run, "fspo")
    config = run / "hydra/.hydra/config.yaml"
    config.write_text(f"actor_rollout_ref: {{actor: {{policy_loss: {{records_dir: {elsewhere}}}}}}}\n")
    before = runs.written(run)
    assert {file for file, _, _ in before} == {config}
    synthetic_run.write_records(elsewhere, synthetic_run.records(np.random.default_rng(0), **SMALL), "fspo")
    assert {file.parent for file, _, _ in runs.written(run) - before} == {elsewhere}
