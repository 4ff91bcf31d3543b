"""Functions get names by which other processes import them, or are refused with the reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import parse

from async_rl.api.code_name import code_name
from async_rl.errors import ConfigError
from async_rl.process.child import package_environment
from async_rl.process.user_code import load_code

SOURCE = """
import functools

def right(item):
    return 1.0

async def asked(item):
    return 1.0

def logged(function):
    @functools.wraps(function)
    def call(item):
        return function(item)
    return call

@logged
def wrapped(item):
    return 2.0

@functools.lru_cache
def cached(item):
    return 3.0

def make():
    def inner(item):
        return 4.0
    return inner

closure = make()
nameless = lambda item: 5.0

class Judge:
    def score(self, item):
        return 6.0
    def __call__(self, item):
        return 7.0

judge = Judge()
method = judge.score

def replaced(item):
    return 8.0
first, replaced = replaced, right
"""


def module_of(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "my_rewards") -> Any:
    """``SOURCE`` as the module ``name``, imported as a program imports it."""
    file = folder.joinpath(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(folder))
    for part in range(name.count(".") + 1):
        monkeypatch.delitem(sys.modules, name.rsplit(".", part)[0], raising=False)
    return __import__(name, fromlist=["_"])


@pytest.mark.parametrize(("attribute", "value"), [("right", 1.0), ("wrapped", 2.0), ("cached", 3.0)])
def test_a_function_of_a_file_is_named_by_it_and_found_there(
    attribute: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = module_of(tmp_path, monkeypatch)
    absolute = code_name(getattr(module, attribute), "reward.type")
    assert absolute == f"{tmp_path.resolve()}/my_rewards.py:{attribute}"
    assert load_code(absolute, allowed=[absolute.rpartition(":")[0]], digest=None)(None) == value
    monkeypatch.chdir(tmp_path)
    assert code_name(getattr(module, attribute), "reward.type") == f"my_rewards.py:{attribute}"
    assert code_name(module.asked, "reward.type") == "my_rewards.py:asked"


def test_a_function_of_a_package_or_of_an_installed_module_is_named_by_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert code_name(parse, "reward.type") == "packaging.version:parse"
    (tmp_path / "src" / "my_package").mkdir(parents=True)
    (tmp_path / "src" / "my_package" / "__init__.py").write_text("")
    inside = module_of(tmp_path / "src", monkeypatch, "my_package.rewards")
    assert code_name(inside.right, "reward.type") == "my_package.rewards:right"
    single = module_of(tmp_path / "site-packages", monkeypatch, "one_file_of_a_wheel")
    assert code_name(single.right, "reward.type") == "one_file_of_a_wheel:right"


@pytest.mark.parametrize(
    ("attribute", "why"),
    [
        ("nameless", "a lambda, which has no name"),
        ("closure", r"make\.<locals>\.inner, which is defined inside a function or a class"),
        ("method", r"Judge\.score, a method of an object"),
        ("judge", "Judge object at .*, which is no Python function"),
        ("first", r"replaced, but .*my_rewards\.py has another object of that name; give them different names"),
    ],
)
def test_what_other_processes_cannot_import_is_refused_with_the_reason(
    attribute: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = module_of(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=rf"^reward\.type: expected a function that .*, got .*{why}"):
        code_name(getattr(module, attribute), "reward.type")


def test_a_function_of_a_notebook_is_refused_with_what_to_do():
    cell: dict[str, Any] = {"__name__": "__main__"}  # the variables of a notebook have no __file__
    exec(compile("def right(item): return 1.0", "/tmp/ipykernel_7/1.py", "exec"), cell)
    with pytest.raises(
        ConfigError, match=r"right, which was typed in a notebook.*%%writefile reward\.py.*import right"
    ):
        code_name(cell["right"], "reward.type")


def printed(folder: Path, *arguments: str, typed: str = "") -> str:
    """What Python prints with these arguments, or when this is typed at its prompt."""
    done = subprocess.run(
        [sys.executable, *arguments], input=typed, capture_output=True, text=True, timeout=60, cwd=folder,
        env=package_environment(),
    )  # fmt: skip
    return done.stdout + done.stderr


NAME = "from async_rl.api.code_name import code_name\n"
CALL = 'print(code_name(right, "reward.type"))'


GUARD = 'if __name__ == "__main__":'


def write_script(path: Path, guard: str = f"{GUARD}\n    ") -> None:
    path.write_text(f"{NAME}def right(item):\n    return 1.0\n\ndef main():\n    {CALL}\n\n{guard}main()\n")


def test_a_function_of_the_script_itself_is_named_by_its_file(tmp_path: Path):
    write_script(tmp_path / "train.py")
    assert printed(tmp_path, "train.py") == "train.py:right\n"
    assert printed(tmp_path.parent, str(tmp_path / "train.py")).strip().endswith(f"{tmp_path.name}/train.py:right")
    assert printed(tmp_path, "-m", "train") == "train.py:right\n"
    write_script(tmp_path / "one_line.py", f"{GUARD} ")
    assert printed(tmp_path, "one_line.py") == "one_line.py:right\n"
    (tmp_path / "package").mkdir()
    write_script(tmp_path / "package" / "run.py")
    assert printed(tmp_path, "-m", "package.run") == "package.run:right\n"


def test_a_script_that_would_start_the_run_again_is_refused_with_its_line(tmp_path: Path):
    write_script(tmp_path / "train.py", guard="")
    refusal = printed(tmp_path, "train.py").splitlines()[-1]
    assert "right is a function of the script" in refusal
    assert "whose line 8 calls async_rl.train whenever it is imported" in refusal
    assert 'put that line under if __name__ == "__main__":' in refusal


def test_a_script_without_the_ending_py_is_refused(tmp_path: Path):
    write_script(tmp_path / "train")
    assert "move it to a file whose name ends in .py" in printed(tmp_path, "train")


def test_a_module_that_trains_when_a_run_imports_it_is_refused_there(tmp_path: Path):
    module = tmp_path / "trains.py"
    module.write_text("import async_rl\n\ndef right(item): return 1.0\n\nasync_rl.train(run='never')\n")
    with pytest.raises(ConfigError, match=r"a process of a run imports this file .*; call it under if __name__ =="):
        load_code(f"{module}:right", allowed=[str(module)], digest=None)
