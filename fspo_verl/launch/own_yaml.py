# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Switches a user's config in YAML: the loss in its defaults list, and values in the way of it. All else stays.

ruamel.yaml says where keys and values stand. The text is edited there, as writing the file anew would lay it out anew.
"""

import io
import re
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from fspo_verl.keys import GROUP
from fspo_verl.launch.hydra_files import option
from fspo_verl.launch.trainings import in_the_way


def switched(text: str, loss: str) -> tuple[str, list[str]]:
    """The config that selects a loss, and what was changed.

    Args:
        text: of a config of a user's, for a main of verl.
        loss: an option of the group.

    Raises:
        ValueError: it is no mapping in YAML, or its defaults list is of another kind than Hydra's.
    """
    try:
        content = YAML().load(io.StringIO(text))
    except YAMLError as error:
        raise ValueError(f"no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, CommentedMap) or not isinstance(content.get("defaults", []), list):
        raise ValueError("no config of Hydra: it is no mapping with a list `defaults`")
    lines, changes = text.splitlines(keepends=True), []
    for mapping, name, key in reversed([*_leaves(content)]):  # from the end, so that the lines above keep their numbers
        value, sets = mapping[key], option(loss)
        if value != sets.get(name) and (why := in_the_way(f"{name}={value}", loss, sets)):
            line, column = mapping.lc.value(key)
            if len(mapping) > 1 and not mapping.fa.flow_style():
                del lines[line], mapping[key]
                changes.append(f"{name}: {value} is taken out, {why}")
            elif name in sets:
                lines[line] = lines[line][:column] + re.sub(r"^[^\s,}#]+", str(sets[name]), lines[line][column:])
                changes.append(f"{name}: {value} becomes {sets[name]}, for it is a value {why}")
    return "".join(_selected(content, lines, loss, changes)), changes


def _leaves(mapping: CommentedMap, path: str = "") -> Iterator[tuple[CommentedMap, str, Any]]:
    """Every mapping and key of a scalar value, with its dotted name; in the order of the file."""
    for key, value in mapping.items():
        if isinstance(value, CommentedMap):
            yield from _leaves(value, f"{path}{key}.")
        elif not isinstance(value, list):
            yield mapping, f"{path}{key}", key


def _selected(content: CommentedMap, lines: list[str], loss: str, changes: list[str]) -> list[str]:
    """The lines with the loss in the defaults list: before `_self_`, so that the file has the last word.

    `observed` comes at the end. It changes no setting of the file but the class, which a copy of verl's config names.
    """
    item, defaults = f"{GROUP}: {loss}", content.get("defaults")
    if not defaults:
        first = next(iter(content))
        line = content.lc.key("defaults" if "defaults" in content else first)[0]
        order = ["_self_", item] if loss == "observed" else [item, "_self_"]
        changes.append(f"a defaults list with {item}")
        return [
            *lines[:line],
            "defaults:\n",
            *(f"  - {one}\n" for one in order),
            *lines[line + (defaults is not None) :],
        ]
    for one in defaults:
        key = next((key for key in one if str(key).split()[-1] == GROUP), None) if isinstance(one, dict) else None
        if key is not None:
            if loss != "observed" and one[key] != loss:
                line, column = one.lc.value(key)
                lines[line] = lines[line][:column] + lines[line][column:].replace(str(one[key]), loss, 1)
                changes.append(f"the defaults list selects {loss} instead of {one[key]}")
            return lines
    changes.append(f"the defaults list selects {item}")
    before = (
        next((place for place, one in enumerate(defaults) if one == "_self_"), None) if loss != "observed" else None
    )
    line, column = defaults.lc.item(len(defaults) - 1 if before is None else before)
    if defaults.fa.flow_style():
        end = column if before is not None else column + len(re.split(r"[,\]]", lines[line][column:])[0].rstrip())
        added = f"{item}, " if before is not None else f", {item}"
        lines[line] = lines[line][:end] + added + lines[line][end:]
        return lines
    place = line + (before is None)
    lines[place:place] = [f"{lines[line][: lines[line].index('-')]}- {item}\n"]
    return lines
