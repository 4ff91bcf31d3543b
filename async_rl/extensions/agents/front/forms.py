"""The forms in which models write thoughts and tool calls, each a response template of transformers
(``tokenizer.parse_response``).

They are read off the calls that public chat templates write; TRL has the like for some. ``answers.form_of`` finds that
of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Form = Mapping[str, Any]
CALLS, CONTENT = "tool_calls", "content"
THOUGHTS = ("reasoning_content", "thinking")
"""The names that forms have for the thoughts."""
THINK, THINK_END = "<think>", "</think>"
_THINK = {"open": THINK, "close": THINK_END}
_CHATML, _NAME = "<|im_start|>assistant\n", r"(?P<name>[^\s<>{}\"]+)"


def _form(
    anchor: str, calls: Form, thoughts: Form = _THINK, content: Form = MappingProxyType({}), *, name: str = "{name}"
) -> Form:  # fmt: skip
    """Return the form of a model whose turn begins with ``anchor``, the end of its prompt.

    ``calls``, ``thoughts`` and ``content`` say how each opens and closes, and how a call's arguments are written.
    ``name`` is where the tool's name stands.
    """
    function = "{content}" if name == CONTENT else {"name": name, "arguments": "{content}"}
    asis = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
    return {
        "start_anchor": anchor,
        "fields": {
            THOUGHTS[0]: asis | dict(thoughts),
            CALLS: {"content": "json", "repeats": True, "transform": {"function": function}} | dict(calls),
            CONTENT: asis | dict(content),
        },
    }


def _tags(pattern: str) -> Form:
    """Return how arguments are read that each stand in a tag. Their types are those of the tool's schema."""
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern, "value_parser": {"name": "text"}}}


_FUNCTION_TAGS = {
    "open_pattern": rf"<tool_call>\s*<function={_NAME}>", "close": "</tool_call>",
    **_tags(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
}  # fmt: skip
_START = r"(?:<\|start\|>assistant)?"
"""An answer of several messages: the first begins in the prompt."""
FORMS: Mapping[str, Form] = {
    "JSON in <tool_call> (Qwen 2.5 and 3, Hermes)": _form(
        _CHATML, {"open": "<tool_call>", "close": "</tool_call>"}, name=CONTENT
    ),
    "<function=NAME> (Qwen 3.5 and later, Nemotron 3)": _form(_CHATML, _FUNCTION_TAGS),
    "<arg_key> (GLM 4.5 and later)": _form(
        "<|assistant|>",
        {
            "open_pattern": rf"<tool_call>{_NAME}", "close": "</tool_call>",
            **_tags(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        },
    ),
    "call:NAME{...} (Gemma 4)": _form(
        "<|turn>model\n",
        {
            "open_pattern": rf"<\|tool_call>call:{_NAME}", "close": "<tool_call|>",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
        },
        {"open": "<|channel>thought\n", "close": "<channel|>"},
    ),
    "channels (gpt-oss)": _form(
        "<|start|>assistant",
        {
            # The model itself writes the recipient behind the channel, the template before it.
            "open_pattern": rf"{_START}(?:<\|channel\|>commentary)? to=functions\.(?P<name>[^\s<]+)\s*"
            r"(?:<\|channel\|>commentary\s*)?(?:<\|constrain\|>)?(?:json)?<\|message\|>",
            "close": "<|call|>",
        },
        {"open_pattern": rf"{_START}<\|channel\|>analysis<\|message\|>", "close": "<|end|>"},
        {"open_pattern": rf"{_START}<\|channel\|>(?:final|commentary)<\|message\|>", "close": "<|end|>"},
    ),
    "parameters (Llama 3.1 and 3.2)": _form(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        {
            "open_pattern": r'(?:<\|python_tag\|>)?(?=\{\s*"name"\s*:)', "close": ["<|eot_id|>", "<|eom_id|>"],
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
        },
    ),
    "[NAME(key=value)] (LFM 2 and 2.5)": _form(
        _CHATML, {"open": "<|tool_call_start|>", "close": "<|tool_call_end|>", "content": "text"}, name=CONTENT
    ),
    "code blocks (DeepSeek)": _form(
        "<｜Assistant｜>",
        {
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
            r"(?P<name>[^\n<]+)(?:\n```json\n|<｜tool▁sep｜>)",
            "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?",
        },
    ),
    "<atem:invoke> (Muse)": _form(
        "<|start|>assistant",
        {
            "open_pattern": rf'{_START} to=\S+<\|message\|><atem:function_calls>\s*'
            rf'<atem:invoke name="{_NAME}">',
            "close_pattern": r"</atem:invoke>\s*</atem:function_calls>(?:<\|eom\|>)?",
            **_tags(r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</atem:parameter>'),
        },
        {"open_pattern": rf"{_START} to=self<\|message\|>", "close": "<|eom|>"},
        {"open_pattern": rf"{_START}(?: to=user)?<\|message\|>", "close": "<|eom|>"},
    ),
}  # fmt: skip
"""What it looks like and who writes it -> the form."""
PLAIN = _form("\0", {"open": "\0"})
"""The form of a model that writes no calls. Its anchor is in no prompt."""
