"""Hooks of mkdocs: pages link to files beside ``docs/``, which the site gets copies of.

In the repository a page names them by ``../NAME``. Markdown files become pages of the site, others lie in ``source/``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parent.parent
_PAGES = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
_LINK = re.compile(r"\]\(\.\./([^)#\s]+)")
_LINK_OF_ROOT = re.compile(r"\]\((?!https?:|#)(docs/)?")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files that pages name."""
    texts = [Path(page.abs_src_path).read_text("utf-8") for page in files.documentation_pages() if page.abs_src_path]
    for name in _PAGES:
        texts.append(_LINK_OF_ROOT.sub(lambda found: "](" if found[1] else "](../", (_ROOT / name).read_text("utf-8")))
        files.append(File.generated(config, name, content=texts[-1]))
    for name in sorted({found for text in texts for found in _LINK.findall(text)} - set(_PAGES)):
        files.append(File.generated(config, f"source/{name}", abs_src_path=str(_ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let the links to those files lead to their copies."""
    return _LINK.sub(lambda found: f"]({_place(found[1])}", markdown)


def _place(name: str) -> str:
    return name if name in _PAGES else f"source/{name}"
