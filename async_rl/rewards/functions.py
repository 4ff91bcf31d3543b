"""Wraps the user's reward function. The function may be sync or async, and may score one rollout or a group.

The names of the function's parameters select its form (``forms``). For each rollout it returns a number, a pair
(reward, accuracy) or a ``RewardOutput``; in TRL's form also None, which judges nothing; in verl's form also a dict with
``score`` and, if it has an accuracy of its own, ``acc``; in DistRL-LLM's form a pair ``[format, accuracy]``.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from async_rl.errors import RewardError
from async_rl.rewards.forms import form_of, list_arguments, score_arguments
from async_rl.rewards.records import UNJUDGED, RewardInput, RewardOutput

MAX_CONCURRENT_CALLS = 64
"""Maximum number of calls of an async function that run at the same time. A function that needs fewer calls at a time
must use a semaphore."""

PROCESS = "process"
"""The reward part that is the sum of the rewards of parts of the text (``RewardOutput.spans``)."""


class FunctionReward:
    """Calls the user's ``function`` and checks what it returns. A number becomes a reward part named like the function.

    Without an accuracy of its own, the number is also the accuracy, outside [0, 1] too
    (``records.RewardOutput.accuracy``).
    """

    def __init__(
        self, name: str, function: Callable[..., Any], *, scale: float, time_limit_s: float,
        columns: Mapping[str, str] | None = None, max_concurrent: int = MAX_CONCURRENT_CALLS,
    ) -> None:  # fmt: skip
        """Check the form of ``function`` and store the settings.

        ``time_limit_s`` limits each call of an async function, and at most ``max_concurrent`` calls run at the same
        time. A sync function is called by one thread at a time and has no time limit. ``columns``: the name of a
        column in the data -> the key of the row that holds it.

        Raises:
            ConfigError: ``function`` is not a function, or has other parameters than the forms of this module.
        """
        self._name, self._function, self._scale = name, function, scale
        self._columns = columns or {}
        self._part = name.rpartition(":")[2]
        self._time_limit_s = time_limit_s
        self._form = form_of(name, function)
        self._calls = AsyncCalls(max_concurrent=max_concurrent, time_limit_s=time_limit_s)
        self._one_at_a_time = threading.Lock()
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  (whether it is async, not whether it is callable)
        )

    @property
    def needs_whole_group(self) -> bool:
        return self._form.kind not in ("item", "score")

    def __call__(self, item: RewardInput) -> RewardOutput:
        return self.score_group([item])[0]

    def score_group(self, items: Sequence[RewardInput]) -> list[RewardOutput]:
        try:
            values = self._awaited(items) if self.is_async else self._called(items)
        except _TimeLimitError as error:
            raise RewardError(
                f"{self._name} took longer than reward.time_limit_s = {self._time_limit_s:g} s; raise the key, or make "
                f"the function faster"
            ) from error
        if self.needs_whole_group and (isinstance(values, str) or len(values) != len(items)):
            raise RewardError(
                f"{self._name}: expected a list of {len(items)} values, one for each rollout, got {len(values)}; "
                f"correct what the function returns"
            )
        return [self._output(value, item) for value, item in zip(values, items, strict=True)]

    def close(self) -> None:
        self._calls.close()

    def _called(self, items: Sequence[RewardInput]) -> Sequence[Any]:
        with self._one_at_a_time:
            values = [call() for call in self._bound(items)]
        return self._sequence(values[0]) if self.needs_whole_group else values

    def _awaited(self, items: Sequence[RewardInput]) -> Sequence[Any]:
        values = self._calls.results(self._bound(items))
        return self._sequence(values[0]) if self.needs_whole_group else values

    def _bound(self, items: Sequence[RewardInput]) -> list[Callable[[], Any]]:
        """Return the calls of the function that score ``items``: one for each of them, or one for the group."""
        function = self._function
        match self._form.kind:
            case "item":
                return [partial(function, item) for item in items]
            case "score":
                return [partial(function, **score_arguments(self._form, item)) for item in items]
            case "items":
                return [partial(function, list(items))]
            case "pairs":
                answers = [item.reward_data.get("gt_answer") for item in items]
                return [partial(function, [item.text for item in items], answers)]
            case "lists":
                return [partial(function, **list_arguments(self._name, self._form, items, self._columns))]

    def _sequence(self, values: Any) -> Sequence[Any]:
        if hasattr(values, "tolist"):  # an array of numpy or torch
            values = values.tolist()
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise RewardError(
                f"{self._name}: expected a list with a value for each rollout, got {type(values).__name__}; correct "
                f"what the function returns"
            )
        return values

    def _output(self, value: Any, item: RewardInput) -> RewardOutput:
        if self._form.kind == "pairs" and not isinstance(_plain(value), int | float):
            value = self._format_and_accuracy(value)
        if self._form.kind == "lists" and value is None:
            return UNJUDGED
        if self._form.kind == "score" and isinstance(value, Mapping):
            return self._scored(value)
        if isinstance(value, RewardOutput) and not value.is_judged:
            return UNJUDGED
        if isinstance(value, RewardOutput):
            numbers = {**value.parts, "accuracy": value.accuracy}
            for part, number in numbers.items():
                self._check_number(number, part)
            if not 0 <= value.accuracy <= 1:
                raise RewardError(
                    f"{self._name}: expected an accuracy in [0, 1], got {value.accuracy}; correct what the function "
                    f"returns"
                )
            parts = {part: self._scale * number for part, number in value.parts.items()}
            spans = self._spans(value, item)
            if spans:
                parts[PROCESS] = sum(reward for _, reward in spans)
            return RewardOutput(parts, float(value.accuracy), value.extracted, spans=spans)
        if isinstance(value, tuple | list) and len(value) == 2:
            return self._with_accuracy(*value)
        return self._with_accuracy(value, None)

    def _with_accuracy(self, value: Any, accuracy: Any, extracted: str | None = None) -> RewardOutput:
        """Return the output of a reward ``value`` and its accuracy. If that is None, the reward is the accuracy."""
        value, accuracy = _plain(value), _plain(accuracy)
        self._check_number(value, "")
        if accuracy is not None:
            self._check_number(accuracy, "the accuracy")
            if not 0 <= accuracy <= 1:
                raise RewardError(
                    f"{self._name}: expected an accuracy in [0, 1], got {accuracy}; correct what the function returns"
                )
        shown = float(value if accuracy is None else accuracy)
        return RewardOutput({self._part: self._scale * float(value)}, shown, extracted)

    def _scored(self, value: Mapping[str, Any]) -> RewardOutput:
        """Return the output of verl's dict: ``score``, if given ``acc`` (the accuracy) and ``pred`` (the answer)."""
        if "score" not in value:
            raise RewardError(
                f"{self._name}: expected a number, or a dict with the key score, got a dict with "
                f"{', '.join(map(repr, value)) or 'no key'}; correct what the function returns"
            )
        pred = value.get("pred")
        return self._with_accuracy(value["score"], value.get("acc"), None if pred is None else str(pred))

    def _spans(self, output: RewardOutput, item: RewardInput) -> tuple[tuple[int, float], ...]:
        """Return the rewards of parts of the text, scaled."""
        try:
            spans = [(end, reward) for end, reward in output.spans]
        except (TypeError, ValueError):
            raise RewardError(
                f"{self._name}: expected spans to be pairs (end, reward), got {output.spans!r:.80}; correct what the "
                f"function returns"
            ) from None
        for _, reward in spans:
            self._check_number(reward, "the reward of a span")
        ends = [0, *(end for end, _ in spans)]
        if any(not isinstance(end, int) for end in ends) or any(not a < b <= len(item.text) for a, b in pairwise(ends)):
            raise RewardError(
                f"{self._name}: expected ends of spans from 1 to the text's {len(item.text)} characters, ascending, "
                f"got {ends[1:]!r:.80}; correct what the function returns"
            )
        if spans and PROCESS in output.parts:
            raise RewardError(
                f"{self._name}: expected no part {PROCESS!r} with spans, whose sum it is; give the part another name"
            )
        return tuple((end, self._scale * float(reward)) for end, reward in spans)

    def _format_and_accuracy(self, row: Any) -> RewardOutput:
        row = self._sequence(row)
        if len(row) != 2:
            raise RewardError(
                f"{self._name}: expected [format, accuracy] for each rollout, got {len(row)} values; correct what the "
                f"function returns"
            )
        for number in row:
            self._check_number(number, "")
        return RewardOutput({"format": row[0], "accuracy": row[1]}, min(1.0, max(0.0, float(row[1]))))

    def _check_number(self, value: Any, what: str) -> None:
        if not isinstance(value, int | float) or not math.isfinite(value):
            expected = f"{what} to be a finite number" if what else "a finite number or a RewardOutput"
            raise RewardError(
                f"{self._name}: expected {expected}, got {value!r:.80}; correct what the function returns"
            )


def _plain(value: Any) -> Any:
    """Return a number of numpy or torch as Python's. Other values stay as they are."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


class _TimeLimitError(Exception):
    """An async call took longer than its time limit. A ``TimeoutError`` of the function itself is another thing."""


class AsyncCalls:
    """Runs the async calls of all threads in one event loop, which runs in a thread until ``close``.

    At most ``max_concurrent`` calls run at the same time. A call is cancelled ``time_limit_s`` seconds after it began;
    the time before it began does not count. Because all calls use the same loop, a function can keep objects such as
    network sessions between calls.
    """

    def __init__(self, *, max_concurrent: int, time_limit_s: float) -> None:
        self._max_concurrent, self._time_limit_s = max_concurrent, time_limit_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._slots: asyncio.Semaphore | None = None

    def results(self, calls: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
        """Run all ``calls`` and return their results, in order. Any thread may call this.

        Raises:
            _TimeLimitError: a call took longer than the time limit.
            Exception: the first error that a call raised. The other calls are cancelled.
        """
        with self._lock:
            loop = self._running_loop()
        return asyncio.run_coroutine_threadsafe(self._gathered(calls), loop).result()

    def close(self) -> None:
        """Cancel all running calls and stop the event loop."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._slots = asyncio.Semaphore(self._max_concurrent)
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
        assert self._slots is not None
        async with self._slots:
            limit = asyncio.timeout(self._time_limit_s)
            try:
                async with limit:
                    return await call()
            except TimeoutError:
                if limit.expired():
                    raise _TimeLimitError from None
                raise


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the event loop ``loop`` until it is stopped. Then cancel the running calls and wait until they end."""
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
