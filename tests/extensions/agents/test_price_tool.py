"""The example of an agent with a tool, against a real front whose answers are written down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from agents import price_tool

from tests.extensions.agents.test_chat import Server

PRICES = {"ham": "57", "tea": "31"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("tokenizer"))
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([price_tool.call_of("ham"), "57"], 1.0),
        ([price_tool.call_of("tea"), "31"], 0.0),
        ([price_tool.call_of("mud"), price_tool.call_of("ham"), "57"], 1.0),
        (["57"], 1.0),
        (["<tool_call>no call</tool_call>"], 0.0),
        ([price_tool.call_of("ham")] * 3, 0.0),
    ],
)
def test_the_agent_calls_its_tool_and_judges_the_answer(server: Server, answers: list[str], reward: float):
    server.script, server.calls = list(answers), []
    task = SimpleNamespace(
        base_url=f"{server.front.url}/s/k/v1", api_key="any", messages=[{"role": "user", "content": "ham?"}],
        extra_info={"item": "ham", "prices": PRICES},
    )  # fmt: skip
    assert asyncio.run(price_tool.run(task)) == reward
    assert len(server.calls) == len(answers)


def test_the_pupil_swaps_the_digits_of_seven_prices_in_ten(tmp_path: Path):
    price_tool.write_rows(tmp_path, 0)
    notes = [json.loads(line)["messages"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    swapped = sum(said["content"] == price["content"][::-1] for _, _, price, said in notes) / len(notes)
    assert 0.7 < swapped < 0.75  # prices such as 44 look the same either way
