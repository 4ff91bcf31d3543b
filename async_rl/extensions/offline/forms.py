"""The forms of rows for training on given answers: which fields are the prompt, and which the answers.

The prompt is ``prompt``, or else ``messages``. It is text, a list of messages, or one message. Answers have these
forms, too. Text stays text only if prompt and answers are text: beside messages, a text prompt is a user's message and
a text answer an assistant's. An answer may repeat the messages of the prompt. ``system`` and ``history`` come before
the prompt, if it has messages. Other fields are free (``data.context_columns``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from async_rl.data.context_columns import CONTEXT, INSTRUCTION, check_beside_text, split_context, text_of
from async_rl.data.values import kind
from async_rl.errors import DataError

Text = str | Sequence[Any]
"""Plain text, or a list of messages."""

_ANSWERS = ("response", "completion")


def supervised_parts(row: Mapping[str, Any], where: str) -> tuple[Text | None, Text]:
    """Return the prompt and the answer of a row of ``sft``.

    Of ``messages`` that end with an assistant's, or have no answer beside them, all are the answer, to an empty list. A
    row ``{"text": text}`` is an answer without a prompt, which is None then.

    Raises:
        DataError: the row at the place ``where`` has none of the forms.
    """
    key = next((key for key in _ANSWERS if key in row), "")
    messages = _text_or_messages(row.get("messages"))
    if isinstance(messages, list) and not (key and "prompt" not in row and _role(messages[-1:]) != "assistant"):
        return split_context(row, messages, where)
    if key:
        prompt, (answer,) = _prompt_and_answers(row, (key,), where)
        if prompt is not None:
            return _in_context(row, prompt, where), answer
    if isinstance(text := row.get("text"), str):
        return _in_context(row, None, where, text), text
    raise DataError(
        f'{where}: expected "messages" as a list, "prompt" with "response" or "completion" as text or lists of '
        f'messages, or "text", got keys {sorted(row)}; correct the row'
    )


def labelled_parts(row: Mapping[str, Any], where: str) -> tuple[Text, Text, Any]:
    """Return the prompt, the answer and the label of a row of ``dpo.loss = "kto"``.

    Raises:
        DataError: the row at the place ``where`` has none of the forms.
    """
    if "label" in row and "completion" in row:
        prompt, (answer,) = _prompt_and_answers(row, ("completion",), where)
        if prompt is not None:
            return _in_context(row, prompt, where), answer, row["label"]
    raise DataError(
        f'{where}: expected "prompt" and "completion" as text or lists of messages, and "label" as true or false, got '
        f"keys {sorted(row)}; correct the row"
    )


def pair_parts(row: Mapping[str, Any], where: str) -> tuple[Text | None, Text, Text]:
    """Return the prompt, the chosen and the rejected answer of a row.

    Without a prompt, the messages that both answers begin with are the prompt. It is None if both are text: what they
    begin with is the prompt.

    Raises:
        DataError: the row at the place ``where`` has none of the forms.
    """
    prompt, (chosen, rejected) = _prompt_and_answers(row, ("chosen", "rejected"), where)
    if prompt is None and not isinstance(chosen, str) and not isinstance(rejected, str):
        prompt, chosen, rejected = _split(chosen, rejected, row.get("prompt"), where)
    return _in_context(row, prompt, where, chosen), chosen, rejected


def _in_context(row: Mapping[str, Any], prompt: Text | None, where: str, whole: Text = "") -> Any:
    """Return ``prompt`` with the other columns of its row that the model reads. Without a prompt it reads ``whole``.

    Raises:
        DataError: text has no place for one of them, or a column has another form.
    """
    names, text = CONTEXT, whole if prompt is None else prompt
    if not isinstance(text, str):
        prompt = [message for part in split_context(row, text, where) for message in part]
        names, text = (), "\n".join(map(text_of, prompt))
    check_beside_text(row, (*names, *INSTRUCTION) if "prompt" in row else names, text, where)
    return prompt


def _prompt_and_answers(row: Mapping[str, Any], keys: Sequence[str], where: str) -> tuple[Text | None, list[Text]]:
    """Return the prompt of a row, and its answers at ``keys``. The prompt is None if the answers contain it.

    Raises:
        DataError: a field is neither text nor messages, or text and messages are mixed.
    """
    asked = "prompt" if "prompt" in row else "messages"
    prompt = _text_or_messages(row.get(asked))
    answers: list[Text] = [found for key in keys if (found := _text_or_messages(row.get(key))) is not None]
    is_text = {isinstance(answer, str) for answer in answers}
    if (asked in row and prompt is None) or len(answers) < len(keys) or len(is_text) > 1:
        raise _no_form(row, (asked, *keys), where)
    size = len(prompt or ())
    if isinstance(prompt, list) and all(answer[:size] == prompt and len(answer) > size for answer in answers):
        return prompt, [answer[size:] for answer in answers]
    are_whole = is_text == {False} and any(_role(answer) != "assistant" for answer in answers)
    if are_whole and (isinstance(prompt, str) or asked == "messages"):
        return None, answers
    if asked == "messages" and isinstance(prompt, list) and _role(prompt[-1:]) == "assistant":
        raise DataError(
            f'{where}: expected "messages" to end before the answer, got an assistant\'s as the last; remove it, or '
            f"rename the column"
        )
    if isinstance(prompt, str) and is_text == {False}:
        return [{"role": "user", "content": prompt}], answers
    if isinstance(prompt, list):
        _check_not_repeated(prompt, answers, where)
    return prompt, answers


def _check_not_repeated(prompt: Sequence[Any], answers: Sequence[Text], where: str) -> None:
    """Check that no answer begins with a part of the prompt, which would then be in the text twice.

    Raises:
        DataError: one does.
    """
    for answer in answers:
        asked = [] if isinstance(answer, str) else list(takewhile(lambda one: _role([one]) != "assistant", answer))
        if asked and (prompt[-1] in asked or _role(asked) == "system"):
            raise DataError(
                f"{where}: expected answers that begin after the prompt, or that repeat all its messages, got one that "
                f"begins with {asked[0]!r:.80}; remove what stands before the answer, or put all of it into the prompt"
            )


def _no_form(row: Mapping[str, Any], keys: Sequence[str], where: str) -> DataError:
    shown = ", ".join(f"{key}: {kind(row[key])}" for key in keys if key in row)
    names = " and ".join(f'"{key}"' for key in keys[1:])
    return DataError(
        f'{where}: expected {names}, all as text or as lists of messages, with "prompt" or "messages" before them, or '
        f"whole lists of messages without a prompt, got {shown or f'keys {sorted(row)}'}; correct the row"
    )


def _text_or_messages(value: Any) -> str | list[Any] | None:
    """Return ``value`` if it is text or a list that is not empty, and one message as a list. Else None."""
    if isinstance(value, dict) and "role" in value:
        return [value]
    return value if isinstance(value, str) or (isinstance(value, list) and value) else None


def _role(messages: Text) -> Any:
    """Return the role of the first of ``messages``."""
    first = messages[0] if messages else None
    return first.get("role") if isinstance(first, dict) else None


def _split(chosen: Sequence[Any], rejected: Sequence[Any], prompt: Any, where: str) -> tuple[Text, Text, Text]:
    """Return the messages that both lists begin with, and what follows in each. A ``prompt`` repeats the last of
    these.
    """
    both = list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    size = len(both)
    if chosen == rejected:  # the same answer twice
        size -= 1
    rests = chosen[size:], rejected[size:]
    if not size or any(_role(rest) != "assistant" for rest in rests):
        raise DataError(
            f"{where}: expected chosen and rejected to begin with the same messages and to differ from an assistant "
            f"message on, got {len(both)} equal messages of {len(chosen)} and {len(rejected)}; correct the row, or "
            f'give these messages as "prompt"'
        )
    if isinstance(prompt, str) and text_of(both[size - 1][0]) != prompt.strip():
        raise DataError(
            f'{where}: expected "prompt" to be the last message that chosen and rejected have in common, got '
            f"{prompt!r:.80}; leave the prompt out, or write it as a list of messages"
        )
    return chosen[:size], *rests
