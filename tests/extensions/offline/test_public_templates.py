"""Every public chat template, from a row to what is trained, compared with the template that trl trains with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from transformers import Qwen2Config

from async_rl.data.template import apply_template
from async_rl.data.template_forms import adapted, forms_of
from async_rl.data.turn_end import TurnEnds, turn_ends
from async_rl.errors import AsyncRLError, DataError
from async_rl.extensions.offline.rows import RowEncoder
from async_rl.learner.sequences import TrainSequence
from tests.data.public_templates import cases, listed_ids, template, tokenizer_of

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}},
        },
    }
]
CALL = {"type": "function", "id": "c12345678", "function": {"name": "weather", "arguments": '{"place": "Bonn"}'}}
ASKED, ANSWERED = {"role": "user", "content": "Q1"}, {"role": "assistant", "content": "A1"}
MORE = [{"role": "user", "content": "Q2"}, {"role": "assistant", "content": "A2"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "one turn": [ASKED, ANSWERED],
    "two turns": [ASKED, ANSWERED, *MORE],
    "system": [{"role": "system", "content": "S"}, ASKED, ANSWERED],
    "thinking": [
        ASKED,
        {"role": "assistant", "content": "<think>\nT1\n</think>\n\nA1"},
        MORE[0],
        {"role": "assistant", "content": "<think>\nT2\n</think>\n\nA2"},
    ],
    "tools": [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "tool_call_id": "c12345678", "content": "12"},
        ANSWERED,
    ],
}


@cache
def prepared(name: str) -> tuple[Any, TurnEnds]:
    """A tokenizer with the template ``name``, and the end tokens of a model that lists those of its own."""
    tokenizer = tokenizer_of(name)
    with TemporaryDirectory() as folder:
        Qwen2Config(vocab_size=len(tokenizer)).save_pretrained(folder)
        (Path(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": listed_ids(tokenizer, name)}))
        return tokenizer, turn_ends(tokenizer, Path(folder))


def encoder_of(name: str, section: str = "sft") -> RowEncoder:
    tokenizer, ends = prepared(name)
    return RowEncoder(tokenizer, {}, max_length=100_000, section=section, ends=ends)


def encoded(name: str, row: str) -> list[TrainSequence] | str:
    """The sequences of a row, or why it is refused."""
    tools = TOOLS if row == "tools" else None
    try:
        return encoder_of(name).encode_turns(0, [], ROWS[row], "row", tools=tools)
    except AsyncRLError as error:
        return str(error)


def spelled(tokenizer: Any, token_ids: Sequence[int] | np.ndarray) -> str:
    return str(tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=False))


def trained(name: str, sequence: TrainSequence) -> str:
    return spelled(prepared(name)[0], sequence.token_ids[sequence.loss_mask])


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", cases())
def test_each_turn_is_trained_once_from_the_prompt_that_sampling_would_use_up_to_one_end(name: str, row: str):
    tokenizer, ends = prepared(name)
    sequences = encoded(name, row)
    if isinstance(sequences, str):
        assert sequences.startswith(("row: ", "data.tools: "))
        return
    texts = [trained(name, sequence) for sequence in sequences]
    for word in ("A1", *(["A2"] if row in ("two turns", "thinking") else []), *(["Bonn"] if row == "tools" else [])):
        assert "".join(texts).count(word) == 1
    for word in ("Q1", "Q2", "12"):
        assert word not in "".join(texts)
    for sequence in sequences:
        # After each run of trained tokens comes what sampling would not have: every run ends with an end token.
        mask, token_ids = sequence.loss_mask, sequence.token_ids
        last = [i for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]
        assert all(int(token_ids[i]) in ends.ids for i in last)
    first = int(sequences[-1].loss_mask.argmax())
    if len(sequences) > 1 or row == "one turn":
        # The prompt as it would be sampled, or, where the answer closes what the prompt opens, its beginning.
        turn = max(i for i, message in enumerate(ROWS[row]) if message["role"] == "assistant")
        prompt = apply_template(tokenizer, ROWS[row][:turn], {"tools": TOOLS} if row == "tools" else {})
        assert str(prompt).startswith(spelled(tokenizer, sequences[-1].token_ids[:first]))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(training=True))
@pytest.mark.parametrize("row", ROWS)
def test_the_tokens_and_the_mask_are_those_of_trl_or_differ_for_a_written_reason(name: str, row: str):
    found = difference(name, row)
    assert found in REASONS, found


REASONS = {
    "equal": "",
    "refused": "The template refuses the row, or does not read the tools.",
    "narrower": "The same tokens. trl also trains what the generation prompt has already, and what follows the end.",
    "as sampled": "The template rewrites earlier turns once the conversation goes on; each turn has the history that "
    "sampling would show it, and trl one history that no prompt has.",
    "thinking opened": "The prompt opens the thinking, and the template drops or repeats what the row says in it.",
    "parts": "The template reads contents as parts; trl's tokens lack all words of plain text.",
    "tool end": "trl leaves out the token that ends a tool call's turn.",
}


def difference(name: str, row: str) -> str:
    """How our sequences of a row differ from what trl's twin of the template gives: a key of REASONS."""
    sequences = encoded(name, row)
    if isinstance(sequences, str):
        return "refused"
    tokenizer = prepared(name)[0]
    twin = tokenizer_of(name)
    twin.chat_template = template(name, training=True)
    if forms_of(template(name)).needs_parts:
        return "parts"
    theirs = twin.apply_chat_template(
        adapted(twin.chat_template, ROWS[row]),
        tools=TOOLS if row == "tools" else None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    text = spelled(tokenizer, theirs["input_ids"])
    if len(sequences) > 1:
        return "as sampled"
    (sequence,) = sequences
    if sequence.token_ids.tolist() != theirs["input_ids"]:
        return "thinking opened" if row == "thinking" else f"tokens: {spelled(tokenizer, sequence.token_ids)} | {text}"
    mask = np.array(theirs["assistant_masks"], dtype=np.bool_)
    if (mask == sequence.loss_mask).all():
        return "equal"
    if not (sequence.loss_mask & ~mask).any():
        # What trl trains in addition touches a turn: what the prompt opens it with, or what follows its end.
        padded = np.concatenate([[False], sequence.loss_mask, [False]])
        more = np.concatenate([[False], mask & ~sequence.loss_mask, [False]])
        starts, stops = np.flatnonzero(more & ~np.roll(more, 1)), np.flatnonzero(more & ~np.roll(more, -1))
        assert all(padded[start - 1] or padded[stop + 1] for start, stop in zip(starts, stops, strict=True))
        return "narrower"
    more = spelled(tokenizer, sequence.token_ids[sequence.loss_mask & ~mask])
    return "tool end" if more.startswith("<|tool_response>") else f"wider: {more}"


@pytest.mark.parametrize("name", cases())
def test_dpo_scores_one_text_an_answer_or_says_what_to_move_to_the_prompt(name: str):
    encoder = encoder_of(name, "dpo")
    one = encoder.encode(0, [ASKED], "A1", "row")
    assert trained(name, one) == trained(name, encoded(name, "one turn")[0])  # pyright: ignore[reportArgumentType]
    answer = [ANSWERED, *MORE]
    if len(encoded(name, "two turns")) == 1:
        assert trained(name, encoder.encode(0, [ASKED], answer, "row")).count("A") == 2
        return
    with pytest.raises(DataError, match=r"^row: .*move all but the last to prompt"):
        encoder.encode(0, [ASKED], answer, "row")
    # The advice: the last turn is scored alone, as the prompt of sampling would have it.
    moved = encoder.encode(0, [ASKED, *answer[:-1]], answer[-1:], "row")
    assert trained(name, moved) == trained(name, encoded(name, "two turns")[-1])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "assistant", "content": [{"type": "image", "url": "x"}]}, "or a list of text parts"),
        ({"role": "assistant", "content": None}, "or a list of text parts"),
        ({**ANSWERED, "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}, "as the JSON text of one"),
        ({**ANSWERED, "tool_calls": [{"function": None}]}, "expected a tool call as"),
        ({**ANSWERED, "tool_calls": ["weather"]}, "expected a tool call as"),
        ({**ANSWERED, "tool_calls": json.dumps([CALL])}, "expected tool_calls as a list of calls, got the text"),
    ],
)
def test_a_message_without_text_or_with_other_calls_is_refused(message: dict[str, Any], error: str):
    with pytest.raises(DataError, match=f"^row: .*{error}"):
        encoder_of("qwen3").encode_turns(0, [], [ASKED, message], "row")


@pytest.mark.parametrize("name", cases())
def test_a_refused_row_of_tools_is_accepted_as_its_advice_says(name: str):
    refusal = encoded(name, "tools")
    if not isinstance(refusal, str):
        return
    assert "or leave them out" in refusal or "write the call as its content" in refusal
    called = {"role": "assistant", "content": '{"name": "weather", "place": "Bonn"}'}
    row = [ASKED, called, {"role": "user", "content": "12"}, ANSWERED]
    (sequence,) = encoder_of(name).encode_turns(0, [], row, "row")
    assert "Bonn" in trained(name, sequence)
