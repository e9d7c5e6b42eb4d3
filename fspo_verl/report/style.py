# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How losses and clips are drawn: one colour and one marker each, by their name in :data:`fspo_verl.clips.CLIPS`.

The colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers can tell apart.
"""

from typing import NamedTuple


class Style(NamedTuple):
    """How a run or a clip is drawn."""

    color: str
    marker: str
    line: str = "-"
    hollow: bool = False

    def line_kwargs(self) -> dict:
        """Keyword arguments for :meth:`Axes.plot` and :meth:`Axes.errorbar` of matplotlib."""
        face = "white" if self.hollow else self.color
        return {"color": self.color, "marker": self.marker, "ls": self.line, "mfc": face, "mew": 1.1}


STYLES = {
    "fspo": Style("#0072B2", "o"),
    "fspo_drift_corrected": Style("#56B4E9", "v", "--"),
    "fspo_studentized": Style("#E69F00", "P", "--"),
    "gspo": Style("#D55E00", "s"),
    "grpo": Style("#009E73", "^"),
    "fixed_band": Style("#CC79A7", "D"),
    "no_clip": Style("#882255", "X"),
}
"""Of the losses that this package trains with, and of the clips that figures show; the others are in tables only."""
