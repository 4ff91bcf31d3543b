"""The record of one rollout that an agent plays: its calls, its times, and what the agent returned.

``AgentRollouts`` makes one for each rollout of a lease and alone changes it. ``SessionTokens`` turns its calls
into sequences.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from async_rl.extensions.agents.front.messages import Call, Said
from async_rl.extensions.agents.session_tokens import SessionTokens
from async_rl.extensions.agents.transcript import Transcript
from async_rl.records import AgentSession, Lease

KEY_BYTES = 24
_MAX_NAMES = _MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent returned at its end: its reward, and what is only logged: a score and metrics. None: none."""

    reward: float | None
    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class OpenSession:
    """One rollout. ``rollout_key`` is its key in the pool, ``key`` the secret that the agent's calls carry.

    ``requests`` are the backend's requests of running calls, and ``said`` what the agent says in those that are chats.
    ``waiting`` are calls that wait for a slot of the backend, or until others of the session need less room.
    ``quiet_since_s`` is the time since which no call has run, and ``calling_since_s`` that since which one does;
    ``sampling_s`` is the time in which some did before. ``outcome`` is set when the agent has ended; ``reported``
    is what was told before with ``finish_key``, and comes first. ``is_cut`` says that a call found no room.
    ``without_effect`` are the first fields of its calls, 64 at most, that had no effect.
    ``is_offered`` says that the session waits for a program elsewhere: its times begin when one takes it.
    """

    rollout_key: str
    key: str
    lease: Lease
    index: int
    tokens: SessionTokens
    begin_s: float
    quiet_since_s: float
    calling_since_s: float | None = None
    sampling_s: float = 0.0
    transcript: Transcript = field(default_factory=Transcript)
    waiting: deque[Call] = field(default_factory=deque)
    requests: dict[int, str] = field(default_factory=dict)
    said: dict[int, Said] = field(default_factory=dict)
    num_received: int = 0
    num_begun: int = 0
    is_cut: bool = False
    is_offered: bool = False
    without_effect: set[str] = field(default_factory=set)
    outcome: Outcome | None = None
    reported: Outcome | None = None
    finish_key: str = field(default_factory=partial(secrets.token_urlsafe, KEY_BYTES))

    def note_without_effect(self, names: Iterable[str]) -> None:
        """Note fields of a call that have no effect. The agent writes the names, so they are cut."""
        self.without_effect.update(islice((one[:_MAX_NAME] for one in names), _MAX_NAMES - len(self.without_effect)))

    @property
    def is_unclaimed(self) -> bool:
        return not self.num_begun

    def note_calls(self, now_s: float) -> None:
        """Keep the times up to date. Call it when a call begins to wait or has ended."""
        self.quiet_since_s = now_s
        if self.requests or self.waiting:
            self.calling_since_s = now_s if self.calling_since_s is None else self.calling_since_s
        elif self.calling_since_s is not None:
            self.sampling_s, self.calling_since_s = self.sampling_s + now_s - self.calling_since_s, None

    def summary(self, now_s: float) -> AgentSession:
        """Return what happened, for people."""
        own_s = max(0.0, now_s - self.begin_s - self.sampling_s)
        names = tuple(sorted(self.without_effect))
        return AgentSession(dict(self.tokens.counts()), dict(self.transcript.tools), self.sampling_s, own_s, names)
