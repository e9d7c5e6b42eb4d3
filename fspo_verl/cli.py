# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The ``fspo-verl`` command: what its subcommands take. What they do is in ``main(args)`` of the module of each.

A module is imported when its subcommand runs, and not for its ``--help``: torch, scipy and matplotlib take seconds.
`doctor` also works where matplotlib is missing, and `report` where verl is.
"""

import argparse
import ast
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fspo_verl import __version__, output


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


def run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [-h] [--loss LOSS] [OVERRIDE ...] -- COMMAND ..."
    add = parser.add_argument
    losses = ("fspo", "observed", "gspo", "grpo", "fixed_band", "no_clip")
    own = "what to train; observed measures the command's own loss (default: fspo)"
    add("--loss", choices=losses, default="fspo", help=own)
    fields = (
        "field of actor_rollout_ref.actor.policy_loss, clip range or aggregation of the actor, as calibrate prints it"
    )
    add("overrides", nargs="*", metavar="OVERRIDE", help=fields)


def calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run, with its records")
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


COMMANDS = {
    "demo": Command(
        "demo.command", "the conclusion and the page of a recorded run: what you would get", lambda parser: None
    ),
    "doctor": Command(
        "launch.doctor", "what is wrong with an installation or a launch, before anything is trained", doctor_arguments
    ),
    "run": Command("launch.run", "a command of yours, with FSPO in every training that it starts", run_arguments),
    "calibrate": Command(
        "analysis.calibration", "the range that clips a target share, from the records of a run", calibrate_arguments
    ),
    "report": Command(
        "report.page", "one page of figures and numbers on length fairness, from one or several runs", report_arguments
    ),
}


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of ``fspo-verl``, and those of its subcommands by name."""
    top = argparse.ArgumentParser(
        prog="fspo-verl", description="Length-fair clipping for verl: check a launch, look at a run, tune its range."
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
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if argv[:1] == ["run"] and "--" in argv else len(argv)
    with output.streams():
        args = parsers()[0].parse_args(argv[:end])
        args.argv = argv[end + 1 :]  # of the command that `run` starts
        try:
            code = _run(args.command, args)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BrokenPipeError:  # whoever reads has enough, as in `fspo-verl report RUN | head -1`
            code = 128 + signal.SIGPIPE
        try:
            sys.stdout.flush()
        except OSError:  # the interpreter's end would try again, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code


def _run(command: str, args: argparse.Namespace) -> int:
    try:
        code = importlib.import_module(f"fspo_verl.{COMMANDS[command].module}").main(args)
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        problem = f" needs {error.name}: pip install 'fspo-verl[report]'"
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        problem = f": {output.one_line(error)}"
    with contextlib.suppress(OSError):  # nobody can be told
        print(f"fspo-verl {command}{problem}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
