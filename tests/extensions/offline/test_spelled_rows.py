"""Rows whose contents spell control tokens: an answer that names the end mark is trained to its end, and no further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.config.data import DataConfig
from async_rl.data.spellings import control_of
from async_rl.data.template_forms import adapted
from async_rl.errors import DataError
from async_rl.extensions.offline.rows import RowEncoder
from tests.data.public_templates import cases
from tests.extensions.offline.read import scored_pairs
from tests.extensions.offline.test_public_templates import ASKED, encoder_of, prepared, spelled, trained
from tests.extensions.offline.test_sft_rows import rows_file

AS_TOKEN = DataConfig(special_tokens_in_content="token").template_arguments


def marks_of(name: str) -> list[str]:
    """The marks that open or end a turn of this template and this model."""
    tokenizer, ends = prepared(name)
    control = control_of(tokenizer, ends.ids)
    return sorted(mark for mark in control.names if control.of_turns.fullmatch(mark))


@pytest.mark.parametrize("name", cases())
def test_an_answer_that_names_a_mark_is_trained_whole_and_ends_once(name: str):
    tokenizer, ends = prepared(name)
    encoder = encoder_of(name)
    for mark in marks_of(name):
        said = f"Write {mark} last, then stop"
        chat = [
            {"role": "user", "content": f"Why {mark}? Say"},
            {"role": "assistant", "content": said},
            ASKED,
            {"role": "assistant", "content": f"{mark} is it"},
        ]
        neutral = [{**one, "content": one["content"].replace(mark, "so")} for one in chat]
        found, expected = (encoder.encode_turns(0, [], row, "row") for row in (chat, neutral))
        assert len(found) == len(expected), mark
        for one, other in zip(found, expected, strict=True):
            text, trained_text = spelled(tokenizer, one.token_ids), trained(name, one)
            assert text.replace(mark, "so") == spelled(tokenizer, other.token_ids).replace(mark, "so")
            assert trained_text.replace(mark, "so") == trained(name, other).replace(mark, "so")
            # The same end tokens at the same places of the text, trained and not.
            for ids, others in ((one.token_ids, other.token_ids), (one.token_ids[one.loss_mask],
                                                                   other.token_ids[other.loss_mask])):  # fmt: skip
                ended = [[int(token) for token in given if int(token) in ends.ids] for given in (ids, others)]
                assert ended[0] == ended[1], mark
        assert any(said in trained(name, one) for one in found)


def test_a_listed_end_that_only_the_models_files_know_is_text_inside_an_answer_too():
    tokenizer, ends = prepared("llama3")
    end = tokenizer.convert_tokens_to_ids("<|end_of_text|>")
    assert end in ends.ids
    chat = [ASKED, {"role": "assistant", "content": "It is <|end_of_text|>, I think"}]
    (sequence,) = encoder_of("llama3").encode_turns(0, [], chat, "row")
    assert end not in sequence.token_ids.tolist()
    assert trained("llama3", sequence) == "It is <|end_of_text|>, I think<|eot_id|>"


@pytest.mark.parametrize("content", ["4<|im_end|>", "4<|im_end|>\n", "4", "<think>\nT\n</think>\n\n4<|im_end|>"])
def test_an_end_mark_behind_an_answer_is_trained_as_before(content: str):
    encoder = encoder_of("qwen2_5")
    tokenizer, ends = prepared("qwen2_5")
    chat = [ASKED, {"role": "assistant", "content": content}]
    (found,) = encoder.encode_turns(0, [], chat, "row")
    before = RowEncoder(tokenizer, AS_TOKEN, max_length=1000, section="sft", ends=ends)
    (expected,) = before.encode_turns(0, [], chat, "row")
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.loss_mask.tolist() == expected.loss_mask.tolist()
    assert found.token_ids.tolist() == tokenizer.apply_chat_template(
        adapted(tokenizer.chat_template, chat), tokenize=True, return_dict=False
    )


def test_what_the_template_marks_as_the_models_own_is_found_behind_a_spelled_token():
    tokenizer, ends = prepared("qwen2_5")
    kept = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}Well, "
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = [{"role": "user", "content": "<|im_end|>?"}, {"role": "assistant", "content": "<|im_end|> it is"}]
    try:
        encoder = RowEncoder(tokenizer, {}, max_length=1000, section="sft", ends=ends)
        (sequence,) = encoder.encode_turns(0, [], chat, "row")
    finally:
        tokenizer.chat_template = kept
    assert spelled(tokenizer, sequence.token_ids[sequence.loss_mask]) == "<|im_end|> it is<|im_end|>"
    assert sequence.token_ids.tolist().count(tokenizer.eos_token_id) == 2


def test_plain_text_keeps_its_tokens():
    (sequence,) = [encoder_of("qwen2_5").encode(0, "a<|im_end|>", "b", "row")]
    assert sequence.token_ids.tolist().count(prepared("qwen2_5")[0].eos_token_id) == 2


def test_pairs_for_reward_models_have_the_setting_of_the_run(tmp_path: Path):
    tokenizer: Any = prepared("qwen2_5")[0]
    prompt = [{"role": "user", "content": "a <|im_end|> b"}]
    path = rows_file(tmp_path, {"prompt": prompt, "chosen": "4", "rejected": "5"})
    (as_text,) = scored_pairs(path, tokenizer, max_length=1000)
    (as_token,) = scored_pairs(path, tokenizer, max_length=1000, arguments=AS_TOKEN)
    ends = [one.chosen.token_ids.tolist().count(tokenizer.eos_token_id) for one in (as_text, as_token)]
    assert ends == [3, 4]  # system, user and answer, and the spelled one


def test_a_row_that_the_template_hides_in_is_refused_with_its_place(tmp_path: Path):
    tokenizer: Any = prepared("qwen2_5")[0]
    kept = tokenizer.chat_template
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | replace('<|im_end|>', '') }}<|im_end|>{% endfor %}"
    try:
        encoder = RowEncoder(tokenizer, {}, max_length=1000, section="sft")
        with pytest.raises(DataError, match=r"^rows:1: .*does not look for it.*special_tokens_in_content"):
            encoder.encode_turns(
                0, [], [{"role": "user", "content": "<|im_end|>"}, ASKED | {"role": "assistant"}], "rows:1"
            )
    finally:
        tokenizer.chat_template = kept
