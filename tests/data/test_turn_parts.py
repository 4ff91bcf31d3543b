"""The parts of a sequence: whose message each is, and whether the loss has its tokens."""

import pytest

from async_rl.data.template import apply_template
from async_rl.data.turn_parts import num_computed_again, parts_of, role_headers
from tests.data import public_templates as public
from tests.extensions.agents.test_conversations import ASKED, RESULT, TOOLS


def test_parts_begin_at_headers_and_where_the_use_changes():
    headers = {"<|im_start|>user": "user", "<|im_start|>assistant": "assistant", "<|im_start|>user\n<tool>": "tool"}
    texts = ["Hi", "<|im_start|>", "user", "\n", "2+3?", "<|im_start|>", "assistant", "\n"]
    texts += ["add", "(", "<|im_end|>", "\n", "<|im_start|>", "user", "\n", "<tool>", "5"]
    outcomes = [*["given"] * 8, "trained", "clipped_low", "masked/truncated", *["given"] * 6]
    found = parts_of(texts, outcomes, headers)
    assert found == [
        ("", "context", 0, 1), ("user", "context", 1, 5), ("assistant", "context", 5, 8),
        ("assistant", "target", 8, 10), ("assistant", "untrained: masked/truncated", 10, 11),
        ("", "context", 11, 12), ("tool", "context", 12, 17),
    ]  # fmt: skip
    # The second sequence has eight tokens before its answer; the third has no answer.
    assert num_computed_again([found, found, found[:3]]) == 8


@pytest.mark.parametrize("name", ["glm4moe", "lfm2_2_5", "llama3_1", "qwen3", "qwen3_5_think"])
def test_headers_are_found_in_what_the_templates_of_the_field_write(name: str):
    tokenizer = public.tokenizer_of(name)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    chat = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT]
    text = str(apply_template(tokenizer, chat, {"tools": TOOLS}))
    parts = parts_of([*text], ["given"] * len(text), role_headers(public.template(name)))
    assert [part.role for part in parts][-4:] == ["user", "assistant", "tool", "assistant"]
