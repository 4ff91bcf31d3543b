"""Our call in vLLM's engine core, the process whose loop schedules decode steps. No torch.

The core serves calls of its clients between two steps, never during one. Ours is a single call, so nothing has to be
paused by another one before it, and everything that has to change together changes between the same two steps: tensors,
the version that tokens are stamped with, and the caches.
"""

from __future__ import annotations

import time
from typing import Any

SWAP = "async_rl_swap"


def add_swap(core: type[Any]) -> None:
    """Make it known to ``core``, vLLM's ``EngineCore``, which finds its clients' calls by name."""
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
