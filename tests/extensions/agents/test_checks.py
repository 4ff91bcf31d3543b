"""An agent is tried on two rows before a run starts, against the real front, with an answer that solves nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.data.dataset import Row
from async_rl.errors import ConfigError
from async_rl.extensions.agents.checks import check_agents, try_agent
from async_rl.extensions.agents.programs import isolation
from tests.data.public_templates import tokenizer_of
from tests.extensions.agents.world import PROGRAM

ROWS = [
    Row(messages=({"role": "user", "content": f"{n}+1?"},), reward_data={"idx": n, "gt_answer": str(n)})
    for n in range(3)
]
CHAT = """
from openai import AsyncOpenAI

async def run(task):
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        answer = await client.chat.completions.create(model="policy", messages=task.messages)
    {then}
"""


def config_of(directory: Path, source: str, **environment: Any) -> Config:
    path, model = directory / "agent.py", directory / "model"
    path.write_text(source)
    tokenizer_of("qwen3").save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 400}')
    named = environment or {"name": f"{path}:run"}
    allowed = [str(path), f"{sys.executable} {path}"]
    return parse_config(
        {
            "run": {"dir": str(directory / "run")}, "model": {"path": str(model)}, "environment": named,
            "generator": {"serve": True, "allow_code": allowed, "backend": "transformers"},
            "sampling": {"max_prompt_tokens": 200, "max_new_tokens": 200},
        },
        "test",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("refuse", "expected the run's sampling.temperature = 1 or none, got 0.3"),
        ("untrained", "made no call that was answered; 1 were, and are not trained on"),
    ],
)
def test_an_agent_that_fails_on_each_row_is_refused_such_as_one_that_asks_for_another_distribution(
    tmp_path: Path, settings: str, said: str
):
    source = CHAT.format(then="return 1.0").replace('model="policy",', 'model="policy", temperature=0.3,')
    config = config_of(tmp_path, source, name=f"{tmp_path / 'agent.py'}:run", other_settings=settings)
    with pytest.raises(ConfigError, match=r"environment.name: .*agent.py:run can't play training row 0: ") as refused:
        try_agent(config, ROWS)
    assert said in str(refused.value)


def test_an_agent_that_fails_on_some_rows_is_a_warning(tmp_path: Path):
    said, _ = try_agent(config_of(tmp_path, CHAT.format(then="return 1 / task.extra_info['idx']")), ROWS)
    assert "can't play training row 0: ZeroDivisionError" in said
    assert "training row 1" not in said


def test_the_trial_shows_which_tokens_are_trained_and_what_rewritten_turns_cost(tmp_path: Path):
    first = '        answer = await client.chat.completions.create(model="policy", messages=task.messages)\n'
    other = first.replace("task.messages", '[{"role": "user", "content": "x" * 150}], user="me", temperature=0.3')
    problem, shown = try_agent(
        config_of(tmp_path, CHAT.format(then="return 1.0").replace(first, first + other)), ROWS[:1]
    )
    ends = [
        "  assistant context     11 tokens  <|im_start|>assistant",
        "  assistant target      25 tokens  no such answer, 91827364<|im_end|>",
    ]
    calls, without_effect, *lines = shown.splitlines()
    assert problem == ""
    assert calls == (
        "row 0: calls: 1 first, 1 rewritten; 169 tokens of context are computed again for those that do not continue"
    )
    assert without_effect == "  sent without effect: temperature, user"
    assert lines == [
        r"  user      context     12 tokens  <|im_start|>user\n0+1?<|im_end|>", *ends,
        rf"  user      context    158 tokens  <|im_start|>user\n{'x' * 150}<|im_end|>", *ends,
    ]  # fmt: skip


def test_a_program_is_tried_too(tmp_path: Path):
    words = [sys.executable, str(tmp_path / "agent.py")]
    config = config_of(tmp_path, "import sys; print('no tool here'); sys.exit(4)", command=words)
    with pytest.raises(ConfigError, match=r"environment.command: .* can't play training row 0: .*no tool here"):
        try_agent(config, ROWS)


@pytest.mark.parametrize(("level", "said"), [("all", "isolated"), ("keys", "each other's"), ("none", "UNPROTECTED")])
def test_programs_that_can_not_be_isolated_are_a_warning_and_play_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, said: str
):
    monkeypatch.setattr(isolation, "reach", lambda: (level, "mount /proc: Operation not permitted"))
    words = [sys.executable, str(tmp_path / "agent.py")]
    config = config_of(tmp_path, PROGRAM + "ask([1])", command=words)
    start: Any = SimpleNamespace(config=config, rows=ROWS)
    first, trial = check_agents(start)
    state = "OK" if level == "all" else "WARN"
    assert (first.check, first.state, trial.state) == ("environment.sandbox", state, "OK")
    assert said in first.found
