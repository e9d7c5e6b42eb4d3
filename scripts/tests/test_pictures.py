# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Pictures of pages: smaller, and the same to the eye."""

import io

import numpy as np
import pictures
from matplotlib.figure import Figure
from PIL import Image


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def test_a_small_picture_shows_what_the_large_one_does(tmp_path):
    figure, drawn = Figure(dpi=200), io.BytesIO()
    axes = figure.subplots()
    for place in range(8):
        axes.plot([0, 1], [0, place], label=f"line {place}")
        axes.fill_between([0, 1], [place, 1], alpha=0.1)
    axes.legend()
    figure.savefig(drawn)
    large = drawn.getvalue()
    small = pictures.small_png(large)
    difference = np.abs(pixels(small) - pixels(large)).max(2)  # of 255
    assert difference.max() <= 64 and np.quantile(difference, 0.99) <= 16
    assert len(small) < len(large) / 2
    assert np.array_equal(pixels(pictures.small_png(small)), pixels(small))
