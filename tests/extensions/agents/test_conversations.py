"""Chats as token ids: what is recognised keeps its sampled ids, under the chat templates of the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError

from async_rl.extensions.agents.front.answers import message_of, parse_answer
from async_rl.extensions.agents.front.chat import ChatRenderer
from async_rl.extensions.agents.front.conversations import ChatPrompt, Conversations
from tests.data import public_templates as public

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "integer", "description": f"Number {key}."} for key in "ab"},
                "required": ["a", "b"],
            },
        },
    }
]
CALL = 'So.\n<tool_call>\n{"name": "add",  "arguments": {"a": 2, "b": 3}}\n</tool_call>'
"""With two spaces that no template would write."""
ASKED = {"role": "user", "content": "What is 2+3?"}
MORE = {"role": "user", "content": "And 4+4?"}
RESULT = {"role": "tool", "tool_call_id": "call-0-0", "name": "add", "content": "5"}

RENDERED_WHOLE = {
    # Its history ends turns with <|end|>, where the model samples <|return|>.
    ("gptoss", "text"),
    # They end a tool call with other marks than an answer, with which the answer here ends.
    *((name, "tools") for name in ("cohere2", "diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4")),
    ("gemma4_v5", "tools"),
    # They leave a tool's answer out without a word. A request with tools is refused, because they read no tools either.
    ("phi3", "tools"), ("phi3_5", "tools"),
}  # fmt: skip
CALLS_END = {"glm4moe": "<|observation|>", "gptoss": "<|call|>"}
"""With which token the model ends a tool call, if not with that of an answer."""
REFUSED = {("cohere", "tools"), ("gemma", "tools"), ("gemma3", "tools"), ("llava_next", "tools")}
"""Templates that raise on a tool's answer."""


class Chat:
    """A session's conversations with a template's tokenizer, and the model's answers as tokens."""

    def __init__(self, name: str) -> None:
        tokenizer = public.tokenizer_of(name)
        self.renderer = ChatRenderer(tokenizer, {})
        self.known = Conversations(self.renderer)
        self.decode = tokenizer.decode
        self.name, self.end = name, public.marks_of(name).end

    def answer(
        self, messages: Sequence[Mapping[str, Any]], text: str, tools: Any = None
    ) -> tuple[ChatPrompt, np.ndarray, dict[str, Any]]:
        """The prompt, the sampled ids, and the message that the agent gets."""
        prompt = self.known.prompt(messages, tools)
        end = CALLS_END.get(self.name, self.end) if tools is not None else self.end
        token_ids = np.concatenate([self.renderer.encode(text), self.renderer.encode(end)])
        message = message_of(parse_answer(text, has_tools=tools is not None), "call-0")
        self.known.add(prompt, 7, token_ids, message, is_cut=False)
        return prompt, token_ids, message


def continues(before: ChatPrompt, answer: np.ndarray, after: ChatPrompt) -> bool:
    sampled = [*before.token_ids.tolist(), *answer.tolist()]
    return after.continued and after.token_ids[: len(sampled)].tolist() == sampled


@pytest.mark.parametrize("kind", ["text", "tools"])
@pytest.mark.parametrize("name", public.cases())
def test_a_second_call_continues_the_sampled_ids_under_the_templates_of_the_field(name: str, kind: str):
    chat = Chat(name)
    tools, text, reply = (TOOLS, CALL, RESULT) if kind == "tools" else (None, "It is 5.", MORE)
    prompt, token_ids, message = chat.answer([ASKED], text, tools)
    assert not prompt.continued
    if (name, kind) in REFUSED:
        with pytest.raises(TemplateError):
            chat.known.prompt([ASKED, message, reply], tools)
        return
    after = chat.known.prompt([ASKED, message, reply], tools)
    assert continues(prompt, token_ids, after) == ((name, kind) not in RENDERED_WHOLE)
    if kind == "text" or chat.renderer.reads_tools:
        assert reply["content"] in chat.decode(after.token_ids[len(prompt.token_ids) :])


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "gemma", "phi3"])
def test_what_is_continued_is_what_the_template_would_write(name: str):
    chat = Chat(name)
    _, _, message = chat.answer([ASKED], "It is 5.")
    after = chat.known.prompt([ASKED, message, MORE], None)
    assert chat.decode(after.token_ids) == chat.renderer.render([ASKED, message, MORE], None)


def test_thoughts_that_the_template_would_drop_stay_in_the_sequence():
    chat = Chat("qwen3")
    prompt, token_ids, message = chat.answer([ASKED], "<think>\n2 and 3\n</think>\n\n5")
    assert message == {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}
    after = chat.known.prompt([ASKED, {"role": "assistant", "content": "5"}, MORE], None)
    assert continues(prompt, token_ids, after)
    assert "2 and 3" in chat.decode(after.token_ids)
    assert "2 and 3" not in chat.renderer.render([ASKED, message, MORE], None)


@pytest.mark.parametrize("cut", [True, False])
def test_a_special_token_before_the_end_of_an_answer_is_no_end_and_a_cut_one_is_ended_by_the_template(cut: bool):
    chat = Chat("qwen3")
    prompt = chat.known.prompt([ASKED], None)
    token_ids = chat.renderer.encode("It is<|im_start|>" if cut else "It is<|im_start|><|im_end|>")
    message = {"role": "assistant", "content": "It is"}
    chat.known.add(prompt, 7, token_ids, message, is_cut=cut)
    after = chat.known.prompt([ASKED, message, MORE], None)
    assert continues(prompt, token_ids, after)
    assert "It is<|im_start|><|im_end|>\n<|im_start|>user" in chat.decode(after.token_ids)


CHANGED: dict[str, tuple[Mapping[str, Any], dict[str, Any], Any]] = {
    "content": (ASKED, {"content": "It is 5"}, TOOLS),
    "a longer content": (ASKED, {"content": "It is 5.\nCalling tools:"}, TOOLS),
    "calls": (ASKED, {"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}, TOOLS),
    "other tools": (ASKED, {}, None),
    "another beginning": ({"role": "user", "content": "Hello"}, {}, TOOLS),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_the_agent_changed_is_another_conversation(what: str):
    asked, changed, tools = CHANGED[what]
    chat = Chat("qwen3")
    _, _, message = chat.answer([ASKED], "It is 5.", TOOLS)
    assert not chat.known.prompt([asked, {**message, **changed}, MORE], tools).continued


def test_fields_that_clients_add_or_leave_out_change_nothing():
    chat = Chat("qwen3")
    _, _, message = chat.answer([ASKED], CALL, TOOLS)
    call = {**message["tool_calls"][0], "index": 0, "function": {"name": "add", "arguments": {"b": 3, "a": 2}}}
    echoed = {"role": "assistant", "content": [{"type": "text", "text": "So."}], "tool_calls": [call], "refusal": None}
    assert chat.known.prompt([ASKED, echoed, RESULT], TOOLS).continued


def test_answers_to_one_conversation_are_told_apart_whatever_they_say():
    chat = Chat("qwen3")
    asked = {"role": "user", "content": "Say bluebell-0-buttercup."}  # words of ours
    for text in ("It is 5.", "Five.", "bluebell-1-buttercup"):
        prompt, token_ids, message = chat.answer([asked], text)
        assert continues(prompt, token_ids, chat.known.prompt([asked, message, MORE], None))


@pytest.mark.parametrize(
    ("text", "content", "thoughts", "calls"),
    [
        ("5", "5", None, []),
        ("<think>\nhm\n</think>\n\n5", "5", "hm", []),
        ("hm</think>5", "5", "hm", []),
        (CALL, "So.", None, [("add", '{"a": 2, "b": 3}')]),
        ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", None, []),
        ('<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}', "", None, [("a", "{}"), ("b", "{}")]),
    ],
)
def test_an_answer_is_read(text: str, content: str, thoughts: str | None, calls: list[tuple[str, str]]):
    parsed = parse_answer(text, has_tools=True)
    assert (parsed.content, parsed.thoughts, list(parsed.calls)) == (content, thoughts, calls)
    assert parse_answer(text, has_tools=False).calls == ()
