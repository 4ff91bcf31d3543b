"""Datasets: a JSONL file becomes checked rows. Called by the queue server (training), evaluation and ``doctor``.

A math row is ``{"messages": [{"role": ..., "content": ...}, ...], "gt_answer": "72"}``; ``messages`` may also be one
such object, ``gt_answer`` a number. Every other key travels to the reward untouched. Blank lines are ignored.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgpack

from async_rl.errors import DataError

OnBadRow = Literal["refuse", "skip"]

MAX_NESTING = 6
"""Lists and objects inside each other in one value of a row; the wire allows little more around them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt as the file has it. ``reward_data`` holds ``gt_answer`` as text, and the row's other keys."""

    messages: tuple[Mapping[str, str], ...]
    reward_data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """A dataset: its good rows in file order, how many bad ones were skipped, the file's SHA-256 in hex."""

    rows: tuple[Row, ...]
    num_skipped: int
    digest: str


def load_rows(
    path: str, *, on_bad_row: OnBadRow = "refuse", system_prompt: str = "", needs_answer: bool = True
) -> LoadedRows:
    """The rows of the JSONL file at ``path``.

    Args:
        path: UTF-8, one JSON object a line.
        on_bad_row: ``refuse`` raises at the first bad row, ``skip`` leaves bad rows out and counts them.
        system_prompt: put in front of every row that has no system message of its own; empty adds nothing.
        needs_answer: whether a row must have ``messages`` and ``gt_answer``. An environment's may lack either, as it
            can make the first state and the reward from whatever else is there; such a row's messages are ().

    Raises:
        DataError: the file can't be read or has no good row; or, under ``refuse``, a row is not UTF-8, not JSON, not
            of the shape above, or lacks its answer. The message names ``file:line``.
    """
    if on_bad_row not in ("refuse", "skip"):
        raise ValueError(f"on_bad_row: expected 'refuse' or 'skip', got {on_bad_row!r}")
    rows: list[Row] = []
    num_skipped = 0
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if not line.strip():
                    continue
                try:
                    rows.append(_parse_row(line, f"{path}:{number}", system_prompt, needs_answer=needs_answer))
                except DataError:
                    if on_bad_row == "refuse":
                        raise
                    num_skipped += 1
    except FileNotFoundError:
        raise DataError(f"no dataset at {path}") from None
    except OSError as error:
        raise DataError(f"can't read the dataset {path}: {error.strerror or error}") from error
    if not rows:
        cause = f"all {num_skipped} rows are bad and were skipped" if num_skipped else "the file has no rows"
        raise DataError(f"expected at least one row in {path}, got none: {cause}")
    return LoadedRows(tuple(rows), num_skipped, digest.hexdigest())


def made_up_rows(num_rows: int) -> LoadedRows:
    """Rows without anything, for an environment that makes its own tasks (from a seed, say)."""
    digest = hashlib.sha256(f"made up: {num_rows}".encode()).hexdigest()
    return LoadedRows((Row((), {}),) * num_rows, 0, digest)


def _parse_row(line: bytes, where: str, system_prompt: str, *, needs_answer: bool) -> Row:
    raw = _parse_json(line, where)
    if not isinstance(raw, dict):
        raise DataError(f"{where}: expected a JSON object, got {_kind(raw)}")
    if needs_answer and ("messages" not in raw or raw.get("gt_answer") is None):
        missing = "messages" if "messages" not in raw else "gt_answer"
        raise DataError(f'{where}: expected a row with "messages" and "gt_answer", got no {missing} in {sorted(raw)}')
    messages = _parse_messages(raw["messages"], where) if "messages" in raw else ()
    if messages and system_prompt and all(message["role"] != "system" for message in messages):
        messages = ({"role": "system", "content": system_prompt}, *messages)
    reward_data = {key: value for key, value in raw.items() if key != "messages"}
    if raw.get("gt_answer") is not None:
        reward_data["gt_answer"] = _answer_text(raw["gt_answer"], where)
    _check_can_travel(messages, reward_data, where)
    return Row(messages, reward_data)


def _parse_json(line: bytes, where: str) -> Any:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected UTF-8, got byte 0x{line[error.start]:02x} at {error.start}") from None
    try:
        return json.loads(text.strip(), parse_constant=_no_constant, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        cause = f"{error.msg.removesuffix(' at')} at column {error.colno}"  # some of Python's messages end in " at"
        raise DataError(f"{where}: expected one JSON object a line: {cause}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not usable JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} comes twice")
    return found


def _parse_messages(raw: Any, where: str) -> tuple[Mapping[str, str], ...]:
    listed = [raw] if isinstance(raw, dict) else raw
    if not isinstance(listed, list) or not listed:
        raise DataError(f"{where}: messages: expected an object or a list of them, got {_kind(raw)}")
    for index, message in enumerate(listed):
        is_message = (
            isinstance(message, dict)
            and message.keys() == {"role", "content"}
            and all(isinstance(value, str) for value in message.values())
        )
        if not is_message or not message["role"]:
            got = str(message)[:120]
            raise DataError(f'{where}: messages[{index}]: expected {{"role": text, "content": text}}, got {got}')
    return tuple({"role": message["role"], "content": message["content"]} for message in listed)


def _answer_text(answer: Any, where: str) -> str:
    if isinstance(answer, str) and answer.strip():
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, float) and math.isfinite(answer):
        return format(Decimal(repr(answer)), "f")  # 1e-07 is no way to write an answer
    raise DataError(f"{where}: gt_answer: expected text that is not blank or a number, got {_kind(answer)}")


def _check_can_travel(messages: tuple[Mapping[str, str], ...], reward_data: Mapping[str, Any], where: str) -> None:
    for key, value in reward_data.items():
        if _nesting(value) > MAX_NESTING:
            raise DataError(f"{where}: {key}: expected at most {MAX_NESTING} levels of nesting, got more")
    try:
        msgpack.packb([messages, reward_data])
    except (TypeError, ValueError, OverflowError) as error:
        # JSON allows what the wire can't carry: lone surrogates, integers beyond 64 bits.
        raise DataError(f"{where}: a value can't be sent to a generator: {error}") from None


def _nesting(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max((_nesting(item) for item in items), default=0)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else f"the number {str(value)[:40]}"
