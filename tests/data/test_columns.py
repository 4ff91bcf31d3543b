"""Columns that nobody asked for: what can be sent travels, the rest is dropped by name, and reading it is an error."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from async_rl.data.dataset import Row, RowRules, load_rows, load_rows_of, parse_row
from async_rl.data.sendable import MAX_NESTING, split_sendable
from async_rl.environments.child import RemoteRollout
from async_rl.errors import DataError
from async_rl.generator.environment_rollouts import extra_info
from async_rl.records import DROPPED_KEY, Lease, Prompt, Sampling, row_fields
from async_rl.rewards.conformance import rollout_of
from tests.config.made import a_config
from tests.examples import examples

DAY = datetime.date(2024, 5, 1)
DEEP: Any = [[[[[[[1]]]]]]]


def parse(raw: object, **rules: Any) -> Row:
    return parse_row(raw, "f:1", RowRules(**rules))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (DAY, "a value of the type date"),
        (decimal.Decimal("1.5"), "a value of the type Decimal"),
        (b"\x89PNG", "a value of the type bytes"),
        (1 << 64, "an integer of more than 64 bits"),
        (DEEP, "a value of more than 6 levels of nested lists and objects"),
        ({1: "a"}, "an object with keys that are not text"),
        ("\ud800", "text that is not Unicode (a lone surrogate)"),
    ],
)
def test_a_column_that_can_not_be_sent_is_dropped_and_reading_it_is_an_error(value: Any, reason: str):
    row = parse({"prompt": "q", "gt_answer": 2, "when": value, "level": 5})
    assert row.reward_data == {"gt_answer": "2", "level": 5, DROPPED_KEY: [[["when"], reason]]}
    item = rollout_of("text", msgpack.unpackb(msgpack.packb(row.reward_data)), 8)
    assert dict(item.reward_data) == {"gt_answer": "2", "level": 5}
    for read in (lambda: item.reward_data["when"], lambda: item.reward_data.get("when")):
        with pytest.raises(DataError, match=r"field when was dropped .* because .* can't be sent .* store it as text"):
            read()
    assert item.reward_data.get("level") == 5
    assert item.reward_data.get("other", 7) == 7
    with pytest.raises(KeyError):
        item.reward_data["other"]


def test_only_the_part_of_an_object_that_can_not_be_sent_is_dropped():
    row = parse({"prompt": "q", "extra_info": {"when": DAY, "index": 3, "deep": {"big": 1 << 70, "a": 1}}}, needs=())
    fields = row_fields(row.reward_data)
    assert fields == {"extra_info": {"index": 3, "deep": {"a": 1}}}
    with pytest.raises(DataError, match="field when was dropped"):
        fields["extra_info"]["when"]
    with pytest.raises(DataError, match=r"field big was dropped .* an integer of more than 64 bits"):
        fields["extra_info"]["deep"]["big"]


def test_an_environment_that_reads_a_dropped_field_gets_an_error():
    raw = {"extra_info": {"when": DAY, "target": 24}, "image": b"x"}
    row = parse(raw, needs=(), needs_prompt=False)
    prompt = Prompt(0, 0, 0, row.messages, row.reward_data)
    sampling = Sampling(1.0, 1.0, 0, 8, 8, ())
    sent = extra_info({"mode": "easy"}, Lease("l", "train", prompt, 1, sampling, "", 0, 0, 0, 5), 0, None)
    start = {"extra_info": json.loads(json.dumps(sent)), "prompt": None, "state": None, "max_turns": 2}

    async def made() -> dict[str, Any]:
        return RemoteRollout(None, start).extra_info  # pyright: ignore[reportArgumentType]

    found = asyncio.run(made())
    assert (found["target"], found["mode"], found["seed"]) == (24, "easy", 5)
    for name in ("when", "image"):
        with pytest.raises(DataError, match=f"field {name} was dropped"):
            found[name]


def test_a_field_that_the_reward_needs_is_never_dropped():
    with pytest.raises(DataError, match=r"f:1: gt_answer: expected a number, or .* a value of the type date"):
        parse({"prompt": "q", "gt_answer": DAY})
    with pytest.raises(DataError, match=r"f:1: gt_answer: expected a value that can be sent .* lone surrogate"):
        parse({"prompt": "q", "gt_answer": "\ud800"})
    with pytest.raises(DataError, match=r"f:1: expected a value that can be sent .* lone surrogate"):
        parse({"prompt": "\ud800", "gt_answer": 1})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()) | st.binary()
    | st.dates() | st.just(1 << 70),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text("abc", max_size=3), VALUES, max_size=3))
@examples(200)
def test_what_is_kept_of_any_row_can_be_written_as_message_and_as_json(fields: dict[str, Any]):
    kept, dropped = split_sendable(fields)
    assert msgpack.unpackb(msgpack.packb(kept)) == kept == json.loads(json.dumps(kept))
    for names, _ in dropped:  # each was there, and is not any more
        before: Any = fields
        after: Any = kept
        for name in names:
            before, after = before[name], after.get(name, {})
        assert after == {}
    assert len(json.dumps(kept).split("[[[[[[[")) == 1, f"more than {MAX_NESTING} levels"


def test_columns_of_other_forms_than_ours_are_left_alone_if_nobody_asked_for_them():
    raw = {"prompt": "q", "gt_answer": 2, "test_cases": "none", "extra_info": "{no json", "fn_name": 3}
    assert parse(raw).reward_data == {"gt_answer": "2", "test_cases": "none", "extra_info": "{no json", "fn_name": 3}
    with pytest.raises(DataError, match="extra_info: expected JSON"):
        parse({"prompt": "q", "extra_info": "{no json"}, needs=(), needs_prompt=False)


def test_tests_with_numbers_beyond_64_bits_or_deep_lists_travel_as_json_text():
    cases = {"inputs": [[1 << 70, "a"], [1], [DEEP]], "outputs": [[1 << 70], 2, DEEP]}
    row = parse({"prompt": "q", "test_cases": cases, "fn_name": "f"}, needs=("test_cases",))
    inputs, outputs = [f'{1 << 70}\n"a"', [1], "[[[[[[[1]]]]]]]"], [f"[{1 << 70}]", 2, "[[[[[[[1]]]]]]]"]
    assert row.reward_data["test_cases"] == {"inputs": inputs, "outputs": outputs}


def test_what_is_dropped_of_a_file_is_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = [{"prompt": "q", "gt_answer": "1", "when": DAY, "image": {"bytes": b"x", "path": "a.png"}}] * 2
    parquet.write_table(pa.Table.from_pylist([*rows, {"prompt": "q", "gt_answer": "1"}]), tmp_path / "rows.parquet")
    loaded = load_rows(str(tmp_path / "rows.parquet"))
    assert loaded.dropped == {
        "when (a value of the type date32[day])": 2, "image.bytes (a value of the type bytes)": 2,
    }  # fmt: skip
    assert row_fields(loaded.rows[0].reward_data) == {"gt_answer": "1", "image": {"path": "a.png"}}
    load_rows_of(a_config(), str(tmp_path / "rows.parquet"))
    assert "when (a value of the type date32[day]) of 2 rows" in caplog.text


@pytest.mark.parametrize(
    ("text", "kept", "path"),
    [
        (r'{"a": 1, "\ud800": 2}', {"a": 1}, ["'\\ud800'"]),
        (r'{"a": {"b": 1, "\ud800": 2}}', {"a": {"b": 1}}, ["a", "'\\ud800'"]),
        (r'{"a": 1, "b": [{"\ud800": 2}]}', {"a": 1}, ["b"]),
        (r'{"a": 1, "b": {"c": "\ud800"}}', {"a": 1, "b": {}}, ["b", "c"]),
    ],
)
def test_a_lone_surrogate_is_dropped_as_a_name_as_well_as_a_value(text: str, kept: dict[str, Any], path: list[str]):
    found, ((names, reason),) = split_sendable(json.loads(text))
    assert (found, names) == (kept, path)
    assert reason.endswith("text that is not Unicode (a lone surrogate)")
    json.dumps([found, names, reason], ensure_ascii=False).encode()
