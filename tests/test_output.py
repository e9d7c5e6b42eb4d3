# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Commands write plain lines on the streams, and whole files of their own."""

import ast
import errno
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fspo_verl
from fspo_verl import output


@given(st.text())
def test_a_plain_text_is_one_line_that_acts_on_nothing(text):
    shown = output.plain(text)
    assert shown.isprintable() and len(f"{shown}|".splitlines()) == 1
    assert text.isprintable() == (shown == text)


@pytest.mark.parametrize("links", [None, ["Paper, https://arxiv.org/abs/2509.09177"]])
def test_a_message_names_a_page_that_can_be_opened_or_none(links, monkeypatch):
    class Metadata:
        get_all = staticmethod(lambda name: links)

    monkeypatch.setattr(output.metadata, "metadata", lambda package: Metadata)
    assert output.see("noise.md") == ""
    links = [*(links or []), "Source, https://github.com/owner/name"]
    assert output.see("noise.md") == " (https://github.com/owner/name/blob/main/docs/noise.md)"


def test_what_is_logged_or_warned_of_is_a_plain_line_said_once():
    """It runs in a process of its own, as pytest takes both."""
    code = """
import logging, sys, warnings
import fspo_verl
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


def test_no_file_is_written_through_a_link(tmp_path, monkeypatch):
    """Somebody else's folder may hold links that wait for what is written there."""
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    (tmp_path / "page").symlink_to(mine)
    output.write_whole([(tmp_path / "page", b"page")])
    assert (tmp_path / "page").read_bytes() == b"page" and mine.read_bytes() == b"mine"
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))
    waiting = tmp_path / f".unfinished.{uuid.UUID(int=0).hex}"
    waiting.symlink_to(mine)
    with pytest.raises(FileExistsError):
        output.write_whole([(tmp_path / "page", b"another")])
    assert (tmp_path / "page").read_bytes() == b"page" and mine.read_bytes() == b"mine" and waiting.is_symlink()


def test_a_full_disk_leaves_every_file_as_it_was(tmp_path, monkeypatch):
    files, write = [tmp_path / "folder/a", tmp_path / "b"], Path.write_bytes
    output.write_whole([(file, b"old") for file in files])

    def write_until_full(file, content):
        write(file, content[:1])
        if content == b"long":
            raise OSError(errno.ENOSPC, "No space left on device", str(file))

    monkeypatch.setattr(Path, "write_bytes", write_until_full)
    with pytest.raises(OSError, match="No space left"):
        output.write_whole(zip(files, [b"new", b"long"], strict=True))
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == {*files}
    assert all(file.read_bytes() == b"old" for file in files)


def test_commands_that_read_runs_write_by_that_function_alone():
    package = Path(fspo_verl.__file__).parent
    for file in (*package.glob("analysis/*.py"), *package.glob("report/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                assert name not in ("write_text", "write_bytes", "mkdir", "touch"), file
                modes = [one.value for one in node.args if isinstance(one, ast.Constant)] if name == "open" else []
                assert not any(mode in str(modes) for mode in "wax"), file
