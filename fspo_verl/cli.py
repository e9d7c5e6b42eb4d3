# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The ``fspo-verl`` command: what its subcommands take. What they do is in ``main(args)`` of the module of each.

A module is imported when its subcommand runs, and not for its ``--help``: torch, scipy and matplotlib take seconds.
`doctor` also works where matplotlib is missing, and `report` where verl is.
"""

import argparse
import ast
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fspo_verl import __version__


class Command(NamedTuple):
    """A subcommand; its description is the text at the head of its module."""

    module: str  # below fspo_verl, with a function main(args)
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("launch", nargs="*", help="Hydra overrides of main_ppo, or after -- a command with -m MAIN")
    add("--strict", action="store_true", help="exit with 1 on warnings, too")
    add("--json", action="store_true", help="print one JSON object instead of text")


def switch_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("script", type=Path, help="a script of yours in bash, or a config in YAML")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-o", "--output", type=Path, metavar="NEW", help="write the new script to this file")
    where.add_argument("--in-place", action="store_true", help="write the new script over the old one")
    losses = ("fspo", "observed", "gspo", "grpo", "fixed_band", "no_clip")
    add(
        "--loss",
        choices=losses,
        default="fspo",
        help="what to train; observed measures the script's own (default: fspo)",
    )
    folder = "folder for records, in which each launch and each start has one of its own (default: $PWD/fspo_records)"
    add("--records", metavar="DIR", help=folder)


def selftest_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model", type=Path, metavar="FOLDER", help="of a model, whose noise is measured (default: a small random one)"
    )
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    add("--json", action="store_true", help="print one JSON object instead of text")


def calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run: its records, or else its metrics")
    rate = (
        "share to clip of the responses with A > 0, and of those with A < 0, on-policy ones included (default: 0.1; "
        "the authors' clip rates are not known)"
    )
    add("--target-clip-rate", type=float, default=0.1, metavar="RATE", help=rate)
    add("--max-rows", type=int, default=1_000_000, help="records to use; of more, a random part (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of text")


def report_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or a log")
    place = (
        "folder for the page, its figures and tables (default: RUN/report, LOG-report of a log; several runs need it)"
    )
    add("-o", "--output", type=Path, metavar="DIR", help=place)
    add("--names", nargs="+", metavar="NAME", help="what to call the runs (default: as their folders)")
    rows = "records to use, over all runs; of more a random part is taken (default: %(default)s)"
    add("--max-rows", type=int, default=2_000_000, help=rows)
    add("--json", action="store_true", help="print report.json instead of text")


def watch_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run, or a log")
    add("--every", type=int, default=10, metavar="N", help="steps from one line to the next (default: %(default)s)")
    add("--once", action="store_true", help="end with what is there, also where the run goes on")


COMMANDS = {
    "doctor": Command(
        "launch.doctor",
        "what is wrong with an installation or a launch, before anything is trained",
        doctor_arguments,
    ),
    "switch": Command(
        "launch.switch", "the command of a script of yours, changed so that it trains FSPO", switch_arguments
    ),
    "selftest": Command(
        "selftest.command",
        "checks the loss on this machine, and measures its noise floor for eps",
        selftest_arguments,
    ),
    "calibrate": Command(
        "analysis.calibration", "the band that gives a target clip rate, from the records of a run", calibrate_arguments
    ),
    "watch": Command("watch", "a line every few steps of a run that goes on, and one when it changes", watch_arguments),
    "report": Command(
        "report.page", "one page of figures and numbers on length fairness, from one or several runs", report_arguments
    ),
}


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of ``fspo-verl``, and those of its subcommands by name."""
    top = argparse.ArgumentParser(
        prog="fspo-verl", description="Length-fair clipping for verl: check a launch, look at a run, tune its band."
    )
    top.add_argument("--version", action=_Version, nargs=0, help="versions of this package and of verl")
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        # The text is read and not imported, as a module of a command may import torch.
        file = Path(__file__).parent / f"{command.module.replace('.', '/')}.py"
        of_command = subparsers.add_parser(
            name,
            help=command.summary,
            description=ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(of_command)
    return top, subparsers.choices


class _Version(argparse.Action):
    def __call__(self, parser, *_):
        from fspo_verl import versions

        verl = versions.installed("verl")
        print(f"fspo-verl {__version__}, {f'verl {verl}' if verl else 'verl is not installed'}")
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit code, and says in one line what a user can fix."""
    args = parsers()[0].parse_args(argv)
    try:
        code = _run(args.command, args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever reads has enough, as in `fspo-verl report RUN | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's end would complain
        return 128 + signal.SIGPIPE


def _run(command: str, args: argparse.Namespace) -> int:
    try:
        module = importlib.import_module(f"fspo_verl.{COMMANDS[command].module}")
    except ModuleNotFoundError as error:
        print(f"fspo-verl {command} needs {error.name}: pip install 'fspo-verl[report]'", file=sys.stderr)
        return 2
    try:
        return module.main(args)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        from fspo_verl import output

        print(f"fspo-verl {command}: {output.one_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
