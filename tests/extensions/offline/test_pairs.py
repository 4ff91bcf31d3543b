"""Rows of preferences to tokens and masks, spelled out; bad rows named by file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase as Tokenizer

from async_rl.errors import DataError
from async_rl.learner.sequences import TrainSequence
from tests.extensions.offline.read import labelled_of, pairs_of, scored_pairs
from tests.extensions.offline.test_sft_rows import rows_file, spelled, write_in

ASK = {"role": "user", "content": "1+1"}
SAY_2, SAY_3 = ({"role": "assistant", "content": content} for content in "23")
SYSTEM = {"role": "system", "content": "be brief"}
CHAT = "<|user|>1+1<|end|>\n<|assistant|>"


def split(tokenizer: Tokenizer, sequence: TrainSequence) -> tuple[str, str]:
    """What is not trained on up to the answer, and what is."""
    text, begin = spelled(tokenizer, sequence.token_ids), int(sequence.loss_mask.argmax())
    return text[: len(spelled(tokenizer, sequence.token_ids[:begin]))], spelled(
        tokenizer, sequence.token_ids[sequence.loss_mask]
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": "2", "rejected": "3"},
        {"prompt": [ASK], "chosen": [ASK, SAY_2], "rejected": [ASK, SAY_3]},
        {"chosen": [ASK, SAY_2], "rejected": [ASK, SAY_3]},
        {"messages": [ASK], "chosen": "2", "rejected": "3"},
        {"messages": ASK, "chosen": SAY_2, "rejected": SAY_3},
        {"messages": [ASK, SAY_2], "chosen": [ASK, SAY_2], "rejected": [ASK, SAY_3]},
        {"messages": [ASK, SAY_2], "prompt": "1+1", "chosen": [ASK, SAY_2], "rejected": [ASK, SAY_3], "n": None},
        {"prompt": "1+1", "chosen": [SAY_2], "rejected": [SAY_3]},
        {"prompt": None, "messages": [{**ASK, "name": None}], "chosen": "2", "rejected": "3"},
    ],
)
@pytest.mark.parametrize("form", [".jsonl", ".parquet", ".csv"])
def test_every_form_of_a_pair_of_messages_means_the_same(
    row: dict[str, Any], form: str, tmp_path: Path, tokenizer: Tokenizer
):
    if form == ".csv":
        row = {key: value for key, value in row.items() if value is not None}
    path = rows_file(tmp_path, row) if form == ".jsonl" else write_in(form, tmp_path, [row])
    (scored,) = scored_pairs(path, tokenizer)
    assert spelled(tokenizer, scored.chosen.token_ids[:-1]) == f"{CHAT}2<|end|>\n"
    assert spelled(tokenizer, scored.rejected.token_ids[:-1]) == f"{CHAT}3<|end|>\n"
    (pair,) = pairs_of(path, tokenizer)
    assert split(tokenizer, pair.chosen) == (CHAT, "2<|end|>")
    assert split(tokenizer, pair.rejected) == (CHAT, "3<|end|>")


@pytest.mark.parametrize(
    ("row", "chosen", "rejected"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3333"}, ("1+1=", "2<|end|>"), ("1+1=", "333")),  # cut at 7
        # Without a prompt both share what they begin with.
        ({"chosen": "1+1= 2", "rejected": "1+1= 3"}, ("1+1= ", "2<|end|>"), ("1+1= ", "3<|end|>")),
        ({"chosen": "aab", "rejected": "aa"}, ("aa", "b<|end|>"), ("aa", "<|end|>")),
    ],
)
def test_text_is_used_without_a_template_and_cut_on_the_right(
    row: dict[str, Any], chosen: tuple[str, str], rejected: tuple[str, str], tmp_path: Path,
    tokenizer: Tokenizer,
):  # fmt: skip
    (pair,) = pairs_of(rows_file(tmp_path, row), tokenizer, max_length=7)
    assert (split(tokenizer, pair.chosen), split(tokenizer, pair.rejected)) == (chosen, rejected)


def test_pairs_of_equal_answers_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    same = [{"prompt": "1+1=", "chosen": "2", "rejected": "2"}, {"chosen": [ASK, SAY_2], "rejected": [ASK, SAY_2]}]
    cut = [{"prompt": "1+1=", "chosen": "2" * 30, "rejected": "2" * 31}, {"chosen": "a" * 30, "rejected": "a" * 31}]
    path = rows_file(tmp_path, *same, *cut, {"prompt": "1+1=", "chosen": "2", "rejected": "3"})
    (pair,) = pairs_of(path, tokenizer, max_length=20)
    assert split(tokenizer, pair.chosen) == ("1+1=", "2<|end|>")
    assert "4 of 5 pairs have two equal answers, 2 of them since they were cut" in caplog.text
    assert "dpo.data: cut the end of 4 of 10 sequences, which have more than dpo.max_length = 20 tokens" in caplog.text
    caplog.clear()
    assert len(scored_pairs(path, tokenizer)) == 3
    assert "rm.data: 2 of 5 pairs have two equal answers" in caplog.text
    for load in (pairs_of, scored_pairs):
        with pytest.raises(DataError, match="two different answers, got none: 2 of 2 pairs have two equal"):
            load(rows_file(tmp_path, *same), tokenizer)


def test_earlier_turns_of_the_assistant_belong_to_the_prompt(tmp_path: Path, tokenizer: Tokenizer):
    row = {"chosen": [ASK, SAY_3, ASK, SAY_2], "rejected": [ASK, SAY_3, ASK, SAY_3, ASK, SAY_2]}
    (pair,) = pairs_of(rows_file(tmp_path, row), tokenizer)
    assert split(tokenizer, pair.chosen) == (f"{CHAT}3<|end|>\n{CHAT}", "2<|end|>")
    assert split(tokenizer, pair.rejected) == (f"{CHAT}3<|end|>\n{CHAT}", "3<|end|>2<|end|>")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "rows.jsonl:1: expected .* got prompt: the text 'a', chosen"),
        ({"chosen": "b", "rejected": "c"}, 'begin with the same text, .* give the question as "prompt"'),
        ({"prompt": [SYSTEM, ASK], "chosen": [ASK, SAY_2], "rejected": [ASK, SAY_3]}, "that begin after the prompt"),
        (
            {"prompt": [ASK], "chosen": [SYSTEM, ASK, SAY_2], "rejected": [SYSTEM, ASK, SAY_3]},
            "begins with .*be brief.*put all of it into the prompt",
        ),
        ({"messages": [ASK, SAY_2], "chosen": "b", "rejected": "c"}, "to end before the answer"),
        ({"prompt": "a", "chosen": "b", "rejected": [SAY_2]}, "all as text or as lists"),
        ({"chosen": [SAY_2, ASK], "rejected": [SAY_2, ASK]}, "differ from an assistant message on, got 2 equal"),
        ({"chosen": [SAY_2], "rejected": [SAY_3]}, "got 0 equal messages"),
        ({"prompt": "?", "chosen": [ASK, SAY_2], "rejected": [ASK, SAY_3]}, "the last message that chosen and"),
        ({"prompt": "abcdefgh", "chosen": "b", "rejected": "c"}, "raise dpo.max_length"),
    ],
)
def test_a_bad_pair_is_refused_with_its_place(row: dict[str, Any], message: str, tmp_path: Path, tokenizer: Tokenizer):
    with pytest.raises(DataError, match=message):
        pairs_of(rows_file(tmp_path, row), tokenizer, max_length=8)


def test_labelled_answers_of_every_form_have_the_next_rows_answer_as_mismatched(tmp_path: Path, tokenizer: Tokenizer):
    rows = [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": [ASK], "completion": [SAY_2], "label": False},
        {"prompt": "cc", "completion": "dddd", "label": 1, "messages": None},
        {"messages": ASK, "completion": SAY_3, "label": 0},
        {"prompt": "1+1", "completion": [SAY_2], "label": False},
        {"prompt": [{**ASK, "name": None}], "completion": "3", "label": True, "id": None},
    ]
    found = labelled_of(rows_file(tmp_path, *rows), tokenizer)
    assert [row.is_good for row in found] == [True, False, True, False, False, True]
    answers = ["b<|end|>", "2<|end|>", "dddd<|end|>", "3<|end|>", "2<|end|>", "3<|end|>"]
    prompts = ["a", CHAT, "cc", CHAT, CHAT, CHAT]
    assert [split(tokenizer, row.answer) for row in found] == list(zip(prompts, answers, strict=True))
    mismatched = [*answers[1:], answers[0]]
    assert [split(tokenizer, row.mismatched) for row in found] == list(zip(prompts, mismatched, strict=True))


def test_bad_labels_are_refused(tmp_path: Path, tokenizer: Tokenizer):
    for label, message in (
        ({"label": True}, "expected at least two rows"),
        ({"label": 2}, 'expected true or false .* as "label", got 2'),
        ({}, "got keys"),
    ):
        with pytest.raises(DataError, match=message):
            labelled_of(rows_file(tmp_path, {"prompt": "a", "completion": "b", **label}), tokenizer)
