"""Chats as token ids: what is recognised keeps its sampled ids, under the chat templates of the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from trl.chat_template_utils import add_response_schema

from async_rl.data.template import apply_template
from async_rl.data.template_forms import forms_of
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
SUM = {"a": 2, "b": 3}
ASKED = {"role": "user", "content": "What is 2+3?"}
MORE = {"role": "user", "content": "And 4+4?"}
RESULT = {"role": "tool", "tool_call_id": "call-0-0", "name": "add", "content": "5"}

RENDERED_WHOLE = {
    # Its history ends turns with <|end|>, where the model samples <|return|>.
    ("gptoss", "text"),
}  # fmt: skip
CALLS_END = {
    "glm4moe": "<|observation|>",
    "gptoss": "<|call|>",
    **dict.fromkeys(("diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"), "<|tool_response>"),
}
"""With which token the model ends a tool call, if not with that of an answer."""


class Chat:
    """A session's conversations with a template's tokenizer, and the model's answers as tokens."""

    def __init__(self, name: str) -> None:
        tokenizer = public.tokenizer_of(name)
        self.renderer = ChatRenderer(tokenizer, {})
        self.known = Conversations(self.renderer)
        self.decode = tokenizer.decode
        self.name, self.end = name, public.marks_of(name).end

    @property
    def writes_calls(self) -> bool:
        return forms_of(str(self.renderer.tokenizer.chat_template)).reads_calls

    def written(self, *calls: Mapping[str, Any]) -> str:
        """The answer that calls ``add`` with these arguments, as the template writes it: from where the prompt ends."""
        asked = [
            {"id": f"{number:09d}", "type": "function", "function": {"name": "add", "arguments": dict(arguments)}}
            for number, arguments in enumerate(calls)
        ]
        chat = [ASKED, {"role": "assistant", "content": "", "tool_calls": asked}]
        text = str(apply_template(self.renderer.tokenizer, chat, {"tools": TOOLS}, open_turn=False))
        assert self.renderer.form is not None
        answer = text.rpartition(str(ASKED["content"]))[2].partition(self.renderer.form["start_anchor"])[2]
        for end in (*public.marks_of(self.name).listed, "<|tool_response>", "<|call|>"):
            answer = answer.removesuffix("\n").removesuffix(end)
        return answer

    def answer(
        self, messages: Sequence[Mapping[str, Any]], text: str, tools: Any = None
    ) -> tuple[ChatPrompt, np.ndarray, dict[str, Any]]:
        """The prompt, the sampled ids, and the message that the agent gets."""
        prompt = self.known.prompt(messages, tools)
        end = CALLS_END.get(self.name, self.end) if tools is not None else self.end
        token_ids = np.concatenate([self.renderer.encode(text), self.renderer.encode(end)])
        message = message_of(parse_answer(self.renderer.form, text, "", tools), "call-0")
        self.known.add(prompt, 7, token_ids, message, is_cut=False)
        return prompt, token_ids, message


def continues(before: ChatPrompt, answer: np.ndarray, after: ChatPrompt) -> bool:
    sampled = [*before.token_ids.tolist(), *answer.tolist()]
    return after.continued and after.token_ids[: len(sampled)].tolist() == sampled


@pytest.mark.parametrize("kind", ["text", "tools"])
@pytest.mark.parametrize("name", public.cases())
def test_a_second_call_continues_the_sampled_ids_under_the_templates_of_the_field(name: str, kind: str):
    chat = Chat(name)
    if kind == "tools" and chat.renderer.form is None:
        assert not chat.writes_calls
        return
    tools, text, reply = (TOOLS, chat.written(SUM), RESULT) if kind == "tools" else (None, "It is 5.", MORE)
    prompt, token_ids, message = chat.answer([ASKED], text, tools)
    assert not prompt.continued
    assert [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())] == [SUM] * bool(tools)
    after = chat.known.prompt([ASKED, message, reply], tools)
    assert continues(prompt, token_ids, after) == ((name, kind) not in RENDERED_WHOLE)
    assert reply["content"] in chat.decode(after.token_ids[len(prompt.token_ids) :])


@pytest.mark.parametrize("name", public.cases())
def test_turns_after_a_call_are_said_to_be_rewritten_where_they_are(name: str, caplog: pytest.LogCaptureFixture):
    tokenizer = public.tokenizer_of(name)
    renderer = ChatRenderer(tokenizer, {}, lambda: public.listed_ids(tokenizer, name))
    for tools in (TOOLS, TOOLS * 2):
        assert renderer.unread_tools(tools) == []
    # gpt-oss: the prompt of the second question has all before the first answer again.
    assert [one.args for one in caplog.records] == ([(pytest.approx(48, abs=1),)] if name == "gptoss" else [])


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
    for name, own in (
        ("qwen3_6", {"preserve_thinking": True}),
        ("nemotron_3_nano", {"truncate_history_thinking": False}),
    ):
        assert "2 and 3" in Chat(name).renderer.render([ASKED, message, MORE], None, own)


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
    assert chat.known.prompt([ASKED, {**echoed, "content": None}, RESULT], TOOLS).continued


def test_answers_to_one_conversation_are_told_apart_whatever_they_say():
    chat = Chat("qwen3")
    asked = {"role": "user", "content": "Say bluebell-0-buttercup."}  # words of ours
    for text in ("It is 5.", "Five.", "bluebell-1-buttercup"):
        prompt, token_ids, message = chat.answer([asked], text)
        assert continues(prompt, token_ids, chat.known.prompt([asked, message, MORE], None))


ODD = {"note": 'it is, "x" {1} <b> 7', "a": 2, "digits": "7", "deep": {"k": [1, {"z": "y"}]}, "flag": True}


@pytest.mark.parametrize("name", public.cases())
def test_calls_are_read_in_the_form_in_which_the_template_writes_them(name: str):
    chat = Chat(name)
    form = chat.renderer.form
    if form is None:
        return
    kinds = {"note": "string", "a": "integer", "b": "integer", "digits": "string", "deep": "object", "flag": "boolean"}
    properties = {key: {"type": kind, "description": key} for key, kind in kinds.items()}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}]
    text = chat.written(ODD)
    parsed = parse_answer(form, f"So.{text}" if "<tool_call>" in text else text, "", tools)
    assert [(tool, json.loads(arguments)) for tool, arguments in parsed.calls] == [("add", ODD)]
    assert parsed.content in ("", "So.")
    # Without tools, and if it was cut, the text stays.
    assert parse_answer(form, text, "", None).calls == ()
    assert parse_answer(form, text[: text.index("digits")], "", tools).calls == ()
    assert "add" in parse_answer(form, text[: text.index("digits")], "", tools).content
    try:
        theirs = add_response_schema(public.tokenizer_of(name)).response_template
    except ValueError:  # trl knows none
        theirs = form
    for one in (theirs, form):
        if "tool_calls" in one["fields"]:
            found = parse_answer(one, chat.written(SUM), "", tools, CALLS_END.get(name, chat.end))
            assert found.calls == (("add", '{"a": 2, "b": 3}'),)
    if name not in ("gptoss", "llama3_1", "llama3_2"):  # their templates write one call
        both = parse_answer(form, chat.written(ODD, SUM), "", tools).calls
        assert [json.loads(arguments) for _, arguments in both] == [ODD, SUM]


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        ("gptoss", "<|start|>assistant", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
         '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}', ("", "hm", 1)),
        ("gptoss", "", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>5",
         ("5", "hm", 0)),
        ("qwen3_5_think", "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\n5", ("5", "hm", 0)),
        ("qwen3_5_think", "<|im_start|>assistant\n<think>\n", "hm", ("hm", None, 0)),
        ("qwen3", "<think>\n", "hm</think>5", ("5", "hm", 0)),
        ("qwen3_5_think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "5", ("5", None, 0)),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nhm<channel|>5", ("5", "hm", 0)),
        ("gemma4", "<|turn>model\n", "hm</think>5", ("hm</think>5", None, 0)),
        # Without a thought: the lines around its marks are no part of the answer.
        ("glm4moe", "<|assistant|>", "\n<think></think>\n5", ("5", None, 0)),
        ("glm4moe", "<|assistant|>\n<think></think>", "\n5", ("5", None, 0)),
        *(("lfm2_2_5", "", text, (text, None, 0)) for text in (
            "<|tool_call_start|>[add(2)]<|tool_call_end|>", "<|tool_call_start|>[add(a=b'2')]<|tool_call_end|>",
            "<|tool_call_start|>[add(a={(1, 2): 3})]<|tool_call_end|>",
        )),
    ],
)  # fmt: skip
def test_thoughts_are_read_where_the_prompt_or_the_answer_opens_them(
    name: str, prompt: str, text: str, expected: tuple[str, str | None, int]
):
    parsed = parse_answer(Chat(name).renderer.form, text, prompt, TOOLS)
    assert (parsed.content, parsed.thoughts, len(parsed.calls)) == expected


def test_the_tokenizers_own_response_template_comes_first():
    renderer = Chat("qwen3").renderer
    own = {"start_anchor": "assistant\n", "fields": {"tool_calls": {
        "open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True,
        "transform": {"function": "{content}"}}, "content": {}}}  # fmt: skip
    renderer.tokenizer.response_template = own
    assert renderer.form is own


@pytest.mark.parametrize(
    ("text", "content", "thoughts", "calls"),
    [
        ("5", "5", None, []),
        ("<think>\nhm\n</think>\n\n5", "5", "hm", []),
        ("hm</think>5", "hm</think>5", None, []),
        (CALL, "So.", None, [("add", '{"a": 2, "b": 3}')]),
        ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", None, []),
        ('<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}', "", None, [("a", "{}"), ("b", "{}")]),
    ],
)
def test_an_answer_is_read(text: str, content: str, thoughts: str | None, calls: list[tuple[str, str]]):
    form = Chat("qwen3").renderer.form
    parsed = parse_answer(form, text, "", TOOLS)
    assert (parsed.content, parsed.thoughts, list(parsed.calls)) == (content, thoughts, calls)
    assert parse_answer(form, text, "", None).calls == ()


def test_calls_of_all_tools_are_read_back_unless_they_are_none_or_write_an_end_of_a_call():
    kinds = {"s": {"type": "string"}, "i": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "e": {"enum": ["a"]}}
    kinds |= {kind: {"type": kind} for kind in ("number", "boolean", "array", "object")}
    tools = [
        {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}
        for name, parameters in (("many", {"type": "object", "properties": kinds}), ("none", {"type": "object"}))
    ]
    for name in public.names():
        assert Chat(name).renderer.unread_tools(tools) == [], name
    renderer = Chat("qwen3").renderer
    marked = {"properties": {"x": {"type": "string", "enum": ["</tool_call>"]}}}
    assert renderer.unread_tools([{"type": "web_search"}]) == ["web_search"]
    assert renderer.unread_tools([{"function": {"name": "mark", "parameters": marked}}, *tools]) == ["mark"]
