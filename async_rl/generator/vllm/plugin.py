"""The part of async-rl that vLLM loads in each of its processes, by entry point ``vllm.general_plugins``. No torch.

``register`` registers our weight transfer by name. In the processes of an engine that a generator started, it adds
the function ``swap`` to vLLM's engine core. It also ends the process with its parent, because vLLM's engine process
would otherwise outlive a generator that is killed.

The engine core is the process whose loop schedules decode steps. It serves its clients' calls between two steps.
``swap`` is a single call, so no other call has to pause the engine first. Tensors, the version of new tokens and the
caches all change between the same two steps.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from typing import Any

TRANSFER_NAME = "async_rl"
OWNED = "ASYNC_RL_VLLM_ENGINE"
"""An environment variable of the engines that generators start. Any other vLLM stays unchanged."""

SWAP = "async_rl_swap"


def register() -> None:
    """Register our weight transfer with vLLM. vLLM calls this function in every process, before it builds anything."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]

    WeightTransferEngineFactory.register_engine(TRANSFER_NAME, "async_rl.generator.vllm.weights", "SharedWeights")
    if os.environ.get(OWNED):
        from vllm.v1.engine.core import EngineCore  # pyright: ignore[reportMissingImports]

        add_swap(EngineCore)
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


def add_swap(core: type[Any]) -> None:
    """Add ``swap`` as a method to ``core``, vLLM's class ``EngineCore``.

    Clients of the engine can then call it by name.
    """
    setattr(core, SWAP, swap)


def swap(core: Any, number: int, version: str, recompute: bool) -> float:
    """Switch every worker to the weights of preparation ``number``. Later tokens carry ``version``.

    Return the duration in seconds. The engine's core can't run a decode step meanwhile. With ``recompute``, running
    sequences are computed again from their tokens, and no cached keys and values are reused. Otherwise they go on with
    the keys and values that they have.

    Raises:
        RuntimeError: steps are in progress (on a GPU only), a worker did not swap, or the cache is in use.
    """
    started_s = time.perf_counter()
    if core.batch_queue:
        raise RuntimeError(
            f"expected no running step in vLLM's engine during a swap of weights, got {len(core.batch_queue)}; this is "
            f"a bug in async-rl or vLLM, please report it"
        )
    core.collective_rpc("swap_weights", args=(number,))
    core.set_weight_version(version)
    if recompute and not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise RuntimeError(
            "vLLM could not discard its cached keys and values after a swap of weights; set "
            'generator.kv_after_update = "keep", or report it with the installed version of vLLM'
        )
    return time.perf_counter() - started_s
