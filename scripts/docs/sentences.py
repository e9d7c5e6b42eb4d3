# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Counts words and sentences of README.md and docs/, and prints the longest ones.

  python scripts/docs/sentences.py [PAGE ...]     default: README.md and all of docs/

Code, tables, headings and generated pages are left out.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ("commands.md", "configuration.md")
LONGEST, AVERAGE = 35, 18  # words of one sentence, and of all on average
_SHOWN = 10


def pages() -> list[Path]:
    docs = (page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED)
    return [ROOT / "README.md", *docs]


def sentences(page: str) -> list[str]:
    """The sentences of a page of Markdown, without code, tables, headings and the targets of links."""
    text = re.sub(r"^```.*?^```", "\n", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "\n", text, flags=re.DOTALL)
    text = re.sub(r"^(#|\||>).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*(-|\*|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "Code", text)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    found = (sentence for part in paragraphs for sentence in re.split(r"(?<=[.?!:])[*)\"]* (?=[*A-Z√\d])", part))
    return [sentence for sentence in found if re.search(r"\w", sentence)]


def words(text: str) -> int:
    return len(re.findall(r"\w[\w'.,-]*", text))


def main() -> None:
    every = []
    for page in [*map(Path, sys.argv[1:])] or pages():
        text = page.read_text(encoding="utf-8")
        found = [(words(sentence), sentence) for sentence in sentences(text)]
        every += found
        average = sum(count for count, _ in found) / max(len(found), 1)
        print(f"{page.name:20} {len(text.split()):6,} words, {average:5.1f} a sentence, longest {max(found)[0]}")
    print(f"{'all':20} {sum(count for count, _ in every) / len(every):21.1f} a sentence")
    for count, sentence in sorted(every, reverse=True)[:_SHOWN]:
        print(f"\n{count} words: {sentence}")


if __name__ == "__main__":
    main()
