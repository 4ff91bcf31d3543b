"""Rows whose contents spell control tokens: an answer that names the end mark is trained to its end, and no further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.config.data import DataConfig
from async_rl.data.spellings import control_of
from async_rl.errors import DataError
from tests.data.public_templates import cases
from tests.extensions.offline.read import scored_pairs
from tests.extensions.offline.test_public_templates import ANSWERED, ASKED, encoder_of, prepared, spelled, trained
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
            # The same end tokens, trained and not.
            for mask, other_mask in ((slice(None), slice(None)), (one.loss_mask, other.loss_mask)):
                ids, others = one.token_ids[mask].tolist(), other.token_ids[other_mask].tolist()
                assert [t for t in ids if t in ends.ids] == [t for t in others if t in ends.ids], mark
        assert any(said in trained(name, one) for one in found)


def test_a_listed_end_that_only_the_models_files_know_is_text_inside_an_answer_too():
    tokenizer, ends = prepared("llama3")
    end = tokenizer.convert_tokens_to_ids("<|end_of_text|>")
    assert end in ends.ids
    chat = [ASKED, {"role": "assistant", "content": "It is <|end_of_text|>, I think"}]
    (sequence,) = encoder_of("llama3").encode_turns(0, [], chat, "row")
    assert end not in sequence.token_ids.tolist()
    assert trained("llama3", sequence) == "It is <|end_of_text|>, I think<|eot_id|>"


def test_what_the_template_marks_as_the_models_own_is_found_behind_a_spelled_token(monkeypatch: pytest.MonkeyPatch):
    tokenizer = prepared("qwen2_5")[0]
    marked = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}Well, "
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = [{"role": "user", "content": "<|im_end|>?"}, {"role": "assistant", "content": "<|im_end|> it is"}]
    monkeypatch.setattr(tokenizer, "chat_template", marked)
    (sequence,) = encoder_of("qwen2_5").encode_turns(0, [], [*chat, *chat], "row")
    assert spelled(tokenizer, sequence.token_ids[sequence.loss_mask]) == "<|im_end|> it is<|im_end|>" * 2
    assert sequence.token_ids.tolist().count(tokenizer.eos_token_id) == 4


def test_plain_text_keeps_its_tokens():
    sequence = encoder_of("qwen2_5").encode(0, "a<|im_end|>", "b", "row")
    assert sequence.token_ids.tolist().count(prepared("qwen2_5")[0].eos_token_id) == 2


def test_pairs_for_reward_models_have_the_setting_of_the_run(tmp_path: Path):
    tokenizer: Any = prepared("qwen2_5")[0]
    prompt = [{"role": "user", "content": "a <|im_end|> b"}]
    path = rows_file(tmp_path, {"prompt": prompt, "chosen": "4", "rejected": "5"})
    (as_text,) = scored_pairs(path, tokenizer, max_length=1000)
    (as_token,) = scored_pairs(path, tokenizer, max_length=1000, arguments=AS_TOKEN)
    ends = [one.chosen.token_ids.tolist().count(tokenizer.eos_token_id) for one in (as_text, as_token)]
    assert ends == [3, 4]  # system, user and answer, and the spelled one


def test_a_row_that_the_template_hides_in_is_refused_with_its_place(monkeypatch: pytest.MonkeyPatch):
    template = "{% for m in messages %}{{ m.content | replace('<|im_end|>', '') }}<|im_end|>{% endfor %}"
    monkeypatch.setattr(prepared("qwen2_5")[0], "chat_template", template)
    chat = [{"role": "user", "content": "<|im_end|>"}, ANSWERED]
    with pytest.raises(DataError, match=r"^rows:1: .*does not look for it.*special_tokens_in_content"):
        encoder_of("qwen2_5").encode_turns(0, [], chat, "rows:1")
