# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of which a program writes the part between two marks."""

import pytest

from fspo_verl.output import between

BEGIN, END = "<!-- begin -->", "<!-- end -->"


def test_only_what_stands_between_the_marks_changes():
    first = between("", BEGIN, END, "first\n")
    assert first == f"{BEGIN}\n\nfirst\n\n{END}\n"
    second = between(f"before\n{first}after\n", BEGIN, END, "second")
    assert second == f"before\n{BEGIN}\n\nsecond\n\n{END}\nafter\n"
    assert between(second, BEGIN, END, "second") == second


@pytest.mark.parametrize("page", ["text", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"])
def test_a_page_without_both_marks_once_is_refused(page):
    with pytest.raises(ValueError, match="once each"):
        between(page, BEGIN, END, "text")
