"""Reads the rows of a dataset and turns them into tokens with a loss mask.

A prompt and an answer are both text, or both lists of messages. Text is used without a template. The tokenizer's usual
start tokens come first, as at sampling time, and the answer is followed by the end-of-sequence token. Messages are
rendered with the chat template, turn by turn (``turns.py``). What it writes in front of a turn is tokenised in one
piece with the messages before it, as at sampling time. No system message is added. The loss is on the answer: its text
and end token, or every assistant turn up to its end token. Sequences are cut on the right.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash

from async_rl.config.data import SET_BY_US, parse_tools
from async_rl.data.chat import TEXT_ROLE, ids_after, render_answer, text_ids
from async_rl.data.context_columns import check_columns
from async_rl.data.files import Source, messages_without_nulls, parse_json
from async_rl.data.message_keys import ASSISTANT_KEYS, FLAGS, READ_KEYS, is_trained, refuse_flags
from async_rl.data.template import apply_template, check_arguments, variables_of
from async_rl.data.template_forms import call_arguments, called_function, joined_text
from async_rl.data.tool_nulls import without_table_nulls
from async_rl.data.turn_end import TurnEnds, turn_ends
from async_rl.data.values import is_absent, kind
from async_rl.errors import DataError, ModelError, naming
from async_rl.extensions.offline.forms import Text
from async_rl.extensions.offline.turns import Segments, TurnSplitter
from async_rl.learner.sequences import TrainSequence, train_sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Row = TypeVar("Row")
_LISTS = ("messages", "tools")
_TEXTS_OR_LISTS = ("prompt", "chosen", "rejected", "completion", "response")
"""Fields of a row that are lists of messages or tools, and those that are text or lists of messages."""
_MESSAGE = re.compile(r"""\s*\{\s*"role"\s*:""")


def load_rows(
    source: str, key: str, encode: Callable[[int, str, Mapping[str, Any]], Row], ignore: Collection[str] = ()
) -> list[Row]:
    """Read the rows of the dataset ``source``, and encode each.

    Args:
        source: the dataset, as ``data.files.Source`` takes it.
        key: the config key that names it, for messages.
        encode: makes a row from its index, its place and its fields.
        ignore: names of columns that are left out.

    Raises:
        DataError: the dataset can't be read, or has no row or a bad row. The message names the row's place.
    """
    rows = [encode(index, where, fields) for index, (where, fields) in enumerate(read_rows(source, key, ignore))]
    if not rows:
        raise DataError(f"{key}: expected at least one row in {source}, got none; add rows to it")
    return rows


def read_rows(source: str, key: str, ignore: Collection[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row as a pair (its place, its fields). Messages and tools may be JSON text, as in CSV."""
    with naming(key, DataError):
        dataset = Source(source)
    for where, row in dataset.records():
        if isinstance(row, DataError):
            raise DataError(f"{row}; correct the row")
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, got {kind(row)}; write the row as an object of fields")
        fields = {name: value for name, value in row.items() if name not in ignore}
        check_columns(fields, where)
        begins = dict.fromkeys(_LISTS, "[")
        if source.lower().endswith(".csv"):  # every cell is text
            begins |= dict.fromkeys(_TEXTS_OR_LISTS, "[{")
        for name, begin in begins.items():
            if isinstance(text := fields.get(name), str) and (text.lstrip().startswith(begin) or _MESSAGE.match(text)):
                value = parse_json(text.encode(errors="replace"), f"{where}: {name}", "JSON")
                fields[name] = value if name == "tools" else messages_without_nulls(value)
        yield where, without_table_nulls(fields)


class RowEncoder:
    """Turns prompts and answers into sequences, with one tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any],
        *,
        max_length: int,
        section: str,
        ends: TurnEnds | None = None,
    ) -> None:
        """Check the chat template's ``arguments``, its variables in addition to the messages.

        Args:
            tokenizer: that of the model.
            arguments: those of the config. A row's own tools have precedence.
            max_length: longer sequences are cut on the right. Also an attribute.
            section: the config section with ``max_length``, for messages.
            ends: the tokens that end a turn; if None, those that the tokenizer knows.

        Raises:
            ModelError: the template does not read one of the arguments.
        """
        check_arguments(tokenizer, arguments)
        self._tokenizer, self._arguments = tokenizer, arguments
        self.max_length, self._section = max_length, section
        self._ends = ends or turn_ends(tokenizer, arguments=arguments)
        self._splitter = TurnSplitter(tokenizer, self._ends)
        self._num_encoded = self._num_cut = self._num_left_out = 0
        self._seen_keys: set[tuple[str, str]] = set()
        self._named: set[str] = set()

    def encode(
        self, index: int, prompt: Text, answer: Text, where: str, *, tools: Any = None, variables: Any = None
    ) -> TrainSequence:
        """Return the sequence of ``answer`` to ``prompt``, which is compared with others. Its ``sequence_id`` is
        ``index``.

        Raises:
            DataError: the row at the place ``where`` is bad, no token of the answer is left, or the chat template makes
                several sequences of the answer's turns.
            ModelError: the chat template does not read the row's ``tools``.
        """
        refuse_flags(answer, where)
        first, *more = self.encode_turns(index, prompt, answer, where, tools=tools, variables=variables)
        if more:
            raise DataError(
                f"{where}: expected an answer that is one text, got {1 + len(more)} assistant messages that the chat "
                f"template renders differently once the conversation goes on; move all but the last to prompt"
            )
        return first

    def encode_turns(
        self,
        index: int,
        prompt: Text,
        answer: Text,
        where: str,
        *,
        tools: Any = None,
        variables: Any = None,
        only_last: bool = False,
    ) -> list[TrainSequence]:
        """Return the sequences of ``answer`` to ``prompt``: one, or one for each turn of the model (``turns.py``). The
        ``sequence_id`` of each is ``index``.

        The prompt of a list of messages may be empty: the loss is then on all assistant turns of ``answer``, or with
        ``only_last`` on the last, but for those that a flag leaves out. ``tools`` and ``variables`` are what the row
        has for the template: its columns ``tools`` and ``chat_template_kwargs``.

        Raises:
            DataError: the row at the place ``where`` is bad, or no token of the answer is left.
            ModelError: the chat template does not read the row's ``tools``.
        """
        if isinstance(prompt, str) and isinstance(answer, str):
            found = [self._text_segments(prompt, answer, where)]
        else:
            messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            arguments = self._arguments_of(tools, variables, where)
            whole = [*prompt, *messages]
            turns = _trained_turns(whole, len(prompt), where, only_last=only_last)
            self._name_unread_keys(whole, arguments, where)
            found = self._splitter.split(whole, turns, where, arguments)
        sequences = [self._sequence(index, segments) for segments in found]
        trained = [sequence for sequence in sequences if sequence.loss_mask.any()]
        if not trained:
            raise DataError(
                f"{where}: expected a token of the answer within the first {self.max_length} tokens, got none; raise "
                f"{self._section}.max_length, or remove the row"
            )
        self._num_left_out += len(sequences) - len(trained)
        return trained

    def _sequence(self, index: int, segments: Segments) -> TrainSequence:
        token_ids = [token for tokens, _ in segments for token in tokens]
        loss_mask = np.array([trained for _, mask in segments for trained in mask], dtype=np.bool_)
        loss_mask[:1] = False  # nothing predicts a first token
        self._num_encoded += 1
        self._num_cut += len(token_ids) > self.max_length
        return train_sequence(index, token_ids[: self.max_length], loss_mask[: self.max_length])

    def encode_whole(self, index: int, text: str, where: str) -> TrainSequence:
        """Return the sequence of ``text``, all of which is trained on. Its ``sequence_id`` is ``index``.

        The tokenizer's start tokens and the end-of-sequence token are added, unless the text itself has them.

        Raises:
            DataError: the row at the place ``where`` has no text to train on.
        """
        begin, end = (token if isinstance(token, str) else "" for token in (
            self._tokenizer.bos_token, self._tokenizer.eos_token,
        ))  # fmt: skip
        if self._tokenizer("")["input_ids"]:
            text = text.removeprefix(begin)
        return self.encode(index, "", text.removesuffix(end), where)

    def scored(self, prompt: Text, answer: Text, where: str, variables: Any = None) -> np.ndarray:
        """Return the tokens of ``prompt`` with ``answer``, int32 [T], as a reward model reads them: rendered without
        the variables of the config and without tools, and not cut.

        Raises:
            DataError: the row at the place ``where`` is bad.
        """
        match prompt, answer:
            case str(), str(content):
                messages: list[Any] = [{"role": TEXT_ROLE, "content": prompt}]
            case [*messages], str(content):
                pass
            case [*before], [*turns, {"role": "assistant", "content": text, **more}] if joined_text(text) is not None:
                messages, content = [*before, *turns], joined_text(text) or ""
                self._name([key for key, value in more.items() if not is_absent(value)], f"{where}: the answer")
            case _:
                raise DataError(
                    f"{where}: expected chosen and rejected as text, or as lists of messages that end with an "
                    f"assistant's, got {answer!r:.80}; correct the row"
                )
        for message in messages:
            check_message(message, where)
        refuse_flags(answer, where)
        arguments = self._arguments_of(None, variables, where)
        self._name_unread_keys(messages, arguments, where)
        try:
            return render_answer(self._tokenizer, messages, content, arguments)
        except ModelError as error:
            raise DataError(f"{where}: {error}") from error

    def say_what_was_cut(self, key: str) -> None:
        """Log how many of the sequences so far, which are of the dataset ``key``, were longer than ``max_length``."""
        if self._num_cut:
            logger.warning(
                "%s: cut the end of %d of %d sequences, which have more than %s.max_length = %d tokens",
                key, self._num_cut, self._num_encoded, self._section, self.max_length,
            )  # fmt: skip
        if self._num_left_out:
            logger.warning(
                "%s: left out %d assistant messages that begin after %s.max_length = %d tokens",
                key, self._num_left_out, self._section, self.max_length,
            )  # fmt: skip

    def _arguments_of(self, tools: Any, variables: Any, where: str) -> Mapping[str, Any]:
        """Return the variables of the template for a row: those of the config, and over them those of the row."""
        own = {**self._arguments, **self._variables(variables or {}, f"{where}: chat_template_kwargs")}
        if is_absent(tools):
            return own
        try:
            own["tools"] = parse_tools(json.dumps(tools))
        except ValueError as error:
            raise DataError(f"{where}: tools: {error}, or rename the column if it has something else") from None
        check_arguments(self._tokenizer, {"tools": own["tools"]})
        return own

    def _variables(self, given: Any, where: str) -> dict[str, Any]:
        """Return those variables of a row that the template reads. Name the others once."""
        found = parse_json(given.encode(), where, "a JSON object") if isinstance(given, str) else given
        if not isinstance(found, dict):
            raise DataError(
                f"{where}: expected an object of variables of the chat template, got {kind(given)}; correct it"
            )
        read = variables_of(self._tokenizer.get_chat_template() if self._tokenizer.chat_template else "") - SET_BY_US
        found = {name: value for name, value in found.items() if value is not None}
        self._name(found.keys() - read, where)
        return {name: value for name, value in found.items() if name in read}

    def _name_unread_keys(self, messages: Sequence[Any], arguments: Mapping[str, Any], where: str) -> None:
        """Name once those keys of ``messages`` without which the rendered text is the same."""
        for place, message in enumerate(messages):
            read = ASSISTANT_KEYS if message["role"] == "assistant" else READ_KEYS
            keys = [key for key in message.keys() - read if not is_absent(message[key])]
            new = {(message["role"], key) for key in keys} - self._seen_keys
            self._seen_keys |= new
            unread = [key for _, key in new if self._is_unread(messages, place, key, arguments)]
            self._name(unread, f"{where}: message {place}")

    def _is_unread(self, messages: Sequence[Any], place: int, key: str, arguments: Mapping[str, Any]) -> bool:
        without = {name: value for name, value in messages[place].items() if name != key}
        both = messages, [*messages[:place], without, *messages[place + 1 :]]
        try:
            texts = [apply_template(self._tokenizer, one, arguments, open_turn=False) for one in both]
        except Exception:  # a template raises whatever its author wrote: one that raises without the key reads it
            return False
        return texts[0] == texts[1]

    def _name(self, unread: Iterable[str], where: str) -> None:
        if names := sorted(set(unread) - self._named):
            self._named.update(names)
            logger.warning("%s: nothing reads %s; the same in other rows is not said", where, ", ".join(names))

    def _text_segments(self, prompt: str, answer: str, where: str) -> Segments:
        end = self._ends.eos
        if end is None:
            raise DataError(
                f"{where}: expected a tokenizer with an end-of-sequence token, which ends the answer, got one without; "
                f"set its eos_token, or write the row as messages"
            )
        begin = text_ids(self._tokenizer, prompt).tolist()
        trained: list[int] = [*ids_after(self._tokenizer, prompt, answer), end]
        return [(begin, [False] * len(begin)), (trained, [True] * len(trained))]


def template_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``RowEncoder`` that a row has for the chat template."""
    return {"tools": row.get("tools"), "variables": row.get("chat_template_kwargs")}


def _trained_turns(messages: Sequence[Any], first: int, where: str, *, only_last: bool) -> list[int]:
    """Return the indices of the assistant messages from number ``first`` on, or with ``only_last`` of the last, that no
    flag leaves out.

    Raises:
        DataError: there is none, or a message has another form.
    """
    for message in messages:
        check_message(message, where)
    turns = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    trained = [i for i in turns[-1 if only_last else 0 :] if is_trained(messages[i], f"{where}: message {i}")]
    if not trained:
        roles = [message["role"] for message in messages[first:]]
        flags = ", ".join(sorted({key for i in turns for key in FLAGS & messages[i].keys()}))
        raise DataError(
            f'{where}: expected at least one message with the role "assistant"'
            f"{flags and f' that is not left out by {flags}'}, got the roles {roles}; remove the row"
        )
    return trained


def check_message(message: Any, where: str) -> None:
    """Check a message: it has a role, and text, text parts or, with tool calls, nothing as its content.

    Raises:
        DataError: it is another one.
    """
    match message:
        case {"role": str(), "tool_calls": [*calls], "content": None} if calls:
            pass
        case {"role": str(), "tool_calls": [*calls]} if calls and "content" not in message:
            pass
        case {"role": str(), "content": content} if joined_text(content) is not None:
            calls = message.get("tool_calls") or []
        case _:
            raise DataError(
                f'{where}: expected messages with "role" and "content" as text, or a list of text parts, got '
                f"{message!r:.80}; correct the message"
            )
    if not isinstance(calls, list):
        raise DataError(
            f"{where}: expected tool_calls as a list of calls, got {kind(calls)}; write it as a list, not as JSON text"
        )
    for call in calls:
        if not isinstance(called_function(call).get("name"), str):
            raise DataError(
                f'{where}: expected a tool call as {{"function": {{"name", "arguments"}}}}, got {call!r:.80}; correct '
                f"the message"
            )
        if not isinstance(call_arguments(call), dict | None):
            raise DataError(
                f"{where}: expected the arguments of a tool call as an object, or as the JSON text of one, got "
                f"{call!r:.80}; correct the message"
            )


def digest_of(sequences: Iterable[TrainSequence], figures: Sequence[float] = ()) -> str:
    """Return the digest of the tokens of sequences, of which of them are trained, and of ``figures``.

    Figures that are all 0 count as none.
    """
    hasher = xxhash.xxh3_128()
    for sequence in sequences:
        hasher.update(len(sequence.token_ids).to_bytes(8, "little"))
        hasher.update(sequence.token_ids.tobytes())
        hasher.update(sequence.loss_mask.tobytes())
    if any(figures):
        hasher.update(np.array(figures, dtype="<f8").tobytes())
    return hasher.hexdigest()
