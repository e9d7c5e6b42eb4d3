# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The knowledge of a process about its launch, and what it tells ``fspo-verl run`` of it: lines of JSON in a file.

Nothing here ends or delays a training: a file that is gone, full or cut off is passed over.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from omegaconf import DictConfig

from fspo_verl.keys import GROUP, OVERRIDES, RECORDS_DIR
from fspo_verl.launch.view import Launch

RECEIPT = "FSPO_VERL_RECEIPT"
"""The environment variable with the file."""

STATES = PRINTED, COMPOSED, LAUNCHED, REFUSED = ("printed", "composed", "launched", "refused")
"""How far a launch has come: its config was printed, or composed to train; it was launched; it was refused."""


@dataclass
class Taken:
    """The part that a launch takes of the environment's request, as its config was composed."""

    added: Sequence[str] = ()
    left_out: Sequence[str] = ()
    rest: Sequence[str] = ()
    """The words that tell it from other launches, but for what was left out."""

    is_said: bool = False

    def say_once(self) -> None:
        """Tell on stderr what is added and left out."""
        if not self.is_said:
            left_out = f"; left out {shlex.join(self.left_out)}" if self.left_out else ""
            say(f"added {shlex.join(self.added) or 'nothing'}{left_out}")
        self.is_said = True


@dataclass
class Start:
    """One launch of this process, from where its config is first seen until Ray starts."""

    composed: DictConfig | None = None
    """The config as Hydra has composed it, where anything is asked of a launch."""

    taken: Taken | None = None
    """None where Hydra has composed nothing that takes the request."""

    places: set[str] = field(default_factory=set)
    """The functions that its main has called."""

    checked: object = None
    """The content of its config that was checked last."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def note(self, state: str, config: DictConfig | None = None) -> None:
        """Tell of this launch, if anybody has asked for one."""
        if not os.environ.get(OVERRIDES):
            return
        launch = None if config is None else Launch(config)
        known = {} if launch is None else {"records": launch.get(RECORDS_DIR), "run": str(launch.checkpoints)}
        taken = {name: getattr(self.taken, name) for name in ("added", "left_out", "rest") if self.taken}
        line = json.dumps(dataclasses.asdict(Receipt(self.id, state, _loss_that_is_asked_for(), **known, **taken)))
        with contextlib.suppress(OSError, KeyError):
            file = os.open(os.environ[RECEIPT], os.O_WRONLY | os.O_APPEND)
            try:
                os.write(file, f"\n{line}\n".encode())  # the line before may have been cut off
            finally:
                os.close(file)


@dataclass(frozen=True)
class Receipt:
    """A line that a process writes about a launch."""

    id: str
    state: str
    loss: str
    records: str | None = None
    """Its folder of records."""

    run: str = ""
    """Its folder of checkpoints."""

    added: Sequence[str] = ()
    left_out: Sequence[str] = ()
    rest: Sequence[str] = ()


def receipts(path: str | None = None, start: int = 0) -> list[Receipt]:
    """The launches in a file, by default that of the variable, from a place in it on; each as it was told last."""
    found: dict[str, Receipt] = {}
    with contextlib.suppress(OSError), open(path or os.environ.get(RECEIPT) or os.devnull, "rb") as file:
        file.seek(start)
        for line in file.read().decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                receipt = Receipt(**json.loads(line))
                before = found.get(receipt.id, receipt)
                if not receipt.rest:  # of a worker: the driver alone knows what was added
                    receipt = dataclasses.replace(
                        receipt, added=before.added, left_out=before.left_out, rest=before.rest
                    )
                found[receipt.id] = receipt
    return [*found.values()]


def _loss_that_is_asked_for() -> str:
    with contextlib.suppress(ValueError):
        words = shlex.split(os.environ[OVERRIDES])
        return next((word.partition("=")[2] for word in words if word.startswith(f"{GROUP}=")), "")
    return ""


def say(text: str) -> None:
    """Tell on stderr: Hydra has not set up logging yet, and whoever has forgotten the variable has to see it."""
    with contextlib.suppress(OSError):
        print(f"fspo_verl: {OVERRIDES}: {text}", file=sys.stderr, flush=True)
