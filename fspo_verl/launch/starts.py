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

from omegaconf import DictConfig, OmegaConf

from fspo_verl.keys import OVERRIDES, RECORDS_DIR
from fspo_verl.launch.view import Launch

RECEIPT = "FSPO_VERL_RECEIPT"
"""The environment variable with the file."""

STATES = PRINTED, TAKEN, REFUSED = ("printed", "taken", "refused")
"""The config of a launch was printed, or is to train what was asked for, or was refused."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The part that a launch takes of the environment's request, as its config was composed."""

    loss: str = ""
    added: Sequence[str] = ()
    left_out: Sequence[str] = ()
    rest: Sequence[str] = ()
    """The words that tell it from other launches, but for what was left out."""


@dataclass(frozen=True, kw_only=True)
class Receipt(Taken):
    """The receipt of a launch: what it has told of itself."""

    id: str
    state: str
    pid: int
    records: str | None = None
    """Its folder of records."""

    run: str = ""
    """Its folder of checkpoints."""


@dataclass
class Start:
    """One launch of this process, from where its config is first seen until Ray starts."""

    composed: DictConfig | None = None
    """The config as Hydra has composed it, where anything is asked of a launch."""

    taken: Taken | None = None
    """None where Hydra has composed nothing that takes the request."""

    is_told: bool = False
    """Whether it was told on stderr what is taken."""

    places: set[str] = field(default_factory=set)
    """The functions that its main has called."""

    checked: object = None
    """The content of its config that was checked last."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def tell(self, state: str) -> None:
        """Say once on stderr what is added and left out, and which earlier launch differs in what was left out alone.

        Hydra has not set up logging yet, and whoever has forgotten the variable has to see it.
        """
        if self.taken is None or self.is_told:
            return
        self.is_told = True
        left_out = f"; left out {shlex.join(self.taken.left_out)}" if self.taken.left_out else ""
        lines = [f"added {shlex.join(self.taken.added) or 'nothing'}{left_out}"]
        earlier = [one for one in receipts() if one.state == TAKEN and one.id != self.id]
        for number, one in enumerate(earlier, 1):
            if state == TAKEN and [*one.rest] == [*self.taken.rest] and [*one.left_out] != [*self.taken.left_out]:
                lines.append(f"this is the same training as launch {number}: what they differ in was left out")
        with contextlib.suppress(OSError):
            for line in lines:
                print(f"fspo_verl: {OVERRIDES}: {line}", file=sys.stderr, flush=True)

    def note(self, state: str, config: DictConfig | None = None) -> None:
        """Tell `run` of this launch, if it has asked for one."""
        launch = Launch(OmegaConf.create() if config is None else config)
        where = {"records": launch.get(RECORDS_DIR), "run": str(launch.checkpoints)}
        receipt = Receipt(**vars(self.taken or Taken()), id=self.id, state=state, pid=os.getpid(), **where)
        with contextlib.suppress(OSError, KeyError):
            file = os.open(os.environ[RECEIPT], os.O_WRONLY | os.O_APPEND)
            try:
                # The line before may have been cut off.
                os.write(file, f"\n{json.dumps(dataclasses.asdict(receipt))}\n".encode())
            finally:
                os.close(file)


def receipts(path: str | None = None, start: int = 0) -> list[Receipt]:
    """The launches in a file, by default that of the variable, from a place in it on; each as it was told last."""
    found: dict[str, Receipt] = {}
    with contextlib.suppress(OSError), open(path or os.environ.get(RECEIPT) or os.devnull, "rb") as file:
        file.seek(start)
        for line in file.read().decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                receipt = Receipt(**json.loads(line))
                found[receipt.id] = receipt
    return [*found.values()]
