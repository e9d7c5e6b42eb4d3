# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The ``fspo-verl`` command: one subcommand per module that has ``add_arguments(parser)`` and ``main(args) -> int``."""

import argparse
import importlib
import sys

# Imported only when asked for: `doctor` must work where matplotlib is missing, `report` where verl is.
COMMANDS = {
    "doctor": "what is wrong with an installation or a launch, before anything is trained",
    "calibrate": "the band that gives a target clip rate, from the records of a run",
    "report": "one page of figures and numbers on length fairness, from one or several runs",
    "compare": "several losses over several seeds: paired differences with intervals",
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit code, and says in one line what a user can mend."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="fspo-verl",
        description="Length-fair clipping for verl: check a launch, look at a run, tune its band, compare losses.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="see below; `fspo-verl COMMAND --help`")
    command = parser.parse_args(argv[:1]).command
    try:
        module = importlib.import_module(f"fspo_verl.{command}")
    except ModuleNotFoundError as error:
        print(f"fspo-verl {command} needs {error.name}: pip install 'fspo-verl[report]'", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(
        prog=f"fspo-verl {command}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    try:
        return module.main(parser.parse_args(argv[1:]))
    except (FileNotFoundError, ValueError) as error:
        print(f"fspo-verl {command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
