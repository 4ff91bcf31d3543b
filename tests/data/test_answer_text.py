"""The text that rewards read: which special tokens stay in it, and what a prompt opens."""

from __future__ import annotations

import numpy as np
import pytest

from async_rl.data.answer_text import answer_decoder, prompt_opened
from async_rl.data.chat import render_prompt
from async_rl.data.turn_end import turn_ends
from tests.data.public_templates import cases, tokenizer_of

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


@pytest.mark.parametrize("tags_are_special", [False, True])
def test_special_tags_stay_and_what_ends_a_turn_or_pads_does_not(tags_are_special: bool):
    tokenizer = tokenizer_of("qwen2_5", eos="<|endoftext|>", more=["<|pad|>"])
    tokenizer.pad_token = "<|pad|>"
    tokenizer.add_tokens(TAGS, special_tokens=tags_are_special)
    said = "<think>\ntwo\n</think>\n<answer>\n4\n</answer>"
    ids = tokenizer(said + "<|im_end|><|endoftext|><|pad|>")["input_ids"]
    decode = answer_decoder(tokenizer, turn_ends(tokenizer).ids)
    assert decode(np.array(ids, np.int32)) == said


OPENED = {
    "deepseek": "<think>\n",
    "nemotron": "<think>\n",
    "qwen3_5_think": "<think>\n",
    "qwen3_5_nothink": "<think>\n\n</think>\n\n",
    "qwen3_6": "<think>\n",
    "qwen3_8": "<think>\n",
}
"""By the beginning of the template's name. All others open nothing."""


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("content", ["2+2?", "Write <think>", "<answer>\n"])
def test_what_each_public_template_opens(name: str, content: str):
    tokenizer = tokenizer_of(name)
    prompt = render_prompt(tokenizer, [{"role": "user", "content": content}])
    decode = answer_decoder(tokenizer, turn_ends(tokenizer).ids)
    opened = next((text for start, text in OPENED.items() if name.startswith(start)), "")
    assert prompt_opened(prompt, decode) == opened


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("Assistant: Let me solve this.\n<think>", "<think>"),
        ("Assistant: <scratch-pad>\n\n", "<scratch-pad>\n\n"),
        ("<think>\nshort\n</think>\n<answer>", "<answer>"),
        ("a <b> is", ""),
        ("", ""),
    ],
)
def test_what_a_plain_prompt_opens(prompt: str, opened: str):
    tokenizer = tokenizer_of("qwen2_5")
    ids = np.array(tokenizer(prompt)["input_ids"], np.int32)
    assert prompt_opened(ids, answer_decoder(tokenizer, turn_ends(tokenizer).ids)) == opened
