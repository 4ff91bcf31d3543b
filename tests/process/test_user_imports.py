"""What the digest of the user's own code covers: the file, and the files and folders beside it that it imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.process.user_code import code_digests, load_code


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test imports is forgotten after it."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, **sources: str) -> None:
    """``a__b`` is the file ``a/b.py``, a trailing ``init`` the package's own."""
    for name, source in sources.items():
        path = folder / (name.replace("__", "/").replace("/init", "/__init__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def covers(folder: Path, name: str, changed: str) -> bool:
    """Whether a change of the file ``changed`` is one of the digest."""
    before, path = code_digests([name]), folder / changed
    path.write_text(path.read_text() + "\n# changed\n")
    return code_digests([name]) != before


SOURCES = {
    "mine": (
        "import json, helper\nfrom shared import prompts\nfrom far.away.place import x\n"
        "def f(item):\n    import late\n    return helper.one()\n"
    ),
    "helper": "from shared.deep import two\ndef one():\n    return two() - 1.0\n",
    "late": "",
    "json": "1 / 0\n",  # the standard library's is meant
    "unused": "",
    "shared__prompts": "",
    "shared__deep": "def two():\n    return 2.0\n",
    "shared__unused": "",
    "shared__deeper__still": "",
    "far__away__place": "x = 1\n",  # folders without an __init__.py
}


@pytest.mark.parametrize(
    ("changed", "is_covered"),
    [
        ("mine.py", True),
        ("helper.py", True),
        ("late.py", True),
        ("shared/prompts.py", True),
        ("shared/deep.py", True),
        ("far/away/place.py", True),
        ("shared/unused.py", True),  # a folder counts as a whole
        ("shared/deeper/still.py", True),
        ("unused.py", False),
        ("json.py", False),
    ],
)
def test_a_file_is_matched_with_the_modules_beside_it_that_it_imports(tmp_path: Path, changed: str, is_covered: bool):
    write(tmp_path, **SOURCES)
    assert covers(tmp_path, f"{tmp_path}/mine.py:f", changed) == is_covered


def test_what_is_matched_can_be_imported_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, **SOURCES)
    monkeypatch.chdir("/")
    path = str(tmp_path / "mine.py")
    digest = code_digests([f"{path}:f"])[f"{path}:f"]
    assert load_code(f"{path}:f", allowed=[path], digest=digest)(None) == 1.0
    write(tmp_path, helper="def one():\n    return 7.0\n")
    with pytest.raises(ConfigError, match=r"expected the learner's source, .* in .*mine\.py, .*helper\.py"):
        load_code(f"{path}:f", allowed=[path], digest=digest)


@pytest.mark.parametrize(
    ("changed", "is_covered"),
    [
        ("pkg/__init__.py", True),  # runs before its modules do
        ("pkg/rewards/__init__.py", True),
        ("pkg/rewards/math.py", True),
        ("pkg/rewards/parts.py", True),
        ("pkg/shared.py", True),
        ("pkg/unused.py", True),
        ("beside.py", False),  # another package's matter
    ],
)
def test_a_module_is_matched_with_its_own_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, is_covered: bool
):
    write(
        tmp_path,
        pkg__rewards__math="from . import parts\nfrom ..shared import x\nimport beside\ndef f(item): return 1.0\n",
        pkg__shared="x = 1\n", pkg__init="", pkg__rewards__init="", pkg__rewards__parts="", pkg__unused="", beside="",
    )  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    assert covers(tmp_path, "pkg.rewards.math:f", changed) == is_covered


def test_an_installed_module_of_the_same_name_is_what_is_imported_so_the_one_beside_is_not_matched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path / "installed", helper="def one(): return 3.0\n")
    write(tmp_path / "own", mine="import helper\ndef f(item): return helper.one()\n", helper="1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    path = str(tmp_path / "own" / "mine.py")
    assert not covers(tmp_path / "own", f"{path}:f", "helper.py")
    assert load_code(f"{path}:f", allowed=[path], digest=None)(None) == 3.0


def test_two_helpers_of_one_name_in_one_process_are_refused(tmp_path: Path):
    for folder in ("a", "b"):
        write(tmp_path / folder, mine="import helper\ndef f(item): return helper.name\n", helper=f"name = {folder!r}\n")
    first, second = (str(tmp_path / folder / "mine.py") for folder in ("a", "b"))
    assert load_code(f"{first}:f", allowed=[first], digest=None)(None) == "a"
    with pytest.raises(
        ConfigError, match=r"expected module helper from .*/b/helper\.py, but .* imported from .*/a/helper\.py"
    ):
        load_code(f"{second}:f", allowed=[second], digest=None)


def test_imports_in_a_circle_and_what_is_no_python_are_read_all_the_same(tmp_path: Path):
    write(
        tmp_path,
        mine="import a\ntry:\n    import broken\nexcept SyntaxError: pass\n",
        a="import mine, b\n",
        b="import a\n",
    )
    (tmp_path / "broken.py").write_text("def (:\n")
    for changed in ("a.py", "b.py", "broken.py"):
        assert covers(tmp_path, f"{tmp_path}/mine.py:f", changed)
