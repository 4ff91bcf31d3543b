"""The example environments and the tool helpers, called as their process would; numbers worked by hand."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.environments.arithmetic import evaluate
from async_rl.environments.gem import Gem
from async_rl.environments.protocol import ToolCall, last_tag, parse_tool_calls
from async_rl.process.user_code import load_code

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def environment(name: str, attribute: str = "") -> Any:
    path = f"{EXAMPLES / 'environments' / name}.py"
    return load_code(path + attribute, allowed=[path], digest=None)


def step(code: Any, state: Any, action: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    return asyncio.run(code.step(state, action, extra_info))


def test_tool_calls_and_tags_are_read_and_malformed_calls_kept():
    text = (
        'Let me see. <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call> and '
        '<tool_call>{"name": "g", "arguments": "{\\"y\\": 2}"}</tool_call><tool_call>{"name": "h"}'
    )
    assert parse_tool_calls(text) == [ToolCall("f", {"x": 1}), ToolCall("g", {"y": 2}), ToolCall("h", {})]
    for body in ("{", "[1]", '{"name": 3}', '{"name": "f", "arguments": [1]}', "[" * 100_000):
        (call,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
        assert call.error.startswith("a tool call must")
    assert parse_tool_calls("none") == []
    assert (last_tag("<a> 1 </a><a>\n2</a><a>3", "a"), last_tag("<a>1", "a")) == ("2", None)  # the last one counts


def test_arithmetic_is_exact_and_nothing_else():
    assert evaluate("(1 + 2) * 3 / 7 - -0.5") == (Fraction(9, 7) + Fraction(1, 2), [1, 2, 3, 7, Fraction(1, 2)])
    for text in ("2**9**9", "__import__('os')", "1/0", "True", "(" * 500, "1" * 201, ""):
        with pytest.raises(ValueError, match=r"expected|Error"):
            evaluate(text)


def test_countdown_rewards_form_and_right_equations():
    code, info = environment("countdown"), {"target": 24, "numbers": [2, 3, 4]}
    assert step(code, "s", "<answer>2 * 3 * 4 = 24</answer>", dict(info)) == {"reward": 1.0, "score": 1.0, "done": True}
    told = {
        "24": "Use each of [2, 3, 4] exactly once.",
        "2 + 3 + 4": "That is 9, not 24.",
        "2 ^ 3": "That is no equation of numbers with + - * /.",
    }
    for answer, fault in told.items():
        result = step(code, "s", f"<answer>{answer}</answer>", dict(info))
        assert (result["reward"], result["score"]) == (0.1, 0.0)
        assert result["next_state"] == f"s<answer>{answer}</answer>\n{fault} Try again.\n"
    assert step(code, "s", "24!", dict(info))["reward"] == 0.0
    # Right in the second try: half of the reward, beside the 0.1 of the first.
    assert step(code, "s", "<answer>4 * 3 * 2</answer>", {**info, "tries": 1})["reward"] == 0.5


def test_the_calculator_answers_calls_and_scores_the_box():
    calculator = environment("calculator", ":Calculator")()
    state = [{"role": "user", "content": "12 * 34?"}]
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 34"}}</tool_call>'
    result = step(calculator, state, call, {"gt_answer": "408"})
    assert result["next_state"] == [
        *state, {"role": "assistant", "content": call}, {"role": "tool", "content": "408"}
    ]  # fmt: skip
    assert step(calculator, state, "so \\boxed{408.0}", {"gt_answer": "408"}) == {"reward": 1.0, "done": True}
    assert step(calculator, state, "I don't know", {"gt_answer": "408"})["reward"] == 0.0


def test_local_search_finds_passages_and_scores_answers():
    code = environment("local_search")
    info = {"collection": str(EXAMPLES / "environments" / "islands.jsonl"), "answers": ["1843"]}
    found = step(code, "s", "<search>lighthouse of Harrow Skerry</search>", info)["next_state"]
    assert found.startswith("s<search>lighthouse of Harrow Skerry</search>\n<information>\nHarrow Skerry: ")
    assert "1843" in found
    assert step(code, "s", "<search>zebra</search>", info)["next_state"].endswith("Nothing found.\n</information>\n")
    assert step(code, "s", "<answer>In 1843</answer>", info) == {"reward": 0.0, "done": True}
    assert step(code, "s", "<answer>The 1843.</answer>", info) == {"reward": 1.0, "done": True}
    assert step(code, "s", "hm", info)["next_state"] == f"shm\n{code.CORRECTION}\n"


class GemLike:
    """GEM's interface: reset(seed) -> (observation, info), step(action) -> five values."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return f"seed {seed}, {self.kwargs}", {"suffix": "Go on."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"heard {action}", 0.25, action == "end", action == "cut", {"suffix": "Go on."}


def test_the_gem_adapter_keeps_the_conversation_and_the_seed(monkeypatch):
    monkeypatch.setattr(Gem, "make", staticmethod(lambda env_id, **kwargs: GemLike(id=env_id, **kwargs)))
    gem = Gem()
    info = {"env_id": "game:X", "env_kwargs": {"n": 3}, "prompt": "none", "seed": 2**32 + 5, "messages": []}
    state = asyncio.run(gem.reset(info))
    assert state == [{"role": "user", "content": "seed 5, {'id': 'game:X', 'n': 3}\nGo on."}]
    result = step(gem, state, "left", info)
    assert result["next_state"] == [
        *state, {"role": "assistant", "content": "left"}, {"role": "user", "content": "heard left\nGo on."}
    ]  # fmt: skip
    assert step(gem, state, "end", info) == step(gem, state, "cut", info) == {"reward": 0.25, "done": True}
    for wrong in ({**info, "prompt": "x"}, {"seed": 1, "messages": []}):
        with pytest.raises(ValueError, match=r"environment.extra"):
            asyncio.run(Gem().reset(wrong))


def test_gem_and_the_module_of_its_environment_are_imported_before_the_fork(monkeypatch):
    imported: list[str] = []
    spec = SimpleNamespace(entry_point="games.guess:Guess")

    def import_module(name: str) -> Any:
        if "not installed" in imported:
            raise ModuleNotFoundError(f"No module named {name!r}", name="gem")
        imported.append(name)
        return SimpleNamespace(ENV_REGISTRY={"game:X": spec, "made": SimpleNamespace(entry_point=GemLike)})

    monkeypatch.setattr("async_rl.environments.gem.importlib.import_module", import_module)
    for env_id in ("game:X", "made"):
        Gem.prepare({"env_id": env_id})
    assert imported == ["gem.envs.registration", "games.guess", "gem.envs.registration"]
    imported.append("not installed")
    with pytest.raises(ImportError, match=r"pip install async-rl\[gem\]"):
        Gem.prepare({"env_id": "made"})


def test_gems_own_guess_the_number_is_played():
    pytest.importorskip("gem", reason="the extra [gem] is not installed")
    gem = Gem()
    info = {"env_id": "game:GuessTheNumber-v0-easy", "seed": 3, "messages": []}
    state = asyncio.run(gem.reset(info))
    assert "guess the number" in state[0]["content"]
    guesses = [step(gem, state, f"\\boxed{{{number}}}", info) for number in range(1, 6)]
    assert all("reward" in result for result in guesses)
