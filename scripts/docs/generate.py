# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes what follows from the code: configuration.md, commands.md, the tables of scripts/bench/record.py, the address.

  python scripts/docs/generate.py            write them
  python scripts/docs/generate.py --check    exit with 1 if they differ from the code

Sources are parsed, not run: no page depends on the machine.
"""

import argparse
import ast
import itertools
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml

from fspo_verl.output import markdown_table

ROOT = Path(__file__).parents[2]
_HEAD = "<!-- Written by scripts/docs/generate.py from the code; do not edit. -->\n\n"


def pages() -> dict[str, str]:
    """Path of each file that is generated, or holds something generated -> its text."""
    texts = {"docs/configuration.md": configuration(), "docs/commands.md": f"{commands()}\n\n{checks()}"}
    written = {name: f"{_HEAD}{text.strip()}\n" for name, text in texts.items()}
    handwritten = [*(ROOT / "docs").glob("*.md"), ROOT / "scripts/bench/README.md"]
    others = {str(file.relative_to(ROOT)): file.read_text() for file in handwritten}
    records = json.loads((ROOT / "scripts/bench/records.json").read_text())
    tables = {name: measured(text, records) for name, text in others.items() if name not in written}
    return written | tables | {name: addressed(name, repository()) for name in ADDRESSED}


# --- the address -----------------------------------------------------------------------------------------------------

# File -> its line with the address, and the line before which that stands.
ADDRESSED = {
    "README.md": ("git clone {url} && cd {name}", 'pip install ".[report]"'),
    "CITATION.cff": ("repository-code: {url}", "license:"),
    "mkdocs.yml": ("repo_url: {url}", "theme:"),
    "SECURITY.md": ("The form is {url}/security/advisories/new.", "Leave time"),
}


def repository() -> str:
    """Return the address of the public repository, from setup.py; empty while there is none."""
    return re.search(r'^REPOSITORY = "(.*)"$', (ROOT / "setup.py").read_text(), re.MULTILINE)[1]


def addressed(name: str, url: str) -> str:
    """Return the text of a file with its line for this address; without such a line if the address is empty."""
    line, following = ADDRESSED[name]
    text = re.sub(rf"^{line.split('{')[0]}.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    if not url:
        return text
    before, start, after = text.partition(f"\n{following}")
    return f"{before}\n{line.format(url=url, name=url.rsplit('/')[-1])}{start}{after}"


# --- tables of benches -----------------------------------------------------------------------------------------------


def measured(page: str, records: dict) -> str:
    """The page with the recorded tables between their marks."""
    for name, record in records.items():
        if (begin := f"<!-- record.py {name} -->") in page:
            before, _, rest = page.partition(begin)
            _, end, after = rest.partition(f"<!-- end of {name} -->")
            if not end:
                raise ValueError(f"a page has the begin of {name}, and no end")
            page = f"{before}{begin}\n\n{_bench(**record)}\n\n{end}{after}"
    return page


def _bench(machine: dict, table: list[dict]) -> str:
    where = "Commit {commit}, verl {verl}, torch {torch}, {cores} cores ({cpu}).".format(**machine)
    return f"{markdown_table([*table[0]], (row.values() for row in table))}\n\n{where}"


# --- configuration ---------------------------------------------------------------------------------------------------


def configuration() -> str:
    losses = ROOT / "fspo_verl/configs/algorithm.policy_loss"
    parts = [
        "# Configuration",
        "All fields lie under `actor_rollout_ref.actor.policy_loss`. S is the log importance-sampling ratio of a "
        "response, L its length in tokens. Bad values are refused before Ray starts; verl refuses unknown fields.",
        "## The clip range (fspo, and fixed_band as one of its members)",
        fields("fspo_verl/band.py", "Band"),
        "## An eps that follows a clip rate",
        fields("fspo_verl/adaptive.py", "AdaptiveBand"),
        "## What is measured (fspo, and every observed loss)",
        fields("fspo_verl/config.py", "Observation"),
        "## What is not a field of the range",
        markdown_table(("setting", "source"), _SOURCES.items()),
        "## What each option of the group sets",
        "`algorithm.policy_loss=NAME` on any verl config selects one:",
        markdown_table(("option", "what it is", "sets"), map(_option, sorted(losses.glob("*.yaml")))),
        "In a file of your own:",
        _FILE,
    ]
    return "\n\n".join(parts)


def _option(file: Path) -> tuple[str, str, str]:
    """Return a row for an option: its name, the comment at its head, and what it sets beside the fields' defaults."""
    comments = itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    what = " ".join(line.removeprefix("#").strip() for line in comments if "@package" not in line)
    option = yaml.safe_load(file.read_text())
    actor = option["actor_rollout_ref"]["actor"]
    loss = actor.pop("policy_loss")
    if "defaults" not in option:  # one that has all fields
        loss = {key: loss[key] for key in ("_target_", "loss_mode") if key in loss}
    sets = [f"`{key}: {'null' if value is None else value}`" for key, value in {**loss, **actor}.items()]
    return f"`{file.stem}`", what.strip().removesuffix("."), ", ".join(sets)


# Where the values come from that no field documents.
_SOURCES = {
    "S is of the whole response, without 1/L": 'abstract: "we clip the sequence log-IS ratio"',
    "`loss_agg_mode`": "this project: responses count alike, with w·A",
    "10% clipped, at which `calibrate` aims": "this project; the authors' clip rates are not known",
    "advantage estimator, learning rate, batch, lengths, KL": "not known; the scripts follow verl's GSPO example",
    "Qwen3-8B-Base": 'abstract: "the largest gains"',
    "Qwen3-1.7B-Base; MATH500, AIME24, AIME25": "public reviews; how they sample is not known",
    "length reweighting error (LRE)": "abstract, without a formula; ours is in [Measure](measure.md#the-sentence)",
    "`fixed_band`": "verl's range, without a dual clip; that of the paper's baseline is not known",
}
# A file that trains what the group alone trains.
_FILE = """
```yaml
defaults:
  - ppo_trainer
  - algorithm.policy_loss: fspo
  - _self_
data:
  train_batch_size: 512
actor_rollout_ref:
  actor:
    ppo_mini_batch_size: 128  # four steps per rollout
```
""".strip()


def fields(source: str, name: str) -> str:
    """Return a table of the fields of a dataclass, from the text below each; a column for sources if it names any."""
    body = _definition(ROOT / source, name).body
    rows = []
    for field, text in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            meaning, _, where = text.value.value.partition("Source: ")
            cells = [f"`{field.target.id}`", _default(field.value), markdown(meaning), markdown(where)]
            rows.append([cell.removesuffix(".") for cell in cells if cell])
    return markdown_table(("field", "default", "meaning", "source")[: len(rows[0])], rows)


def _definition(file: Path, name: str) -> ast.ClassDef:
    tree = ast.parse(file.read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _default(value: ast.expr) -> str:
    if not isinstance(value, ast.Constant):
        return "below"
    return "`null`" if value.value is None else f"`{value.value}`"


def markdown(text: str) -> str:
    """A docstring's reStructuredText on one line of a Markdown table."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text.replace("``", "`"))
    text = re.sub(r"\bdocs/(\w+)\.md", r"[\1](\1.md)", text)
    return " ".join(text.split()).replace("|", r"\|")


# --- checks ----------------------------------------------------------------------------------------------------------


def checks() -> str:
    launch = [*_found("selection"), *_found("checks"), *_found("at_size")]
    launch += _found("installation", "too_old", "left_out", "verl_version")
    parts = [
        "## Launch checks",
        "An **error** stops the launch: it would fail, or train something else than it says. With a **warning** it "
        "trains, but works against the method. Each message names the override that corrects it.",
        "Before Ray starts, and by `fspo-verl doctor`:",
        "\n".join(launch),
        "By `fspo-verl doctor` alone:",
        "\n".join([*_found("doctor"), *_found("installation", "findings")]),
    ]
    return "\n\n".join(parts)


_FRAME = ("_found", "main", "judge", "examine")  # functions that run checks, and make findings of what goes wrong there


def _found(module: str, *functions: str) -> Iterator[str]:
    """A line for each function that makes findings: their severities, and what its docstring says.

    Args:
        functions: of which there are to be lines; of all without it.
    """
    for node in ast.parse((ROOT / f"fspo_verl/launch/{module}.py").read_text()).body:
        if not isinstance(node, ast.FunctionDef) or node.name in _FRAME or (functions and node.name not in functions):
            continue
        calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
        if found := " ".join(filter(None, map(_severity, calls))):
            said = ast.get_docstring(node)
            if said is None:
                raise ValueError(f"{module}.py: {node.name} makes findings and has no docstring")
            severities = " or ".join(one for one in ("error", "warning", "note") if one in found)
            yield f"- **{severities}**: {markdown(said.split(chr(10) * 2)[0])}"


def _severity(call: ast.Call) -> str | None:
    """Return the severity of the finding that a call makes."""
    of = {name: name for name in ("error", "warning", "note")}
    of |= {"severity": "error or warning"}
    return of.get(ast.unparse(call.func))


# --- commands --------------------------------------------------------------------------------------------------------


def commands() -> str:
    os.environ["COLUMNS"] = "80"  # of argparse, and of a block of code on the site
    sys.path.insert(0, str(ROOT))
    from fspo_verl import cli

    parts = [
        "# Commands and launch checks",
        "`fspo-verl --version` names the versions of this package and of verl. [Launch checks](#launch-checks) are at "
        "the end.",
    ]
    for command, parser in cli.parsers()[1].items():
        said, parser.description = parser.description, None
        takes = re.sub(r"^ *-h, --help .*\n(?: {10,}.*\n)*", "", parser.format_help(), flags=re.MULTILINE)
        _, _, takes = takes.removesuffix("\noptions:\n").partition("\n\n")  # without the usage, which repeats them
        parts += [f"## fspo-verl {command}", *map(_paragraph, said.strip().split("\n\n"))]
        parts += [_code(takes)] if takes.strip() else []
    return "\n\n".join(parts)


def _paragraph(text: str) -> str:
    """Return the Markdown of a description: what is indented there is code."""
    return _code(textwrap.dedent(text)) if text.startswith(" ") else markdown(text)


def _code(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    args = parser.parse_args()
    stale = False
    for name, text in pages().items():
        file = ROOT / name
        if file.exists() and file.read_text() == text:
            continue
        stale = True
        if args.check:
            print(f"{name} differs from the code: python scripts/docs/generate.py", file=sys.stderr)
        else:
            file.write_text(text)
            print(name)
    return int(stale and args.check)


if __name__ == "__main__":
    sys.exit(main())
