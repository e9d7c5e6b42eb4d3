# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a bash script without running it: its commands, the words that they are given, and where each word stands.

A variable or array stands for everything that the script ever assigns to it, in whatever branch. A text that is not the
same in all of them, or that only a run knows (the environment, the output of a command), is hidden under its name.
Strings that are scripts themselves (``bash -c "..."``, a heredoc) are read in their place.
"""

import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

HIDDEN = re.compile("\0([^\0]*)\0")
"""In the text of a word: the name of what only a run knows, such as ``$HOME`` or ``$(...)``."""
ARGUMENTS = re.compile(r'"?\$(\{[@*](:\d)?\}|[@*])"?')
"""``"$@"``, as it is written."""

_PARSER = Parser(Language(tree_sitter_bash.language()))
# A word that is one variable or array; also ${X[@]+"${X[@]}"}, and the like.
_REFERENCE = re.compile(r'"?\$(?:(\w+)|\{(\w+)(\[[@*]\](?:[:+-].*)?)?\})"?')
_OUTPUT = "\0$(...)\0"  # of a command
_POSITION = re.compile(r"\$\{?(\d+|#(?!\w))")  # $1, ${1:-x}, $#
_READS = re.compile(r"(read|mapfile|readarray|getopts|printf\s+-v)\s")  # gives its arguments values, as their names
_SETS = re.compile(r"set\s+([-+]\w*o\s+\w+(\s+|$)|[-+]\w*[^\Wo]\s+)*(--?(?!\S)|[^-+\s])")  # gives "$@" other words
_MULTIPLIES = re.compile(r"(xargs|parallel)\s")
_RUNS = re.compile(rf"({ARGUMENTS.pattern}|eval)(?!\S)")
_SHIFTS = re.compile(r"shift(?!\S)")
_BRACES = re.compile(r"[^=]*(?<!\\)\{[^}]*(,|\.\.)")  # of one word the shell makes several, each with a key of its own
_NO_WORDS = {"variable_assignment", "file_redirect", "heredoc_redirect", "herestring_redirect", "comment"}
_LOG = re.compile(r"-a|\d+|/dev/.*|.*\.log", re.DOTALL)  # where a text is shown, as of a redirection or tee
_HOLD = {"list", "pipeline", "negated_command"}  # their redirections are those of their last command
_PRINTS = re.compile(r"(\S*echo|printf|log|die|info)$")
_COMMAND = re.compile(r"(?=.*(\s-m\s|\.py\b)).*[|;&>]", re.DOTALL)  # a text that only eval or -c can run


class Word(NamedTuple):
    """One word that a command is given."""

    text: str
    span: tuple[int, int] | None  # its bytes; None where it stands in the script as a part of something else


class Command(NamedTuple):
    """A command of the script."""

    node: Node
    words: list[Word]
    quoting: str  # of the string that it is part of: ", ' or << (a heredoc); "" where it stands as it is run

    @property
    def line(self) -> int:
        """Its number, from 1."""
        return self.node.start_point[0] + 1

    @property
    def parts(self) -> list[Node]:
        """Its words as they are written, without assignments and redirections; also those behind a redirection."""
        last = self.node
        while last.parent and last.parent.type in _HOLD and last == last.parent.named_children[-1]:
            last = last.parent
        outer = last.parent.named_children if last.parent and last.parent.type == "redirected_statement" else []
        redirects = [node for node in (*self.node.named_children, *outer) if node.type.endswith("_redirect")]
        behind = [word for node in redirects for word in node.children_by_field_name("destination")[1:]]
        behind += [word for node in redirects for word in node.children_by_field_name("argument")]
        return [child for child in self.node.named_children if child.type not in _NO_WORDS] + behind


def shown(text: str) -> str:
    """A text with the names of what is hidden in it."""
    return HIDDEN.sub(r"\1", text)


def written(node: Node) -> str:
    """The text of a node as it stands in the script."""
    return (node.text or b"").decode(errors="replace")


class Script:
    """A script that is read once.

    Attributes:
        commands: its commands, those of strings that are scripts included where such a string can be read.
    """

    def __init__(self, source: bytes):
        self.source = source
        self.commands: list[Command] = []
        self._assigned: dict[str, list[Node | None]] = {}  # by name, the values; None: one that only a run knows
        self._shown: list[tuple[int, int]] = []  # the bytes of commands that show a text and do nothing else
        self._open: list[int] = []  # the values that are being looked up, against circles
        self._root = _PARSER.parse(source).root_node
        runs = [function for node in _below(self._root) if _is_command(node, _RUNS) and (function := _function(node))]
        self._runners = {written(function.named_children[0]) for function in runs}  # functions that run what they get
        self._index(self._root)
        self._read(self._root, "")

    def _index(self, node: Node) -> None:
        name = node.child_by_field_name("name") or node.child_by_field_name("variable")
        if name is not None and node.type in ("variable_assignment", "for_statement"):
            is_whole = node.type == "variable_assignment" and name.type == "variable_name"
            value = node.child_by_field_name("value") if is_whole else None
            self._assigned.setdefault(re.sub(r"\[.*", "", written(name), flags=re.DOTALL), []).append(value)
        elif name is not None and node.type == "command":
            text = self.source[name.start_byte : node.end_byte].decode(errors="replace")
            for argument in node.children_by_field_name("argument") if _READS.match(text) else ():
                self._assigned.setdefault(written(argument), []).append(None)
        for child in node.named_children:
            self._index(child)

    def _read(self, node: Node, quoting: str) -> None:
        """Collect the commands below a node."""
        if node.type == "command" and not node.has_error:
            name = written(node.named_children[0])
            if _PRINTS.match(name) and name not in self._runners:
                if re.match(r"\S*echo\b|printf\b", written(node)) and self._is_shown(node):
                    self._shown.append((node.start_byte, node.end_byte))
                return
            if _MULTIPLIES.match(written(node)):
                return  # a command that is given words which do not stand in it
            command = Command(node, [], quoting)
            command.words.extend(word for part in command.parts for word in self.words(part))
            self.commands.append(command)
        is_text = node.type in ("string", "raw_string") and node.parent and node.parent.type != "concatenation"
        if node.type == "heredoc_body" or (is_text and _is_script(node)):
            self._read_string(node, quoting)
        for child in node.named_children:
            self._read(child, quoting)

    def _is_shown(self, node: Node | None, within: tuple[Node, ...] = ()) -> bool:
        """Whether what a node prints goes to the terminal or a log, and to nothing that may run it."""
        while node is not None and (outer := node.parent) is not None:
            if outer.type in ("command_substitution", "process_substitution"):
                return False
            files = [file for redirect in outer.children_by_field_name("redirect") for file in redirect.named_children]
            if outer.type == "pipeline":
                reads = [part for part in outer.named_children if part.start_byte > node.start_byte]
                if any(not re.match(r"tee\s", written(part)) for part in reads):
                    return False
                files += [file for part in reads for file in part.children_by_field_name("argument")]
            if not all(_LOG.fullmatch(self.text(file)) for file in files if file.type != "file_descriptor"):
                return False
            if outer.type == "function_definition":
                return outer in within or all(self._is_shown(call, (*within, outer)) for call in _calls(outer))
            node = outer
        return True

    def _read_string(self, node: Node, quoting: str) -> None:
        """Read a string as a script, in its place, if it can be one."""
        parent, text = node.parent, written(node)
        assert parent is not None
        if node.type == "heredoc_body":
            # With quotes around its mark a heredoc is a script as it stands.
            mark, edge = ("" if re.match(r"<<-?\s*['\"\\]", written(parent)) else "<<"), 0
        else:
            mark, edge = text[0], 1
        if parent.type == "variable_assignment" and not _COMMAND.match(text):
            return  # its words are read where the variable is used
        root = self._parse_inside(node.start_byte + edge, node.end_byte - edge)
        if not (quoting or root.has_error or (mark == '"' and '\\"' in text)):
            self._read(root, mark)

    def _parse_inside(self, start: int, end: int) -> Node:
        """The tree of a part of the script, every position as in the whole."""
        return _PARSER.parse(re.sub(rb"[^\n]", b" ", self.source[:start]) + self.source[start:end]).root_node

    def _parse_words(self, start: int, end: int) -> list[Node]:
        """The words of a text that the shell splits at its blanks."""
        flat = self.source[start:end].replace(b"\\\n", b"  ").replace(b"\n", b" ")
        # As arguments of `:`, which stands where the assignment has its `=` and the quote.
        root = _PARSER.parse(b" " * (start - 2) + b": " + flat).root_node
        command = next((node for node in _below(root) if node.type == "command"), None)
        return command.named_children[1:] if command else []

    def values(self, name: str) -> list[str]:
        """The texts that the script assigns to a variable."""
        return [text for value in self._assigned.get(name, []) if (text := self._value(value)) is not None]

    def unread(self, pattern: re.Pattern) -> list[int]:
        """Lines with a text of this pattern that is no word of a command, and no comment or message."""
        spans = [word.span for command in self.commands for word in command.words if word.span]
        read = [(first, last) for first, last in spans if not re.search(rb"\s", self.source[first:last])] + self._shown
        found, place = [], 0
        for number, line in enumerate(self.source.decode(errors="replace").split("\n"), 1):
            starts = [place + len(line[: match.start()].encode()) for match in pattern.finditer(line)]
            if not line.lstrip().startswith("#"):
                is_read = [any(first <= start < last for first, last in read) for start in starts]
                found += [] if all(is_read) else [number]
            place += len(line.encode()) + 1
        return found

    # --- words -------------------------------------------------------------------------------------------------------

    def words(self, node: Node) -> list[Word]:
        """What a word, as it is written, may become: of an array or an unquoted variable all that is assigned to it."""
        inner = node.named_children[0] if node.type == "command_name" else node
        text = written(inner)
        if ARGUMENTS.fullmatch(text):
            return self._given(inner)
        reference = _REFERENCE.fullmatch(text)
        name = reference and (reference[1] or reference[2])
        if reference is None or name not in self._assigned or (text[0] == '"' and not reference[3]):
            made = f"\0{text}\0" if _BRACES.match(_unquoted(inner)) else self.text(inner)
            return [Word(made, (inner.start_byte, inner.end_byte))]
        words = [word for value in self._assigned[name] for word in self._words_of(name, value)]
        # The output of a command is named by the variable that it fills.
        return [word._replace(text=f"\0${name}\0") if word.text == _OUTPUT else word for word in words]

    def _words_of(self, name: str, value: Node | None) -> Iterator[Word]:
        if value is None:
            yield Word(f"\0${name}\0", None)
        elif value.start_byte not in self._open:
            self._open.append(value.start_byte)
            if value.type == "array":
                yield from (
                    word for child in value.named_children if child.type != "comment" for word in self.words(child)
                )
            elif value.type in ("string", "raw_string") and not _COMMAND.match(written(value)):
                parts = self._parse_words(value.start_byte + 1, value.end_byte - 1)
                yield from (word for part in parts for word in self.words(part))
            elif value.type not in ("string", "raw_string"):
                yield from (Word(text, None) for text in self.text(value).split())
            self._open.pop()

    def _given(self, node: Node) -> list[Word]:
        """``"$@"``: in a function what its calls give it, in a text of ``-c`` what follows it, else the user's own."""
        outer = self._root.descendant_for_byte_range(node.start_byte, node.end_byte) or node
        is_inside = outer.type in ("raw_string", "heredoc_body")  # a script with arguments of its own
        function, script = _function(node if is_inside else outer), _root(node) if is_inside else self._root
        if function is not None:
            name, body = written(function.named_children[0]), function.child_by_field_name("body")
            calls = [(Command(call, [], "").parts[1:], _function(call) is not None) for call in _calls(function)]
        elif sets := next(
            (inner for inner in _below(script) if _is_command(inner, _SETS) and not _function(inner)), None
        ):
            return [Word(f'\0"$@", which line {sets.start_point[0] + 1} sets\0', None)]
        elif outer.type == "raw_string" and outer.parent and outer.parent.type == "command":
            parts = [part for part in Command(outer.parent, [], "").parts if part.start_byte > outer.start_byte]
            name, body, calls = "the script within quotes", script, [(parts[1:], _function(outer) is not None)]
        else:
            return [Word('\0"$@"\0', None)]
        if node.start_byte in self._open:
            return []
        given, first = [], self._first(body, node) if body else None
        for parts, is_in_function in calls:
            own = next((at for at, part in enumerate(parts) if ARGUMENTS.fullmatch(written(part))), len(parts))
            is_split = own < (first or 0) and is_in_function
            if first is None or is_split or any(re.search(r"\[[@*]\]", written(part)) for part in parts[:first]):
                return [Word(f'\0"$@" of {name}\0', None)]
            given += parts[min(first, own) :]
        self._open.append(node.start_byte)
        words = [word for part in given for word in self.words(part)]
        self._open.pop()
        return words

    def _first(self, body: Node, node: Node) -> int | None:
        """How many of its words a function or script has taken away from its ``"$@"``.

        None if only a run knows. None, too, if it uses one of the others by its number: they keep their places.
        """
        slice_of = re.search(r":(\d)", written(node))
        first, shifted, used = 0, 0, 0
        for inner in _below(body):
            text = written(inner)
            if _is_command(inner, _SETS) or _is_command(inner, _SHIFTS):
                shift = re.fullmatch(r"shift(?:\s+(\d+))?", text)
                if not shift or inner.parent != body:
                    return None
                shifted += int(shift[1] or 1)
                first = shifted if inner.start_byte < node.start_byte else first
            elif inner.type in ("simple_expansion", "expansion") and (number := _POSITION.match(text)):
                used = max(used, shifted + int(number[1])) if number[1] != "#" else sys.maxsize
        first += max(int(slice_of[1]) - 1, 0) if slice_of else 0
        return first if used <= first else None

    def text(self, node: Node) -> str:
        """The text that the shell makes of a node, what is hidden under its name."""
        text = written(node)
        if node.type == "raw_string":
            return text[1:-1]
        if node.type in ("string", "concatenation"):
            edge = int(node.type == "string")
            place, made = node.start_byte + edge, ""
            for child in node.named_children:
                made += self._plain(place, child.start_byte) + self.text(child)
                place = child.end_byte
            return made + self._plain(place, node.end_byte - edge)
        if node.type not in ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"):
            escaped = r'\\([$`"\\])' if node.type == "string_content" else r"\\(.)"
            return re.sub(escaped, r"\1", text.replace("\\\n", ""))
        return self._expanded(node)

    def _plain(self, start: int, end: int) -> str:
        return self.source[start:end].decode(errors="replace").replace("\\\n", "")

    def _expanded(self, node: Node) -> str:
        """The text of a variable, with its default if it has one; any other expansion is hidden."""
        text = written(node)
        variable = re.fullmatch(r"\$(\w+)|\$\{(\w+)(:?[-=].*)?\}", text, re.DOTALL)
        if variable is None:
            part_of = re.match(r"\$\{[#!]?(\w+)", text)
            return f"\0${part_of[1]}\0" if part_of else _OUTPUT
        name = variable[1] or variable[2]
        assigned = [value for value in self._assigned.get(name, []) if not value or value.start_byte not in self._open]
        texts = {self._value(value) for value in assigned}
        if name.isdigit() and _function(node):
            return f"\0${name}\0"
        if variable[3] and (not texts or texts == {""}):
            return "".join(map(self.text, node.named_children[1:]))
        return next(iter(texts)) or "" if len(texts) == 1 and None not in texts else f"\0${name}\0"

    def _value(self, value: Node | None) -> str | None:
        if value is None or value.type == "array" or self.source[value.end_byte :].startswith(b"\\\n"):
            return None  # also of a text that goes on in the next line, which the parser does not see
        self._open.append(value.start_byte)
        text = self.text(value)
        self._open.pop()
        return text


def _is_script(text: Node) -> bool:
    """Whether a string may be a script: it holds several words, or it is a variable that ``-c`` or eval runs."""
    words = written(text.parent).split()[:-1] if text.parent else []
    runs = {"-c", "-lc", "-ic", "-lic", "eval"} & set(words)
    return bool(re.search(r"\s", written(text)) if not _REFERENCE.fullmatch(written(text)) else runs)


def _function(node: Node) -> Node | None:
    """The function that a node stands in."""
    outer = node.parent
    while outer is not None and outer.type != "function_definition":
        outer = outer.parent
    return outer


def _is_command(node: Node, pattern: re.Pattern) -> bool:
    return node.type == "command" and bool(pattern.match(written(node)))


def _calls(function: Node) -> list[Node]:
    """The commands with the name of a function, in its script."""
    name = function.named_children[0].text
    names = [(node, node.child_by_field_name("name")) for node in _below(_root(function)) if node.type == "command"]
    return [node for node, called in names if called and called.text == name]


def _unquoted(word: Node) -> str:
    """The characters of a word that have a meaning to the shell, without its variables."""
    parts = word.named_children if word.type == "concatenation" else [word]
    return "".join(written(part) if part.type in ("word", "brace_expression") else "_" for part in parts)


def _root(node: Node) -> Node:
    return _root(node.parent) if node.parent else node


def _below(node: Node) -> Iterator[Node]:
    yield node
    for child in node.named_children:
        yield from _below(child)
