"""Hooks of mkdocs: pages link to files beside ``docs/``, which the site gets copies of.

In the repository a page names them by ``../NAME``. ``_PAGES`` become pages of the site; others lie in ``source/``, as
pages if they are Markdown, whose own links lead to the same places.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parent.parent
_PAGES = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
_LINK = re.compile(r"\]\(\.\./([^)#\s]+)")
_RELATIVE = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
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


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let the links to those files lead to their copies."""
    if page.file.src_uri.startswith("source/"):
        folder = posixpath.dirname(page.file.src_uri.removeprefix("source/"))
        return _RELATIVE.sub(lambda found: f"]({_from_source(folder, found[1])}", markdown)
    return _LINK.sub(lambda found: f"]({_place(found[1])}", markdown)


def _from_source(folder: str, link: str) -> str:
    """Return where a link of a Markdown file in ``folder`` leads on the site, from this file's copy."""
    target = posixpath.normpath(posixpath.join(folder, link))
    place = target.removeprefix("docs/") if target.startswith("docs/") else _place(target)
    return posixpath.relpath(place, f"source/{folder}")


def _place(name: str) -> str:
    return name if name in _PAGES else f"source/{name}"
