"""Each public chat template gets messages in the form that it reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from async_rl.data.template import apply_template
from async_rl.data.template_forms import Forms, call_arguments, forms_of
from tests.data.public_templates import cases, template, tokenizer_of

ARGUMENTS = {"place": "Köln", "days": 2}
ASKED = {"role": "user", "content": "How warm?"}
SILENT = (
    "cohere",
    "gemma",
    "gemma3",
    "idefics3",
    "lfm2",
    "llama3",
    "llava_next",
    "phi3",
    "phi3_5",
    "qwen2_5_vl",
    "smolvlm",
)
"""Templates without tool calls; ``cohere2`` is one too. Of Gemma only the first three versions."""


def called(content: Any, arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "a12345678", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("name", cases())
def test_a_tool_call_is_rendered_once_in_every_form_that_people_write(name: str):
    tokenizer = tokenizer_of(name)
    texts: set[str] = set()
    for content in (None, "", []):
        for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
            texts.add(str(apply_template(tokenizer, [ASKED, called(content, arguments)], {}, open_turn=False)))
    (text,) = texts
    assert forms_of(template(name)).reads_calls == (name not in (*SILENT, "cohere2"))
    if forms_of(template(name)).reads_calls:
        assert "weather" in text
        assert "Köln" in text
        assert '\\"' not in text
    for nothing in ("None", "null"):
        assert nothing not in text.rpartition("How warm?")[2]


def test_arguments_that_are_no_json_object_stay_as_they_are():
    assert call_arguments({"function": {"name": "f", "arguments": '{"a": 1}'}}) == {"a": 1}
    assert call_arguments({"name": "f", "arguments": '{"a": 1}'}) == {"a": 1}
    assert call_arguments({"function": {"name": "f", "arguments": " "}}) == {}
    assert call_arguments({"function": {"name": "f", "arguments": "[1"}}) == "[1"
    assert call_arguments({"function": {"name": "f", "arguments": "[1]"}}) == "[1]"


CALLING = (
    r"{%% if tools %%}Write \"f\".{%% endif %%}{%% for m in messages %%}<|im_start|>{{ m.role }}: {{ m.content }}"
    r"{%% for call in m.tool_calls or [] %%}{{ call.function.name }} {{ %s }}{%% endfor %%}<|im_end|>{%% endfor %%}"
)


def test_a_backslash_before_a_quote_in_a_templates_own_words_hides_no_tool_call():
    assert forms_of(CALLING % "call.function.arguments | tojson") == Forms(reads_calls=True)


def test_a_template_that_would_write_an_object_as_python_does_gets_json_text():
    assert forms_of(CALLING % "call.function.arguments") == Forms(reads_calls=True, arguments_as_text=True)
