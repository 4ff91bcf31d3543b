"""What vLLM loads of async-rl in each of its processes, by the entry point ``vllm.general_plugins``. No torch.

``register`` makes our weight transfer known, by name only. In the processes of an engine that a generator started it
also adds our call ``swap`` to vLLM's engine core, and ties the process to its parent: vLLM's engine process would
outlive a generator that was killed.

The engine core is the process whose loop schedules decode steps. It serves calls of its clients between two steps,
never during one. Ours is a single call, so nothing has to be paused by another one before it, and everything that has
to change together changes between the same two steps: tensors, the version that tokens are stamped with, and the
caches.
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
"""Set in the environment of the engines that generators start; anybody else's vLLM is left alone."""

SWAP = "async_rl_swap"


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


def add_swap(core: type[Any]) -> None:
    """Make ``swap`` known to ``core``, vLLM's ``EngineCore``, which finds its clients' calls by name."""
    setattr(core, SWAP, swap)


def swap(core: Any, number: int, version: str, recompute: bool) -> float:
    """Swap preparation ``number`` in, in every worker, and stamp tokens with ``version`` from now on.

    Returns the seconds from its begin to its end: for so long the core can run no step because of it.

    With ``recompute`` the running sequences are put back in line, to be computed anew with all their tokens, and
    nothing that is cached is used again. Otherwise they go on over the keys and values that they have.

    Raises:
        RuntimeError: steps are under way, which vLLM has on a GPU only; a worker did not swap; the cache is in use.
    """
    started_s = time.perf_counter()
    if core.batch_queue:
        raise RuntimeError(f"expected no step under way, got {len(core.batch_queue)}")
    core.collective_rpc("swap_weights", args=(number,))
    core.set_weight_version(version)
    if recompute and not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise RuntimeError("the cache of keys and values could not be reset")
    return time.perf_counter() - started_s
