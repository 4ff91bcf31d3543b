"""What an agent and the model said to each other in one session, as messages: for reward functions and for people.

Each chat names the call that it goes on from, so what is kept grows with what is new, not with each call's history.
Calls with token ids have no messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from async_rl.extensions.agents.front.messages import Answered, Said

_MAX_TOOLS, _MAX_NAME = 32, 64
_OTHERS = "(others)"


class Transcript:
    """The chats of one session, by the numbers of their calls.

    Attributes:
        tools: the number of calls of each tool. The model writes the names, so they are cut, and only the first 32
            different ones are counted by name.
    """

    def __init__(self) -> None:
        self.tools: Counter[str] = Counter()
        self._chats: dict[int, tuple[Said, dict[str, Any]]] = {}

    def add(self, said: Said, answered: Answered) -> None:
        """Remember a chat and its answer."""
        message = json.loads(answered.message)
        for call in message.get("tool_calls", ()):
            known = str(call["function"]["name"])[:_MAX_NAME]
            self.tools[known if known in self.tools or len(self.tools) < _MAX_TOOLS else _OTHERS] += 1
        self._chats[answered.call] = said, message

    def messages(self, call: int | None) -> tuple[Mapping[str, Any], ...]:
        """Return the conversation that ends with the answer to ``call``; empty if that was no chat."""
        found: list[Mapping[str, Any]] = []
        while call is not None and (chat := self._chats.get(call)) is not None:
            said, answer = chat
            found += [answer, *reversed(json.loads(said.messages))]
            call = said.after
        return tuple(reversed(found))
