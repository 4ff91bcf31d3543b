"""A group filter of the user's own: a function that says of each scored group whether it may be trained on.

``queue.filter_function = "file.py:function"`` names it. ``FilteredRollouts`` calls it once for each group of training,
when the last rollout is scored, in a thread of the grader, one call at a time::

    def keep(row, rollouts, texts):
        return len({rollout.num_sampled for rollout in rollouts}) > 1

``row`` has the row's fields, as rewards get them. ``rollouts`` are ``records.Rollout``, with ``reward``,
``reward_parts``, ``accuracy``, ``finish_reason`` (``error`` of those that failed) and ``num_sampled``. ``texts`` are
their last answers.

The answer, True or False, goes to the queue with the group. The queue filters the group as one outside of
``queue.filter_range``, and counts it: another prompt replaces it, or it is masked (``queue.refill``). If the function
raises or returns anything else, the lease fails as one whose reward raises. A call that hangs is named in the
generator's heartbeats, and its leases expire after ``reward.max_call_s``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from async_rl.errors import OwnCodeError
from async_rl.generator.rollouts import Graded, Rollouts, ThreadGrader, WrappedRollouts, failure_of
from async_rl.records import row_fields


class FilteredRollouts(WrappedRollouts):
    """Plays rollouts as ``rollouts`` does, and gives those of a group out once the filter ``keeps`` has answered.

    ``name`` is that of the filter, for messages. It implements ``Rollouts``.
    """

    def __init__(self, rollouts: Rollouts, keeps: Callable[..., Any], name: str | None, grader: ThreadGrader) -> None:
        super().__init__(rollouts)
        self._keeps, self._name, self._grader = keeps, name, grader
        self._incomplete: dict[str, list[Graded]] = {}
        self._decided: queue.SimpleQueue[list[Graded]] = queue.SimpleQueue()
        self._one_at_a_time, self._num_undecided = threading.Lock(), 0

    @property
    def num_pending(self) -> int:
        return self._rollouts.num_pending + self._num_undecided

    def cancel(self, lease_id: str) -> None:
        self._incomplete.pop(lease_id, None)
        self._rollouts.cancel(lease_id)

    def collect(self) -> list[Graded]:
        done: list[Graded] = []
        for graded in self._rollouts.collect():
            if graded.lease.kind != "train" or graded.rollout is None:
                done.append(graded)
                continue
            group = self._incomplete.setdefault(graded.lease.lease_id, [])
            group.append(graded)
            if len(group) == graded.lease.group_size:
                del self._incomplete[graded.lease.lease_id]
                self._num_undecided += 1
                self._grader.call(partial(self._decide, sorted(group, key=lambda one: one.index)))
        while not self._decided.empty():
            self._num_undecided -= 1
            done += self._decided.get()
        return done

    def _decide(self, group: list[Graded]) -> None:
        rollouts = [graded.rollout for graded in group if graded.rollout is not None]
        # If every rollout has failed, so does the lease, by their own failures.
        kept: Any = all(rollout.finish_reason == "error" for rollout in rollouts)
        try:
            if not kept:
                row, texts = row_fields(group[0].lease.prompt.reward_data), [graded.text for graded in group]
                with self._one_at_a_time:
                    kept = self._keeps(row, rollouts, texts)
            if not isinstance(kept, bool):
                raise OwnCodeError(
                    f"queue.filter_function: expected {self._name} to return True or False, got {kept!r:.80}; "
                    f"correct it"
                )
            self._decided.put([replace(graded, kept=kept) for graded in group])
        except (Exception, SystemExit) as error:  # the boundary to the user's code
            failure = failure_of(error, "filter_error")
            self._decided.put([replace(group[0], rollout=None, failure=failure, error=error)])
