"""The chat endpoint as OpenAI's own client sees it: sync, async, tools, several choices, streaming, refusals."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from agents import price_tool

from async_rl.extensions.agents.front.chat import ChatRenderer, prompt_of, read_chat
from async_rl.extensions.agents.front.conversations import Conversations
from async_rl.extensions.agents.front.demands import TRIES
from async_rl.extensions.agents.front.messages import Answered, Call, Reply
from async_rl.extensions.agents.front.process import Front
from async_rl.extensions.agents.front.requests import NEUTRAL, SAMPLED, RefusedError, RequestRules, check_fields
from async_rl.extensions.agents.transcript import Transcript
from tests.data.public_templates import tokenizer_of
from tests.extensions.agents.test_conversations import ASKED, CALL, MORE, RESULT, TOOLS

DEADLINE_S = 120.0


class Server:
    """A front with Qwen3's template, whose calls a thread answers: each with the next of ``script``.

    ``k`` is the key of an open session, ``short`` that of one that has ended.
    """

    def __init__(self, directory: Path, *, longest: int = 4096) -> None:
        self.tokenizer = tokenizer_of("qwen3")
        self.tokenizer.save_pretrained(directory)
        self.front = Front(RequestRules("tiny", frozenset({"gpt-4o"})), longest, directory)
        self.front.open(["k", "short"])
        self.front.close_session("short", "ended")
        self.script: list[str] = []
        self.calls: list[Call] = []
        self.answered = Queue[Answered]()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while not self._is_closing.wait(0.002):
            for message in self.front.poll():
                if isinstance(message, Call):
                    self.calls.append(message)
                    self.front.reply(self._reply(message.call, self.script.pop(0)))
                elif isinstance(message, Answered):
                    self.answered.put(message)

    def _reply(self, call: int, text: str) -> Reply:
        token_ids = np.array(self.tokenizer.encode(text + "<|im_end|>"), "<i4")
        logprobs, versions = np.linspace(-1, -0.5, len(token_ids)).astype("<f4"), np.zeros(len(token_ids), "<i4")
        return Reply(call, token_ids.tobytes(), logprobs.tobytes(), versions.tobytes(), "stop", 1, text)

    def prompt(self, number: int) -> str:
        return self.tokenizer.decode(np.frombuffer(self.calls[number].token_ids, np.int32))

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        self.front.close()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    base_url = f"{server.front.url}/s/k/v1"
    with openai.OpenAI(base_url=base_url, api_key="any", timeout=DEADLINE_S, max_retries=0) as found:
        yield found


def asked(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=messages, **more)


def test_a_tool_conversation_goes_on_from_the_sampled_ids(server: Server, client: openai.OpenAI):
    server.script = [CALL, "<think>\n5\n</think>\n\nIt is 5."]
    first = asked(client, [ASKED], tools=TOOLS, max_tokens=50)
    choice = first.choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So.")
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 2, "b": 3}')
    result = {**RESULT, "tool_call_id": call.id}
    second = asked(client, [ASKED, choice.message, result], tools=TOOLS)
    assert (second.choices[0].message.content, second.choices[0].message.reasoning_content) == ("It is 5.", "5")
    assert server.prompt(1).startswith(server.prompt(0) + CALL + "<|im_end|>\n<|im_start|>user\n<tool_response>\n5")
    assert server.calls[0].max_tokens == 50
    assert first.usage.prompt_tokens == len(server.calls[0].token_ids) // 4


def test_the_transcript_has_what_was_said_once_whatever_is_repeated(server: Server, client: openai.OpenAI):
    transcript = Transcript()
    server.script = [CALL, "<think>\n5\n</think>\n\nIt is 5.", "8"]
    first = asked(client, [ASKED], tools=TOOLS).choices[0].message
    result = {**RESULT, "tool_call_id": first.tool_calls[0].id}
    second = asked(client, [ASKED, first, result], tools=TOOLS).choices[0].message
    # This history is not what was said: it begins anew.
    asked(client, [ASKED, {"role": "assistant", "content": "4"}, MORE], tools=TOOLS)
    for call in server.calls:
        assert call.said is not None
        while (answered := server.answered.get(timeout=DEADLINE_S)).call != call.call:
            pass  # of an earlier test
        transcript.add(call.said, answered)
    one, other, third = (call.call for call in server.calls)
    assert [len(json.loads(call.said.messages)) for call in server.calls if call.said] == [1, 1, 3]
    assert "4<|im_end|>" in server.prompt(2)
    assert "It is 5." not in server.prompt(2)
    told = transcript.messages(other)
    assert told == (ASKED, first.model_dump(exclude_none=True), result, second.model_dump(exclude_none=True))
    assert transcript.messages(one) == told[:2]
    assert [message["content"] for message in transcript.messages(third)][1:] == ["4", MORE["content"], "8"]
    assert transcript.tools == {"add": 1}
    assert transcript.messages(None) == transcript.messages(-1) == ()


def test_the_async_client_gets_several_choices_with_seeds_of_their_own(server: Server):
    server.script = ["one", "two", "three", "four"]

    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.front.url}/v1", api_key="k", timeout=DEADLINE_S) as client:
            return await client.chat.completions.create(model="tiny", messages=[ASKED], n=4, seed=5)  # type: ignore[list-item]

    found = asyncio.run(ask())
    assert [choice.message.content for choice in found.choices] == ["one", "two", "three", "four"]
    assert [call.seed for call in server.calls] == [5, 6, 7, 8]
    assert len({call.token_ids for call in server.calls}) == 1


def test_a_streamed_answer_comes_in_one_piece_with_its_calls_after_its_text(server: Server, client: openai.OpenAI):
    server.script = [CALL]
    more = {"stream_options": {"include_usage": True}, "extra_body": {"return_token_ids": True}}
    chunks = list(asked(client, [ASKED], tools=TOOLS, stream=True, **more))
    # Some clients read no call beside a text.
    (before,), (choice,) = chunks[0].choices, chunks[1].choices
    token_ids = server.tokenizer.encode(CALL + "<|im_end|>")
    assert (before.delta.content, before.delta.tool_calls, before.finish_reason) == ("So.", None, None)
    assert (choice.delta.content, choice.delta.tool_calls[0].function.name) == (None, "add")
    assert (choice.finish_reason, chunks[-1].usage.completion_tokens) == ("tool_calls", len(token_ids))
    assert choice.token_ids == token_ids
    assert chunks[0].prompt_token_ids == np.frombuffer(server.calls[0].token_ids, np.int32).tolist()


def test_log_probabilities_and_ids_are_those_of_the_sampled_tokens(server: Server, client: openai.OpenAI):
    server.script = ["ab"]
    found = asked(client, [ASKED], logprobs=True, extra_body={"return_token_ids": True})
    content = found.choices[0].logprobs.content
    assert [one.token for one in content] == ["a", "b", "<|im_end|>"]
    assert [one.logprob for one in content] == pytest.approx([-1.0, -0.75, -0.5])
    assert found.choices[0].token_ids == server.tokenizer.encode("ab<|im_end|>")
    assert found.prompt_token_ids == np.frombuffer(server.calls[0].token_ids, np.int32).tolist()


def test_a_stop_text_ends_the_answer_and_is_left_out_of_it(server: Server, client: openai.OpenAI):
    server.script = ["Think.\nObservation:", "8"]
    first = asked(client, [ASKED], stop=["Result:", "Observation:"], extra_body={"stop_token_ids": [5, 7]})
    assert server.calls[0].stop_token_ids == (5, 7)
    assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("Think.\n", "stop")
    asked(client, [ASKED, first.choices[0].message, MORE])
    assert server.prompt(1).startswith(server.prompt(0) + "Think.\nObservation:")


def test_tools_are_left_out_if_none_may_be_called(server: Server, client: openai.OpenAI):
    server.script = [CALL]
    found = asked(client, [ASKED], tools=TOOLS, tool_choice="none")
    assert found.choices[0].message.tool_calls is None
    assert "add" not in server.prompt(0)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "required": ["a"]}}}
ADD = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("demand", "fitting", "others"),
    [
        ({"tool_choice": "required", "tools": TOOLS}, CALL, ["5"]),
        ({"tool_choice": ADD, "tools": TOOLS}, CALL, ["5", CALL.replace("add", "other")]),
        ({"response_format": {"type": "json_object"}}, "{}", ["5", "{"]),
        ({"response_format": SCHEMA}, '{"a": 1}', ["{}", "[]"]),
    ],
)
def test_an_answer_that_must_have_a_form_is_sampled_until_it_has_and_not_trained(
    server: Server, client: openai.OpenAI, demand: dict[str, Any], fitting: str, others: list[str]
):
    server.script = [*others, fitting]
    found = asked(client, [ASKED], **demand).choices[0]
    assert (found.finish_reason == "tool_calls") == ("tools" in demand)
    assert (found.message.content == fitting) == ("tools" not in demand)
    assert [call.is_trained for call in server.calls] == [False] * (len(others) + 1)
    server.script = others[:1] * TRIES
    with pytest.raises(openai.UnprocessableEntityError, match="got 8 others"):
        asked(client, [ASKED], **demand)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 100), ("stop_token_ids", "5"), ("token_ids", [1]), ("sampling_params", {"temperature": 0}),
        ("tools", [{"type": "web_search"}]),
        ("chat_template_kwargs", [1]), ("chat_template_kwargs", {"tools": []}), ("messages", []), ("is_answer", 1),
        ("messages", [ASKED, {"content": "b"}]), ("stream_options", [1]),
        *((name, ["another value"]) for name in sorted(NEUTRAL.keys() - {"n", "logprobs"})),
    ],
)  # fmt: skip
def test_what_would_be_left_aside_is_refused_by_name(server: Server, client: openai.OpenAI, param: str, value: Any):
    with pytest.raises(openai.BadRequestError) as refused:
        asked(client, [ASKED], extra_body={param: value})
    assert (refused.value.param, server.calls) == (param, [])
    if value == ["another value"]:
        neutral = [None, "", [], {}, *NEUTRAL[param]]
        server.script = ["a"] * len(neutral)
        for same in neutral:
            asked(client, [ASKED], extra_body={param: same})
        assert len(server.calls) == len(neutral)


def test_a_chat_sets_variables_of_its_template_and_hears_of_those_that_it_does_not_read(server: Server):
    renderer = ChatRenderer(server.tokenizer, {"enable_thinking": False})

    def prompt(**fields: Any) -> tuple[str, list[str]]:
        found: list[str] = []
        wanted = read_chat({"messages": [ASKED], **fields}, RequestRules("tiny"), lambda name, _: found.append(name))
        asked = prompt_of(Conversations(renderer), wanted, renderer, lambda name, _: found.append(name))
        return server.tokenizer.decode(asked.token_ids), found

    silent, thinks = "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_start|>assistant\n"
    for fields, end, unread in (
        ({}, silent, []),
        ({"chat_template_kwargs": {"enable_thinking": False}}, silent, []),
        ({"chat_template_kwargs": {"enable_thinking": True}}, thinks, []),
        ({"enable_thinking": True}, thinks, []),
        (
            {"chat_template_kwargs": {"thinking_mode": 1}, "reasoning_effort": "low"},
            silent,
            ["thinking_mode", "reasoning_effort"],
        ),
        ({"thinking": {"type": "enabled"}}, silent, ["thinking"]),
    ):
        text, found = prompt(**fields)
        assert (text.endswith(end), found) == (True, unread), fields


@pytest.mark.parametrize("name", sorted(SAMPLED))
def test_what_would_sample_otherwise_is_left_out_and_named_or_refused(name: str):
    noted: list[tuple[str, Any]] = []
    for value in (*SAMPLED[name], "another"):
        check_fields({name: value}, frozenset(), lambda *found: noted.append(found))
    assert noted == [(name, "another")]
    with pytest.raises(RefusedError, match=name):
        check_fields({name: "another"}, frozenset(), print, refuses=True)


def test_the_model_s_name_decides_whether_a_call_is_trained(server: Server, client: openai.OpenAI):
    server.script = ["1"] * 4
    for name, more in (("tiny", {}), ("policy", {"is_answer": True}), ("policy", {"untrained": True}), ("gpt-4o", {})):
        client.chat.completions.create(model=name, messages=[ASKED], extra_body=more)  # type: ignore[list-item]
    assert [(call.is_trained, call.is_answer) for call in server.calls] == [
        (True, False), (True, True), (False, False), (False, False),
    ]  # fmt: skip
    with pytest.raises(openai.NotFoundError, match=r"environment\.untrained_models") as refused:
        client.chat.completions.create(model="gpt-5", messages=[ASKED])  # type: ignore[list-item]
    assert refused.value.code == "model_not_found"
    assert [model.id for model in client.models.list()] == ["tiny", "policy", "gpt-4o"]


def test_what_is_wrong_in_an_agent_s_calls_is_logged_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    extra = {"a_typo": 3, "cache_salt": "s", "echo": True}
    with closing(Front(RequestRules("tiny"), 64, tmp_path)) as front:
        front.open(["k"])
        with openai.OpenAI(base_url=f"{front.url}/s/k/v1", api_key="any", max_retries=0) as client:
            for _ in range(2):
                with pytest.raises(openai.BadRequestError):
                    asked(client, [ASKED], extra_body=extra)
    typo, salt, echo = capfd.readouterr().err.splitlines()
    assert "the field 'a_typo' (first 3), which has no effect here and is not known" in typo
    assert salt.endswith("the field 'cache_salt' (first 's'), which has no effect here")
    assert "refused (HTTP 400): echo" in echo


def test_the_client_repeats_no_call_of_a_session_that_has_ended(server: Server):
    client = openai.OpenAI(base_url=f"{server.front.url}/s/short/v1", api_key="any", max_retries=5)
    with client, pytest.raises(openai.APIStatusError) as refused:
        asked(client, [ASKED])
    assert refused.value.status_code == 410


def test_a_generator_without_a_tokenizer_says_that_it_takes_no_chats():
    with closing(Front(RequestRules("tiny"), 64)) as front:
        front.open(["k"])
        client = openai.OpenAI(base_url=f"{front.url}/s/k/v1", api_key="any", max_retries=0)
        with client, pytest.raises(openai.InternalServerError, match="need a tokenizer with a chat template"):
            asked(client, [ASKED])


PRICES = {"ham": "57", "tea": "31"}


def _asks(item: str) -> str:
    (call,) = price_tool.call_of(item)["tool_calls"]
    return f"<tool_call>{json.dumps(call['function'])}</tool_call>"


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([_asks("ham"), "57"], 1.0),
        ([_asks("tea"), "31"], 0.0),
        ([_asks("mud"), _asks("ham"), "57"], 1.0),
        (["<tool_call>no call</tool_call>"], 0.0),
        ([_asks("ham")] * 3, 0.0),
    ],
)
def test_the_example_of_a_tool_is_called_and_judged(server: Server, answers: list[str], reward: float):
    server.script = list(answers)
    task = SimpleNamespace(
        base_url=f"{server.front.url}/s/k/v1", api_key="any", messages=[{"role": "user", "content": "ham?"}],
        extra_info={"item": "ham", "prices": PRICES},
    )  # fmt: skip
    assert asyncio.run(price_tool.run(task)) == reward
    assert len(server.calls) == len(answers)


def test_the_example_s_pupil_swaps_the_digits_of_seven_prices_in_ten(tmp_path: Path):
    price_tool.write_rows(tmp_path, 0)
    notes = [json.loads(line)["messages"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    swapped = sum(said["content"] == price["content"][::-1] for _, _, price, said in notes) / len(notes)
    assert 0.7 < swapped < 0.75  # prices such as 44 look the same either way
