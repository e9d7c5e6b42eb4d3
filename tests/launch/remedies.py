# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Applies the fix that a finding offers to the overrides of a launch."""

import re
import shlex
from collections.abc import Sequence


def applied(fix: str, overrides: Sequence[str]) -> list[str]:
    """The overrides after the first fix of those that are offered: some removed, others added at the end.

    Raises:
        AssertionError: an override that is to be removed is not there, or nothing is offered.
    """
    first = re.split(r",? or |;| on the command line| instead of it", fix)[0]
    removal = re.fullmatch(r"remove (.+?)(?:, and add (.+))?", first)
    words = shlex.split if '"' in first else str.split  # quoted for a shell
    removed, added = (removal[1].split(), (removal[2] or "").split()) if removal else ([], words(first))
    assert removed or added, fix
    # Hydra records an option of the group that it adds with a plus, typed or not.
    removed = [text if text in overrides else text.removeprefix("+") for text in removed]
    assert set(removed) <= set(overrides), f"{removed} is not all in {overrides}"
    assert all(re.match(r"[+]*[\w.@/]+=", text) for text in added), fix
    return [text for text in overrides if text not in removed] + added
