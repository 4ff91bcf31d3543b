"""What the handlers answer: a reply, or something to wait for. A batch is an answer in several messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from async_rl.queue.core.batches import TakenBody
from async_rl.queue.messages import TakenEntry
from async_rl.queue.storage.payloads import Body

_MESSAGE_BYTES = 1 << 20
_MAX_MESSAGES = 64
"""Of one batch: well below what a socket lines up for a peer before it drops some."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply's type, fields, arrays and parts; the server adds ``request_id`` and the notice.

    ``further`` messages of the same answer follow; all but the last say ``more``.
    """

    type: str
    fields: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()
    parts: Sequence[Body] = ()
    further: Sequence[Reply] = ()


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not answerable yet. ``attempt(now, True)`` must answer, if only with a reason."""

    wait_s: float
    attempt: Callable[[float, bool], Reply | None]


def batch_reply(groups: Sequence[TakenBody]) -> Reply:
    """One step's groups, in several messages: the learner decodes the first while the next are on their way."""
    enough = max(_MESSAGE_BYTES, sum(len(g.body) for g in groups) // _MAX_MESSAGES)
    messages: list[Reply] = []
    first = num_bytes = 0
    for end, group in enumerate(groups, start=1):
        num_bytes += len(group.body)
        if num_bytes >= enough or end == len(groups):
            messages.append(_part(groups[first:end], first, len(groups)))
            first, num_bytes = end, 0
    return replace(messages[0], further=messages[1:])


def _part(groups: Sequence[TakenBody], first: int, num_groups: int) -> Reply:
    entries = [TakenEntry(g.prompt, g.queued_s, g.arrival_version, g.masked) for g in groups]
    more = first + len(groups) < num_groups
    fields = {"groups": entries, "first": first, "num_groups": num_groups, "more": more}
    return Reply("batch", fields, parts=[g.body for g in groups])
