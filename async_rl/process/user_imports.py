"""Finds the source files of a module of the user's own: its file and the local modules that it imports.

Called by ``user_code`` for digests. Local modules are those in the outermost package that the module is part of, or
else in the folder of its file and below. They are found by reading ``import`` statements, also in functions, and those
of the imported modules; nothing is run. Not found are modules imported by a computed name, opened files, packages
installed elsewhere and async-rl itself.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_INSTALLED = ("site-packages", "dist-packages")
_PACKAGE_FILE = "__init__.py"
_OWN = "async_rl"


class LocalFolder(str):
    """An entry of ``sys.path`` added for one module of the user's own; other modules' imports don't count it."""

    __slots__ = ()


def search_folder(source: Path) -> Path:
    """The folder of the top-level local modules that ``source`` may import."""
    folder = source.resolve().parent
    while (folder / _PACKAGE_FILE).is_file():
        folder = folder.parent
    return folder


def source_files(spec: ModuleSpec, source: Path) -> dict[str, Path]:
    """Map module names to files, the module of ``spec`` first. Imports nothing."""
    source = source.resolve()
    folder = search_folder(source)
    found = {spec.name: source}
    if folder.name in _INSTALLED and source.parent == folder:
        return found  # a module that is installed as a single file: everything beside it is something else
    root = folder / source.relative_to(folder).parts[0] if source.parent != folder else folder
    # Where a module is imported by its name, its packages run first.
    todo = [".".join(spec.name.split(".")[:depth]) for depth in range(1, spec.name.count(".") + 1)]
    todo += _imported(source, spec.parent or "")
    while todo:
        name = todo.pop()
        if name in found or name.partition(".")[0] in (_OWN, *sys.stdlib_module_names):
            continue
        path = _find(name, folder)
        if path is None or not path.is_relative_to(root) or set(path.relative_to(root).parts) & set(_INSTALLED):
            continue
        found[name] = path
        todo += _imported(path, name if path.name == _PACKAGE_FILE else name.rpartition(".")[0])
    return found


def _find(name: str, folder: Path) -> Path | None:
    """The file in ``folder`` that Python would import as ``name``, if that were the only ``LocalFolder``.

    None if there is none, or if another place of ``sys.path`` comes first.
    """
    first, *rest = name.split(".")
    places = [*(place for place in sys.path if not isinstance(place, LocalFolder)), str(folder)]
    top = PathFinder.find_spec(first, places)
    if top is None or (top.origin is not None and not Path(top.origin).resolve().is_relative_to(folder)):
        return None
    # Below the top all is in its folder, with or without an __init__.py.
    place = folder.joinpath(first, *rest)
    for path in (place / _PACKAGE_FILE, place.with_name(f"{place.name}.py")):
        if path.is_file():
            return path.resolve()
    return None


def _imported(source: Path, package: str) -> set[str]:
    """Every dotted name that ``source``, a module in ``package``, may import, and all packages on the way to it.

    A name that is imported *from* a module may be a module itself, so it is among them. Nothing of a file that is not
    Python.
    """
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    names = [name.split(".") for node in ast.walk(tree) for name in _names(node, package)]
    return {".".join(parts[:depth]) for parts in names for depth in range(1, len(parts) + 1)}


def _names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if not isinstance(node, ast.ImportFrom):
        return
    parents = package.split(".") if package else []
    if node.level > len(parents):
        return  # beyond the outermost package: Python refuses it
    above = parents[: len(parents) + 1 - node.level] if node.level else []
    base = ".".join([*above, *filter(None, [node.module])])
    yield base
    yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
