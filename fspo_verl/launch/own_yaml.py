# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Switches a user's config in YAML: the loss in its defaults list, and values in the way of it. All else stays.

PyYAML, with which Hydra reads a config, says where keys and values stand. The text is edited there, as writing the file
anew would lay it out anew. The new text is read once more: its content is the old one after the changes that are
listed, or the file is refused.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from fspo_verl.keys import GROUP, POLICY_LOSS
from fspo_verl.launch.hydra_files import leaves, option
from fspo_verl.launch.trainings import in_the_way

_CLASS = f"{POLICY_LOSS}._target_"
_MERGE = "tag:yaml.org,2002:merge"
_LINE_END = re.compile(r"[ \t]*(#[^\n]*)?(\r?\n|\Z)")


def switched(text: str, loss: str) -> tuple[str, list[str]]:
    """The config that selects a loss, and what was changed.

    Args:
        text: of a config of a user's, for a main of verl.
        loss: an option of the group.

    Raises:
        ValueError: it is no mapping in YAML, its defaults list is of another kind than Hydra's, or a change is not safe
            to make: something else uses what it would change, or the layout is not understood.
    """
    file = _File(text)
    file.take_out(loss)
    file.select(loss)
    return file.edited(), file.changes


def _content(text: str) -> Any:
    """What Hydra reads, interpolations as written."""
    try:
        return OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ValueError(f"no YAML that Hydra reads: {' '.join(str(error).split())[:300]}") from None


def _nodes(node: Node) -> Iterator[Node]:
    """A node and all below it; one that an alias repeats comes as often as it is used."""
    yield node
    if not isinstance(node, ScalarNode):
        for child in node.value:
            for one in child if isinstance(child, tuple) else (child,):
                yield from _nodes(one)


def _mappings(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[MappingNode, tuple[str, ...]]]:
    """Every mapping that is no item of a list, and the keys that lead to it; what a merge key brings counts as own."""
    if isinstance(node, MappingNode):
        yield node, path
        for key, value in node.value:
            if key.tag == _MERGE:
                for one in value.value if isinstance(value, SequenceNode) else (value,):
                    yield from _mappings(one, path)
            else:
                yield from _mappings(value, (*path, key.value))


def _ends(item: Any, loss: str) -> bool:
    """Whether the entry of a loss has to stand before an item of the defaults list."""
    if isinstance(item, dict):
        return str(next(iter(item), "")).startswith("override ")
    return item == "_self_" and loss != "observed"


def _by_hand(node: Node, name: str, why: str, remedy: str) -> ValueError:
    return ValueError(f"line {node.start_mark.line + 1}: {name} {why}; {remedy}, and switch again")


class _File:
    """A config, the edits of its text, and the content that it has after them."""

    def __init__(self, text: str) -> None:
        self.text, self.content = text, _content(text)
        self.root = yaml.compose(text, yaml.SafeLoader)
        if not isinstance(self.root, MappingNode) or not isinstance(self.content.get("defaults", []), list):
            raise ValueError("no config of Hydra: it is no mapping with a list `defaults`")
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.edits: list[tuple[int, int, str]] = []  # begin, end, and the text instead
        self.changes: list[str] = []
        self.uses = Counter(map(id, _nodes(self.root)))

    def edited(self) -> str:
        """The new text, if it has the content that the changes leave."""
        new = self.text
        for begin, end, instead in sorted(self.edits, reverse=True):
            new = new[:begin] + instead + new[end:]
        try:
            is_right = str(_content(new)) == str(self.content)  # as text, in which 1 is not True, and nan is nan
        except ValueError:
            is_right = False
        if not is_right:
            raise ValueError(f"this layout is not understood; change it by hand: {'; '.join(self.changes)}")
        return new

    # --- values in the way -------------------------------------------------------------------------------------------

    def take_out(self, loss: str) -> None:
        """Take out what is in the way of a loss. The last key of a mapping stays, with the value of the loss."""
        sets = option(loss)
        for mapping, path in _mappings(self.root):
            inner: Any = self.content
            for part in path:
                inner = inner.get(part) if isinstance(inner, dict) else None
            if not isinstance(inner, dict) or any("." in part for part in path):
                continue
            gone = self._in_the_way(mapping, path, inner, loss, sets)
            is_all = len(gone) == len(mapping.value)
            stays = next((place for place, (name, _) in gone.items() if is_all and name in sets), None)
            kept = [place for place in range(len(mapping.value)) if place not in gone or place == stays]
            for place, (name, why) in gone.items():
                key, value = mapping.value[place]
                old = value.value if isinstance(value, ScalarNode) else inner[key.value]
                if place == stays:
                    inner[key.value] = sets[name]
                    self._replace(value, f"'{sets[name]}'" if "{" in str(sets[name]) else str(sets[name]))
                    self.changes.append(f"{name}: {old} becomes {sets[name]}, for it is a value {why}")
                else:
                    del inner[key.value]
                    self.changes.append(f"{name}: {old} is taken out, {why}")
                    self._remove(mapping, place, kept, name)

    def _in_the_way(
        self, mapping: MappingNode, path: tuple[str, ...], inner: dict, loss: str, sets: dict
    ) -> dict[int, tuple[str, str]]:
        """Of each key in a mapping that is in the way: its place, its dotted name and why it is."""
        found = {}
        for place, (key, value) in enumerate(mapping.value):
            # Hydra takes a dot in the key of a file for a part of the key, which is none of verl's then.
            if isinstance(value, MappingNode) or key.value not in inner or "." in key.value:
                continue
            name, is_scalar = ".".join((*path, key.value)), isinstance(value, ScalarNode)
            if loss != "observed" and any(other.startswith(f"{name}.") for other in sets):
                raise _by_hand(key, name, "replaces a section that the loss sets", "take it out by hand")
            if is_scalar and name in sets and value.value == str(sets[name]):
                continue
            if why := in_the_way(f"{name}={value.value if is_scalar else ''}", loss, sets):
                self._refuse_if_used(name, key, value, name in sets)
                found[place] = name, why
        return found

    def _refuse_if_used(self, name: str, key: Node, value: Node, is_set: bool) -> None:
        """Raise if a value is bound to another place: what the loss sets may be referred to, as it is there after."""
        if self.uses[id(value)] > 1:
            raise _by_hand(key, name, "is shared by an anchor", "write it out by hand, without alias and merge key")
        if "${" in str(value.value):
            raise _by_hand(key, name, "is an interpolation", "take it out by hand")
        word = re.compile(rf"\b{re.escape(key.value)}\b")
        texts = (node for node in _nodes(self.root) if isinstance(node, ScalarNode) and "${" in node.value)
        other = None if is_set else next(filter(lambda node: word.search(node.value), texts), None)
        if other is not None:
            where = f"line {other.start_mark.line + 1}"
            raise _by_hand(key, name, f"is used by the interpolation in {where}", "write the value there by hand")

    def _remove(self, mapping: MappingNode, place: int, kept: list[int], name: str) -> None:
        """Remove a key: in a block its lines; in a flow it and one comma. A block that has no key left becomes {}."""
        key, value = mapping.value[place]
        begin, end = key.start_mark.index, self._end(value)
        if mapping.flow_style:
            first, last = begin, end
            if any(one < place for one in kept):
                first = self._end(mapping.value[place - 1][1])
            elif place + 1 < len(mapping.value):
                last = mapping.value[place + 1][0].start_mark.index
            if "#" in self.text[first:begin] + self.text[end:last]:
                raise _by_hand(key, name, "stands beside a comment between braces", "take it out by hand")
            self.edits.append((first, last, ""))
            return
        if not kept and place == len(mapping.value) - 1:
            self.edits.append((begin, end, "{}"))
            return
        line, after = self._line(begin), _LINE_END.match(self.text, end)
        if self.text[line:begin].strip() or after is None:
            raise _by_hand(key, name, "shares its line", "take it out by hand")
        self.edits.append((line, after.end(), ""))

    # --- the defaults list -------------------------------------------------------------------------------------------

    def select(self, loss: str) -> None:
        """Put the loss into the defaults list: before `_self_`, so that the file has the last word.

        `observed` comes at the end. It changes no setting of the file but the class, which a copy of verl's config
        names. Overrides have to be the last entries of a list, and Hydra adds a `_self_` that is missing at the end.
        """
        defaults = self.content.get("defaults", [])
        node = next((value for key, value in self.root.value if key.value == "defaults"), None)
        for place, one in enumerate(defaults):
            for key in one if isinstance(one, dict) else ():
                if str(key).split()[-1:] == [GROUP]:
                    if loss != "observed" and one[key] != loss:
                        self._select_instead(node, place, key, loss)
                    return
        added: list[Any] = [{GROUP: loss}]
        if "_self_" not in defaults and (loss == "observed" or not defaults):
            added.insert(0 if loss == "observed" else 1, "_self_")
        place = next((at for at, one in enumerate(defaults) if _ends(one, loss)), len(defaults))
        if loss == "observed" and "_self_" in defaults[place:] and _CLASS in leaves(self.content):
            raise ValueError(
                f"{_CLASS} comes after the loss in the defaults list; take it out by hand, and switch again"
            )
        self._insert(node, place, [one if one == "_self_" else f"{GROUP}: {loss}" for one in added])
        self.changes.append(f"{'the' if defaults else 'a'} defaults list selects {GROUP}: {loss}")
        new = [*defaults[:place], *added, *defaults[place:]]
        self.content = {"defaults": new} | self.content if node is None else self.content | {"defaults": new}

    def _select_instead(self, defaults: Any, place: int, key: str, loss: str) -> None:
        """Another option in the item that selects one."""
        item = defaults.value[place]
        value = next((value for name, value in item.value if name.value == key), None)
        if not isinstance(value, ScalarNode) or "${" in value.value or self.uses[id(value)] > 1:
            raise _by_hand(item, key, "in the defaults list is no plain option", f"write {loss} there by hand")
        self.changes.append(f"the defaults list selects {loss} instead of {value.value}")
        self.content["defaults"][place][key] = loss
        self._replace(value, loss)

    def _insert(self, node: Node | None, place: int, items: list[str]) -> None:
        """Insert items into the defaults list; a list that is missing goes above the first key."""
        if node is None:
            first = self.root.value[0][0].start_mark.index if self.root.value else 0
            line = self._line(first)
            self.edits.append((line, line, f"{self.text[line:first]}defaults: [{', '.join(items)}]{self.newline}"))
        elif not node.value:
            self._replace(node, f"[{', '.join(items)}]")
        elif node.flow_style:
            is_last = place == len(node.value)
            at = self._end(node.value[-1]) if is_last else node.value[place].start_mark.index
            self.edits.append((at, at, "".join(f", {one}" if is_last else f"{one}, " for one in items)))
        else:
            is_last = place == len(node.value)
            beside = node.value[place - is_last].start_mark.index
            line = self._line(beside)
            lines = [self.text[line:beside] + one for one in items]  # the dash and the blanks as beside it
            if is_last:
                at = self.text.find(self.newline, self._end(node))
                at = len(self.text) if at < 0 else at
                self.edits.append((at, at, "".join(f"{self.newline}{one}" for one in lines)))
            else:
                self.edits.append((line, line, "".join(f"{one}{self.newline}" for one in lines)))

    # --- places in the text ------------------------------------------------------------------------------------------

    def _replace(self, node: Node, new: str) -> None:
        begin, end = node.start_mark.index, self._end(node)
        self.edits.append((begin, end, new if end > begin else f" {new}"))

    def _line(self, at: int) -> int:
        """Where the line of a place begins."""
        return self.text.rfind("\n", 0, at) + 1

    def _end(self, node: Node) -> int:
        """Where the text of a node ends; the marks of a block reach beyond comments, to what comes next."""
        if not isinstance(node, ScalarNode) and not node.flow_style:
            last = node.value[-1]
            return self._end(last[1] if isinstance(last, tuple) else last)
        begin = node.start_mark.index
        return begin + len(self.text[begin : node.end_mark.index].rstrip())
