"""Packages from outside of the tree, as pip would install them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    directory: Path, name: str, files: Mapping[str, str], entry_points: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Install the package ``name`` 1.0 in ``directory``, for this process and those that it starts.

    ``files`` are texts by their names; ``entry_points`` is the text of ``entry_points.txt``.
    """
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    for path, text in files.items():
        (directory / path).write_text(text)
    monkeypatch.syspath_prepend(directory)
    for path in files:  # of an earlier test
        sys.modules.pop(path.removesuffix(".py"), None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")]))
