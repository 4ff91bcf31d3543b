"""A message of which a template renders nothing is refused by name; what it drops on purpose is no loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.loading import config_from_toml
from async_rl.data.chat import load_tokenizer, render_answer, render_prompt
from async_rl.data.dataset import load_train_rows
from async_rl.data.template import apply_template, check_rendered
from async_rl.data.template_forms import forms_of
from async_rl.errors import DataError, ModelError
from async_rl.extensions.agents.front.chat import ChatRenderer, prompt_of, read_chat
from async_rl.extensions.agents.front.conversations import Conversations
from async_rl.extensions.agents.front.requests import RefusedError, RequestRules
from async_rl.extensions.offline.rows import RowEncoder
from async_rl.generator.environment_rollouts import TokenizerText
from tests.data.public_templates import names, template, tokenizer_of
from tests.generator.tiny_model import write_model

ASKED, ANSWERED = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


def said(role: str) -> dict[str, Any]:
    return {"role": role, "content": "word"}


CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a12345678", "type": "function", "function": {"name": "word", "arguments": {}}}],
}
RESULT = {**said("tool"), "name": "word", "tool_call_id": "a12345678"}
STRICT = ("deepseek_r1_distill", "deepseekv3", "glm4moe", "muse_glimmer", "phi3", "phi3_5", "qwen2_5", "qwen3")
GEMMA4 = ("diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5")
LOST: dict[str, tuple[list[dict[str, Any]], tuple[str, ...] | None]] = {
    "first system": ([said("system"), ASKED], ()),
    "second system": ([{"role": "system", "content": "S"}, said("system"), ASKED], ("gptoss", "qwen3_vl")),
    "later system": ([ASKED, ANSWERED, said("system"), ASKED], ("gptoss", "qwen3_vl")),
    "last system": ([ASKED, said("system")], ("cohere", "gptoss", "qwen3_vl")),
    "developer": ([said("developer"), ASKED], ()),
    "function": ([ASKED, ANSWERED, said("function"), ANSWERED], (*STRICT, "gptoss", "qwen3_instruct_2507", "qwen3_vl")),
    "critic": ([ASKED, ANSWERED, said("critic"), ANSWERED], (*STRICT, "gptoss", "qwen3_instruct_2507", "qwen3_vl")),
    "result without a call": ([ASKED, ANSWERED, said("tool"), ANSWERED], (*GEMMA4, "phi3", "phi3_5")),
    "result": ([ASKED, CALLED, RESULT, ASKED], None),
    "results": ([ASKED, CALLED, RESULT, RESULT, ANSWERED, ASKED], None),
    "call": ([ASKED, CALLED], None),
    "answers": ([ASKED, ANSWERED, ASKED, ANSWERED, ASKED], ()),
}
"""Chats, and the public templates that lose the message of ``word`` without a refusal of their own. None: those that
read no calls."""


@pytest.mark.parametrize("which", LOST)
def test_the_public_templates_that_lose_a_message_refuse_it_and_no_others(which: str):
    words = [f"word{number}x" for number in range(6)]
    chat = [json.loads(json.dumps(one).replace("word", word)) for one, word in zip(LOST[which][0], words, strict=False)]
    losing, refused = [], []
    for name in names():
        tokenizer = tokenizer_of(name)
        try:
            text = str(apply_template(tokenizer, chat, {}))
        except Exception:  # it refuses the roles itself
            continue
        asked = [word for word, one in zip(words, chat, strict=False) if word in json.dumps(one)]
        losing += [name] if any(word not in text for word in asked) else []
        try:
            check_rendered(tokenizer, chat, {})
        except ModelError:
            refused.append(name)
    if which == "second system":  # of DeepSeek R1 the last one counts
        assert refused == ["deepseek_r1_distill", *losing]
        return
    assert refused == losing
    if LOST[which][1] is not None:
        assert sorted(refused) == sorted(LOST[which][1] or ())
    else:
        assert refused == [name for name in refused if not forms_of(template(name)).reads_calls]


def test_a_developer_is_the_system_where_a_template_knows_only_that():
    as_system = [name for name in names() if forms_of(template(name)).developer == "system"]
    assert set(as_system) >= {*STRICT, "cohere2", "qwen3_vl", "qwen3_5_think"}
    for name in as_system:
        tokenizer = tokenizer_of(name)
        chats = ([said(role), ASKED] for role in ("developer", "system"))
        developer, system = (apply_template(tokenizer, chat, {}) for chat in chats)
        assert developer == system
    # Llama 3 writes the name of any role, and gpt-oss has developers.
    assert not {"llama3", "gptoss", "smolvlm"} & set(as_system)


PARTS = (
    "{% for m in messages %}{{ m.role }}{% for p in m.content if p.type in ('text', 'image') %}{{ p.text or '<img>' }}"
    "{% endfor %}{% endfor %}"
)
TEXT = "{% for m in messages %}{{ m.role }}:{{ m.content if m.content is string }}|{% endfor %}"
ANY = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


@pytest.mark.parametrize(
    ("chat_template", "content", "is_lost"),
    [
        (TEXT, 7, True),
        (TEXT, {}, True),
        (TEXT, [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}], True),
        (ANY, 7, False),
        (PARTS, [{"type": "text", "text": "a"}, {"type": "image"}], False),
        (PARTS, [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}], True),
        (PARTS, [{"type": "refusal", "refusal": "no"}], True),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "a", False),
        (TEXT, "", False),
        (TEXT, [], False),
    ],
)
def test_a_content_that_is_no_text_is_refused_where_it_leaves_no_trace(chat_template: str, content: Any, is_lost: bool):
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = chat_template
    chat = [{"role": "user", "content": content}]
    if not is_lost:
        check_rendered(tokenizer, chat, {})
        return
    with pytest.raises(ModelError, match=r"does not render \{'role': 'user'.*, or a part of it"):
        check_rendered(tokenizer, chat, {})


@pytest.mark.parametrize("key", ["refusal", "audio", "function_call"])
def test_what_stands_in_place_of_a_content_is_refused(key: str):
    tokenizer = tokenizer_of("qwen3")
    chat = [ASKED, {"role": "assistant", "content": None, key: {"name": "f"}}]
    with pytest.raises(ModelError, match=r"does not render \{'role': 'assistant'"):
        check_rendered(tokenizer, chat, {})
    check_rendered(tokenizer, [ASKED, {**chat[1], key: None, "content": "A"}], {})


def test_a_thought_or_an_answer_that_a_template_drops_later_is_no_loss():
    for name in names():
        chat = [ASKED, {"role": "assistant", "content": "<think>T</think>A", "reasoning_content": "T"}, ASKED]
        check_rendered(tokenizer_of(name), chat, {})


# --- where rows, prompts and chats are refused ------------------------------------------------------------------------

STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}="
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    (path / "chat_template.jinja").write_text(STRICT_TEMPLATE)
    return path


def config_of(directory: Path, rows: Path, *, more: str = "", backend: str = "transformers") -> Any:
    return config_from_toml(
        f'[run]\ndir = "{rows.parent}/run"\n[model]\npath = "{directory}"\n[data]\ntrain = "{rows}"\n{more}\n'
        f'[generator]\nbackend = "{backend}"\n',
        "config",
    )


LOSING = [[ASKED, {"role": "function", "content": "1"}], [ASKED], [{"role": "developer", "content": "1"}, ASKED]]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": one, "gt_answer": "1"}) + "\n" for one in LOSING))
    return path


def test_rows_of_training_are_refused_or_skipped_before_the_run_starts(directory: Path, rows: Path):
    message = rf"rows.jsonl:1: messages: the chat template of {directory} does not render {{'role': 'function'"
    with pytest.raises(DataError, match=message + r".*on_bad_row = \"skip\""):
        load_train_rows(config_of(directory, rows))
    loaded = load_train_rows(config_of(directory, rows, more='on_bad_row = "skip"'))
    assert (len(loaded.rows), loaded.num_skipped) == (2, 1)
    assert "does not render {'role': 'function'" in loaded.first_skipped


def test_every_renderer_refuses_a_lost_message(directory: Path):
    tokenizer = load_tokenizer(directory)
    chat = LOSING[0]
    match = rf"the chat template of {directory} does not render {{'role': 'function'"
    for render in (render_prompt, lambda one, two: render_answer(one, two, "A")):
        with pytest.raises(ModelError, match=match):
            render(tokenizer, chat)
    with pytest.raises(ModelError, match=match):
        TokenizerText(tokenizer).render(chat)
    encoder = RowEncoder(tokenizer, {}, max_length=100, section="sft")
    for turns in ([*chat, ANSWERED], [*chat, ANSWERED, ASKED, ANSWERED]):
        with pytest.raises(DataError, match=rf"row: .*{match}"):
            encoder.encode_turns(0, [], turns, "row")
    renderer = ChatRenderer(tokenizer, {})
    wanted = read_chat({"messages": list(chat)}, RequestRules("tiny"), print)
    with pytest.raises(RefusedError, match=r"does not render \{'role': 'function'"):
        prompt_of(Conversations(renderer), wanted, renderer, print)
