"""Whose message each part of a token sequence is, and what became of its tokens: for people who look at rollouts.

The doctor shows the trial of an agent by parts, and ``async-rl report`` recorded rollouts.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from async_rl.data.template_forms import text_around
from async_rl.run.records.token_columns import GIVEN

_TURNS = (((), "system"), (("user",), "assistant"), (("user", "assistant"), "user"), (("user", "assistant"), "tool"))
"""A role, after those that have spoken before it."""
_MARKS = {"bos_token": "", "eos_token": ""}


class Part(NamedTuple):
    """The tokens ``begin`` to ``end`` of a sequence.

    ``role`` is that of their message, empty where the chat template names none. ``use`` is ``context``, ``target`` or
    ``untrained: CAUSE``.
    """

    role: str
    use: str
    begin: int
    end: int


@lru_cache(maxsize=8)
def role_headers(template: str) -> Mapping[str, str]:
    """Return the texts with which a chat template begins a message, each with the message's role."""
    found: dict[str, str] = {}
    for before, role in _TURNS:
        around, ended = (text_around(template, roles, _MARKS) for roles in ((*before, role), before))
        text = around[-2].removeprefix(ended[-1]).strip() if around and ended else ""
        # The first line suffices, unless another role has it, too: a tool may speak as a user.
        line = text.partition("\n")[0]
        if text:
            found.setdefault(text if line in found else line, role)
    return found


def parts_of(texts: Sequence[str], outcomes: Sequence[str], headers: Mapping[str, str]) -> list[Part]:
    """Return the parts of a sequence, from its tokens' texts and outcomes, as ``token_columns.GIVEN`` says.

    A message that spells a header looks like two.
    """
    pattern = "|".join(map(re.escape, sorted(headers, key=len, reverse=True))) or "(?!)"
    begins = [0, *accumulate(map(len, texts))]
    heads = {bisect_left(begins, one.start()): headers[one[0]] for one in re.finditer(pattern, "".join(texts))}
    found: list[Part] = []
    for place, outcome in enumerate(outcomes):
        is_given, is_target = outcome == GIVEN, outcome.startswith(("trained", "clipped"))
        use = "context" if is_given else "target" if is_target else f"untrained: {outcome}"
        last = found[-1] if found else Part("", "", 0, 0)
        head = heads.get(place, "") if is_given else "assistant"
        role = head or (last.role if last.use == use else "")
        is_more = last[:2] == (role, use) and not (is_given and head)
        begin = found.pop().begin if is_more else place
        found.append(Part(role, use, begin, place + 1))
    return found


def num_computed_again(sequences: Sequence[Sequence[Part]]) -> int:
    """Return how many tokens of context, in the sequences of a rollout after the first, come before an answer."""
    firsts = ((part.begin for part in parts if part.use != "context") for parts in sequences[1:])
    return sum(next(first, 0) for first in firsts)
