"""What we use of vLLM is in the installed release, also what only runs on a GPU, where no test has run it.

pyright does not see vLLM. A call counts as right if its number of arguments and its keywords fit the signature.
``make test-vllm-names VLLM=0.33.0`` compares another release.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from tests.config.made import a_config
from tests.generator.test_vllm_names import USED, USERS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def _found(path: str) -> Any:
    """The object at ``MODULE:NAMES``. None: there is none."""
    module, _, names = path.partition(":")
    try:
        return attrgetter(names)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def _fits(function: Any, call: ast.Call, num_bound: int = 0) -> bool:
    keywords = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    try:
        inspect.signature(function).bind(*[None] * (num_bound + len(call.args)), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def _has(found: Any, use: ast.expr) -> bool:
    """Whether the class ``found`` or its objects have an attribute, or a method that takes a call, awaited or not."""
    match use:
        case ast.Name(id=name):
            bases = [base for base in getattr(found, "__mro__", ()) if base.__module__.startswith("vllm")]
            sets = re.compile(rf"self\.{name}\b\s*[:=]")
            return any(
                {name} & {*vars(b), *inspect.get_annotations(b)} or sets.search(inspect.getsource(b)) for b in bases
            )
        case (ast.Call(func=ast.Name(id=name)) as call) | ast.Await(value=ast.Call(func=ast.Name(id=name)) as call):
            method = getattr(found, name, None)
            return _fits(method, call, 1) and inspect.iscoroutinefunction(method) == isinstance(use, ast.Await)
    raise AssertionError(f"expected a name or a call, got {ast.unparse(use)}")


def test_objects_have_the_attributes_that_we_read_and_methods_take_our_arguments():
    lists = [(path, ast.parse(text, mode="eval").body) for path, text in USED.items()]
    rows = [(path, use) for path, uses in lists if isinstance(uses, ast.Tuple | ast.List) for use in uses.elts]
    assert len(lists) == len({path for path, _ in rows})
    assert [f"{path} {ast.unparse(use)}" for path, use in rows if not _has(_found(path), use)] == []


def test_vllm_reads_the_variables_and_has_the_modules_that_we_name():
    named = {name for text in USERS for name in re.findall(r'"(VLLM_\w+|vllm(?:\.\w+)+)"', text)}
    known = {*importlib.import_module("vllm.envs").environment_variables, "vllm.general_plugins"}
    assert [name for name in named - known if name.isupper() or find_spec(name) is None] == []
    assert len(named) >= 8
    assert '"vllm.general_plugins"' in inspect.getsource(importlib.import_module("vllm.plugins"))


def test_every_name_that_is_imported_from_vllm_is_there_and_takes_the_arguments_of_its_calls():
    lacking, num_calls = [], 0
    for nodes in (list(ast.walk(ast.parse(text))) for text in USERS):
        imported = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
            for alias in node.names
        }
        lacking += [path for path in imported.values() if _found(path) is None]
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            owner, dot, method = ast.unparse(call.func).partition(".")
            if owner in imported:
                num_calls += 1
                path = imported[owner] + dot + method
                lacking += [] if _fits(_found(path), call) else [f"{path} {ast.unparse(call)}"]
    assert lacking == []
    assert num_calls >= 15  # none is overlooked because the search is wrong


@pytest.mark.parametrize("lora", [{}, {"rank": 8, "publish": "adapters"}])
def test_vllm_knows_every_argument_of_an_engine_on_a_gpu(tmp_path: Path, lora: dict[str, Any]):
    from vllm import AsyncEngineArgs  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    from async_rl.generator.vllm.adapter import engine_arguments

    arguments = engine_arguments(tmp_path, a_config(lora=lora), device="cuda:0", max_length=64, can_sleep=True)
    assert {"enable_sleep_mode", "gpu_memory_utilization"} <= set(arguments)
    known = inspect.signature(AsyncEngineArgs).parameters
    assert [name for name in arguments if name not in known] == []


def test_our_weight_transfer_and_logger_take_what_vllm_gives_them():
    from async_rl.generator.vllm.engine import Load, _stat_logger
    from async_rl.generator.vllm.weights import VersionTransfer

    for ours in (VersionTransfer, type(_stat_logger(Load()))):
        assert not inspect.isabstract(ours)
        for name, theirs in inspect.getmembers(ours.__mro__[1], inspect.isfunction):
            if name != "__init__":
                taken = inspect.signature(getattr(ours, name)).parameters
                assert list(taken) == list(inspect.signature(theirs).parameters), name
