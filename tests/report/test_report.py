# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The report shows the numbers that the statistics give, loads nothing, and is right where a run lacks something."""

import html
import json
import re
import shlex
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_run

from fspo_verl import cli
from fspo_verl.analysis import clip_rates, logs, runs
from fspo_verl.analysis.judgement import judge
from fspo_verl.analysis.length_effect import length_effect
from fspo_verl.clips import CLIPS, MATCHED_RATE, TokenClip
from fspo_verl.observe.records import Records
from fspo_verl.observe.settings import RunSettings
from fspo_verl.report import figures
from fspo_verl.report import page as report

SMALL = {"steps": 6, "prompts": 16}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report on two runs: its folder, the runs as read, and the page parsed."""
    folder = tmp_path_factory.mktemp("my runs;")
    paths = [synthetic_run.write_run(folder / loss, loss, seed, **SMALL) for seed, loss in enumerate(("fspo", "gspo"))]
    output = folder / "report"
    assert cli.main(["report", *map(str, paths), "-o", str(output)]) == 0
    page, facts = Page((output / "report.html").read_text()), json.loads((output / "report.json").read_text())
    return types.SimpleNamespace(folder=output, paths=paths, runs=list(runs.read_runs(paths)), page=page, facts=facts)


class Page:
    """Tags, addresses, tables and text of a page."""

    def __init__(self, source: str):
        self.source, body = source, source.split("</style>")[1]
        self.text, self.tags = text_of(body), set(re.findall(r"<(\w+)", body))
        self.loads = re.findall(r'(?<![\w-])(?:src|href|srcset|data|poster)="([^"]*)"', source)
        self.tables = [
            [
                [text_of(cell) for cell in re.findall("<t[hd].*?>(.*?)</t[hd]>", row)]
                for row in re.findall("<tr>.*", table)
            ]
            for table in re.findall("<table>.*?</table>", source, re.DOTALL)
        ]

    def table(self, *header: str) -> pd.DataFrame:
        """The first table whose header begins so."""
        rows = next(rows for rows in self.tables if rows[0][: len(header)] == list(header))
        return pd.DataFrame(rows[1:], columns=rows[0]).set_index(header[0])


def text_of(source: str) -> str:
    return html.unescape(re.sub("<[^>]*>", "", source))


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_tables_and_json_are_what_clips_do_to_the_records(made):
    """The run's own clip, and all others scaled to one rate."""
    page, tables = made.page.table("run", "responses with an advantage"), made.page.tables
    scaled = iter([rows for rows in tables if rows[0][:2] == ["clip", "eps"]])
    edges = clip_rates.length_edges(np.concatenate([run.records.length for run in made.runs]))
    for run, row in zip(made.runs, made.facts["runs"], strict=True):
        counted = run.records[run.records.advantage != 0]
        prompts = clip_rates.prompts_of(counted)
        assert (row["run"], row["records"]) == (run.name, len(run.records))
        assert [cells[0] for cells in next(scaled)[1:]] == [clip.label for clip in CLIPS.values()]
        clips = [
            clip if isinstance(clip, TokenClip) else clip.matched(run.records, MATCHED_RATE) for clip in CLIPS.values()
        ]
        assert [(one["method"], one["eps_high"]) for one in row["clips"]] == [
            (clip.name, clip.eps["eps_high"]) for clip in clips
        ]
        all_clipped = [run.records.clipped.to_numpy(), *(clip.clipped(run.records) for clip in clips)]
        for found, clipped in zip([row["clip"], *row["clips"]], all_clipped, strict=True):
            own = clipped[run.records.advantage != 0]
            table = clip_rates.rate_by_length(counted.length, own, edges, prompts)
            lre, effect = clip_rates.length_reweighting_error(table), length_effect(run.records, clipped)
            assert (found["n"], found["rate"], found["lre"]) == pytest.approx((len(counted), own.mean(), lre))
            shown = effect and (effect.is_line or not effect.depends)
            assert found["exponent"] == (pytest.approx(effect.exponent) if shown else None)
            assert found["p"] == (effect and pytest.approx(effect.p))
        of_run = clip_rates.rate_by_length(counted.length, counted.clipped, edges, prompts)
        pd.testing.assert_frame_equal(pd.DataFrame(row["lengths"]), of_run, check_dtype=False)
        shown = page.loc[run.name]
        assert shown["responses with an advantage"] == f"{len(counted):,}"
        assert shown["clip rate (%)"].split()[0] == f"{100 * counted.clipped.mean():.3g}"
        assert shown["LRE"] == f"{row['clip']['lre']:.2g}"


# --- page and files --------------------------------------------------------------------------------------------------


def test_page_needs_nothing_else(made):
    assert not made.page.tags & {"script", "link", "iframe", "object", "embed"}
    assert len(made.page.loads) == len(list((made.folder / "figures").glob("*.svg")))
    assert all(value.startswith("data:image/svg+xml;base64,") for value in made.page.loads)
    styles = re.search("<style>(.*?)</style>", made.page.source, re.DOTALL)[1]
    assert "url(" not in styles and "@import" not in styles
    assert re.findall(r"https?://", made.page.source) == []


def test_same_input_gives_the_same_files(made):
    written = on_disk(made.folder)
    assert report.build(report.analyses_of(made.runs)) == written and set(written) <= set(report.FILES)
    for name in ("clip_rate_by_length", "counterfactuals"):
        assert written[f"figures/{name}.png"].startswith(b"\x89PNG") and b"</svg>" in written[f"figures/{name}.svg"]


def on_disk(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "-o", "OUT", "--max-rows", "0"], "--max-rows=0 has to be one per run or more"),
        (["RUN", "-o", "OUT", "--names", "a", "b"], "1 runs need as many different names"),
        (["RUN/absent", "-o", "OUT"], "no such folder or file"),
        (["RUN", "RUN/records"], "a report on 2 runs needs a folder of its own: -o DIR"),
    ],
)
def test_what_a_user_can_mend_is_said(made, tmp_path, capsys, arguments, message):
    places = {"RUN": str(made.paths[0]), "OUT": str(tmp_path / "out")}
    arguments = [re.sub("RUN|OUT", lambda match: places[match[0]], argument) for argument in arguments]
    assert cli.main(["report", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_pictures")
def test_a_report_replaces_a_report_and_nothing_else(made, tmp_path, capsys):
    log, other = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    for file in (log, other):
        file.write_text(json.dumps({"step": 1, "data": {"critic/score/mean": 0.5}}) + "\n")
    for file in (log, log, other):  # each has a folder of its own
        assert cli.main(["report", str(file)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {log.name, other.name, "train-report", "other-report"}

    assert cli.main(["report", str(made.paths[0]), "-o", str(out := tmp_path / "out")]) == 0
    assert set(on_disk(out)) == set(report.FILES)
    mine = {"notes.txt": b"mine", "figures/mine.svg": b"mine"}
    for name, content in mine.items():
        (out / name).write_bytes(content)
    assert cli.main(["report", str(log), "-o", str(out)]) == 0  # it has no figures
    assert on_disk(out) == on_disk(tmp_path / "train-report") | mine

    for name in ("report.html", "report.json", "figures/counterfactuals.svg"):
        folder = tmp_path / "mine" / name.replace("/", "-")
        folder.joinpath(name).parent.mkdir(parents=True)
        folder.joinpath(name).write_text('["a user\'s"]')
        assert cli.main(["report", str(log), "-o", str(folder)]) == 2 and str(folder / name) in capsys.readouterr().err
        assert on_disk(folder) == {name: b'["a user\'s"]'}


# --- runs that lack something ----------------------------------------------------------------------------------------


@pytest.fixture
def no_pictures(monkeypatch):
    """Reports with a word in place of each picture, which takes a second."""
    monkeypatch.setattr(figures, "render", lambda draw, *kinds: [b"picture"] * len(kinds))


def run_of(name, records=None, loss="fspo", logged=(), config=None):
    frame = synthetic_run.records(np.random.default_rng(0), loss, **SMALL) if records is None else records
    settings = RunSettings.from_json(synthetic_run.settings(loss)) if len(frame) else None
    return runs.Run(name, Path(name), logs.Log.of(logged), Records(frame, settings, len(frame)), config)


def test_everything_that_can_go_wrong_at_once(tmp_path, monkeypatch):
    render = figures.render  # once for all kinds
    monkeypatch.setattr(figures, "render", lambda draw, *kinds: render(draw, "svg") * len(kinds))
    base = synthetic_run.records(np.random.default_rng(0), **SMALL)
    unmoved = dict.fromkeys(("log_ratio", "quadratic_variation"), np.float32(0))
    incomplete = run_of("incomplete")
    incomplete.recorded = replace(incomplete.recorded, rows=10**7, incomplete_steps=2)
    synthetic_run.write_metrics(tmp_path / "m.jsonl", np.random.default_rng(0), "fspo", 200)
    one = base[(base.advantage != 0) & (base.quadratic_variation > 0)].iloc[:1]
    found = [
        incomplete,
        runs.read_run(tmp_path / "m.jsonl", "only metrics <b>&"),
        run_of("kept all", base.assign(clipped=np.float32(0))),
        run_of("clipped all", base.assign(clipped=np.float32(1)), loss="gspo"),
        run_of("unmoved", base.assign(**unmoved)),
        run_of("no advantage", base.assign(advantage=np.float32(0))),
        run_of("one response", one, logged=[(1, {"actor/grad_norm": 0.1})]),
    ]
    files = report.build(report.analyses_of(found))
    shown, facts = Page(files["report.html"].decode()), json.loads(files["report.json"])
    said = {one["run"]: one["findings"] for one in facts["runs"]}
    assert {run: (one["id"], one["action"]) for run, (one, *_) in said.items()} == {
        "incomplete": ("length", "record"),
        "only metrics <b>&": ("unknown", "record"),
        "kept all": ("level", "take"),
        "clipped all": ("level", "take"),
        "unmoved": ("level", "fix"),
        "no advantage": ("unknown", "record"),
        "one response": ("level", "take"),
    }
    assert {one["id"]: one["value"] for one in said["incomplete"][-2:]} == {"incomplete": 2, "sample": 768 / 10**7}
    assert all(found["sentence"] in shown.text for one in facts["runs"] for found in one["findings"])
    assert "<b>&" not in shown.source.replace("&lt;b&gt;&amp;", "")
    assert len(re.findall("<h[12]|<details", shown.source)) <= 6
    clip = pd.DataFrame({one["run"]: one["clip"] for one in facts["runs"]}).T.astype(float)
    assert clip.lre["kept all"] == 0 and clip.rate["kept all"] == 0
    assert clip.rate["clipped all"] == 1 and np.isnan(clip.lre["clipped all"])
    assert clip.n["one response"] == 1 and np.isnan(clip.lre["one response"])
    metrics = runs.read_metrics([tmp_path / "m.jsonl"])
    responses = metrics.filter(regex="^fspo/step_responses/len_")
    clipped = metrics.filter(regex="^fspo/clip_rate/len_").to_numpy() * responses
    assert clip.rate["only metrics <b>&"] == pytest.approx(np.nansum(clipped) / np.nansum(responses))
    (of_metrics,) = (one["lengths"] for one in facts["runs"] if one["run"] == "only metrics <b>&")
    assert [row["rate"] for row in of_metrics] == pytest.approx(list(clipped.sum() / responses.sum()))
    assert [row["low"] for row in of_metrics] == [1, 16, 64]
    assert "nan" not in shown.text.lower()
    assert "figures/clip_rate_by_length.png" in files


# --- small parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["grpo-4-float32", "still-0-bfloat16"])
@pytest.mark.usefixtures("no_pictures")
def test_the_first_line_answers_the_title(folder):
    run = runs.read_run(Path(__file__).parents[1] / "recorded" / folder, folder)
    page = Page(report.build(report.analyses_of([run]))["report.html"].decode())
    title, first, *_ = filter(None, page.text.splitlines())
    conclusion = judge(run).findings[0]
    assert title.startswith("Are long and short") == (conclusion.id in ("length", "even", "unknown"))
    assert first.startswith(conclusion.sentence)


@pytest.mark.usefixtures("no_pictures")
def test_the_findings_open_the_page_and_are_printed(made, capsys):
    for run, row in zip(made.runs, made.facts["runs"], strict=True):
        expected = judge(run).findings
        assert (row["run"], row["findings"]) == (run.name, [one.to_json() for one in expected])
        place = made.page.text.index(expected[0].sentence)
        assert place < made.page.text.index(expected[0].advice, place) < made.page.text.index("How to read it")
        assert not any(one.overrides for one in expected)  # one command prints numbers to paste
    run = made.paths[0]
    assert cli.main(["report", str(run)]) == 0
    _, first, *_, page, last = capsys.readouterr().out.splitlines()
    assert judge(made.runs[0]).findings[0].sentence in first and page.endswith(str(run / "report/report.html"))
    assert last.split(maxsplit=1) == ["next:", f"fspo-verl calibrate {shlex.quote(str(run))}"]
    # A report is no part of its run.
    pd.testing.assert_frame_equal(runs.read_run(run, "again").metrics, made.runs[0].metrics)
