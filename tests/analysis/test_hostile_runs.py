# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Somebody else's run is data: whatever its files hold, no command that reads it executes, resolves or follows that."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import pyarrow.parquet as pq
import pytest
import synthetic_run
from matplotlib.text import Text
from test_alerts import SOUND

import fspo_verl
from fspo_verl import cli, output
from fspo_verl.analysis import runs
from fspo_verl.keys import ACTOR
from fspo_verl.report import figures

READERS = ("report", "calibrate")
SECRET = "the-readers-secret"


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def write_metrics(folder: Path, steps: int = 12) -> Path:
    lines = [json.dumps({"step": step, "data": SOUND}) + "\n" for step in range(1, steps + 1)]
    return write(folder / "metrics-1.jsonl", "".join(lines))


def arguments(command: str, run: Path, output: Path) -> list[str]:
    return [command, str(run), *{"report": ["-o", str(output)]}.get(command, [])]


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(figures, "render", lambda draw, *kinds: [b"picture"] * len(kinds))


# --- a config is text ------------------------------------------------------------------------------------------------

FORMS = (
    "${oc.env:WANDB_API_KEY}",
    "${oc.env:WANDB_API_KEY,none}",
    "${oc.decode:${oc.env:WANDB_API_KEY}}",
    "${oc.env:${mine.name}}",
    "a ${oc.env:WANDB_API_KEY} b",
    "${oc.dict.values:${oc.create:{a: ${oc.env:WANDB_API_KEY}}}}",
    "${mine.form}",
    "${hydra:runtime.cwd}",
)


def configs(form: str) -> list[dict]:
    """Configs with the form in every place that is read."""
    numbers = dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), form)
    band = dict.fromkeys(("eps", "eps_low", "eps_dual", "target_clip_rate"), form)
    sections = (
        {"loss_mode": form, "records_dir": f"/{form}"},
        {"loss_mode": "fspo", "eps_high": 0.1, "records_dir": form} | band,
        form,
    )
    others = {
        "algorithm": {"rollout_correction": {"bypass_mode": form}},
        "data": {"max_response_length": form, "train_batch_size": form},
        "mine": {"name": "WANDB_API_KEY", "form": "${oc.env:WANDB_API_KEY}"},
    }
    return [{"actor_rollout_ref": {"actor": {"policy_loss": section} | numbers}} | others for section in sections]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("command", "form"), [*(("report", form) for form in FORMS), ("calibrate", FORMS[0])])
def test_no_reader_resolves_what_a_config_asks_of_its_environment(command, form, tmp_path, capfd, caplog, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    (here := tmp_path / "where the reader is").mkdir()
    monkeypatch.chdir(here)
    for number, config in enumerate(configs(form)):
        run, output = tmp_path / f"run{number}", tmp_path / f"out{number}"
        write_metrics(run)
        if number == 1:  # as W&B keeps it
            write(run / "files/config.yaml", json.dumps({key: {"value": value} for key, value in config.items()}))
        else:
            write(run / ".hydra/config.yaml", json.dumps(config))
            write(run / ".hydra/overrides.yaml", json.dumps([f"a={form}", SECRET]))
        assert cli.main(arguments(command, run, output)) == (2 if command == "calibrate" else 0)  # without records
        said = "".join(capfd.readouterr()) + caplog.text
        assert SECRET not in said and here.name not in said
        assert all(SECRET.encode() not in file.read_bytes() for file in output.rglob("*") if file.is_file())


def test_no_code_unpickles_or_connects_and_no_reader_of_runs_resolves():
    """SECURITY.md promises it: no file can reach a library that is not imported."""
    package = Path(fspo_verl.__file__).parent
    for file in package.rglob("*.py"):
        unsafe = {"pickle", "cloudpickle", "dill", "joblib", "socket", "http", "urllib", "requests"}
        if file.parent.name in ("analysis", "report"):
            unsafe |= {"omegaconf", "hydra"}
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not unsafe & {name.split(".")[0] for name in names}, file
            called = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert called not in ("torch.load", "np.load", "pd.read_pickle"), file


def test_references_within_the_file_are_followed_and_no_others(tmp_path):
    actor = {
        "clip_ratio_low": "${mine.low}",
        "clip_ratio_high": "${actor_rollout_ref.actor.clip_ratio_low}",
        "clip_ratio_c": "${mine.missing}",
        "policy_loss": "${mine.loss}",
        "circle": "${actor_rollout_ref.actor.circle}",
    }
    mine = {"low": 3e-4, "loss": {"loss_mode": "gspo"}}
    write(tmp_path / ".hydra/config.yaml", json.dumps({"actor_rollout_ref": {"actor": actor}, "mine": mine}))
    run = runs.read_run(tmp_path, "a")
    settings = run.settings
    assert (settings.loss, settings.clip_ratio_low, settings.clip_ratio_high) == ("gspo", 3e-4, 3e-4)
    assert settings.clip_ratio_c is None
    assert runs.setting(run.config, f"{ACTOR}.circle") == actor["circle"]


@pytest.mark.parametrize("eps", ["text", "[1]", "{a: 1}", "-1", ".nan", "${oc.env:EPS}", "true"])
def test_a_band_that_cannot_be_read_is_not_known(eps, tmp_path):
    """And no other one stands for it."""
    policy_loss = f"\n    policy_loss:\n      loss_mode: fspo\n      eps: {eps}\n"
    write(tmp_path / ".hydra/config.yaml", f"actor_rollout_ref:\n  actor:{policy_loss}")
    settings = runs.read_run(tmp_path, "a").settings
    assert settings.loss == "fspo" and settings.band is None and settings.clip is None


# --- what is read is bounded ------------------------------------------------------------------------------------------

NINE = [", ".join([f"*a{i}"] * 9) for i in range(9)]
HANGS = {
    "aliases": "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{nine}]\n" for i, nine in enumerate(NINE, start=1)),
    "merges": "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{nine}]}}\n" for i, nine in enumerate(NINE, start=1)),
    "references": "".join(f"a{i}: {f'${{a{i + 1}}}' * 99}\n" for i in range(99)),
    "a circle": "a: &a [*a]\n",
    "nested": "a: " + "[" * 100_000,
    "nested in blocks": "- " * 100_000,
    "sexagesimal": "a: " + "1:" * 100_000 + "1\n",
    "long number": "a: " + "9" * 200_000 + "\n",
    "large": "a: [" + "x, " * 100_000 + "]\n",
}


def test_a_config_is_read_or_left_out_in_the_time_of_a_config(tmp_path):
    """The process has a few seconds of the processor for each, and ends if one takes more."""
    for place in (".hydra/config.yaml", "files/config.yaml"):
        for name, content in HANGS.items():
            run = write_metrics(tmp_path / f"{name} {place.replace('/', ' ')}", steps=1).parent
            if place.startswith(".hydra"):
                write(run / ".hydra/config.yaml", "a: 1\n")
            write(run / place, content)
    code = """
import resource, sys
from pathlib import Path
from fspo_verl.analysis.runs import read_run, setting
for run in sorted(Path(sys.argv[1]).iterdir()):
    print(run.name, flush=True)
    limit = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 10
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    read = read_run(run, "a")
    read.settings, setting(read.config, "a.b"), setting(read.config, "a0")
    assert len(read.metrics) == 1
"""
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout.splitlines()[-1] + ended.stderr[-500:]
    assert all(" is left out, it cannot be read: " in line for line in ended.stderr.splitlines())
    for said, contents in (("it holds aliases", 3), ("it is larger than", 1)):
        assert ended.stderr.count(said) == 2 * contents  # in each place


# --- a text is printed, drawn and named as a text ---------------------------------------------------------------------

TEXT = "x\x1b]0;pwned\x07\x1b[2J\npage     forged\r\u202e\x9b1m $\\frac$ <b>&amp;"


def write_texts(folder: Path) -> Path:
    """A run that has the text wherever it can have one."""
    run = folder / TEXT
    synthetic_run.write_run(run, "fspo", steps=4, prompts=16)
    for file in run.rglob("step-*.parquet"):
        table = pq.read_table(file)
        settings = json.loads(table.schema.metadata[b"fspo_verl"]) | {"loss": TEXT, "versions": {TEXT: TEXT}}
        pq.write_table(table.replace_schema_metadata({b"fspo_verl": json.dumps(settings)}), file)
    broken = [{"step": step, "data": {f"actor/{TEXT}": float("nan"), TEXT: 1.0}} for step in (1, 2, 3, 4)]
    with (run / "metrics-1.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in broken)
    return run


def assert_plain(printed: str) -> None:
    assert "pwned" in printed
    for line in printed.splitlines():
        assert line.isprintable() and not line.startswith("page     forged"), repr(line)


@pytest.mark.filterwarnings("ignore")  # see test_output.py
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("command", READERS)
def test_no_text_of_a_run_acts_on_a_terminal(command, terminal, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    run = write_texts(tmp_path)
    assert cli.main(arguments(command, run, tmp_path / "out")) == 0
    assert_plain(capsys.readouterr().out.replace("\x1b[0m", ""))
    if command == "report":
        page = (tmp_path / "out/report.html").read_text()
        assert "\x1b" not in page and "<b>" not in page
        assert all(line.isprintable() for line in (tmp_path / "out/report.json").read_text().splitlines())


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", READERS)
def test_no_error_that_names_a_file_acts_on_a_terminal(command, tmp_path, capsys):
    (tmp_path / TEXT).mkdir()
    csv = write(tmp_path / "a.csv", f'Step,"{TEXT}1 - a","{TEXT}2 - a"\n1,2,3\n')
    for run in (tmp_path / TEXT, csv):
        assert cli.main(arguments(command, run, tmp_path / "out")) == 2
        assert_plain(capsys.readouterr().err)


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", ["lr$\\frac$", "$x^{", "_hidden", TEXT, "\n", "100%", "{0}"])
def test_the_name_of_a_folder_is_drawn_as_it_is(name, tmp_path, monkeypatch):
    render, drawn = figures.render, []

    def render_and_look(draw, *kinds):
        with matplotlib.rc_context():
            drawn.extend(text.get_text() for text in draw().findobj(Text))
        return render(draw, "svg") * len(kinds)

    monkeypatch.setattr(figures, "render", render_and_look)
    synthetic_run.write_run(tmp_path / name, "fspo", steps=4, prompts=16)
    assert cli.main(["report", str(tmp_path / name), "-o", str(tmp_path / "out")]) == 0
    assert any(text.strip().startswith(output.plain(name)) for text in drawn), drawn


def test_figures_do_not_depend_on_the_readers_settings():
    def draw():
        return figures.of_panels([(figures.clip_rates, "a", [])], 2.0)

    expected = figures.render(draw, "svg", "png")
    mine = {"text.usetex": True, "font.size": 30, "savefig.transparent": True, "svg.fonttype": "none"}
    with matplotlib.rc_context(mine):
        assert figures.render(draw, "svg", "png") == expected
        assert {key: matplotlib.rcParams[key] for key in mine} == mine
