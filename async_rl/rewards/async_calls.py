"""Awaits async functions in an event loop of its own, many at once, for callers that are threads.

Called by ``functions.FunctionReward``. All calls share one loop that lives as long as the reward, so what a function
keeps between calls (a session, a connection pool) stays usable.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any


class AsyncCalls:
    """At most ``max_concurrent`` calls run at the same time; each is ended ``time_limit_s`` after it began.

    A call's time in line does not count. The loop's thread starts with the first call.
    """

    def __init__(self, *, max_concurrent: int, time_limit_s: float) -> None:
        self._max_concurrent, self._time_limit_s = max_concurrent, time_limit_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._seats: asyncio.Semaphore | None = None

    def results(self, calls: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
        """What the calls return, in order; waits for all of them. From any thread.

        Raises:
            TimeoutError: one took too long. Else the first thing that one of them raises; the others are ended.
        """
        with self._lock:
            loop = self._running_loop()
        return asyncio.run_coroutine_threadsafe(self._gathered(calls), loop).result()

    def close(self) -> None:
        """End the calls that run, and the loop."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._seats = asyncio.Semaphore(self._max_concurrent)
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name="async rewards", daemon=True)
            self._thread.start()
        return self._loop

    async def _gathered(self, calls: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
        tasks = [asyncio.ensure_future(self._one(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        assert self._seats is not None
        async with self._seats:
            return await asyncio.wait_for(call(), self._time_limit_s)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then let every call that still runs see its cancellation."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
