"""``POST /v1/chat/completions``: OpenAI's requests as calls, and answers in OpenAI's shape."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from async_rl.errors import ModelError
from async_rl.extensions.agents.front.answers import (
    begun_answer,
    example_call,
    form_of,
    message_of,
    parse_answer,
    unread_tools,
)
from async_rl.extensions.agents.front.conversations import (
    NO_VARIABLES,
    ChatPrompt,
    Conversations,
    Tools,
    Variables,
    line_of,
    share_again,
)
from async_rl.extensions.agents.front.demands import FIELDS, Demand, demand_of
from async_rl.extensions.agents.front.dialects import Body, Dialect, settings_of
from async_rl.extensions.agents.front.forms import CONTENT, FORMS, THOUGHTS, Form
from async_rl.extensions.agents.front.messages import Call, Reply, Said
from async_rl.extensions.agents.front.requests import (
    OF_CHATS,
    VARIABLES,
    Note,
    RefusedError,
    RequestRules,
    check_fields,
    count_of,
    flag_of,
    stop_of,
    wishes,
)

logger = logging.getLogger(__name__)

MAX_CHOICES = 64
_OF_ALL_MESSAGES = {"role", "content", "type", "text"}
_OF_RENDERING = {"messages", "tools", "add_generation_prompt", "tokenize", "continue_final_message"}
_NUM_LAST = 64
"""Number of tokens at a prompt's end in which the beginning of the model's turn is looked for."""
_LESS_OFTEN = 64
"""An answer that comes is decoded anew, from its beginning, when it has grown by one in so many tokens."""
_REWRITTEN = (
    "agents' calls: under the model's chat template, turns after a tool's call can't go on with the sampled tokens and "
    "are rewritten: %.0f%% of the tokens of a session with a call, its result, an answer and a question are computed "
    "again (docs/templates.md)"
)
_NO_TOKENIZER = "chats need a tokenizer with a chat template, and this generator has none; use /inference/v1/generate"


class ChatRequest(msgspec.Struct):
    """The body of ``POST /v1/chat/completions``. ``raw`` is the whole of it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    n: int
    max_tokens: int | None
    raw: dict[str, Any]
    is_trained: bool
    is_answer: bool
    demand: Demand | None
    without_effect: Collection[str] = ()


class ChatRenderer:
    """Renders, encodes and decodes with a Hugging Face tokenizer. It implements ``conversations.Renderer``."""

    def __init__(
        self, tokenizer: Any, arguments: Mapping[str, Any], ends: Callable[[], Collection[int]] = tuple
    ) -> None:
        """``arguments`` are variables of the chat template, which the request's tools are added to. ``ends`` returns
        the tokens that end a turn; none if they are not known.
        """
        from async_rl.generator.environment_rollouts import TokenizerText

        self.tokenizer, self.arguments, self._ends = tokenizer, arguments, ends
        self._text = TokenizerText(tokenizer, arguments)
        self._unread: dict[str, list[str]] = {}
        self._is_warned = False

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the chat template writes the request's tools into the prompt."""
        from async_rl.data.template import check_arguments

        try:
            check_arguments(self.tokenizer, {"tools": []})
        except ModelError:
            return False
        return True

    @cached_property
    def form(self) -> Form | None:
        """The form in which the model writes tool calls; None if none is known that reads them."""
        return form_of(getattr(self.tokenizer, "response_template", None), self._write)

    def unread_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the names of the tools whose calls would stay text; empty if there is no form."""
        if self.form is None:
            return []
        said = json.dumps(tools, sort_keys=True)
        if said not in self._unread:
            self._unread.clear()
            self._unread[said] = unread_tools(self.form, self._write, tools)
            self._warn_of_rewriting(tools)
        return self._unread[said]

    def _warn_of_rewriting(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Warn, once, if turns after a call of one of ``tools`` do not go on with the tokens before."""
        ends = [] if self._is_warned else [self.ending(one) for one in self._ends()]
        share = 0.0
        with suppress(Exception):  # the template's own: a request with such a conversation is refused by name
            share = max((share_again(example_call(tool), tools, self, ends) for tool in tools if ends), default=0.0)
        if share:
            self._is_warned = True
            logger.warning(_REWRITTEN, 100 * share)

    def _write(self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        from async_rl.data.template import apply_template

        names = {**self.arguments, "tools": list(tools)}
        return str(apply_template(self.tokenizer, chat, names, open_turn=False))

    def reads(self, name: str) -> bool:
        """Whether the chat template reads a variable."""
        from async_rl.data.template import variables_of

        return name in variables_of(self.tokenizer.get_chat_template())

    def check(self, messages: Sequence[Mapping[str, Any]], tools: Tools, own: Variables) -> None:
        """Check that no message is lost, as ``template.check_rendered``."""
        from async_rl.data.template import check_rendered

        check_rendered(self.tokenizer, messages, self._names(tools, own))

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools, own: Variables = NO_VARIABLES) -> str:
        """Render a conversation, as ``conversations.Renderer``."""
        from async_rl.data.template import apply_template

        return str(apply_template(self.tokenizer, messages, self._names(tools, own)))

    def _names(self, tools: Tools, own: Variables) -> dict[str, Any]:
        return {**self.arguments, **own, **({"tools": list(tools)} if tools else {})}

    def encode(self, text: str, before: str = "") -> np.ndarray:
        return self._text.encode(text, before)

    def ending(self, token_id: int) -> str:
        return self._text.ending(token_id)

    def decode(self, token_ids: np.ndarray) -> str:
        """Return the text of tokens, int32 [N], with that of special ones."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))


def load_renderer(directory: str, arguments: Mapping[str, Any]) -> ChatRenderer:
    """Load the tokenizer in ``directory``.

    Raises:
        RefusedError: there is none, or it has no chat template. Each chat is refused with it.
    """
    from async_rl.data.chat import load_tokenizer
    from async_rl.data.turn_end import turn_ends

    if not directory:
        raise RefusedError(501, _NO_TOKENIZER, "no_chat_template")
    try:
        tokenizer, has_model = load_tokenizer(Path(directory)), (Path(directory) / "config.json").is_file()
        # Asked with the first tools: reading the model's config takes seconds.
        ends = (lambda: turn_ends(tokenizer, Path(directory), arguments).ids) if has_model else tuple
        return ChatRenderer(tokenizer, arguments, ends)
    except ModelError as error:
        raise RefusedError(501, f"{_NO_TOKENIZER} ({error})", "no_chat_template") from None


def read_chat(raw: dict[str, Any], rules: RequestRules, note: Note) -> ChatRequest:
    """Read the body of a request. ``note`` gets the fields that have no effect.

    Raises:
        RefusedError: it is malformed, or asks for what can't be had.
    """
    messages, tools = raw.get("messages"), raw.get("tools") or None
    if not isinstance(messages, list) or not messages or not all(_is_message(one) for one in messages):
        raise RefusedError(400, "messages: expected a list of objects with a role", "invalid_request", "messages")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(one, dict) for one in tools)):
        raise RefusedError(400, "tools: expected a list of objects", "invalid_request", "tools")
    refuses = rules.other_settings == "refuse"
    check_fields(raw, OF_CHATS if refuses else OF_CHATS | FIELDS, note, refuses=refuses)
    demand = demand_of(raw, note)
    settings_of(raw, "stream_options", note, include_usage="include_usage")
    n = count_of(raw, "n") or 1
    if n > MAX_CHOICES:
        raise RefusedError(400, f"n: expected at most {MAX_CHOICES}, got {n}", "invalid_request", "n")
    longest = [count for name in ("max_tokens", "max_completion_tokens") if (count := count_of(raw, name)) is not None]
    return ChatRequest(
        messages=messages, tools=None if raw.get("tool_choice") == "none" else tools, n=n,
        max_tokens=min(longest, default=None), raw=raw, is_trained=rules.is_trained(raw) and demand is None,
        is_answer=flag_of(raw, "is_answer"), demand=demand,
    )  # fmt: skip


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def prompt_of(known: Conversations, wanted: ChatRequest, renderer: ChatRenderer, note: Note) -> ChatPrompt:
    """Return the request's conversation as token ids. ``note`` gets the fields that have no effect on it.

    Raises:
        RefusedError: the chat template can't render it, or would render another prompt than the run's.
    """
    if wanted.tools and not renderer.reads_tools:
        text = "tools: the model's chat template does not read them, so the model would not know them"
        raise RefusedError(400, text, "unsupported", "tools")
    if wanted.tools and renderer.form is None:
        text = (
            "tools: expected a chat template that writes calls in a form that is known here (docs/templates.md), got "
            "another one, so its calls would not be seen; set response_template in tokenizer_config.json, or put the "
            "tools into the messages and read the answers' text"
        )
        raise RefusedError(400, text, "unsupported", "tools")
    if wanted.tools and (unread := renderer.unread_tools(wanted.tools)):
        text = (
            f"tools: expected functions whose calls, as the model's chat template writes them, can be read back, got "
            f"{', '.join(unread)[:200]}: such calls would not be seen; correct their schemas or leave them out"
        )
        raise RefusedError(400, text, "unsupported", "tools")
    own = _variables_of(wanted.raw, renderer, note)
    for name, value in _details_of(wanted.messages).items():
        if name.rpartition(".")[2] not in str(renderer.tokenizer.chat_template):
            note(name, value)
    try:
        renderer.check(wanted.messages, wanted.tools, own)
        return known.prompt(wanted.messages, wanted.tools, own)
    except Exception as error:  # boundary to chat templates, which raise what they like
        text = f"messages: the chat template can't render them: {type(error).__name__}: {error}"
        raise RefusedError(400, text, "invalid_request", "messages") from None


def _details_of(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of messages, and of parts of their contents, that not all have."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    inner = [("messages.content", part) for content in contents for part in content if isinstance(part, dict)]
    fields = [
        (f"{at}.{name}", one[name]) for at, one in (*(("messages", one) for one in messages), *inner) for name in one
    ]
    return {name: value for name, value in fields if value and name.rpartition(".")[2] not in _OF_ALL_MESSAGES}


def _variables_of(raw: Mapping[str, Any], renderer: ChatRenderer, note: Note) -> Variables:
    """Return the variables of the template that a request sets. ``note`` gets those that the template does not read."""
    given = raw.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or given.keys() & _OF_RENDERING:
        text = (
            f"chat_template_kwargs: expected an object with variables of the chat template, and none of "
            f"{', '.join(sorted(_OF_RENDERING))}, got {given!r:.80}"
        )
        raise RefusedError(400, text, "invalid_request", "chat_template_kwargs")
    given = given | {name: raw[name] for name in VARIABLES if isinstance(raw.get(name), str | bool)}
    for name in [one for one in VARIABLES if raw.get(one) not in (None, "", [], {}) and one not in given]:
        note(name, raw[name])
    for name in [one for one in given if not renderer.reads(one)]:
        note(name, given.pop(name))
    return given


def chat_call(wanted: ChatRequest, prompt: ChatPrompt, number: int, key: str, choice: int) -> Call:
    """Return the call for one choice of the answer. Each choice has a seed of its own."""
    messages = msgspec.json.encode(wanted.messages[prompt.num_known :])
    said = Said(messages, prompt.known and prompt.known.call, line_of(wanted.messages, wanted.tools))
    token_ids = prompt.token_ids.astype("<i4").tobytes()
    return Call(
        number, key, token_ids, max_tokens=wanted.max_tokens, said=said, is_trained=wanted.is_trained,
        is_answer=wanted.is_answer, is_streamed=bool(wanted.raw.get("stream")), without_effect=wanted.without_effect,
        **wishes(wanted.raw, choice),
    )  # fmt: skip


class Draft:
    """The answer to a chat while it is sampled. ``call`` is the number of its first call.

    A choice has, in addition to OpenAI's fields, the ``parts`` of its message: names of fields and texts, in the order
    in which a client gets them.
    """

    def __init__(self, wanted: ChatRequest, model: str, prompt: ChatPrompt, call: int, renderer: ChatRenderer) -> None:
        self._wanted, self._prompt, self._renderer = wanted, prompt, renderer
        self._before = renderer.decode(prompt.token_ids[-_NUM_LAST:])
        self._named = {"id": f"chatcmpl-{call}", "model": str(wanted.raw.get("model") or model)}
        self._sampled, self._decode_at = b"", 4
        self._parts: list[tuple[str, str]] = []

    def grown(self, token_ids: bytes) -> Body | None:
        """Return the body as far as it is certain after further tokens, int32 [N]; None if that is no more than before,
        or if it can't be known: of one answer of several, in a form that is asked for, or in the model's own.
        """
        from async_rl.data.answer_text import answer_decoder

        self._sampled += token_ids
        wanted, renderer, known, num = self._wanted, self._renderer, self._parts, len(self._sampled)
        if num < self._decode_at or wanted.n > 1 or wanted.demand or renderer.form not in (None, *FORMS.values()):
            return None
        self._decode_at = num + max(4, num // _LESS_OFTEN)
        text = answer_decoder(renderer.tokenizer, ())(np.frombuffer(self._sampled, np.int32))
        if (begun := begun_answer(renderer.form, _certain(text, wanted), self._before, wanted.tools)) is None:
            return None
        message = message_of(begun, "")
        self._parts = self._extended(message)
        none = dict.fromkeys(("finish_reason", "stop_reason", "logprobs"))
        choice = {"index": 0, "message": message, "parts": self._parts, **none}
        return None if self._parts == known else self._body([choice], 0)

    def whole(self, replies: Sequence[Reply]) -> Body:
        """Return the body of the answer, with a choice for each reply."""
        choices = [_choice(self._wanted, *one, self._renderer, self._before) for one in enumerate(replies)]
        for choice in choices:
            choice["parts"] = self._extended(choice["message"])
        return self._body(choices, sum(len(reply.token_ids) // 4 for reply in replies))

    def _extended(self, message: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the parts that were told, and what a message has in addition: first more of the last one."""
        names, parts = (THOUGHTS[0], CONTENT), list(self._parts)
        for name in reversed(names) if parts and parts[-1][0] == CONTENT else names:
            told, text = "".join(one for known, one in parts if known == name), message.get(name) or ""
            assert text.startswith(told), f"expected an answer with {told[-40:]!r}, which was streamed, got another one"
            if rest := text[len(told) :]:
                begun = parts.pop()[1] if parts and parts[-1][0] == name else ""
                parts.append((name, begun + rest))
        return parts

    def _body(self, choices: Sequence[Body], num_sampled: int) -> Body:
        num_prompt, token_ids = len(self._prompt.token_ids), self._prompt.token_ids
        return {
            **self._named, "object": "chat.completion", "created": 0, "choices": choices,
            "usage": {
                "prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled,
            },
            **({"prompt_token_ids": token_ids.tolist()} if self._wanted.raw.get("return_token_ids") else {}),
        }  # fmt: skip


def _choice(
    wanted: ChatRequest, index: int, reply: Reply, renderer: ChatRenderer, before: str
) -> dict[str, Any]:  # fmt: skip
    token_ids = np.frombuffer(reply.token_ids, np.int32)
    end = renderer.ending(int(token_ids[-1])) if len(token_ids) else ""
    text, stop = _text_of(wanted, reply)
    parsed = parse_answer(renderer.form, text, before, wanted.tools, end)
    is_call = bool(parsed.calls) and reply.finish_reason == "stop"
    choice: dict[str, Any] = {
        "index": index,
        "message": message_of(parsed, f"call-{reply.call}"),
        "finish_reason": "tool_calls" if is_call else reply.finish_reason,
        "stop_reason": stop,
        "logprobs": None,
    }
    if wanted.raw.get("logprobs"):
        logprobs = np.frombuffer(reply.logprobs, np.float32)
        texts = [renderer.decode(token_ids[place : place + 1]) for place in range(len(token_ids))]
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ]
        }
    if wanted.raw.get("return_token_ids"):
        choice["token_ids"] = token_ids.tolist()
    return choice


def _certain(text: str, wanted: ChatRequest) -> str:
    """Return the beginning of a text that further tokens do not change, and that ends before a stop text."""
    text, stops = text.rstrip("\ufffd"), stop_of(wanted.raw)  # a character may be cut
    places = (place for stop in stops if (place := text.find(stop)) >= 0)
    begun = (length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
    return text[: min(places, default=len(text) - max(begun, default=0))]


def _text_of(wanted: ChatRequest, reply: Reply) -> tuple[str, str | None]:
    """Return the text of an answer without the request's stop text that ended it, as OpenAI's API does, and that."""
    found = [(place, stop) for stop in stop_of(wanted.raw) if (place := reply.text.find(stop)) >= 0]
    place, stop = min(found, default=(None, None)) if reply.finish_reason == "stop" else (None, None)
    return reply.text[:place], stop


def _answer(answer: Body, asked: Body) -> Body:
    choices = [{name: choice[name] for name in choice if name != "parts"} for choice in answer["choices"]]
    return {**answer, "choices": choices}


def _events(answer: Body, told: Body | None, asked: Body) -> Iterator[Any]:
    """Yield chunks: text before calls and the end, and the usage if it was asked for.

    Some clients lose the calls of an event that has text, too.
    """
    common = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        delta, is_whole = dict(choice["message"]), choice["finish_reason"] is not None
        calls = delta.pop("tool_calls", ())
        if told is not None:
            known = told["choices"][0]["message"]
            rests = {name: (delta.get(name) or "")[len(known.get(name) or "") :] for name in (THOUGHTS[0], CONTENT)}
            delta = {name: rest for name, rest in rests.items() if rest}
        if not is_whole or (calls and any(delta.get(name) for name in (THOUGHTS[0], CONTENT))):
            chunks.append({**common, "choices": [{"index": choice["index"], "delta": delta, "finish_reason": None}]})
            delta = {}
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        piece = {name: choice[name] for name in ("index", "logprobs", "finish_reason", "token_ids") if name in choice}
        chunks += [{**common, "choices": [{**piece, "delta": delta}]}] if is_whole else []
    if "prompt_token_ids" in answer and told is None:
        chunks[0]["prompt_token_ids"] = answer["prompt_token_ids"]
    yield from chunks
    if answer["choices"][0]["finish_reason"] is not None:
        if (asked.get("stream_options") or {}).get("include_usage"):
            yield {**common, "choices": [], "usage": answer["usage"]}
        yield msgspec.Raw(b"[DONE]")


CHATS = Dialect(
    lambda asked, _: asked, _answer, _events, lambda chunk, _: b"data: %s\n\n" % msgspec.json.encode(chunk)
)  # fmt: skip
