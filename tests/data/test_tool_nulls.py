"""Nulls that a table writes into tool schemas and calls are removed; those that an author wrote stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from async_rl.data.tool_nulls import without_table_nulls
from async_rl.extensions.offline.rows import load_rows as load_given


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def called(name: str, arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


CITY = {"type": "string", "description": "The city."}
COUNT = {"type": "integer", "minimum": 0}
TOOLS = [tool("weather", {"city": CITY, "unit": {"type": "string", "enum": ["c", "f"]}}), tool("add", {"a": COUNT})]


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"city": CITY, "a": None}, {"city": CITY}),
        ({"default": None, "city": CITY}, {"city": CITY}),  # a parameter of this name
        ({"city": {**CITY, "enum": None, "minimum": None}}, {"city": CITY}),
        ({"city": {"type": "string", "default": None}}, {"city": {"type": "string", "default": None}}),
        ({"city": {"enum": ["a", None]}}, {"city": {"enum": ["a", None]}}),
        ({"city": {"default": {"x": None}}}, {"city": {"default": {"x": None}}}),
        (
            {"at": {"type": "object", "properties": {"city": CITY, "a": None}}},
            {"at": {"type": "object", "properties": {"city": CITY}}},
        ),
        (
            {"at": {"type": "array", "items": {"properties": {"a": None, "b": COUNT}}}},
            {"at": {"type": "array", "items": {"properties": {"b": COUNT}}}},
        ),
        ({"at": {"anyOf": [{"properties": {"a": None}}, CITY]}}, {"at": {"anyOf": [{"properties": {}}, CITY]}}),
        ({"a": {"type": "integer", "minimum": 0.0}}, {"a": COUNT}),
    ],
)
def test_a_schema_loses_the_nulls_of_a_table_and_keeps_its_author_s(
    properties: dict[str, Any], expected: dict[str, Any]
):
    found = without_table_nulls({"tools": [tool("f", properties)]})["tools"]
    assert json.dumps(found) == json.dumps([tool("f", expected)])  # 0 and 0.0 are equal in Python


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("weather", {"city": "Paris", "a": None}, {"city": "Paris"}),
        ("weather", {"city": "Paris", "unit": None}, {"city": "Paris", "unit": None}),
        ("add", {"a": 2.0, "city": None}, {"a": 2}),
        ("price", {"at": 2.0, "note": 1.5}, {"at": 2.0, "note": 1.5}),
        ("unknown", {"a": 2.0, "city": None}, {"a": 2}),
        ("ship", {"to": {"city": "Paris", "a": None}}, {"to": {"city": "Paris"}}),
        ("ship", {"all": [{"a": None, "city": "Rome"}]}, {"all": [{"city": "Rome"}]}),
        ("ship", {"free": {"x": None}}, {"free": {"x": None}}),
        ("flat", {"city": None, "a": None}, {"city": None}),
        ("add", '{"city": null, "a": 2.0}', '{"city": null, "a": 2.0}'),
    ],
)
def test_a_call_loses_the_nulls_that_its_schema_does_not_name(name: str, arguments: Any, expected: Any):
    place = {"type": "object", "properties": {"city": CITY}}
    tools = [
        *TOOLS,
        tool("price", {"at": {"type": "number"}, "note": {}}),
        tool("limit", {"to": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}),
        tool("ship", {"to": place, "all": {"type": "array", "items": place}, "free": {"type": "object"}}),
        {"name": "flat", "parameters": {"city": CITY}},
    ]
    row = {"messages": [called(name, arguments)], "chosen": [called(name, arguments)], "tools": tools}
    found = without_table_nulls(row)
    for key in ("messages", "chosen"):
        assert json.dumps(found[key]) == json.dumps([called(name, expected)])


def test_a_row_without_tools_stays_as_it_is():
    row = {"messages": [called("add", {"a": None, "b": 2.0})], "x": None}
    assert json.dumps(without_table_nulls(row)) == json.dumps(row)


ASKED = {"role": "user", "content": "q"}
ROWS: list[dict[str, Any]] = [
    {"messages": [ASKED, called("weather", {"city": "Paris"})], "tools": TOOLS},
    {"messages": [ASKED, called("add", {"a": 2})], "tools": TOOLS[1:]},
    {"messages": [ASKED, called("add", {"a": 3})], "tools": TOOLS[:1]},
]


def written(form: str, directory: Path, rows: list[dict[str, Any]]) -> str:
    """The path of ``rows`` as ``datasets`` or pandas write them."""
    table: Any = datasets.Dataset.from_list(rows)
    path = directory / f"rows.{form.rpartition(' ')[2]}"
    match form:
        case "datasets jsonl":
            table.to_json(path)
        case "datasets parquet":
            table.to_parquet(path)
        case "pandas jsonl":
            table.to_pandas().to_json(path, orient="records", lines=True)
        case "pandas parquet":
            table.to_pandas().to_parquet(path)
        case _:
            path.write_text("".join(json.dumps({**row, "tools": json.dumps(row["tools"])}) + "\n" for row in table))
    return str(path)


FORMS = ("datasets jsonl", "datasets parquet", "pandas jsonl", "pandas parquet", "tools as text jsonl")


@pytest.mark.parametrize("form", FORMS)
def test_every_file_gives_the_tools_and_the_calls_that_were_written(tmp_path: Path, form: str):
    found = load_given(written(form, tmp_path, ROWS), "sft.data", lambda index, where, fields: dict(fields))
    assert json.dumps(found, sort_keys=True) == json.dumps(ROWS, sort_keys=True)
