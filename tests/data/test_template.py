"""Arguments of chat templates: what reaches the template, and what it does not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from async_rl.config.loading import load_config
from async_rl.data.chat import check_model, load_tokenizer, render_prompt
from async_rl.data.dataset import RowRules, parse_row
from async_rl.data.template import apply_template, check_arguments
from async_rl.errors import ConfigError, DataError, ModelError
from async_rl.generator.environment_rollouts import TokenizerText
from async_rl.records import TOOLS_ROLE
from tests.config.made import copy_of
from tests.generator.tiny_model import write_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t['function']['name'] }}{% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% if enable_thinking is defined and not enable_thinking %}<>{% endif %}{% endif %}"
)
ADD = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ASKED = [{"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(directory)


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Any, arguments: Any) -> str:
    return str(tokenizer.decode(render_prompt(tokenizer, messages, arguments)))


def test_arguments_reach_the_template_of_prompts_and_of_environments(tokenizer):
    arguments = {"enable_thinking": False, "tools": ADD}
    # The tokenizer has no brackets, so the prompt has unknown tokens in their place.
    assert rendered(tokenizer, ASKED, {"enable_thinking": False}) == "1+1=<>"
    assert rendered(tokenizer, ASKED, {}) == "1+1="
    assert rendered(tokenizer, ASKED, arguments).replace("<unk>", "") == "add1+1=<>"
    assert TokenizerText(tokenizer, arguments).render(ASKED) == "[add]1+1=<>"


def test_a_row_has_tools_of_its_own_that_replace_those_of_the_run(tokenizer):
    mul = [{"function": {"name": "mul"}}]
    row = parse_row({"prompt": "2*2", "gt_answer": 4, "tools": mul}, "f:1", RowRules(system_prompt="s"))
    assert [message["role"] for message in row.messages] == [TOOLS_ROLE, "system", "user"]
    assert "tools" not in row.reward_data
    assert apply_template(tokenizer, row.messages, {"tools": ADD}) == "[mul]s2*2="
    text = parse_row({"prompt": "2*2", "gt_answer": 4, "tools": json.dumps(mul)}, "f:1", RowRules())
    assert apply_template(tokenizer, text.messages, {}) == "[mul]2*2="


@pytest.mark.parametrize("tools", ["a hammer", [], {"function": {}}, ["hammer"]])
def test_a_column_of_tools_with_something_else_is_refused(tools):
    with pytest.raises(DataError, match=r"^f:3: tools: expected a JSON list of tool schemas.*rename the column"):
        parse_row({"prompt": "a", "gt_answer": 4, "tools": tools}, "f:3", RowRules())


def test_tools_without_a_chat_template_are_refused():
    row = {"prompt": "a", "gt_answer": 4, "tools": ADD}
    with pytest.raises(DataError, match=r"expected no tools with data\.prompt_format"):
        parse_row(row, "f:3", RowRules(prompt_format="text"))


def test_rows_without_a_prompt_keep_their_tools_for_the_environment():
    row = parse_row({"tools": ["hammer"]}, "f:1", RowRules(needs=(), needs_prompt=False))
    assert (row.messages, row.reward_data) == ((), {"tools": ["hammer"]})


def test_an_argument_that_the_template_does_not_read_is_refused(directory, tokenizer):
    check_arguments(tokenizer, {"enable_thinking": True, "tools": ADD})
    with pytest.raises(ModelError) as refused:
        check_model(directory, ASKED, arguments={"enable_thinkin": True})
    assert "data.chat_template_kwargs.enable_thinkin: the chat template of model.path does not read" in str(
        refused.value
    )
    assert "(enable_thinking, tools)" in str(refused.value)


def test_a_variable_with_a_default_in_the_template_counts_as_read(tokenizer):
    tokenizer.chat_template = "{% if not today is defined %}{% set today = '1' %}{% endif %}{{ today }}"
    check_arguments(tokenizer, {"today": "2"})
    assert apply_template(tokenizer, ASKED, {"today": "2"}) == "2"


def test_a_template_for_marked_generations_can_be_read(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% generation %}{{ name }}{% endgeneration %}{% continue %}{% endfor %}"
    )
    check_arguments(tokenizer, {"name": "a"})
    with pytest.raises(ModelError, match="does not read m,"):
        check_arguments(tokenizer, {"m": "a"})


def test_tools_that_the_template_does_not_read_are_refused(tokenizer):
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(ModelError, match=r"data\.tools: .*use a model whose chat template reads tools"):
        check_arguments(tokenizer, {}, [{"role": TOOLS_ROLE, "content": json.dumps(ADD)}, *ASKED])


def test_the_saved_config_has_the_tools_themselves(tmp_path):
    path, tools = tmp_path / "config.toml", tmp_path / "tools.json"
    path.write_text(f'[run]\ndir = "r"\n[model]\npath = "m"\n[data]\ntools = "{tools}"\nchat_template_kwargs.a = 1')
    with pytest.raises(
        ConfigError, match=r"data\.tools: expected a JSON file of tool schemas, can't read .*tools\.json"
    ):
        load_config(path)
    tools.write_text(json.dumps(ADD, indent=1))
    config = load_config(path)
    assert config.data.template_arguments == {"a": 1, "tools": ADD}
    assert copy_of(config) == config
