# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Logs as people have pasted them into issues: pasted.txt, with a head above each, as the files of a folder."""

import re
import tempfile
from pathlib import Path

_scratch = tempfile.TemporaryDirectory(prefix="pasted-")  # as long as the process
PASTED = Path(_scratch.name)
_every = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
for _name, _text in re.findall(r"^==> (\S+) <==\n(.*?)(?=^==> |\Z)", _every, re.DOTALL | re.MULTILINE):
    (PASTED / _name).write_text(_text, encoding="utf-8")
