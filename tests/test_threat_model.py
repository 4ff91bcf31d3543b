"""What SECURITY.md says of the source itself: nothing reads a pickle, and the queue server runs nobody's code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "async_rl"
UNPICKLES = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "recv_pyobj", "send_pyobj", "torch.load")
"""Modules and functions that make objects of any class out of bytes."""
RUNS_CODE = ("load_code", "exec", "import_module", "run_path", "run_module")
"""Functions by which a process runs what somebody names."""


def names(tree: ast.AST) -> Iterator[str]:
    """Every module and name that ``tree`` imports or uses; ``load`` with its owner."""
    for node in ast.walk(tree):
        match node:
            case ast.alias(name=name) | ast.ImportFrom(module=str(name)) | ast.Name(id=name):
                yield name
            case ast.Attribute(attr=name):
                yield ast.unparse(node) if name == "load" else name


def found(folder: str, forbidden: tuple[str, ...]) -> list[str]:
    paths = sorted((PACKAGE / folder).rglob("*.py"))
    assert paths
    trees = ((path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths)
    return [f"{path.relative_to(PACKAGE)}: {name}" for path, tree in trees for name in names(tree) if name in forbidden]


def test_no_module_reads_a_pickle():
    assert found(".", UNPICKLES) == []


@pytest.mark.parametrize("folder", ["queue", "net"])
def test_the_queue_server_runs_nobodys_code(folder: str):
    assert found(folder, RUNS_CODE) == []


def test_what_is_forbidden_would_be_found():
    source = "import pickle\nself.socket.recv_pyobj()\ntorch.load(path)\nexec(text)\n"
    assert {"pickle", "recv_pyobj", "torch.load", "exec"} <= set(names(ast.parse(source)))
