# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What commands write: plain lines on the streams, and files that are whole and their own."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from fspo_verl import output


@given(st.text())
def test_a_plain_text_is_one_line_that_acts_on_nothing(text):
    shown = output.plain(text)
    assert shown.isprintable() and len(f"{shown}|".splitlines()) == 1
    assert text.isprintable() == (shown == text)


def test_what_is_logged_or_warned_of_is_a_plain_line_said_once():
    """In a process of its own, as pytest takes both."""
    code = """
import logging, sys, warnings
from fspo_verl import output
with output.streams():
    for _ in range(3):
        logging.getLogger("fspo_verl").warning("%s logged", "a\\x1b[2J\\n")
        logging.getLogger("another").warning("b\\r logged")
        warnings.warn("c\\x1b[2J\\n warned")
    logging.getLogger("fspo_verl").info("not said")
assert not logging.root.handlers and "showwarnmsg" not in repr(warnings.formatwarning)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines() == [r"a\x1b[2J\n logged", r"b\r logged", r"c\x1b[2J\n warned"]
