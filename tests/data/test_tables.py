"""Values of Arrow's types as values of rows: nulls, small floats, times, JSON; and nulls in JSONL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from async_rl.data.files import Source
from async_rl.data.tables import rows_of
from async_rl.data.values import Unreadable
from tests.examples import examples


def values_of(array: pa.Array) -> list[Any]:
    return [row.get("a") for row in rows_of(pa.RecordBatch.from_arrays([array], ["a"]))]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float16(), pa.float64()])
def test_a_float_is_the_shortest_number_that_it_can_be_read_from(kind: pa.DataType):
    assert values_of(pa.array([0.1, None, 0.25], pa.float64()).cast(kind)) == [0.1, None, 0.25]
    assert values_of(pa.array([[0.1], None, []], pa.list_(pa.float64())).cast(pa.list_(kind))) == [[0.1], None, []]
    struct = pa.StructArray.from_arrays([pa.array([0.1], pa.float64()).cast(kind)], ["x"])
    assert values_of(struct) == [{"x": 0.1}]


@pytest.mark.parametrize(
    "kind", [pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.date32(), pa.time64("ns"), pa.duration("ns")]
)
def test_times_are_unreadable_however_large_they_are(kind: pa.DataType):
    largest = (1 << 31) - 1 if kind == pa.date32() else 86_399_999_999_999 if kind == pa.time64("ns") else (1 << 63) - 1
    whole = pa.array([largest, None], pa.int32() if kind == pa.date32() else pa.int64())
    assert values_of(whole.cast(kind)) == [Unreadable(str(kind)), None]


def test_json_of_datasets_keeps_its_nulls(tmp_path: Path):
    import datasets

    features = datasets.Features({"tools": datasets.List(datasets.Json()), "p": datasets.Value("string")})
    tools = [{"name": "f", "parameters": {"x": {"type": "integer", "default": None}}}]
    made = datasets.Dataset.from_list([{"tools": tools, "p": None}], features=features)
    made.to_parquet(str(tmp_path / "rows.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    for name in ("rows.parquet", "saved"):
        assert [row for _, row in Source(str(tmp_path / name)).records()] == [{"tools": tools}]


def test_any_json_of_datasets_has_a_digest(tmp_path: Path):
    import datasets

    digests: set[str] = set()
    for index, text in enumerate((f'{{"a": {1 << 70}}}', f'{{"a": {(1 << 70) + 1}}}', '{"a": "\\ud800"}')):
        column = pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array([text]))
        datasets.Dataset(pa.table({"x": column})).save_to_disk(str(tmp_path / str(index)))
        source = Source(str(tmp_path / str(index)))
        assert [row for _, row in source.records()] == [{"x": json.loads(text)}]
        digests.add(source.digest)
    assert len(digests) == 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)


def without_nulls(value: Any) -> Any:
    """What a reader of a table sees by a plain loop."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@given(st.lists(st.dictionaries(st.sampled_from("abc"), JSON, max_size=3), min_size=1, max_size=4), st.integers(0, 3))
@examples(200)
def test_the_rows_of_a_table_are_pyarrow_s_own_without_nulls(rows: list[dict[str, Any]], begin: int):
    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowException, TypeError):
        return  # values of several types, which no table has
    for batch in table.slice(begin).to_batches():
        assert list(rows_of(batch)) == [without_nulls(row) for row in batch.to_pylist()]


CALL = {"id": None, "function": {"name": "f", "arguments": {"x": None}}}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "integer", "default": None}}}}


def test_in_jsonl_null_is_absent_in_columns_and_message_keys_alone(tmp_path: Path):
    messages = [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "tool_calls": [CALL]}]
    row = {"messages": messages, "prompt": None, "tools": [SCHEMA], "extra_info": {"a": None}}
    for name, text in (("rows.jsonl", json.dumps(row)), ("rows.json", json.dumps([row]))):
        (tmp_path / name).write_text(text)
        (found,) = [row for _, row in Source(str(tmp_path / name)).records()]
        assert found == {
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [CALL]}],
            "tools": [SCHEMA],
            "extra_info": {"a": None},
        }


def test_in_a_table_a_schema_keeps_the_null_that_no_row_fills(tmp_path: Path):
    # The second row's key "y" makes Arrow write a null for it into the first row, which had no such key.
    other = {"type": "function", "function": {"name": "g", "parameters": {"y": {"type": "string"}}}}
    messages = [{"role": "user", "content": "q", "name": None}]
    rows = [{"tools": [SCHEMA], "messages": messages}, {"tools": [other], "messages": messages}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found: list[Any] = [row for _, row in Source(str(tmp_path / "rows.parquet")).records()]
    assert [row["tools"] for row in found] == [[SCHEMA], [other]]
    assert [row["messages"] for row in found] == [[{"role": "user", "content": "q"}]] * 2


@pytest.mark.parametrize("kind", [pa.float32(), pa.date32()])
def test_encoded_columns_give_the_values_that_plain_ones_give(kind: pa.DataType):
    plain = pa.array([1, None, 1, 2], pa.int32()).cast(kind)
    encoded = [plain.dictionary_encode(), pyarrow.compute.call_function("run_end_encode", [plain])]
    for array in encoded:
        assert values_of(array) == values_of(plain)
        assert values_of(array.slice(1)) == values_of(plain)[1:]


def test_a_map_with_text_keys_is_an_object_whose_values_are_those_of_columns():
    kind = pa.map_(pa.string(), pa.struct([("x", pa.float32()), ("t", pa.date32())]))
    rows = [[("a", {"x": 0.1, "t": 3})], None, [], [("b", {"x": None, "t": None}), ("c", None)]]
    found = values_of(pa.array(rows, kind))
    assert found == [{"a": {"x": 0.1, "t": Unreadable("date32[day]")}}, None, {}, {"b": {}}]
    assert values_of(pa.array(rows, kind).slice(2)) == [{}, {"b": {}}]
    numbers = pa.array([[(1, 0.1)]], pa.map_(pa.int32(), pa.float32()))
    assert values_of(numbers) == [[(1, 0.1)]]
