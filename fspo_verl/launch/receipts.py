# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What ``fspo-verl run`` learns of the launches below it: lines of JSON in a file that a variable names.

Nothing here ends or delays a training: a file that is gone, full or cut off is passed over.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

RECEIPT = "FSPO_VERL_RECEIPT"
"""The environment variable with the file."""

STATES = PRINTED, COMPOSED, LAUNCHED, REFUSED = ("printed", "composed", "launched", "refused")
"""How far a launch has come: its config was printed, or composed to train; it was launched; it was refused."""


@dataclass(frozen=True)
class Receipt:
    """One launch, at one of its states."""

    id: str
    state: str
    loss: str = ""
    records: str | None = None
    """Its folder of records."""

    run: str = ""
    """Its folder of checkpoints."""

    added: Sequence[str] = ()
    left_out: Sequence[str] = ()
    rest: Sequence[str] = ()
    """What tells it from other launches, but for what was left out."""


def note(receipt: Receipt) -> None:
    """Tell of a launch, if anybody listens."""
    line = f"\n{json.dumps(dataclasses.asdict(receipt))}\n"  # the line before may have been cut off
    with contextlib.suppress(OSError, KeyError):
        file = os.open(os.environ[RECEIPT], os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


def launches(path: str | None = None, start: int = 0) -> list[Receipt]:
    """The launches in a file, by default that of the variable, from a place in it on; each as it was noted last."""
    found: dict[str, Receipt] = {}
    with contextlib.suppress(OSError), open(path or os.environ.get(RECEIPT) or os.devnull, "rb") as file:
        file.seek(start)
        for line in file.read().decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                receipt = Receipt(**json.loads(line))
                found[receipt.id] = receipt
    return [*found.values()]
