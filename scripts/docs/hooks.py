# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""mkdocs hook: what pages in docs/ name outside of docs/, which works on GitHub and would lead nowhere on the site.

Pictures of scripts/studies/ become files of the site. Links lead to the public repository where mkdocs.yml names one
(``repo_url``), and are plain text otherwise. A link to a file that does not exist is a warning, which
`mkdocs build --strict` takes for an error.
"""

import logging
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
log = logging.getLogger("mkdocs.hooks.repository_links")
_OUTSIDE = re.compile(r"(?<!!)\[([^]]+)\]\(\.\./([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, config, **_) -> None:
    for picture in sorted((ROOT / "scripts/studies").rglob("*.png")):
        files.append(File.generated(config, picture.relative_to(ROOT).as_posix(), abs_src_path=str(picture)))


def on_page_markdown(text: str, page, config, **_) -> str:
    def rewrite(link: re.Match) -> str:
        words, path, anchor = link[1], link[2], link[3] or ""
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        if not config.repo_url:
            return words
        return f"[{words}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"

    return _OUTSIDE.sub(rewrite, text).replace("](../scripts/studies/", "](scripts/studies/")
