"""What vLLM loads of async-rl in each of its processes, by the entry point ``vllm.general_plugins``. No torch.

``register`` makes our weight transfer known, by name only. In the processes of an engine that a generator started it
also adds our call to vLLM's engine core, and ties the process to its parent: vLLM's engine process would outlive a
generator that was killed.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

from async_rl.generator.vllm.core import add_swap

TRANSFER_NAME = "async_rl"
OWNED = "ASYNC_RL_VLLM_ENGINE"
"""Set in the environment of the engines that generators start; anybody else's vLLM is left alone."""


def register() -> None:
    """Called once by vLLM in every process, before it builds anything."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]

    WeightTransferEngineFactory.register_engine(TRANSFER_NAME, "async_rl.generator.vllm.weights", "SharedWeights")
    if os.environ.get(OWNED):
        from vllm.v1.engine.core import EngineCore  # pyright: ignore[reportMissingImports]

        add_swap(EngineCore)
        end_with_parent()


def end_with_parent() -> None:
    """Kill this process when the one that started it through multiprocessing is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    threading.Thread(target=_watch, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _watch(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    # Nothing is worth saving, and its own children watch it in the same way.
    os.kill(os.getpid(), signal.SIGKILL)
