"""Flags of messages: what they say of training, and that a prompt of reinforcement learning may have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.data.dataset import load_rows
from async_rl.data.message_keys import FLAGS, is_trained, refuse_flags
from async_rl.errors import DataError

NAMES = ("weight", "loss", "loss_mask", "trainable", "train", "training")
ASKED = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, False) for value in (0, 0.0, False, "0", "False")),
        *((value, True) for value in (1, 1.0, True, "1", "true", None, "")),
    ],
)
def test_a_flag_of_0_or_false_leaves_a_message_out(name: str, value: Any, expected: bool):
    assert is_trained({**SAID, name: value}, "row") is expected


@pytest.mark.parametrize(
    "flags",
    [
        *({"weight": value} for value in (0.5, -1, "no", [1], float("nan"))),
        *({"weight": 1, "train": False}, {"mask": 0}, {"masked": True}, {"mask": 1, "weight": 1}),
    ],
)
def test_a_flag_whose_meaning_is_not_clear_is_refused(flags: dict[str, Any]):
    with pytest.raises(DataError, match=rf"^row: expected one of the keys weight, .*got .*{next(iter(flags))}"):
        is_trained(SAID | flags, "row")


@pytest.mark.parametrize("name", sorted(FLAGS))
@pytest.mark.parametrize("value", [0, 1])
def test_the_model_s_messages_in_an_answer_that_is_compared_have_no_flags(name: str, value: int):
    refuse_flags([{**ASKED, name: value}, SAID], "row")
    with pytest.raises(DataError, match=rf"^row: expected an answer without flags.*'{name}': {value}"):
        refuse_flags([{**SAID, name: value}], "row")


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_flags_have_no_effect_in_a_prompt_of_reinforcement_learning(tmp_path: Path, name: str):
    messages = [ASKED, {**SAID, name: 0}, {**ASKED, name: 0.5}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages, "gt_answer": "1"}))
    assert load_rows(str(path)).rows[0].messages == (ASKED, SAID, ASKED)
