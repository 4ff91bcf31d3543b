"""What of a row can be sent to generators, and what is dropped by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from async_rl.data.sendable import split_sendable


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
