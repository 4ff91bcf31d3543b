"""The chat endpoint in other APIs: requests and answers there and back, and conversations that stay token-exact."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from async_rl.extensions.agents.front.anthropic_messages import MESSAGES
from tests.extensions.agents.test_chat import DEADLINE_S, Server
from tests.extensions.agents.test_conversations import CALL, TOOLS

FUNCTION = TOOLS[0]["function"]
CLAUDE = {
    "model": "policy", "max_tokens": 50,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.bff; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You write files.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {"name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "What is 2+3?"}]}],
}  # fmt: skip
"""What Claude Code 2.1 sends, shortened."""
CODEX = {
    "model": "policy", "tool_choice": "auto", "parallel_tool_calls": True, "store": False,
    "reasoning": {"summary": "auto", "effort": "low"}, "include": ["reasoning.encrypted_content"],
    "tools": [
        {"type": "function", "strict": False, **FUNCTION}, {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "patch", "description": "Patch."},
        {"type": "namespace", "name": "team", "description": "", "tools": [{"type": "function", "name": "close"}]},
    ],
    "input": [
        {"type": "message", "id": "msg_1", "role": role, "content": [{"type": "input_text", "text": words}]}
        for role, words in (("developer", "You are Codex."), ("developer", "Skills."), ("user", "What is 2+3?"))
    ],
}  # fmt: skip
"""The same of Codex 0.171."""


def post(server: Server, path: str, body: Any, key: str = "k") -> tuple[int, Any]:
    """The status and the body of an answer; of events, the list of their data, whose types are their names."""
    with closing(HTTPConnection(urlsplit(server.front.url).netloc, timeout=DEADLINE_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"x-api-key": key, "anthropic-version": "2023-06-01"})
        response = connection.getresponse()
        text = response.read().decode()
    if response.headers["content-type"] == "application/json":
        return response.status, json.loads(text)
    events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in text.strip().split("\n\n")]
    found = [json.loads(event["data"]) for event in events]
    assert [event["event"] for event in events] == [one["type"] for one in found]
    return response.status, found


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_a_conversation_in_messages_goes_on_from_the_sampled_ids(server: Server):
    server.script = [CALL, "<think>\n5\n</think>\n\nIt is 5.\nObservation: 6"]
    status, first = post(server, "/v1/messages?beta=true", CLAUDE)
    assert post(server, "/v1/messages", CLAUDE, "another")[1]["error"]["type"] == "authentication_error"
    (told, call), num_prompt = first["content"], first["usage"]["input_tokens"]
    assert (status, first["stop_reason"], told, call["type"]) == (200, "tool_use", text("So."), "tool_use")
    assert (call["name"], call["input"]) == ("add", {"a": 2, "b": 3})
    assert (num_prompt, server.calls[0].max_tokens) == (len(server.calls[0].token_ids) // 4, 50)
    given = {"type": "tool_result", "tool_use_id": call["id"], "content": [text("5")]}
    more = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [given]}]
    stops = ["Result:", "\nObservation:"]
    going_on = {**CLAUDE, "messages": [*CLAUDE["messages"], *more], "stop_sequences": stops}
    (_, counted), (_, events) = (
        post(server, f"/s/k/v1/messages{path}", going_on | {"stream": True}) for path in ("/count_tokens", "")
    )
    assert server.prompt(1).startswith(server.prompt(0) + CALL + "<|im_end|>\n<|im_start|>user\n<tool_response>\n5")
    assert counted["input_tokens"] == len(server.calls[1].token_ids) // 4
    begin, delta, end = (f"content_block_{name}" for name in ("start", "delta", "stop"))
    assert [event["type"] for event in events] == [
        "message_start", begin, delta, delta, end, begin, delta, end, "message_delta", "message_stop",
    ]  # fmt: skip
    assert [event["delta"] for event in events if "delta" in event] == [
        {"type": "thinking_delta", "thinking": "5"}, {"type": "signature_delta", "signature": ""},
        {"type": "text_delta", "text": "It is 5."}, {"stop_reason": "stop_sequence", "stop_sequence": stops[1]},
    ]  # fmt: skip


def test_claude_code_s_compacted_conversation_is_the_main_line_and_sub_agents_and_titles_are_not(server: Server):
    server.script = ["5"] * 4
    said = {name: [{"role": "user", "content": name}] for name in ("So far.", "Search.", "<session>What is 2+3?")}
    bodies = [
        CLAUDE, {**CLAUDE, "messages": said["So far."]},
        {**CLAUDE, "messages": said["Search."], "system": "You search."},
        {**CLAUDE, "messages": said["<session>What is 2+3?"], "system": "Write a title.", "tools": []},
    ]  # fmt: skip
    assert [post(server, "/v1/messages", body)[0] for body in bodies] == [200] * 4
    main, *others = [call.said.line for call in server.calls if call.said]
    assert [(one.is_of(main), one.has_tools) for one in others] == [(True, True), (False, True), (False, False)]


def test_messages_are_a_chat_of_a_form_that_most_templates_take():
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "redacted_thinking"}, text("b")]
    mixed = [{"type": "tool_result", "tool_use_id": "t1", "content": [text("5"), text("6")]}, text("c"), text("d")]
    said = [("system", "s"), ("user", "a"), ("assistant", thought), ("user", mixed), ("user", "e"), ("system", "f")]
    found = MESSAGES.chat({"messages": [{"role": role, "content": one} for role, one in said]}, print)
    assert found["messages"] == [
        {"role": "system", "content": "s"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "56"},
        {"role": "user", "content": "cd\n\ne\n\n<system-reminder>\nf\n</system-reminder>"},
    ]  # fmt: skip


def test_a_conversation_in_responses_goes_on_from_the_sampled_ids(server: Server):
    calls = [{"name": "patch", "arguments": {"input": "*** Begin"}}, {"name": "team__close", "arguments": {}}]
    patch, close = (f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    said = [f"<think>\nhm\n</think>\n\n{CALL}", patch, close, "5"]
    kinds = (["reasoning", "message", "function_call"], ["custom_tool_call"], ["function_call"])
    server.script, items, output = list(said), list(CODEX["input"]), []
    with openai.OpenAI(base_url=f"{server.front.url}/s/k/v1", api_key="any", timeout=DEADLINE_S) as client:
        for number, expected in enumerate(kinds):
            found = client.responses.create(**{**CODEX, "input": items})
            output = [item.model_dump(exclude_none=True) for item in found.output]
            assert [item["type"] for item in output] == expected
            result = {"type": f"{expected[-1]}_output", "call_id": output[-1]["call_id"], "output": f"R{number}"}
            items += [*output, result]
        with client.responses.stream(
            **{**CODEX, "instructions": "You are Codex.", "input": items[1:]}  # in another place, the same conversation
        ) as stream:
            events = [event.type.removeprefix("response.") for event in stream]
            assert stream.get_final_response().output_text == "5"
    assert (output[0]["name"], output[0]["namespace"], output[0]["arguments"]) == ("close", "team", "{}")
    assert "system\nYou are Codex.\n\nSkills.\n" in server.prompt(0)
    for number, one in enumerate(said[:-1]):
        goes_on = f"{server.prompt(number)}{one}<|im_end|>\n<|im_start|>user\n<tool_response>\nR{number}"
        assert server.prompt(number + 1).startswith(goes_on)
    assert events == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("path", "param", "values"),
    [
        ("messages", "messages", [
            "a", [], [{"role": "user"}], [{**USER, "role": "tool"}], [USER, {**USER, "role": "assistant"}],
        ]),
        *(("messages", name, [value]) for name, value in (
            ("tool_choice", {"type": "other"}), ("n", 2), ("tools", [{"description": "no name"}]), ("max_tokens", 0),
        )),
        ("responses", "input", [None, [{"role": "tool"}]]),
        *(("responses", name, [value]) for name, value in (
            ("tool_choice", "other"), ("instructions", 5), ("tools", [{"name": "no type"}]), ("include", "x"),
            ("tools", [{"type": "function"}]),
        )),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused_by_name(server: Server, path: str, param: str, values: list[Any]):
    for value in values:
        body = {**(CLAUDE if path == "messages" else CODEX), param: value}
        status, answer = post(server, f"/s/k/v1/{path}", body)
        assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, param, "invalid_request_error"), (
            value
        )
        assert (answer["type"], server.calls) == ("error", [])
        # With these details Anthropic's clients send the whole conversation instead.
        details = {"error_code": "thread_unsupported_request"} if param == "thread" else None
        assert answer["error"].get("details") == details
