"""Which extensions' suites a change concerns: ``python -m tests.touched COMMIT`` prints the others, to be left out.

A suite is concerned if a file of the extension or of its tests has changed since COMMIT, or one that they import
directly: a module of the core, a helper of other tests, an example. Of files that none of them imports, texts, tests
and code concern no suite; what else there is (versions, the Makefile, data of a test) concerns all.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTENSIONS = tuple(sorted(path.parent.name for path in (ROOT / "async_rl/extensions").glob("*/__init__.py")))
SILENT = ("docs/", "benchmarks/", "deploy/", "async_rl/", "packages/", ".ci/last-full")
"""Where a file that no suite imports concerns none. The core's tests run always."""


def _imported_files(path: Path) -> Iterator[str]:
    """The files behind the imports of a module, anywhere in it, and behind texts that are a module's name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value.partition(":")[0]]
        else:
            continue
        for name in names:
            parts = Path(*name.split(".")) if name.replace(".", "").isidentifier() else None
            for file in (parts.with_suffix(".py"), parts / "__init__.py") if parts else ():
                for root in (ROOT, ROOT / "packages/latex-answers/src", ROOT / "examples"):
                    if (root / file).is_file():
                        yield str((root / file).relative_to(ROOT))


@cache
def _needs(extension: str) -> frozenset[str]:
    folders = (f"async_rl/extensions/{extension}", f"tests/extensions/{extension}")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return frozenset(name for path in files for name in _imported_files(path))


def touched(changed: Iterable[str]) -> set[str]:
    """Return the extensions whose suites are concerned by ``changed``, paths from the root."""
    found = set[str]()
    for path in changed:
        own = [name for name in EXTENSIONS if f"extensions/{name}/" in path]
        using = [name for name in EXTENSIONS if path in _needs(name)]
        of_the_core = path.startswith("tests/") and path.endswith(".py") and not path.endswith("conftest.py")
        nobody = path.endswith(".md") or path.startswith(SILENT) or of_the_core
        found.update([*own, *using] or (() if nobody else EXTENSIONS))
    return found


if __name__ == "__main__":
    command = ["git", "diff", "--name-only", sys.argv[1], "--"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # A commit that this clone lacks: everything is tested.
    changed = listed.stdout.splitlines() if listed.returncode == 0 else ["Makefile"]
    print(*(name for name in EXTENSIONS if name not in touched(changed)))
