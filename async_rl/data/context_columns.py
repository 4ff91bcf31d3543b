"""Columns beside the messages of a row that change its conversation: they are read, or refused by name.

``system`` and ``history`` (of alpaca, ms-swift and LLaMA-Factory) are read where a chat template renders the row. The
others of the closed list below are refused, unless ``data.ignore`` lists them. A value that is null, empty text or an
empty list counts as absent. All other columns are free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from async_rl.data.files import parse_json
from async_rl.data.template_forms import joined_text
from async_rl.data.values import is_absent, kind
from async_rl.errors import DataError

CONTEXT = ("system", "history")
INSTRUCTION = ("instruction", "input")
"""Columns of alpaca's form, which are the prompt there."""
_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask", "response_mask")
"""Columns of TRL and verl that say which token ids of a row are trained."""
_SYSTEM_ROLES, _ROLES = ("system", "developer"), ("user", "assistant")


def check_columns(row: Mapping[str, Any], where: str) -> None:
    """Check that a row to train on has no column that would be lost.

    Raises:
        DataError: it has one. The message begins with ``where``, the place of the row.
    """
    has_ids = any(name.endswith("_ids") and isinstance(value, list) for name, value in row.items())
    for name in ("documents", "images", *(() if has_ids else _MASKS)):
        if not is_absent(row.get(name)):
            raise _lost(name, row[name], where, "it is not read: write its words, or weight: 0, into the messages")


def check_beside_text(row: Mapping[str, Any], names: Collection[str], text: str, where: str) -> None:
    """Check that ``text``, which the model reads of a row, has what the columns ``names`` say.

    Raises:
        DataError: one says something else. The message begins with ``where``, the place of the row.
    """
    for name in names:
        if not is_absent(row.get(name)) and not (isinstance(row[name], str) and row[name].strip() in text):
            reason = "no template renders it" if name in CONTEXT else "the prompt does not have its text"
            raise _lost(name, row[name], where, f"{reason}: write it into the prompt, or the row as messages")


def split_context(row: Mapping[str, Any], messages: Sequence[Any], where: str) -> tuple[list[Any], list[Any]]:
    """Return what ``messages`` begin with, given the columns ``system`` and ``history`` of their row, and the rest.

    The first list has the system message and the turns of the history. Both are empty lists or messages. What the
    messages have already is not added to them.

    Raises:
        DataError: a column has another form, or another system message. The message begins with ``where``.
    """
    num_lead = next((i for i, one in enumerate(messages) if _role(one) not in _SYSTEM_ROLES), len(messages))
    lead, rest = list(messages[:num_lead]), list(messages[num_lead:])
    if not is_absent(system := row.get("system")):
        there = [one for one in messages if _role(one) in _SYSTEM_ROLES]
        if not isinstance(system, str) or any(text_of(one) != system.strip() for one in there):
            shown = ", ".join(map(text_of, there))
            raise _lost("system", system, where, f"expected text, equal to the system message {shown[:60]!r}")
        lead = lead if there else [{"role": "system", "content": system}]
    turns = [] if is_absent(row.get("history")) else _turns(row["history"], where)
    return (lead, rest) if rest[: len(turns)] == turns else ([*lead, *turns], rest)


def _turns(history: Any, where: str) -> list[dict[str, str]]:
    """Return the messages of a history, a list of pairs [question, answer], which may be JSON text."""
    found = parse_json(history.encode(), f"{where}: history", "a JSON list") if isinstance(history, str) else history
    pairs: list[Any] = found if isinstance(found, list) else [found]
    if not all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in pairs):
        raise _lost("history", history, where, "expected a list of pairs [question, answer], both text")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(_ROLES, pair, strict=True)]


def _lost(name: str, value: Any, where: str, why: str) -> DataError:
    return DataError(
        f"{where}: {name}: {why}, got {kind(value)}; if it is not meant for the model, put {name!r} into data.ignore"
    )


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def text_of(message: Any) -> str:
    """Return the text of ``message``, without white space around it. Empty if it is no message with text."""
    return (joined_text(message.get("content")) or "").strip() if isinstance(message, dict) else ""
