"""The part of async-rl that vLLM loads in each of its processes, by entry point ``vllm.general_plugins``. No torch.

``register`` registers our weight transfer by name. In the processes of an engine that a generator started, it also ends
the process with its parent, because vLLM's engine process would otherwise outlive a generator that is killed.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

TRANSFER_NAME = "async_rl"
DOUBLE_BUFFER = "async_rl_double_buffer"
"""The key of vLLM's ``additional_config`` that says whether each worker has memory for a second version."""
OWNED = "ASYNC_RL_VLLM_ENGINE"
"""An environment variable of the engines that generators start. Any other vLLM stays unchanged."""


def register() -> None:
    """Register our weight transfer with vLLM. vLLM calls this function in every process, before it builds anything."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]

    WeightTransferEngineFactory.register_engine(TRANSFER_NAME, "async_rl.generator.vllm.weights", "VersionTransfer")
    if os.environ.get(OWNED):
        end_with_parent()


def end_with_parent() -> None:
    """Have this process killed when the process that started it through multiprocessing ends for whatever reason."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    threading.Thread(target=_watch, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _watch(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    # There is nothing to save, and its own children watch it in the same way.
    os.kill(os.getpid(), signal.SIGKILL)
