"""Which source files a module of the user's own is made of: itself, and what it imports from beside it.

Called by ``user_code`` for digests. *Beside it* is the outermost package that it is part of, or else the folder of its
file, with all below. Found by reading ``import`` statements anywhere in the sources (in functions, under conditions),
and what those import in turn; nothing is run. So not found: modules imported by a name that is computed, files that are
opened, packages installed elsewhere, async-rl itself.
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
    """An entry of ``sys.path`` that is there for one module of the user's own, and is none of another's."""

    __slots__ = ()


def search_folder(source: Path) -> Path:
    """Where the top-level names that ``source`` may import from beside it lie."""
    folder = source.resolve().parent
    while (folder / _PACKAGE_FILE).is_file():
        folder = folder.parent
    return folder


def source_files(spec: ModuleSpec, source: Path) -> dict[str, Path]:
    """Module name -> file, the module of ``spec`` first. It need not be imported yet, and is not."""
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
