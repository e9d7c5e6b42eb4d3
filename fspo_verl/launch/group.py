# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Overrides of a launch to remove, and to add, for its loss to be the one that was asked for."""

from collections.abc import Sequence

from fspo_verl.keys import GROUP
from fspo_verl.launch.hydra_files import leaves, parsed, task_overrides


def select_alone(words: Sequence, keep_plus: bool = False) -> tuple[list[str], list[str]]:
    """Overrides to remove, and to add, for the last option that these parsed ones name to be selected alone.

    With ``keep_plus`` ``+GROUP=OPTION`` stays, too.
    """
    names = (one for one in reversed(words) if not one.is_delete() and isinstance(one.value(), str | list))
    last = next(names, None)
    wanted = last and f"{GROUP}={last.get_value_string()}"
    stay = {wanted, f"+{wanted}"} if keep_plus else {wanted}
    removed = [one.input_line for one in words if one.input_line not in stay]
    return removed, [wanted] if wanted and len(removed) == len(words) else []


def overrides_that_decide(key: str, than: object = ...) -> list[str]:
    """The overrides of the running Hydra application that take out a key, or set it to another value ``than`` this."""
    found = []
    for one in parsed(task_overrides()):
        value = None if one.is_delete() else one.value()
        sets = {} if one.is_delete() else leaves({one.key_or_group: value})
        takes_out = f"{key}.".startswith(f"{one.key_or_group}.") and not isinstance(value, dict)
        if (sets[key] != than) if key in sets else takes_out:
            found.append(one.input_line)
    return found


def without(*keys: str) -> list[str]:
    """Return what is to be removed for keys to go: the overrides that set them, or their names where a file does."""
    return [text for key in keys for text in overrides_that_decide(key)] or [*keys]
