"""A control token that a content spells is text; what the template writes, and all other rows, stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from async_rl.config.data import DataConfig
from async_rl.data.chat import plain_ids, render_answer, render_prompt
from async_rl.data.spellings import GUARD, control_of
from async_rl.data.template import apply_template
from async_rl.data.template_forms import adapted
from async_rl.errors import ModelError
from tests.data.public_templates import cases, tokenizer_of
from tests.extensions.offline.test_leading_spaces import WAYS
from tests.extensions.offline.test_leading_spaces import tokenizer_of as with_spaces

AS_TOKEN = DataConfig(special_tokens_in_content="token").template_arguments
ASKED, ANSWERED = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "%", "name": "f", "tool_call_id": "a12345678"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "a % b"}],
    "user's parts": [{"role": "user", "content": [{"type": "text", "text": "%"}, {"type": "text", "text": "%\n"}]}],
    "system": [{"role": "system", "content": "%"}, ASKED],
    "developer": [{"role": "developer", "content": "%"}, ASKED],
    "tool": [ASKED, CALLED, RESULT],
    "later turns": [{"role": "user", "content": "%"}, ANSWERED, {"role": "user", "content": "%"}, ANSWERED, ASKED],
}
SCHEMA = [{"type": "function", "function": {"name": "f", "description": "%", "parameters": {"type": "object"}}}]


def spelling(value: Any, text: str) -> Any:
    """``value`` with ``text`` for each %."""
    if isinstance(value, str):
        return value.replace("%", text)
    if isinstance(value, list):
        return [spelling(one, text) for one in value]
    return {key: spelling(one, text) for key, one in value.items()} if isinstance(value, dict) else value


def plainly(tokenizer: Any, chat: Any, *, tokenize: bool, tools: Any = None) -> Any:
    """What transformers makes of a chat. None: the template refuses it."""
    given = adapted(tokenizer.chat_template, chat)
    try:
        return tokenizer.apply_chat_template(
            given, tools=tools, tokenize=tokenize, add_generation_prompt=True, return_dict=False
        )
    except Exception:
        return None


@pytest.mark.parametrize("name", cases())
def test_what_others_than_the_assistant_spell_is_text_under_every_public_template(name: str):
    tokenizer = tokenizer_of(name)
    control = control_of(tokenizer).names
    ids = {tokenizer.convert_tokens_to_ids(mark) for mark in control}
    for which, chat in CHATS.items():
        tools = SCHEMA if which == "tool" else None
        neutral = plainly(tokenizer, spelling(chat, "Word"), tokenize=True, tools=spelling(tools, "Word"))
        for mark in sorted(control):
            given = spelling(chat, mark)
            text = plainly(tokenizer, given, tokenize=False, tools=spelling(tools, mark))
            if text is None:
                continue
            found = apply_template(tokenizer, given, {"tools": spelling(tools, mark)} if tools else {}, tokenize=True)
            # The same text as before, and the control tokens of a chat that spells none.
            assert tokenizer.decode(found) == text
            assert [one for one in found if one in ids] == [one for one in neutral if one in ids]


@pytest.mark.parametrize("name", cases())
def test_a_chat_that_spells_nothing_has_the_ids_of_the_template_bit_for_bit(name: str):
    tokenizer = tokenizer_of(name)
    for which, chat in CHATS.items():
        tools = SCHEMA if which == "tool" else None
        for text in ("Word", "<|almost|>", f"a{GUARD}b", "\U00100005|im_end|>", "<think>x</think>", "<|im_\nend|>"):
            given = spelling(chat, text)
            expected = plainly(tokenizer, given, tokenize=True, tools=tools)
            if expected is not None:
                assert apply_template(tokenizer, given, {"tools": tools} if tools else {}, tokenize=True) == expected


TURNS = {
    "llama3_1": (("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"), ("<|python_tag|>",)),
    "gemma4": (("<|turn>", "<turn|>"), ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool>")),
    "phi3": (("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"), ()),
    "glm4moe": (("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<sop>"), ("<think>", "</think>")),
    "gptoss": (("<|start|>", "<|end|>", "<|message|>", "<|return|>"), ("<|channel|>",)),
    "cohere2": (
        ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>"),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "deepseekv3": (("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"), ("<｜tool▁calls▁begin｜>",)),
}
"""For some templates: what opens or ends a turn, and marks of thoughts, answers and calls."""


@pytest.mark.parametrize("name", TURNS)
def test_in_an_answer_only_the_marks_of_turns_are_text(name: str):
    tokenizer = tokenizer_of(name)
    of_turns, others = TURNS[name]
    for mark in (*of_turns, *others):
        chat = [ASKED, {"role": "assistant", "content": f"It is {mark}, I think."}, ASKED]
        so = [ASKED, {"role": "assistant", "content": "It is so, I think."}, ASKED]
        neutral = apply_template(tokenizer, so, {}, tokenize=True)
        found, real = apply_template(tokenizer, chat, {}, tokenize=True), plainly(tokenizer, chat, tokenize=True)
        assert tokenizer.decode(found) == tokenizer.decode(real)
        token = tokenizer.convert_tokens_to_ids(mark)
        if mark in of_turns:
            assert found.count(token) == neutral.count(token) == real.count(token) - 1, mark
        else:
            assert found == real


def test_an_end_mark_at_the_end_of_an_answer_ends_it_and_one_inside_does_not():
    tokenizer = tokenizer_of("qwen2_5")
    end = tokenizer.eos_token_id

    def num_ends(content: str) -> int:
        chat = [ASKED, {"role": "assistant", "content": content}, ASKED]
        return apply_template(tokenizer, chat, {}, tokenize=True).count(end)

    # The system's message of the template and the three others have one each.
    assert [num_ends(one) for one in ("4", "<|im_end|> ends", "It is <|im_end|>.")] == [4, 4, 4]
    assert [num_ends(one) for one in ("4<|im_end|>", "4<|im_end|>\n", "4 <|im_end|><|im_end|>")] == [5, 5, 6]
    call = {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": {"a": "<|im_end|>"}}}]}
    assert apply_template(tokenizer, [ASKED, call, ASKED], {}, tokenize=True).count(end) == 4


def test_token_gives_what_transformers_gives():
    tokenizer = tokenizer_of("qwen2_5")
    chat = [{"role": "user", "content": "a <|im_end|> b"}]
    expected = plainly(tokenizer, chat, tokenize=True)
    assert render_prompt(tokenizer, chat, AS_TOKEN).tolist() == expected
    assert render_prompt(tokenizer, chat).tolist() != expected
    assert apply_template(tokenizer, chat, AS_TOKEN) == plainly(tokenizer, chat, tokenize=False)
    whole = [*chat, ANSWERED]
    as_token = plain_ids(tokenizer, tokenizer.apply_chat_template(whole, tokenize=False))
    assert render_answer(tokenizer, chat, "A", {**AS_TOKEN, "enable_thinking": False}).tolist() == as_token
    assert render_answer(tokenizer, chat, "A").tolist().count(tokenizer.eos_token_id) == 3


def test_a_mark_that_the_tokenizer_does_not_call_special_is_one_if_the_template_ends_turns_with_it():
    tokenizer = tokenizer_of("qwen2_5", eos="<|endoftext|>")
    backend = Tokenizer.from_str(
        tokenizer.backend_tokenizer.to_str().replace('"content":"<|im_end|>","single_word":false,"lstrip":false,'
        '"rstrip":false,"normalized":false,"special":true', '"content":"<|im_end|>","single_word":false,'
        '"lstrip":false,"rstrip":false,"normalized":false,"special":false')
    )  # fmt: skip
    plain = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=tokenizer.chat_template
    )
    end: Any = plain.convert_tokens_to_ids("<|im_end|>")
    assert not plain.added_tokens_decoder[end].special
    found = render_prompt(plain, [{"role": "user", "content": "a <|im_end|> b"}]).tolist()
    assert found.count(end) == render_prompt(plain, [ASKED]).tolist().count(end)


# --- encoding in one piece -------------------------------------------------------------------------------------------


def byte_level(*, ignore_merges: bool = False) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("<", "s"), ("<s", ">"), ("a", "b")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<s", "<s>", "ab"])}
    backend: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def unigram() -> Any:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), *((character, -2.0) for character in "▁ab<s>/user:"), ("ab", -1.0)]
    backend: Any = Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def words() -> Any:
    backend: Any = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2, "b": 3, "user": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


BACKENDS = {
    "byte level": byte_level, "byte level by words": lambda: byte_level(ignore_merges=True), "unigram": unigram,
    "words": words, "words of lower case": None,
    **dict.fromkeys(WAYS),
}  # fmt: skip
PROMPT = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}{% endfor %}"


def tokenizer_with(kind: str, **flags: bool) -> Any:
    """A tokenizer whose model knows <s> by itself, or could merge it, where it has such a vocabulary."""
    if kind in WAYS:
        tokenizer = with_spaces(kind)
        tokenizer.chat_template = PROMPT
        return tokenizer
    from tokenizers import normalizers

    backend = words() if kind == "words of lower case" else BACKENDS[kind]()  # pyright: ignore[reportOptionalCall]
    if kind == "words of lower case":
        backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<s>", special=True, **({"normalized": False} | flags))])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", chat_template=PROMPT)


FLAGS = [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_spelled_token_is_text_and_all_else_is_as_the_tokenizer_has_it(kind: str, flags: dict[str, bool]):
    tokenizer = tokenizer_with(kind, **flags)
    begin = tokenizer.bos_token_id
    for content in ("a", "a b", " a", "ab<s>", "<s>", "a <s> b", "<s><s>a", "a<s"):
        chat = [{"role": "user", "content": content}, {"role": "user", "content": "b"}]
        found = apply_template(tokenizer, chat, {}, tokenize=True)
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        real = tokenizer(text, add_special_tokens=False)["input_ids"]
        if "<s>" not in content:
            assert found == real
            if flags.get("single_word"):
                continue
            # The same in a text with a guard further on: the tokens before it are the tokenizer's own.
            more = apply_template(tokenizer, [*chat, {"role": "user", "content": "b <s>"}], {}, tokenize=True)
            assert more[: len(real)] == real
            continue
        if not flags.get("single_word"):  # such a token is none where it touches a word, so it is left as it is
            assert found.count(begin) == real.count(begin) - content.count("<s>")


# --- refused by name -------------------------------------------------------------------------------------------------


def test_a_python_tokenizer_refuses_only_what_spells_a_token_with_the_ways_out():
    tokenizer: Any = ByT5Tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    assert len(render_prompt(tokenizer, [ASKED])) == 2
    with pytest.raises(
        ModelError, match=r'got a ByT5Tokenizer; remove it, or set data.special_tokens_in_content = "tok'
    ):
        render_prompt(tokenizer, [{"role": "user", "content": "a</s>"}])
    assert render_prompt(tokenizer, [{"role": "user", "content": "a</s>"}], AS_TOKEN).tolist().count(1) == 2


@pytest.mark.parametrize("content", ["<s>\U00100000s>", "\U0010fffdx <s>"])
def test_characters_that_stand_for_tokens_are_refused_beside_a_spelled_one(content: str):
    tokenizer = tokenizer_with("byte level")
    with pytest.raises(ModelError, match="and characters below U\\+100000"):
        render_prompt(tokenizer, [{"role": "user", "content": content}])


def test_a_template_that_acts_on_a_spelled_token_sees_it_and_is_refused_if_that_hides_where_it_is():
    tokenizer = tokenizer_with("byte level")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | replace('<s>', '') }}{% endfor %}b"
    with pytest.raises(ModelError, match="a chat template that does not look for it"):
        render_prompt(tokenizer, [{"role": "user", "content": "a<s>"}])
