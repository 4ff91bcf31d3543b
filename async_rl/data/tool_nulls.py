"""Removes what a table adds to tool schemas and tool calls, where a row has no such key.

A column of a table has one struct for all its tools: written as JSON, each tool has the parameters of all tools, and
each call their arguments, null where there are none. pandas also turns integers beside nulls into floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.data.template_forms import called_function, with_arguments

_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords of JSON Schema whose value has schemas by names that the author chose."""
_VALUES = frozenset({"default", "const", "enum", "examples"})
"""Keywords whose value is no schema. Of the first two, null is a value."""


def without_table_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``row`` without the nulls that a table wrote into its ``tools`` and into the calls of its messages.

    In a schema, keys with null go, but for ``default`` and ``const``. In a call, an argument with null goes if the
    row's schema of the function does not name it. Floats that are whole numbers become integers, unless the schema of
    the parameter has another type. A row without tools, and arguments that are JSON text, stay as they are.
    """
    if not isinstance(row.get("tools"), list):
        return dict(row)
    tools = _schema(row["tools"])
    schemas = {one.get("name"): one.get("parameters") or one.get("input_schema") for one in map(called_function, tools)}
    return {key: _with_calls(value, schemas) for key, value in row.items()} | {"tools": tools}


def _schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for key, item in value.items():
        if key in _BY_NAME and isinstance(item, dict):
            found[key] = {name: _schema(one) for name, one in item.items() if one is not None}
        elif item is not None or key in ("default", "const"):
            kept = item if key in _VALUES else _schema(item)
            found[key] = _whole(kept) if _is_integer(value) else kept
    return found


def _with_calls(value: Any, schemas: Mapping[Any, Any]) -> Any:
    """Return ``value``, a message or a list of messages, with its calls mended. Other values stay as they are."""
    if isinstance(value, list):
        return [_with_calls(one, schemas) for one in value]
    if not isinstance(value, dict) or not isinstance(calls := value.get("tool_calls"), list):
        return value
    return {**value, "tool_calls": [_call(call, schemas) for call in calls]}


def _call(call: Any, schemas: Mapping[Any, Any]) -> Any:
    function = called_function(call)
    if not isinstance(given := function.get("arguments"), dict):
        return call
    schema = schemas.get(function.get("name"))
    named = schema.get("properties", schema) if isinstance(schema, dict) else {}  # some have no ``properties``
    return with_arguments(call, _argument(given, {"properties": named}))


def _argument(value: Any, schema: Any) -> Any:
    of = schema if isinstance(schema, dict) else {}
    if isinstance(value, dict) and isinstance(named := of.get("properties"), dict):
        return {key: _argument(one, named.get(key)) for key, one in value.items() if one is not None or key in named}
    if isinstance(value, list):
        return [_argument(one, of.get("items")) for one in value]
    return _whole(value) if not of or _is_integer(of) else value


def _is_integer(schema: Mapping[str, Any]) -> bool:
    """Return whether the numbers of ``schema`` are integers, also as one of several types."""
    types = str([schema.get("type"), schema.get("anyOf")])
    return "'int" in types and "'number'" not in types


def _whole(value: Any) -> Any:
    """Return a float that is a whole number as an integer. Other values stay as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
