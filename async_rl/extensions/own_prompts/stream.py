"""The stream of a source of prompts of the user's own: an iterator that is asked in a thread, one row ahead.

``data.source = "file.py:function"`` names a function of a state and of results, which returns an iterator of pairs
``(row, state)``: a row as a line of ``data.train`` has it, and the state from which the rows after it follow::

    def rows(state, results):
        for number in itertools.count(state or 0):
            yield {"prompt": f"{number}+1", "gt_answer": str(number + 1)}, number + 1

The state is what JSON can hold, None at first. The queue keeps the one after the last row that was drawn, in its
journal and in each checkpoint, with the rows whose prompts have not ended. So nothing is asked for twice that is still
there, and a run that goes back to a checkpoint goes on from the state that it had then. ``results`` is a deque of the
newest ``(row, accuracy)`` of returned groups, oldest first, for the function to take from.

The server does not wait for the iterator: while no row has come, generators wait, and the run says for how long. If the
iterator raises, or yields something else, the run stops with the cause. If it ends, so does the data.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

from async_rl.config.config import Config
from async_rl.data.dataset import parse_row, rules_of
from async_rl.errors import DataError
from async_rl.process.user_code import describe_error, load_named_code
from async_rl.queue.core.prompts import OwnRow, Place, PromptStream, StreamCursor

logger = logging.getLogger(__name__)

Drawn = tuple[OwnRow, str]
"""A row, and the state after it."""
Results = deque[tuple[Mapping[str, Any], float]]
OpenRows = Callable[[Any, Results], Iterator[tuple[Mapping[str, Any], Any]]]
"""What ``data.source`` names. See the head of this file."""

MAX_STATE_BYTES = 1 << 16
"""Limit on a state as JSON, because every commit of the journal writes one."""
_MAX_RESULTS = 4096
_WAIT_S = 0.005
"""How long a request waits for a row, so that a source that is quick is asked once for each row."""
_REMEDY = "correct it, and run the same command again"


class OwnStream(PromptStream):
    """The stream of ``data.source``. Position N is its N-th row, which is kept in the place of the open prompt.

    The source begins again, at the cursor's state, whenever the cursor was replaced: after a restart, and when a
    learner goes back to a checkpoint.
    """

    def __init__(self, config: Config) -> None:
        """Import the source.

        Raises:
            ConfigError: the code is missing, or its import fails.
        """
        super().__init__(1, seed=config.run.seed)
        self.num_rows = sys.maxsize
        self._name, self._rules = f"data.source = {config.data.source}", rules_of(config)
        self._open: OpenRows = load_named_code(str(config.data.source))
        self._results: Results = deque(maxlen=_MAX_RESULTS)
        self._begun_at: StreamCursor | None = None

    @property
    def is_at_end(self) -> bool:
        arrived = self._arrived
        return arrived is not None and not arrived.exception() and arrived.result() is None

    @property
    def _arrived(self) -> Future[Drawn | None] | None:
        """The row that was asked for, None at the end, or the error; None if there is no answer yet."""
        return self._awaited if self._begun_at is self.cursor and self._awaited.done() else None

    def _ask(self) -> None:
        """Ask for the next row, in a thread that ends with this process, whatever it does."""
        self._asked_at, self._awaited = time.monotonic(), Future[Drawn | None]()

        def run(rows: Iterator[Drawn], awaited: Future[Drawn | None]) -> None:
            try:
                awaited.set_result(next(rows, None))
            except DataError as error:
                awaited.set_exception(error)

        threading.Thread(target=run, args=(self._rows, self._awaited), name="data.source", daemon=True).start()

    def why_stopped(self) -> str:
        return "" if self._arrived is None else str(self._arrived.exception() or "")

    def why_starved(self) -> str:
        if not self.is_starved:
            return ""
        return f"{self._name} has given no row for {time.monotonic() - self._asked_at:.0f} s"

    def has_grown(self) -> bool:
        has_grown = self.is_starved and self._arrived is not None
        self.is_starved = self.is_starved and not has_grown
        return has_grown

    def observe(self, position: int, rate: float) -> None:
        if (row := self.curriculum.places[position].row) is not None:
            self._results.append((row.reward_data, rate))

    def _draw_new(self) -> int | None:
        if self._begun_at is not self.cursor:
            self._begun_at, self._rows = self.cursor, self._read(self.cursor.state)
            self._ask()
        wait([self._awaited], _WAIT_S)
        self.is_starved = self._arrived is None
        if self._arrived is None or self._arrived.exception() or (drawn := self._arrived.result()) is None:
            return None
        position = self.cursor.position
        row, self.cursor.state = drawn
        self.curriculum.open_place(position, Place(position, row))
        self.cursor.position += 1
        self._ask()
        return position

    def _row(self, source: int, index: int) -> tuple[int, int]:
        return index, 0

    def _read(self, state: str) -> Iterator[Drawn]:
        """Yield the checked rows after ``state``, each with the state after it, as JSON.

        Raises:
            DataError: the source raised, or yielded something else. The message names it.
        """
        number = 0
        try:
            for number, pair in enumerate(self._open(json.loads(state or "null"), self._results), 1):
                where = f"{self._name}, row {number} since its start"
                if not isinstance(pair, tuple) or len(pair) != 2:
                    raise DataError(f"{where}: expected a pair (row, state), got {pair!r:.80}; {_REMEDY}")
                row, after = parse_row(pair[0], where, self._rules), json.dumps(pair[1])
                if len(after) > MAX_STATE_BYTES:
                    raise DataError(
                        f"{where}: expected a state of at most {MAX_STATE_BYTES} bytes, got {len(after)}; {_REMEDY}"
                    )
                yield OwnRow(row.messages, row.reward_data), after
        except DataError:
            raise
        except (Exception, SystemExit) as error:  # the boundary to the user's code
            logger.exception("%s failed", self._name)
            raise DataError(f"{self._name} failed after {number} rows: {describe_error(error)[0]}; {_REMEDY}") from None
