# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Pictures for pages of this repository, a quarter of their size: with 64 colours, of which a figure needs no more.

  python scripts/pictures.py FILE.png ...     rewrites files, such as screenshots

Each version of a picture stays in the repository's history. Scripts that draw call :func:`small_png` or :func:`save`.
"""

import io
import sys
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from fspo_verl.output import write_whole

COLOURS = 64


def small_png(png: bytes) -> bytes:
    """The same picture, without transparency, in at most ``COLOURS`` colours; none that has as few is changed."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    small = io.BytesIO()
    picture.save(small, "PNG", optimize=True)
    return small.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure for a page."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, metadata={"Software": None})
    write_whole([(path, small_png(drawn.getvalue()))])


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        path.write_bytes(small_png(path.read_bytes()))


if __name__ == "__main__":
    main()
