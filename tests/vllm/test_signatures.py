"""Our calls into vLLM fit the pinned release, also those that only run on a GPU, where no test has run them.

pyright does not see vLLM. A call counts as right if its number of arguments and its keywords fit the signature.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.config.made import a_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
CORE = "vllm.v1.engine.core_client:AsyncMPClient"
METHODS: list[tuple[str, int, tuple[str, ...]]] = [
    # method, number of positional arguments without self, keywords; all but the last four are coroutines
    (f"{ASYNC_LLM}.collective_rpc", 1, ("args",)),
    (f"{ASYNC_LLM}.init_weight_transfer_engine", 1, ()),
    (f"{ASYNC_LLM}.wake_up", 1, ()),
    (f"{ASYNC_LLM}.sleep", 2, ()),
    (f"{CORE}.pause_scheduler_async", 0, ("mode", "clear_cache")),
    (f"{ASYNC_LLM}.start_weight_update", 0, ()),
    (f"{ASYNC_LLM}.update_weights", 1, ()),
    (f"{ASYNC_LLM}.finish_weight_update", 1, ()),
    (f"{ASYNC_LLM}.resume_generation", 0, ()),
    (f"{ASYNC_LLM}.remove_lora", 1, ()),
    (f"{ASYNC_LLM}.add_lora", 1, ()),
    (f"{ASYNC_LLM}.generate", 3, ("lora_request",)),
    (f"{ASYNC_LLM}.shutdown", 0, ("timeout",)),
    ("vllm.v1.engine.llm_engine:LLMEngine.add_request", 3, ()),
    ("vllm.v1.engine.llm_engine:LLMEngine.step", 0, ()),
]
NUM_OTHERS = 4
WORKER = "vllm.v1.worker.gpu_worker:Worker"
OF_WORKERS = [
    # What vLLM calls in a worker on a GPU for our requests, and what our code reads there.
    (f"{WORKER}.sleep", 0, ("level",)),
    (f"{WORKER}.wake_up", 0, ("tags",)),
    (f"{WORKER}.init_weight_transfer_engine", 0, ("init_info",)),
    (f"{WORKER}.update_weights", 0, ("update_info",)),
    (f"{WORKER}.get_model", 0, ()),
    ("vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model", 0, ()),
    ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_model", 0, ()),
    ("vllm.lora.model_manager:LoRAModelManager.get_adapter", 1, ()),
]


def _found(path: str) -> Any:
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def _fits(function: Any, num_positional: int, keywords: tuple[str, ...]) -> bool:
    try:
        inspect.signature(function).bind(*[None] * num_positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def test_the_methods_that_we_call_take_our_arguments():
    wrong = [row for row in METHODS + OF_WORKERS if not _fits(_found(row[0]), row[1] + 1, row[2])]
    assert wrong == []
    assert [row[0] for row in METHODS if not inspect.iscoroutinefunction(_found(row[0]))] == [
        row[0] for row in METHODS[-NUM_OTHERS:]
    ]


def _calls_of_imported_names() -> Iterator[tuple[str, ast.Call]]:
    """Each call of a name that one of our files imports from vLLM: ``MODULE:NAME``, the call."""
    for path in sorted((ROOT / "async_rl").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imported = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
            for alias in node.names
        }
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            owner, dot, method = ast.unparse(call.func).partition(".")
            if owner in imported:
                yield imported[owner] + dot + method, call


def test_every_name_that_is_imported_from_vllm_takes_the_arguments_of_its_calls():
    calls = [
        (name, len(call.args), tuple(keyword.arg for keyword in call.keywords if keyword.arg is not None))
        for name, call in _calls_of_imported_names()
    ]
    assert [call for call in calls if not _fits(_found(call[0]), *call[1:])] == []
    assert len(calls) >= 15  # none is overlooked because the search is wrong


@pytest.mark.parametrize("lora", [{}, {"rank": 8, "publish": "adapters"}])
def test_vllm_knows_every_argument_of_an_engine_on_a_gpu(tmp_path: Path, lora: dict[str, Any]):
    from vllm import AsyncEngineArgs  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    from async_rl.generator.vllm.adapter import engine_arguments

    arguments = engine_arguments(tmp_path, a_config(lora=lora), device="cuda:0", max_length=64, can_sleep=True)
    assert {"enable_sleep_mode", "gpu_memory_utilization"} <= set(arguments)
    known = inspect.signature(AsyncEngineArgs).parameters
    assert [name for name in arguments if name not in known] == []


def test_our_weight_transfer_takes_what_vllms_worker_gives_it():
    from vllm.distributed.weight_transfer.base import WeightTransferEngine  # pyright: ignore[reportMissingImports]

    from async_rl.generator.vllm.weights import VersionTransfer

    assert not inspect.isabstract(VersionTransfer)
    for name, theirs in inspect.getmembers(WeightTransferEngine, inspect.isfunction):
        if name != "__init__":
            ours = getattr(VersionTransfer, name)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


def test_workers_of_both_model_runners_hold_adapters_where_we_read_them():
    mixin = _found("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin")
    for runner in ("gpu_model_runner", "gpu.model_runner"):
        assert issubclass(_found(f"vllm.v1.worker.{runner}:GPUModelRunner"), mixin)
    assert "self.lora_manager = " in inspect.getsource(mixin)
    assert "self._adapter_manager" in inspect.getsource(_found("vllm.lora.worker_manager:WorkerLoRAManager"))
