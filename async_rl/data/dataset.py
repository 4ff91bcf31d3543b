"""Loads a dataset. The input is the path of a file, a hub id or NAME:REST, which an extension reads. The output is the
dataset's checked rows.

The queue server (for training and evaluations), offline evaluation and the checks before a run call this module.
``files`` reads the data, and ``parse_row`` checks one row. A row has a prompt, as ``messages`` or as ``prompt`` text.
With an environment, a row may have no prompt. A row also has the fields that its reward needs: ``gt_answer``
(mathematics), ``test_cases`` with an optional ``fn_name`` (programs), ``extra_info`` (environments and rewards of the
user). Other columns go to the reward as they are. What can't be sent to a generator is dropped by name (``sendable``).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from async_rl.config.config import Config
from async_rl.config.data import PromptFormat, RowField, parse_tools
from async_rl.config.generator import has_model
from async_rl.data.chat import stored_template
from async_rl.data.context_columns import CONTEXT, check_beside_text, split_context
from async_rl.data.files import Source, messages_without_nulls, parse_json
from async_rl.data.message_keys import FLAGS
from async_rl.data.sendable import split_sendable, why_unsendable
from async_rl.data.template_forms import adapted, joined_text, why_lost
from async_rl.data.tool_nulls import without_table_nulls
from async_rl.data.values import kind
from async_rl.errors import DataError
from async_rl.records import DROPPED_KEY, TEXT_ROLE, TOOLS_ROLE
from async_rl.registry import find_offer, load, our_offers
from async_rl.rewards.gold import gold_readings, number_text

_KEYS: tuple[RowField, ...] = get_args(RowField)
_JSON_KEYS: tuple[RowField, ...] = ("messages", "tools", "test_cases", "extra_info")
"""Keys whose value may be JSON text. CSV can't hold objects, and some datasets write test cases as text."""

FieldReader = Callable[[dict[str, Any]], dict[str, Any]]
"""What ``async_rl.row_fields`` has: a function of the fields of a row. It checks the field that it is offered for, and
returns the fields as a generator gets them, or as they are if the row lacks that field. ValueError names a wrong field.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row of a dataset.

    Attributes:
        messages: the prompt. Each message has ``role`` and ``content``. Empty if an environment makes the prompt. A
            row with tools of its own has them in a first message with the role ``TOOLS_ROLE``.
        reward_data: all other fields of the row, for the reward and the environment. ``gt_answer`` is as its author
            wrote it, but for numbers (``RowRules.keeps_numbers``). What was dropped is listed at ``DROPPED_KEY``, as
            ``records.row_fields`` reads it.
        source: the name of the row's source in the table ``data.train``. Empty if there is no table.
    """

    messages: tuple[Mapping[str, str], ...]
    reward_data: Mapping[str, Any]
    source: str = ""


@dataclass(frozen=True, slots=True)
class RowRules:
    """The rules by which ``parse_row`` checks and reads a row of a dataset.

    Attributes:
        system_prompt: the system message that is added to rows without a system message. If empty, none is added.
        needs: the keys that every row must have for its reward.
        needs_prompt: whether every row must have a prompt. With an environment a row may have none.
        columns: key -> the name of its column in the data, for keys whose column has another name.
        prompt_format: ``chat`` if ``prompt`` is a user's message of a chat, ``text`` if the model continues the text.
        ignore: names of columns that are left out.
        has_own_reader: whether the user's own reward or environment gets the columns ``system`` and ``history``. If
            not, they belong to the prompt.
        is_mathematics: whether ``gt_answer`` must be an answer that can be compared as mathematics.
        keeps_numbers: whether a number in ``gt_answer`` stays one, for a function of the user. Else it becomes text.
        model: names the model in messages.
        template: its chat template, which must render every message of a chat. If empty, none is asked.
    """

    system_prompt: str = ""
    needs: Collection[RowField] = ("gt_answer",)
    needs_prompt: bool = True
    columns: Mapping[RowField, str] = field(default_factory=dict)
    prompt_format: PromptFormat = "chat"
    ignore: Collection[str] = ()
    has_own_reader: bool = False
    is_mathematics: bool = False
    keeps_numbers: bool = False
    model: str = ""
    template: str = ""


def parse_row(raw: Any, where: str, rules: RowRules) -> Row:
    """Check ``raw``, one JSON object of a dataset, and return it as a ``Row``.

    ``where`` is the place of ``raw`` in the data, such as ``file:line``.

    Raises:
        DataError: ``raw`` is not a row, or lacks a field that its reward needs. The message begins with ``where``.
    """
    if not isinstance(raw, dict):
        raise DataError(f"{where}: expected a JSON object, got {kind(raw)}; write each row as an object of fields")
    raw = {name: value for name, value in raw.items() if name not in rules.ignore}
    fields = _canonical(raw, rules.columns, where)
    _parse_json_text(fields, where, rules)
    for key in rules.needs:
        if read := _reader(key):
            try:
                fields = read(fields)
            except ValueError as error:
                raise DataError(f"{where}: {str(error).replace(key, _column(key, rules), 1)}") from None
    _check_keys(fields, raw, where, rules)
    messages = _messages(fields, where, rules)
    is_chat = rules.template and messages and messages[0]["role"] != TEXT_ROLE
    if is_chat and (why := why_lost(rules.template, adapted(rules.template, messages))):
        raise DataError(f"{where}: {_column('messages', rules)}: the chat template of {rules.model} {why}")
    if messages and "tools" in fields:
        messages = (_tools(fields.pop("tools"), messages, f"{where}: {_column('tools', rules)}"), *messages)
    reward_data = {key: value for key, value in fields.items() if key not in ("messages", "prompt")}
    if "gt_answer" in rules.needs or isinstance(reward_data.get("gt_answer"), str | int | float):
        reward_data["gt_answer"] = _answer(reward_data, f"{where}: {_column('gt_answer', rules)}", rules)
    return Row(messages, _sendable(messages, reward_data, where, rules))


@cache
def _reader(key: RowField) -> FieldReader | None:
    """Return what an extension offers to read the field ``key`` of rows whose reward needs it, if one does."""
    offer = our_offers("async_rl.row_fields").get(key)
    return None if offer is None else load(offer)


def _parse_json_text(fields: dict[str, Any], where: str, rules: RowRules) -> None:
    """Replace JSON text in ``fields`` by its value. Text that nobody asked for may be anything, and stays then."""
    for key in _JSON_KEYS:
        if not isinstance(text := fields.get(key), str) or text.lstrip()[:1] not in ("{", "["):
            continue
        is_asked = key in ("messages", "tools", *rules.needs) or (key == "extra_info" and not rules.needs_prompt)
        with nullcontext() if is_asked else suppress(DataError):
            value = parse_json(text.encode(errors="replace"), f"{where}: {_column(key, rules)}", "JSON")
            fields[key] = messages_without_nulls(value) if key == "messages" else value


def _canonical(raw: Mapping[str, Any], columns: Mapping[RowField, str], where: str) -> dict[str, Any]:
    """Return the fields of the row ``raw``, with known columns renamed to our keys. Other columns keep their names.

    ``columns`` maps a key to the name of its column. If ``columns`` names another column for a key, the column that
    happens to have the key's own name is left out. A name with dots that is no column names a value inside an object,
    whose column stays.
    """
    ours = {columns.get(key, key): key for key in _KEYS}
    displaced = set(_KEYS) - ours.keys()
    fields: dict[str, Any] = {}
    for name, value in raw.items():
        if not isinstance(name, str):
            raise DataError(f"{where}: expected column names that are text, got {name!r}; rename the column")
        if name in ours:
            fields[ours[name]] = value
        elif name not in displaced:
            fields[name] = value
    for name, key in ours.items():
        if "." in name and name not in raw:
            fields[key] = _inner(raw, name)
    return {key: value for key, value in fields.items() if value is not None or key not in _KEYS}


def _inner(raw: Mapping[str, Any], path: str) -> Any:
    """Return the value at ``path`` (names of nested objects, with dots between them). None if there is no such value.

    At each level the longest name wins, so an object may have keys with dots.
    """
    if path in raw:
        return raw[path]
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        inner = raw.get(".".join(parts[:count]))
        if isinstance(inner, str) and inner.lstrip().startswith("{"):  # a table may have the object as JSON text
            try:
                inner = json.loads(inner)
            except ValueError:
                continue
        if isinstance(inner, dict) and (found := _inner(inner, ".".join(parts[count:]))) is not None:
            return found
    return None


def _column(key: RowField, rules: RowRules) -> str:
    return rules.columns.get(key, key)


def _check_keys(fields: Mapping[str, Any], raw: Mapping[str, Any], where: str, rules: RowRules) -> None:
    asks = not rules.needs_prompt or "messages" in fields or "prompt" in fields
    missing = [_column(key, rules) for key in rules.needs if key not in fields]
    if asks and not missing:
        return
    needed = " and ".join(f'"{_column(key, rules)}"' for key in ("messages", *rules.needs))
    what = missing[0] if asks else _column("messages", rules)
    columns = {_column(key, rules) for key in _KEYS}
    known = columns | {column.partition(".")[0] for column in columns}
    hint = "" if known & raw.keys() else "; name its columns in [data.columns]"
    raise DataError(f"{where}: expected a row with {needed}, got no {what} among the keys {sorted(raw)}{hint}")


def _messages(fields: Mapping[str, Any], where: str, rules: RowRules) -> tuple[Mapping[str, str], ...]:
    if "messages" not in fields and "prompt" not in fields:
        return ()  # ``rules`` allow a row without a prompt
    columns = {} if rules.has_own_reader else fields
    if "messages" not in fields:
        prompt, place = fields["prompt"], f"{where}: {_column('prompt', rules)}"
        if isinstance(prompt, list | dict):  # some datasets keep messages in a column called prompt
            messages = parse_messages(prompt, place)
        elif not isinstance(prompt, str) or not prompt.strip():
            raise DataError(f"{place}: expected text that is not blank, or messages, got {kind(prompt)}")
        elif rules.prompt_format == "text":
            check_beside_text(columns, CONTEXT, prompt, where)
            return ({"role": TEXT_ROLE, "content": prompt},)
        else:
            messages = ({"role": "user", "content": prompt},)
    else:
        messages = parse_messages(fields["messages"], f"{where}: {_column('messages', rules)}")
    messages = tuple(message for part in split_context(columns, messages, where) for message in part)
    if rules.system_prompt and all(message["role"] not in ("system", "developer") for message in messages):
        return ({"role": "system", "content": rules.system_prompt}, *messages)
    return messages


def _tools(raw: Any, messages: Sequence[Mapping[str, str]], where: str) -> Mapping[str, str]:
    """Return a row's tool schemas as a message, which the chat template turns into its argument ``tools``."""
    if messages[0]["role"] == TEXT_ROLE:
        raise DataError(
            f'{where}: expected no tools with data.prompt_format = "text", which uses no chat template; rename the '
            f"column"
        )
    text = json.dumps(without_table_nulls({"tools": raw})["tools"], ensure_ascii=False)
    try:
        parse_tools(text)
    except ValueError as error:
        raise DataError(f"{where}: {error}, or rename the column if it has something else") from None
    return {"role": TOOLS_ROLE, "content": text}


def parse_messages(raw: Any, where: str) -> tuple[Mapping[str, str], ...]:
    """Check the messages of a chat and return them, each with the keys ``role`` and ``content``, both text.

    ``raw`` is a list of objects, each with a ``role`` and a ``content``, or one such object. A content may be a list of
    text parts, which are joined. ``where`` is the place of ``raw`` in the data.

    Raises:
        DataError: ``raw`` is anything else. The error's message begins with ``where``.
    """
    listed = [raw] if isinstance(raw, dict) else raw
    if not isinstance(listed, list) or not listed:
        raise DataError(f"{where}: expected a message or a list of messages, got {kind(raw)}")
    return tuple(_message(message, f"{where}[{index}]") for index, message in enumerate(listed))


def _message(raw: Any, where: str) -> Mapping[str, str]:
    """Return the message ``raw``, without its flags: nothing of a prompt is trained. Tool calls are refused: a
    rollout's messages have text alone.
    """
    if isinstance(raw, dict) and raw.keys() - FLAGS == {"role", "content"}:
        role, content = raw["role"], joined_text(raw["content"])
        if isinstance(role, str) and role and content is not None:
            return {"role": role, "content": content}
    raise DataError(f'{where}: expected {{"role": text, "content": text}}, got {str(raw)[:120]}')


def _answer(fields: Mapping[str, Any], where: str, rules: RowRules) -> Any:
    """Return the row's answer as rewards get it: a number as text, unless a function of the user gets it."""
    answer = fields["gt_answer"]
    text = number_text(answer)
    is_needed = "gt_answer" in rules.needs
    if not gold_readings(fields, is_mathematics=is_needed and rules.is_mathematics):
        says_nothing = isinstance(answer, str) and answer.strip()
        expected = "an answer that can be compared" if says_nothing else "a number, or text that is not blank"
        raise DataError(f"{where}: expected {expected}, got {kind(answer)}")
    return answer if text is None or (rules.keeps_numbers and not why_unsendable(answer)) else text


def _sendable(
    messages: tuple[Mapping[str, str], ...], reward_data: Mapping[str, Any], where: str, rules: RowRules
) -> dict[str, Any]:
    """Return ``reward_data`` without what can't be sent to a generator. What is dropped is listed at ``DROPPED_KEY``.

    Raises:
        DataError: the prompt or a field that the reward needs can't be sent.
    """
    kept, dropped = split_sendable(reward_data)
    for (name, *_), reason in dropped:
        if name in rules.needs:
            raise _unsendable(f"{where}: {name}", reason)
    if dropped:
        kept[DROPPED_KEY] = [[names, reason] for names, reason in dropped]
    if reason := why_unsendable([dict(message) for message in messages]):
        raise _unsendable(where, reason)
    return kept


def _unsendable(where: str, reason: str) -> DataError:
    return DataError(f"{where}: expected a value that can be sent to a generator, got {reason}; store it as text")


logger = logging.getLogger(__name__)

OnBadRow = Literal["refuse", "skip"]


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """The rows of a dataset, after they were checked.

    Attributes:
        rows: the rows without errors, in the order of the data.
        num_skipped: number of rows that were left out because they have errors.
        digest: SHA-256 of the data, in hex. It changes when the data changes.
        first_skipped: the error of the first row that was left out. Empty if no row was left out.
        dropped: what was dropped, such as ``when (a value of the type date)`` -> number of rows without it.
    """

    rows: tuple[Row, ...]
    num_skipped: int
    digest: str
    first_skipped: str = ""
    dropped: Mapping[str, int] = field(default_factory=dict)


def load_train_rows(config: Config) -> LoadedRows:
    """Load the run's training rows from ``data.train``. If the environment makes its own tasks, return empty rows; with
    ``data.source`` none.

    If ``data.train`` is a table, the rows of its sources follow each other in the order of the sources' names.

    Raises:
        DataError: the data can't be read, or has a row with errors (see ``load_rows``).
    """
    if config.data.source:
        return LoadedRows((), 0, hashlib.sha256(f"own: {config.data.source}".encode()).hexdigest())
    if config.makes_up_rows:
        return empty_rows(config.environment.rows or 0)
    if isinstance(config.data.train, str):
        return load_rows_of(config, config.data.train)
    loaded = {name: load_rows_of(config, source) for name, source in sorted(config.data.train.items())}
    return LoadedRows(
        rows=tuple(replace(row, source=name) for name, one in loaded.items() for row in one.rows),
        num_skipped=sum(one.num_skipped for one in loaded.values()),
        digest=hashlib.sha256(repr([(name, one.digest) for name, one in loaded.items()]).encode()).hexdigest(),
        first_skipped=next((one.first_skipped for one in loaded.values() if one.first_skipped), ""),
        dropped=sum((Counter(one.dropped) for one in loaded.values()), Counter()),
    )


def empty_rows(num_rows: int) -> LoadedRows:
    """Return ``num_rows`` rows without content. An environment that makes its own tasks gets one row for each task."""
    digest = hashlib.sha256(f"made up: {num_rows}".encode()).hexdigest()
    return LoadedRows((Row((), {}),) * num_rows, 0, digest)


OpenRows = Callable[[Config, str], AbstractContextManager[Path]]
"""Writes the rows of a source to a file of JSON Lines, which exists inside the ``with`` block, or raises DataError."""


def load_rows_of(config: Config, source: str) -> LoadedRows:
    """Load the rows of the dataset ``source`` by the rules of the run's config, such as ``data.columns``.

    Raises:
        DataError: the data can't be read, or has a row with errors (see ``load_rows``).
    """
    name, colon, _ = source.partition(":")
    if colon and (offer := find_offer("async_rl.datasets", name)) is not None:
        opened: OpenRows = load(offer)
        with opened(config, source) as path:
            return load_rows(str(path), rules=rules_of(config))
    loaded = load_rows(source, on_bad_row=config.data.on_bad_row, rules=rules_of(config))
    if loaded.num_skipped:
        logger.warning(
            "%s: skipped %d rows of %d, because they have errors; the first error: %s",
            source, loaded.num_skipped, loaded.num_skipped + len(loaded.rows), loaded.first_skipped,
        )  # fmt: skip
    if loaded.dropped:
        logger.warning(
            "%s: dropped what can't be sent to generators: %s; a reward or an environment that reads it fails, so "
            "store it as text if one does",
            source, ", ".join(f"{what} of {count} rows" for what, count in loaded.dropped.items()),
        )  # fmt: skip
    return loaded


def rules_of(config: Config) -> RowRules:
    """Return the rules by which a run reads its rows."""
    return RowRules(
        system_prompt=config.system_prompt,
        needs=config.row_needs,
        needs_prompt=not config.environment.is_set,
        columns=config.data.columns,
        prompt_format=config.data.prompt_format,
        ignore=config.data.ignore,
        has_own_reader=config.environment.is_set or any(one.is_user_code for one in config.reward.types),
        is_mathematics=config.reward.compares_mathematics,
        keeps_numbers=any(one.is_user_code for one in config.reward.types),
        model=config.model.path,
        template=stored_template(config.model.path) if has_model(config.generator.backend) else "",
    )


def load_rows(source: str, *, on_bad_row: OnBadRow = "refuse", rules: RowRules | None = None) -> LoadedRows:
    """Load and check the rows of the dataset ``source``.

    Args:
        source: a path or a hub id, in a form that the module ``files`` describes.
        on_bad_row: ``refuse`` raises if a row has errors. ``skip`` leaves such rows out and counts them.
        rules: the rules for rows. If None, every row must have a prompt and a ``gt_answer``.

    Raises:
        DataError: the data can't be read, or no row is left. With ``refuse`` also if a row is not UTF-8, is not JSON,
            has a wrong form, or lacks a field that its reward needs. The message names the row's place.
    """
    opened, rules = Source(source), rules or RowRules()
    rows: list[Row] = []
    num_skipped, first_skipped = 0, ""
    for where, raw in opened.records():
        try:
            if isinstance(raw, DataError):
                raise raw
            rows.append(parse_row(raw, where, rules))
        except DataError as error:
            num_skipped += 1
            first_skipped = first_skipped or str(error)
    if num_skipped and on_bad_row == "refuse":
        count = f" ({num_skipped} of {num_skipped + len(rows)} rows have errors)" if num_skipped > 1 else ""
        raise DataError(f'{first_skipped}; correct the row, or set data.on_bad_row = "skip"{count}')
    if not rows:
        cause = (
            f"all {num_skipped} rows have errors and were skipped; correct them. The first error: {first_skipped}"
            if num_skipped
            else "the dataset has no rows; write rows to it, or choose another"
        )
        raise DataError(f"expected at least one row in {source}, got none: {cause}")
    dropped = Counter(
        f"{'.'.join(names)} ({reason})" for row in rows for names, reason in row.reward_data.get(DROPPED_KEY, ())
    )
    return LoadedRows(tuple(rows), num_skipped, opened.digest, first_skipped, dropped)
