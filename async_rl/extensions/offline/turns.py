"""Splits a conversation into what is trained and what is context: one turn of the model after the other.

The context of a turn is what a generator would have as its prompt: the messages before it and the start of an answer,
rendered with the chat template. What the template opens there for the model (``<think>``) is context. The rest of the
turn, up to its end token (``data.turn_end``), is trained. If the template marks what the model writes with
``{% generation %}``, only what is marked and the end token are trained.

Turns that the template renders one after the other make one sequence. If it renders an earlier turn in another way once
the conversation goes on (most templates drop its thinking), each turn is a sequence of its own, as it would be sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_rl.config.data import CONTENT_KEY
from async_rl.data.chat import ids_after, places_after, plain_ids
from async_rl.data.message_keys import THOUGHT_KEYS
from async_rl.data.spellings import control_of
from async_rl.data.template import apply_template, check_rendered, marked_spans
from async_rl.data.template_forms import called_function, joined_text
from async_rl.data.turn_end import TurnEnds, mark_after
from async_rl.errors import DataError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Segments = list[tuple[list[int], list[bool]]]
"""Pairs (token ids, whether each is trained)."""
_THINK, _THOUGHT = "<think>", "</think>"
_MARKS = "{% generation %}"
_OTHER = "Bluebell"
"""An answer that begins like no opener of thinking."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One turn of the model in the template's text.

    Attributes:
        opened: the prompt from which a generator would sample it.
        context: the text before the answer.
        answer: the text of the answer, with all that the template writes after it.
        token_ids: the answer's tokens up to its end token.
        is_trained: which of them are trained.
        rest: the tokens after the end token.
        is_open: whether the end token is not in the text, but was added.
    """

    opened: str
    context: str
    answer: str
    token_ids: list[int]
    is_trained: list[bool]
    rest: list[int]
    is_open: bool

    @property
    def closed(self) -> str:
        return self.context + self.answer

    def goes_on(self, text: str) -> bool:
        """Return whether the turn continues ``text``, in training as in sampling."""
        return self.opened.startswith(text) and self.context.startswith(text)


class TurnSplitter:
    """Splits conversations, with one tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: TurnEnds) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._said: set[str] = set()

    def split(
        self, messages: Sequence[Mapping[str, Any]], turns: Sequence[int], where: str, arguments: Mapping[str, Any]
    ) -> list[Segments]:
        """Return the sequences of a conversation, each as segments.

        Args:
            messages: have roles and contents. Those after the last turn are left out.
            turns: the indices of the messages that are trained, of which there is at least one.
            where: the place of the row, for messages.
            arguments: variables of the chat template in addition to the messages.

        Raises:
            DataError: the template can't render the messages, or nothing ends a turn.
        """
        if not turns[0]:
            raise DataError(
                f"{where}: expected a message before the first assistant message, got none; add a user message"
            )
        if arguments.get(CONTENT_KEY) != "token":
            messages = [*map(control_of(self._tokenizer, self._ends.ids).guarded_message, messages)]
        if messages[turns[-1] + 1 :] and "behind" not in self._said:
            self._said.add("behind")
            logger.warning("%s: what follows the last answer is left out; the same in other rows is not said", where)
        found = [self._turn(messages[: turn + 1], where, arguments) for turn in turns]
        joined = self._joined(found)
        if joined is not None:
            return [joined]
        return [
            [_context(plain_ids(self._tokenizer, turn.context)), (turn.token_ids, turn.is_trained)] for turn in found
        ]

    def _turn(self, messages: Sequence[Mapping[str, Any]], where: str, arguments: Mapping[str, Any]) -> _Turn:
        """Return the last of ``messages`` as a turn."""
        opened = self._render(messages[:-1], where, arguments, open_turn=True)
        closed = self._render(messages, where, arguments, open_turn=False)
        spans = self._spans(messages, arguments)
        size = len(opened)
        if not closed.startswith(opened):
            other = [*messages[:-1], {"role": "assistant", "content": _OTHER}]
            answered = self._render(other, where, arguments, open_turn=False)
            unopened = self._render(messages[:-1], where, arguments, open_turn=False)
            # What the answer itself has in common with the opener by chance is no context.
            size = _num_common(opened, closed, answered)
            if size < len(unopened):
                # The template renders the messages before the answer in another way once it is there.
                common = closed[: _num_common(closed, answered)]
                begin = _begin_of_answer(common, opened, unopened, messages[:-1], where)
                spans = spans and [(first + len(opened) - begin, end + len(opened) - begin) for first, end in spans]
                closed, size = opened + closed[begin:], len(opened)
        thinking = _with_thinking(messages[-1], opened, closed, size)
        if thinking is not None:
            closed, size, spans = thinking, len(opened), None
        answer = closed[size:]
        self._check_rendered(messages[-1], answer, f"{where}: message {len(messages) - 1}")
        token_ids, is_marked = self._marked(closed[:size], answer, spans)
        end = self._ends.num_to_end(token_ids)
        if end is not None:
            is_trained = [*is_marked[: end - 1], True]
            return _Turn(opened, closed[:size], answer, token_ids[:end], is_trained, token_ids[end:], is_open=False)
        mark = mark_after(self._tokenizer, self._ends, messages, arguments)
        if mark is None:
            raise DataError(
                f"{where}: expected a token that ends the answer, got none: the chat template writes none, and the "
                f"tokenizer has no eos_token; set it in tokenizer_config.json"
            )
        return _Turn(opened, closed[:size], answer, [*token_ids, mark], [*is_marked, True], [], is_open=True)

    def _check_rendered(self, message: Mapping[str, Any], answer: str, where: str) -> None:
        """Check that the text of a turn has the content of its message. Say which other words of it are missing.

        Raises:
            DataError: it has not.
        """
        content = joined_text(message.get("content") or "") or ""
        if content.rpartition(_THOUGHT)[2].strip() not in answer:
            raise DataError(
                f"{where}: expected its content in the text that the chat template renders, got another text; use a "
                f"template that renders it, or correct the message"
            )
        for key, words in _words_beside_content(message).items():
            if key not in self._said and any(word.strip() not in answer for word in words):
                self._said.add(key)
                logger.warning(
                    "%s: the chat template does not render its %s, so it is not trained; the same in other rows is not "
                    "said", where, key,
                )  # fmt: skip

    def _joined(self, turns: Sequence[_Turn]) -> Segments | None:
        """Return all turns as one sequence. None if the template does not render them one after the other."""
        segments: Segments = []
        done, rest, is_open = "", [], False
        for turn in turns:
            begun = [
                text for text in (done, self._up_to_end(segments, done)) if text is not None and turn.goes_on(text)
            ]
            if not begun:
                return None
            between = ids_after(self._tokenizer, begun[0], turn.context[len(begun[0]) :])
            if is_open:
                # The text goes on with the mark that was added.
                mark = segments[-1][0].pop()
                segments[-1][1].pop()
                if self._ends.next_mark(between, self._tokenizer) != mark:
                    return None
                segments.append((between, [place == between.index(mark) for place in range(len(between))]))
            else:
                segments += [_context(rest if begun[0] == done else []), _context(between)]
            segments.append((list(turn.token_ids), list(turn.is_trained)))
            done, rest, is_open = turn.closed, turn.rest, turn.is_open
        return [*segments, _context(rest)]

    def _up_to_end(self, segments: Segments, done: str) -> str | None:
        """Return the text ``done`` up to the end token of its last turn. None if the text does not spell it out."""
        if not segments:
            return None
        before, end, _ = done.rpartition(str(self._tokenizer.convert_ids_to_tokens(segments[-1][0][-1])))
        return before + end if end else None

    def _marked(
        self, context: str, answer: str, spans: Sequence[tuple[int, int]] | None
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of ``answer``, which follows ``context``, and which of them begin in one of ``spans``,
        characters of the whole text. None as spans is all of it.
        """
        token_ids = ids_after(self._tokenizer, context, answer)
        if spans is None:
            return token_ids, [True] * len(token_ids)
        places = [len(context) + place for place in places_after(self._tokenizer, context, answer)]
        return token_ids, [any(begin <= place < end for begin, end in spans) for place in places]

    def _spans(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> Sequence[tuple[int, int]] | None:
        spans = marked_spans(self._tokenizer, messages, arguments)
        if spans is None or self._tokenizer.is_fast:
            return spans
        if _MARKS not in self._said:
            self._said.add(_MARKS)
            logger.warning(
                "the chat template has %s marks, and the tokenizer (%s) does not know the characters of its tokens, so "
                "the assistant's messages are trained whole; use a tokenizer with a tokenizer.json to train only "
                "what is marked", _MARKS, type(self._tokenizer).__name__,
            )  # fmt: skip
        return None

    def _render(
        self, messages: Sequence[Mapping[str, Any]], where: str, arguments: Mapping[str, Any], *, open_turn: bool
    ) -> str:
        try:
            check_rendered(self._tokenizer, messages, arguments)
            return str(apply_template(self._tokenizer, messages, arguments, open_turn=open_turn))
        except Exception as error:  # a template may raise anything; without a template transformers raises ValueError
            raise DataError(
                f"{where}: the chat template of model.path can't render the messages: {error}; change the row, or use "
                f"a model whose template accepts it"
            ) from error


def _words_beside_content(message: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what the other keys of a message say, by key: the names of called tools, and thoughts."""
    found = {"tool_calls": [str(called_function(call).get("name", "")) for call in message.get("tool_calls") or []]}
    thoughts = {key: message.get(key) for key in THOUGHT_KEYS}
    return found | {key: [text] for key, text in thoughts.items() if isinstance(text, str)}


def _begin_of_answer(closed: str, opened: str, unopened: str, before: Sequence[Mapping[str, Any]], where: str) -> int:
    """Return where the last answer begins in a text that begins with ``closed``: behind the last of what opens it.

    Raises:
        DataError: the text does not have it, or has a message of ``before`` behind it: the template joins messages.
    """
    opener = opened.removeprefix(unopened) if opened.startswith(unopened) else ""
    last = (joined_text(before[-1].get("content") or "") or "").strip() if before[-1]["role"] == "assistant" else ""
    for part in (opener, opener.partition(_THINK)[0]):
        head, found, rest = closed.rpartition(part) if part else ("", "", "")
        if found and not (last and last in rest):
            return len(head) + len(found)
    raise DataError(
        f"{where}: expected an answer that begins where the chat template opens it, got one that the template joins "
        f"with the message before it; join the two in the row, or use a model with another template"
    )


def _num_common(*texts: str) -> int:
    """Return with how many equal characters the texts begin."""
    for place, letters in enumerate(zip(*texts, strict=False)):
        if len(set(letters)) > 1:
            return place
    return min(map(len, texts))


def _context(token_ids: list[int]) -> tuple[list[int], list[bool]]:
    return token_ids, [False] * len(token_ids)


def _with_thinking(message: Mapping[str, Any], opened: str, closed: str, size: int) -> str | None:
    """Return the text of a turn as it would be sampled, if the template opens its thinking in the prompt, but drops the
    thinking of the message or writes the opener a second time. Else None.
    """
    content = (joined_text(message.get("content") or "") or "").strip()
    thought, _, visible = content.rpartition(_THOUGHT)
    if not visible.strip() or not thought.startswith(_THINK) or not opened.rstrip().endswith(_THINK):
        return None
    thought = thought.removeprefix(_THINK)
    if thought.strip() in closed[size:] and _THINK not in closed[size:]:
        return None
    tail = closed.rpartition(visible.strip())[2]
    return opened + thought.lstrip("\n") + _THOUGHT + visible + tail
