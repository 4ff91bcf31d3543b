"""Chats of a session as token ids: what an agent repeats stays as it was sampled, and only what follows is rendered.

A chat template would render an answer again from its parsed parts, and seldom gets the sampled tokens back: thoughts
are left out, tool calls written anew, spaces trimmed. So a conversation that begins with messages that the endpoint has
seen, the model's answer as it was returned included, begins with the ids of that call. The rest is the text that the
template writes after the answer: the conversation is rendered with a word of ours in the answer's place, and what
follows the word, and the end of the turn that was sampled, is new.

A conversation whose answer the agent has changed, shortened or left out is not recognised, and is rendered whole.
Thoughts, and text beside tool calls, may be left out: many clients do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from async_rl.data.spellings import unguarded
from async_rl.data.template_forms import joined_text, with_arguments
from async_rl.extensions.agents.front.messages import Line

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
Variables = Mapping[str, Any]
NO_VARIABLES: Variables = MappingProxyType({})
_WORD = "bluebell-%d-buttercup"
_OF_ANSWERS = ("role", "content", "tool_calls")
"""What identifies an answer. Clients leave thoughts out, and add fields of their own."""
_AFTER_RESULT = ({"role": "assistant", "content": "All went well."}, {"role": "user", "content": "And now?"})


class Renderer(Protocol):
    """A tokenizer with its chat template."""

    def render(self, messages: Sequence[Message], tools: Tools, own: Variables) -> str:
        """Return the conversation as text, which ends where the model's answer begins.

        ``own`` are the request's variables of the template, which replace those of the run.

        Raises:
            Exception: whatever the template's author wrote.
        """
        ...

    def encode(self, text: str, before: str = "") -> np.ndarray:
        """Return the token ids of ``text``, int32 [N], which follows the text ``before``."""
        ...

    def ending(self, token_id: int) -> str:
        """Return the text of a special token; empty for any other."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt:
    """A conversation as token ids, int32 [P]. ``digests`` identify its beginnings, one for each message.

    ``known`` is the conversation of this session from whose answer it goes on, and has its first ``num_known``
    messages; None if there is none.
    """

    token_ids: np.ndarray
    digests: tuple[bytes, ...]
    known: Known | None = None
    num_known: int = 0

    @property
    def continued(self) -> bool:
        return self.known is not None


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A conversation up to the answer to the call ``call``, and the texts of the special tokens at its end.

    ``before`` is the one that it goes on from, and ``new`` its ids after that, int32 [N]: so that a thousand calls
    take the memory of one sequence. ``ending`` is empty if the answer was cut: what it ends with does not end its turn.
    """

    call: int
    before: Known | None
    new: np.ndarray
    ending: tuple[str, ...]

    def token_ids(self) -> np.ndarray:
        """Return all its ids, int32 [N]."""
        parts, one = [self.new], self.before
        while one is not None:
            parts.append(one.new)
            one = one.before
        return np.concatenate(parts[::-1]).astype(np.int32)


class Conversations:
    """The conversations of one session, recognised by their messages."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._known: dict[bytes, Known] = {}

    def prompt(self, messages: Sequence[Message], tools: Tools, own: Variables = NO_VARIABLES) -> ChatPrompt:
        """Return the ids of a conversation, which continue the longest one that is known with the same tools and
        variables.

        Raises:
            Exception: the template can't render it.
        """
        digests = _digests(messages, tools, own)
        for number in range(len(messages), 0, -1):
            known = self._known.get(digests[number - 1])
            if known is None:
                continue
            rest = _rest(messages, number - 1, lambda chat: self._renderer.render(chat, tools, own), known.ending)
            if rest is not None:
                new = self._renderer.encode(rest, "".join(known.ending))
                return ChatPrompt(np.concatenate([known.token_ids(), new]).astype(np.int32), digests, known, number)
        return ChatPrompt(self._renderer.encode(self._renderer.render(messages, tools, own)), digests)

    def add(
        self, prompt: ChatPrompt, call: int, token_ids: np.ndarray, answer: Message, *, is_cut: bool = False
    ) -> None:
        """Remember the answer to a call, int32 [N], as the message that the agent gets. ``is_cut``: it ended at a
        limit.
        """
        texts = (self._renderer.ending(int(token)) for token in reversed(() if is_cut else token_ids))
        ending = tuple(takewhile(bool, texts))[::-1]
        num_known = 0 if prompt.known is None else len(prompt.known.token_ids())
        new = np.concatenate([prompt.token_ids[num_known:], token_ids]).astype(np.int32)
        known = self._known[_digest(prompt.digests[-1], answer)] = Known(call, prompt.known, new, ending)
        if answer.get("tool_calls"):  # some clients leave out the text beside them
            self._known.setdefault(_digest(prompt.digests[-1], {**answer, "content": None}), known)


def share_again(call: Message, tools: Tools, renderer: Renderer, ends: Collection[str]) -> float:
    """Return the share of a session's tokens that are computed again because turns after a tool's ``call`` are
    rewritten. 0 if both go on with the tokens before them: that with the tool's result, and that after an answer to it.

    ``ends`` are the texts of the tokens that may end a turn.

    Raises:
        Exception: the template can't render such a conversation.
    """
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "It is done, as you asked."}
    chat = [{"role": "user", "content": "Do it."}, call, result, *_AFTER_RESULT]

    def render(messages: Sequence[Message]) -> str:
        return renderer.render(messages, tools, NO_VARIABLES)

    def size(messages: Sequence[Message]) -> int:
        return len(renderer.encode(render(messages)))

    rewritten = (place for place in (1, 3) if not any(_rest(chat[: place + 2], place, render, (one,)) for one in ends))
    again = sum(size(chat[:place]) for place in rewritten)
    return again / (size(chat) + again)


def _rest(
    messages: Sequence[Message], place: int, render: Callable[[Sequence[Message]], str],
    ending: tuple[str, ...],
) -> str | None:  # fmt: skip
    """Return the text that the template writes after the answer at ``place`` and the ``ending`` that was sampled.

    Of several special tokens at the end the last ones may suffice: the model may sample others before.

    None: the template does not let it be found.
    """
    answer = messages[place]
    word = _word_outside(messages)
    plain = {"role": answer["role"], "content": word}
    calls = {"tool_calls": answer["tool_calls"]} if answer.get("tool_calls") else {}
    later = [text for message in messages[place + 1 :] if (text := joined_text(message.get("content") or ""))]
    stand_ins = [plain]
    if calls:
        # Some templates write a tool's answer only after its call, others no content beside calls or it behind the
        # tool's answer: there the word is in the last call.
        *others, last = answer["tool_calls"]
        called = {**plain, "content": "", "tool_calls": [*others, with_arguments(last, {"word": word})]}
        stand_ins = [{**plain, **calls}, plain, called]
    for stand_in in stand_ins:
        try:
            text = render([*messages[:place], stand_in, *messages[place + 1 :]])
        except Exception:  # the template's own: the other form may do, or the conversation is rendered whole
            continue
        _, found, after = text.partition(word)
        if not found or word in after:
            continue
        ends = ("".join(ending[number:]) for number in range(len(ending)))
        end = next((text for text in ends if text in after), None)
        # Of an answer that was cut, nothing marks the end but that nothing of it follows.
        rest = after.partition(end)[2] if end else after if stand_in is plain and not ending else ""
        if rest and all(one.strip() in unguarded(rest) for one in later):
            return rest
    return None


def _word_outside(messages: Sequence[Message]) -> str:
    """Return a word that none of the messages contains."""
    texts = json.dumps([dict(message) for message in messages], default=str)
    return next(word for number in range(len(texts) + 1) if (word := _WORD % number) not in texts)


def _digests(messages: Sequence[Message], tools: Tools, own: Variables) -> tuple[bytes, ...]:
    found: list[bytes] = []
    digest = hashlib.sha256(json.dumps([tools, dict(own)], sort_keys=True, default=str).encode()).digest()
    for message in messages:
        digest = _digest(digest, message)
        found.append(digest)
    return tuple(found)


def line_of(messages: Sequence[Message], tools: Tools) -> Line:
    """Return what tells a conversation from others of its session."""
    first = next((place for place, one in enumerate(messages) if one.get("role") == "user"), len(messages))
    system, asked = ((b"", *_digests(part, None, {}))[-1] for part in (messages[:first], messages[first : first + 1]))
    return Line(system, asked, bool(tools))


def _digest(before: bytes, message: Message) -> bytes:
    names = _OF_ANSWERS if message.get("role") == "assistant" else sorted(message)
    fields = {name: value for name in names if (value := message.get(name)) not in (None, "", [])}
    text = joined_text(fields.get("content", ""))
    if text is not None:
        fields["content"] = text
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [_called(call) for call in calls]
    return hashlib.sha256(before + json.dumps(fields, sort_keys=True, default=str).encode()).digest()


def _called(call: Mapping[str, Any]) -> list[Any]:
    """Return the name and the arguments of a tool call. JSON text and an object mean the same."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    try:
        return [function.get("name"), json.loads(arguments) if isinstance(arguments, str) else arguments]
    except ValueError:
        return [function.get("name"), arguments]
