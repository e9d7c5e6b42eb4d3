# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of which a program writes the part between two marks, and tables for spreadsheets."""

import csv
import io

import pandas as pd
import pytest

from fspo_verl.output import between, to_csv

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


@pytest.mark.parametrize("first", ["=", "+", "-", "@"])
def test_a_text_in_a_csv_is_no_formula(first):
    texts = [f"{first}cmd|' /C calc'!A0", "-0.5", "fspo", None]
    table = pd.DataFrame({f"{first}run": texts, "k": [-0.5, 1e-9, 2.0, -3.0]})
    header, *rows = csv.reader(io.StringIO(to_csv(table).decode(), newline=""))
    assert header == [f"'{first}run", "k"] and [float(row[1]) for row in rows] == table.k.tolist()
    assert [row[0] for row in rows] == [f"'{texts[0]}", "-0.5", "fspo", ""]
