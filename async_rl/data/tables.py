"""Turns the batches of an Arrow table into rows of plain Python values.

A table has a null where a row has no such key, so keys with a null are left out, at any depth. Numbers of 32 or 16 bits
get the shortest decimal number that they can be read from: a float32 of 0.1 is 0.1. Dates and times, of which Python
can't hold all, become ``Unreadable``. A column of JSON (Arrow's type ``arrow.json``, which ``datasets.Json`` writes) is
parsed, and keeps its nulls. A map whose keys are text is an object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute

from async_rl.data.values import Unreadable


class _AlwaysNull:
    """The null of a field that is null in all rows. No other row has a value there, so the null does not stand for an
    absent key.
    """


_ALWAYS_NULL = _AlwaysNull()


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A value of parsed JSON. Its nulls have a meaning."""

    value: Any


def rows_of(batch: pyarrow.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``batch``, each without its keys whose value is null.

    A tool schema keeps a null that all rows have, such as ``"default": null``.
    """
    names = batch.schema.names
    for values in zip(*(_values(column) for column in batch.columns), strict=True):
        yield _present(dict(zip(names, values, strict=True)))


def _values(array: pyarrow.Array) -> list[Any]:
    """Return the values of a column, or of a field inside a column. Null is None, or ``_ALWAYS_NULL``."""
    kind, is_valid = array.type, array.is_valid().to_pylist()
    if isinstance(kind, pyarrow.BaseExtensionType):
        values = _values(array.storage)  # pyright: ignore[reportAttributeAccessIssue]
        return [_parsed(value) for value in values] if kind.extension_name == "arrow.json" else values
    if pyarrow.types.is_dictionary(kind):
        return _values(array.dictionary_decode())  # pyright: ignore[reportAttributeAccessIssue]
    if pyarrow.types.is_run_end_encoded(kind):
        return _values(pyarrow.compute.call_function("run_end_decode", [array]))
    if pyarrow.types.is_map(kind):
        return _maps(array)
    if pyarrow.types.is_null(kind):
        return [_ALWAYS_NULL] * len(array)
    if pyarrow.types.is_struct(kind):
        names = [kind.field(index).name for index in range(kind.num_fields)]
        columns = [_values(field) for field in array.flatten()]  # pyright: ignore[reportAttributeAccessIssue]
        found = (
            [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] if names else [{}] * len(array)
        )
        return [value if valid else None for value, valid in zip(found, is_valid, strict=True)]
    if _is_list(kind):
        items = _values(array.flatten())  # pyright: ignore[reportAttributeAccessIssue]
        lengths = pyarrow.compute.call_function("list_value_length", [array]).to_pylist()
        ends = accumulate(length or 0 for length in lengths)
        return [
            None if length is None else items[end - length : end] for length, end in zip(lengths, ends, strict=True)
        ]
    if pyarrow.types.is_float32(kind) or pyarrow.types.is_float16(kind):
        number = np.float32 if pyarrow.types.is_float32(kind) else np.float16
        return [None if value is None else float(str(number(value))) for value in array.to_pylist()]
    if pyarrow.types.is_temporal(kind):
        return [Unreadable(str(kind)) if valid else None for valid in is_valid]
    return array.to_pylist()


def _maps(array: pyarrow.Array) -> list[Any]:
    """Return the values of a column of maps: objects if the keys are text, else lists of pairs.

    Of equal keys in an object the last one counts.
    """
    kind: Any = array.type
    as_lists = array.cast(pyarrow.list_(pyarrow.struct([("key", kind.key_type), ("value", kind.item_type)])))
    found = [
        None if entries is None else [(entry["key"], entry["value"]) for entry in entries]
        for entries in _values(as_lists)
    ]
    if not (pyarrow.types.is_string(kind.key_type) or pyarrow.types.is_large_string(kind.key_type)):
        return found
    return [None if pairs is None else dict(pairs) for pairs in found]


def _parsed(text: str | None) -> _Parsed | Unreadable | None:
    try:
        return None if text is None or (value := json.loads(text)) is None else _Parsed(value)
    except (ValueError, RecursionError):
        return Unreadable("arrow.json whose text is not JSON")


def _is_list(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _present(value: Any, *, in_tools: bool = False) -> Any:
    """Return ``value`` without keys whose value is null. Nulls that are items of lists stay."""
    if isinstance(value, _Parsed):
        return value.value
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item is not None and (in_tools or item is not _ALWAYS_NULL)}
        return {key: _present(item, in_tools=in_tools) for key, item in kept.items()}
    if isinstance(value, list):
        in_tools = in_tools or (bool(value) and all(map(_is_tool_schema, value)))
        return [_present(item, in_tools=in_tools) for item in value]
    return None if value is _ALWAYS_NULL else value


def _is_tool_schema(value: Any) -> bool:
    """Return whether ``value`` looks like the schema of a tool: a name and parameters, or a function that has them."""
    if not isinstance(value, dict):
        return False
    inner = value.get("function")
    return any(isinstance(one, dict) and {"name", "parameters"} <= one.keys() for one in (value, inner))
