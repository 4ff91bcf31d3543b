"""Answers as events while they are sampled: what is told, when, and that it is what the whole answer says."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from async_rl.extensions.agents.front import server
from async_rl.extensions.agents.front.answers import begun_answer, parse_answer
from async_rl.extensions.agents.front.chat import ChatRenderer, Draft, read_chat
from async_rl.extensions.agents.front.conversations import ChatPrompt
from async_rl.extensions.agents.front.forms import FORMS
from async_rl.extensions.agents.front.messages import Reply
from async_rl.extensions.agents.front.requests import RefusedError, RequestRules
from async_rl.generator.backend import Sampled
from async_rl.records import FinishReason, Lease
from tests.data.public_templates import tokenizer_of
from tests.extensions.agents.test_conversations import ASKED, CALL, TOOLS
from tests.extensions.agents.world import World, rollout_of
from tests.generator.scripted import ScriptedBackend

CHATS, MESSAGES, RESPONSES = PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
_THINK = "<think>\n"
_MARKS = [
    "a", "So.", "\n", " ", "{", "add", _THINK, "</think>", "<tool_call>", "</tool_call>", CALL, "<function=add>",
    "<parameter=a>2</parameter>", "<arg_key>a</arg_key><arg_value>2</arg_value>", "<|tool_call>call:add", "{a:2}",
    "<tool_call|>", "<|channel>thought\n", "<channel|>", "<|start|>assistant", "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>", "<|end|>", " to=functions.add <|channel|>commentary<|message|>", "<|call|>",
    "<|python_tag|>", '{"name": "add", "parameters": {}}', "<|tool_call_start|>[add(", "a=2)]<|tool_call_end|>",
    "<｜tool▁call▁begin｜>add<｜tool▁sep｜>", "<｜tool▁call▁end｜>", " to=self<|message|>", " to=user<|message|>",
    "<|eom|>", ' to=add<|message|><atem:function_calls><atem:invoke name="add">',
    "</atem:invoke></atem:function_calls>",
]  # fmt: skip


@given(
    st.sampled_from([None, *FORMS.values()]), st.lists(st.sampled_from(_MARKS), max_size=9).map("".join),
    st.sampled_from(["", _THINK, f"{_THINK}\n</think>\n\n"]), st.sampled_from([None, TOOLS]),
    st.sampled_from(["", "<|im_end|>", "<|call|>"]), st.data(),
)  # fmt: skip
def test_what_was_read_of_an_answer_stays_whatever_follows(
    form: Any, text: str, opened: str, tools: Any, end: str, data: st.DataObject
):
    prompt = (form["start_anchor"] if form else "") + opened
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    read = [one for cut in cuts if (one := begun_answer(form, text[:cut], prompt, tools)) is not None]
    for before, after in pairwise([*read, parse_answer(form, text, prompt, tools, end)]):
        assert after.content.startswith(before.content)
        assert (after.thoughts or "").startswith(before.thoughts or "")


ANSWERS: Mapping[str, tuple[str, FinishReason, int]] = {
    # Whether its beginning is told before its end, in how many events with text.
    "text": ("It is 5.", "stop", 8),
    "thoughts": ("<think>\nhm\n</think>\n\nIt is 5.", "stop", 9),
    "thoughts behind a text": ("<think>a</think>So.<think>b</think>!", "stop", 5),
    "thoughts without an end": ("<think>hm", "length", 1),
    "thoughts without an end behind a text": ("So.<think>hm", "length", 4),
    "a call": (CALL, "stop", 3),
    "a broken call": ("So.\n<tool_call>{", "stop", 4),
    "characters of several tokens": ("é5 🌼", "stop", 4),
    "a stop text": ("So.\nOb\nObservation: 6", "stop", 4),
    "a stop text that does not come": ("So.\nOb", "length", 4),
    "nothing": ("", "stop", 0),
}


_BLOCK = "content_block_start content_block_delta content_block_stop "
_OUTPUT = "output_item.added content_part.added {0}.delta {0}.done content_part.done output_item.done "
SHAPES = {
    MESSAGES: f"message_start {_BLOCK * 3}message_delta message_stop",
    RESPONSES: "created in_progress "
    + "".join(map(_OUTPUT.format, ("reasoning_text", "output_text", "reasoning_text"))) + "completed",
}  # fmt: skip
"""The events of an answer with thoughts, text and thoughts, those of a kind that follow each other as one."""


def told_by(events: list[Any]) -> dict[str, str]:
    """What a client puts together of the events of any of the APIs, by the names that it has there."""
    found: dict[str, str] = defaultdict(str)
    for event in (event for event in events if isinstance(event, dict)):
        for delta in [choice["delta"] for choice in event.get("choices", ())] or [event.get("delta", {})]:
            for name, text in ({event["type"]: delta} if isinstance(delta, str) else delta).items():
                found[name] += str(text or "")
    return {name: text for name, text in found.items() if text and name != "type"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("what", ANSWERS)
def test_the_events_of_an_answer_say_what_it_says_in_one_piece(path: str, what: str):
    text, finish, num_expected = ANSWERS[what]
    tokenizer, dialect = tokenizer_of("qwen3"), server.DIALECTS[path]
    asked = {"messages": [ASKED], "tools": TOOLS, "stop": ["\nObservation:"], "stream": True}
    wanted = read_chat(asked, RequestRules("tiny"), print)
    token_ids = np.array(tokenizer.encode(text), "<i4")
    ended = np.append(token_ids, tokenizer.eos_token_id) if finish == "stop" else token_ids
    reply = Reply(7, ended.astype("<i4").tobytes(), b"", b"", finish, 1, text)
    prompt = ChatPrompt(np.array(tokenizer.encode("<|im_start|>assistant\n"), np.int32), ())
    told, answer = list[list[Any]](), dict[str, Any]()
    for pieces in ((), token_ids):
        draft, before, events = Draft(wanted, "tiny", prompt, 7, ChatRenderer(tokenizer, {})), None, list[Any]()
        for chat in filter(None, [*(draft.grown(one.tobytes()) for one in pieces), draft.whole([reply])]):
            answer = dialect.answer(chat, asked)
            events += dialect.events(answer, before, asked)
            before = answer
        told.append(events)
    assert told_by(told[1]) == told_by(told[0])
    if path == CHATS:
        deltas = [event["choices"][0]["delta"] for event in told[1] if isinstance(event, dict)]
        assert sum(bool(one.get("content") or one.get("reasoning_content")) for one in deltas) == num_expected
    elif what == "thoughts behind a text":
        assert (
            " ".join(kind for kind, _ in groupby(event["type"].removeprefix("response.") for event in told[1]))
            == SHAPES[path]
        )
        output = [item["content"][0]["text"] for item in answer.get("output", ())]
        assert output == (["a", "So.!", "b"] if path == RESPONSES else [])


READ = """
import openai

def texts_of(events):
    for event in events:
        found = event if isinstance(event, dict) else event.model_dump()
        delta = found["choices"][0]["delta"]["content"] if "choices" in found else found.get("delta")
        if text := delta.get("text") if isinstance(delta, dict) else delta:
            yield text

async def run(task):
    client, asked = openai.OpenAI(base_url=task.base_url, api_key="any"), [{"role": "user", "content": "a"}]
    chat = lambda: client.chat.completions.create(model="policy", messages=asked, stream=True)
    response = lambda: client.responses.create(model="policy", input=asked, stream=True)
    body = {"model": "policy", "messages": asked, "stream": True}
    message = lambda: client.post("/messages", body=body, cast_to=object, stream=True, stream_cls=openai.Stream[object])
    answers = []
    for number, ask in enumerate((chat, chat, response, message)):
        events = ask()
        texts = texts_of(events)
        answers.append(next(texts))
        if number == 0:
            events.close()  # it goes away
        else:
            note(number)
            answers[-1] += "|" + "".join(texts)
    return float(answers == ["It is ", *["It is |5."] * 3])
"""


class Waiting(ScriptedBackend):
    """Samples ``It is 5.``, and its end only when the agent has ``heard`` the beginning: the call's number is there."""

    def __init__(self, tokenizer: Any, heard: Callable[[], list[str]]) -> None:
        super().__init__(lambda index, turn: "It is 5.")
        self.token_ids = np.array([*tokenizer.encode("It is 5."), tokenizer.eos_token_id], np.int32)
        self.heard = heard

    def step(self) -> list[Sampled]:
        is_heard = [lease.lease_id.rpartition("/")[2] in self.heard() for lease, _ in self._running]
        return super().step() if all(is_heard) else []

    def _sampled(self, lease: Lease, prompt_ids: np.ndarray) -> Sampled:
        return replace(super()._sampled(lease, prompt_ids), token_ids=self.token_ids)

    def tokens_after(self, counts: Mapping[str, int]) -> dict[str, np.ndarray]:
        return {lease.lease_id: self.token_ids[counts[lease.lease_id] : 6] for lease, _ in self._running}


def test_clients_read_the_beginning_of_an_answer_before_the_engine_has_its_end(tmp_path: Path):
    tokenizer = tokenizer_of("qwen3")
    tokenizer.save_pretrained(tmp_path)
    with ExitStack() as stack:
        backend = Waiting(tokenizer, lambda: played.notes)
        limits = {"vocab_size": len(tokenizer), "max_model_len": 2048}
        played = World(tmp_path, stack, READ, backend, tokenizer=tmp_path, **limits)  # type: ignore[arg-type]
        (graded,) = played.play(max_new_tokens=100, max_prompt_tokens=500)
        assert played.rollouts.counters()["agent/lost"] == 1  # whose client has gone
    assert rollout_of(graded).reward == 1.0


@pytest.mark.parametrize(
    ("path", "ping", "error"),
    [
        (CHATS, b": ping\n\n", b'data: {"message":"no","type":"error",'),
        (MESSAGES, b'event: ping\ndata: {"type":"ping"}\n\n', b'event: error\ndata: {"message":"no","type":"error",'),
        (RESPONSES, b": ping\n\n", b'event: error\ndata: {"message":"no","type":"error",'),
    ],
)
def test_a_client_hears_pings_while_nothing_can_be_told_and_then_of_an_error(
    path: str, ping: bytes, error: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "PING_S", 0.0)
    written: list[dict[str, Any]] = []

    async def play(tell: Callable[[None], Any]) -> Any:
        await tell(None)
        raise RefusedError(422, "no", "form_not_met")

    async def send(message: Any) -> None:
        written.append(message)

    endpoints: Any = server.Endpoints
    asyncio.run(endpoints.stream(None, server.DIALECTS[path], {}, play, {}, None, send))
    start, first, last = written
    assert (start["status"], first["body"], last.get("more_body", False)) == (200, ping, False)
    assert last["body"].startswith(error)
