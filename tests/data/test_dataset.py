"""Dataset files: what is accepted, what is refused and where the message points."""

import hashlib
import json
import math
from decimal import Decimal
from pathlib import Path

import pytest

from async_rl.data.dataset import LoadedRows, Row, RowRules, load_rows, load_train_rows, parse_row
from async_rl.errors import DataError
from async_rl.net.wire import decode, encode
from tests.config.made import a_config

DATA = Path(__file__).parent
GOOD = '{"messages": {"role": "user", "content": "1+1?"}, "gt_answer": "2"}'


def load_text(tmp_path: Path, text: str | bytes, on_bad_row: str = "refuse", system_prompt: str = "") -> LoadedRows:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    rules = RowRules(system_prompt=system_prompt)
    return load_rows(str(path), on_bad_row=on_bad_row, rules=rules)  # pyright: ignore[reportArgumentType]


def with_answer(answer: object) -> str:
    return json.dumps({"messages": {"role": "user", "content": "q"}, "gt_answer": answer})


@pytest.mark.parametrize(
    ("answer", "text"),
    [("2", "2"), (2, "2"), (-3, "-3"), (0, "0"), (0.5, "0.5"), (1e-7, "0.0000001"), (2**80, str(2**80)), (" x ", " x "),
     (Decimal("1.50"), "1.50")],
)  # fmt: skip
def test_answers_become_text_and_other_keys_stay(answer: object, text: str):
    other = {"level": 3, "tags": ["a", 0.5], "source": {"id": None}}
    row = parse_row({"messages": {"role": "user", "content": "q"}, "gt_answer": answer, **other}, "f:1", RowRules())
    assert row == Row(({"role": "user", "content": "q"},), {"gt_answer": text, **other})


def test_an_environments_rows_need_neither_messages_nor_an_answer():
    rules = RowRules(system_prompt="Think.", needs=(), needs_prompt=False)
    assert parse_row({"extra_info": {"number": 7}}, "f:1", rules) == Row((), {"extra_info": {"number": 7}})
    with pytest.raises(DataError, match="f:1: expected a row with"):
        parse_row({"extra_info": {"number": 7}}, "f:1", RowRules())


def test_blank_lines_a_byte_order_mark_and_carriage_returns_are_fine(tmp_path: Path):
    loaded = load_text(tmp_path, f"\ufeff{GOOD}\r\n\r\n   \n{GOOD}")
    assert len(loaded.rows) == 2
    assert loaded.num_skipped == 0


def test_unicode_line_separators_inside_a_text_do_not_split_the_row(tmp_path: Path):
    row = '{"messages": {"role": "user", "content": "a\u2028b"}, "gt_answer": "2"}'
    assert load_text(tmp_path, row).rows[0].messages[0]["content"] == "a\u2028b"


def test_a_rows_own_system_message_wins(tmp_path: Path):
    messages = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "q"}]
    rows = load_text(tmp_path, json.dumps({"messages": messages, "gt_answer": "2"}), system_prompt="Think.").rows
    assert list(rows[0].messages) == messages


def test_a_number_that_is_none_in_a_column_that_nobody_asked_for_refuses_no_row(tmp_path: Path):
    [row] = load_text(tmp_path, GOOD.replace('"gt_answer"', '"score": NaN, "top": -Infinity, "gt_answer"')).rows
    assert math.isnan(row.reward_data["score"])
    assert row.reward_data["top"] == -math.inf


def test_a_content_of_text_parts_is_their_text(tmp_path: Path):
    parts = '[{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]'
    [row] = load_text(tmp_path, f'{{"messages": [{{"role": "user", "content": {parts}}}], "gt_answer": "2"}}\n').rows
    assert row.messages == ({"role": "user", "content": "1 + 1?"},)


def test_the_digest_is_the_files_sha256(tmp_path: Path):
    text = f"{GOOD}\n\n{GOOD}\n"
    assert load_text(tmp_path, text).digest == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"messages": ', "expected one JSON object per line"),
        ("[1, 2]", "expected a JSON object, got a list of 2"),
        ('{"question": "q", "answer": "2"}', r"got no messages among the keys \['answer', 'question'\]"),
        ('{"messages": {"role": "user", "content": "q"}}', r"got no gt_answer among the keys \['messages'\]"),
        (with_answer(None), "got no gt_answer"),
        (with_answer("  "), "gt_answer: expected a number, or text that is not blank"),
        (with_answer(True), "gt_answer: .* got true"),
        (with_answer(["2"]), "gt_answer: .* got a list of 1"),
        (with_answer(2).replace("2}", "NaN}"), "gt_answer: .* got the number nan"),
        ('{"messages": "q", "gt_answer": "2"}', "messages: expected a message or a list of messages, got the text 'q'"),
        ('{"messages": [{"role": "", "content": "q"}], "gt_answer": "2"}', r"messages\[0\]: expected"),
        ('{"messages": [{"role": "user", "content": 5}], "gt_answer": "2"}', r"messages\[0\]: expected"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}], "gt_answer": "2"}', r"expected .*image"),
        ('{"messages": [{"role": "user", "content": "q", "name": "n"}], "gt_answer": "2"}', r"messages\[0\]: expected"),
        (
            '{"gt_answer": "1", "messages": {"role": "user", "content": "q"}, "gt_answer": "2"}',
            "'gt_answer' occurs twice",
        ),
        (GOOD.replace("1+1?", "\\ud800"), "expected a value that can be sent"),
        (GOOD.replace('"2"', '"2", "deep": ' + "[" * 100_000 + "]" * 100_000), "JSON that can't be used"),
        (GOOD.replace('"2"', "1" * 5000), "JSON that can't be used"),
    ],
)
def test_bad_rows_are_refused_with_file_and_line_or_skipped_and_counted(tmp_path: Path, row: str, complaint: str):
    text = f"{GOOD}\n\n{row}\n{GOOD}\n"
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: .*{complaint}"):
        load_text(tmp_path, text)
    skipped = load_text(tmp_path, text, on_bad_row="skip")
    assert (len(skipped.rows), skipped.num_skipped) == (2, 1)


def test_bytes_that_are_not_utf8_are_refused_with_file_and_line(tmp_path: Path):
    text = GOOD.encode() + b"\n" + GOOD.encode().replace(b"1+1?", b"caf\xe9") + b"\n"
    with pytest.raises(DataError, match=r"rows\.jsonl:2: expected UTF-8, got byte 0xe9 at offset \d+"):
        load_text(tmp_path, text)
    assert load_text(tmp_path, text, on_bad_row="skip").num_skipped == 1


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_dataset_is_refused(tmp_path: Path, text: str):
    with pytest.raises(DataError, match=r"at least one row in .*rows\.jsonl, got none: the dataset has no rows"):
        load_text(tmp_path, text)


def test_a_dataset_of_bad_rows_alone_is_refused_even_when_skipping(tmp_path: Path):
    with pytest.raises(DataError, match="all 2 rows have errors and were skipped"):
        load_text(tmp_path, "{}\n{}\n", on_bad_row="skip")


@pytest.mark.parametrize(("name", "num_rows"), [("gsm8k_train_64.jsonl", 64), ("gsm8k_test_32.jsonl", 32)])
def test_the_committed_slices_load_and_travel(name: str, num_rows: int):
    rows = load_rows(str(DATA / name)).rows
    assert len(rows) == num_rows
    for row in rows:
        assert row.messages[-1]["content"].endswith("\\boxed{}.")
        fields = {"messages": list(row.messages), "reward_data": dict(row.reward_data)}
        assert decode(encode("row", fields)).fields == fields


def test_sources_follow_each_other_in_the_order_of_their_names(tmp_path: Path):
    for name, answers in (("two", "34"), ("one", "12")):
        lines = [json.dumps({"prompt": "q", "gt_answer": answer}) for answer in answers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    train = {name: f"{tmp_path}/{name}.jsonl" for name in ("two", "one")}
    loaded = load_train_rows(a_config(data={"train": train}))
    assert [(row.source, row.reward_data["gt_answer"]) for row in loaded.rows] == [
        ("one", "1"), ("one", "2"), ("two", "3"), ("two", "4"),
    ]  # fmt: skip
    again = a_config(data={"train": dict(reversed(train.items()))})
    assert load_train_rows(again) == loaded
    (tmp_path / "one.jsonl").write_text((tmp_path / "one.jsonl").read_text() + "\n")
    assert load_train_rows(again).digest != loaded.digest
