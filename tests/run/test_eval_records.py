"""Answers as lines of a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from async_rl.errors import LineageError
from async_rl.records import NO_VERSION, FinishReason, Group, Prompt, Rollout, TokenSequence
from async_rl.run.records.eval_records import answer_record, append_json_lines, row_records, write_json_lines

PROMPT = Prompt(3, 5, 0, ({"role": "user", "content": "1+1"},), {"gt_answer": "2"})


def rollout(accuracy: float, *, num_tokens: int = 2, version: int = 4, finish_reason: FinishReason = "stop") -> Rollout:
    """One prompt token, then ``num_tokens`` sampled ones, ids 10, 11, ..."""
    sequence = TokenSequence(
        token_ids=np.arange(9, 10 + num_tokens, dtype=np.int32),
        loss_mask=np.array([False] + [True] * num_tokens),
        behavior_logprobs=np.zeros(1 + num_tokens, np.float32),
        versions=np.array([NO_VERSION] + [version] * num_tokens, np.int32),
    )
    return Rollout((sequence,), {"accuracy": accuracy}, accuracy, finish_reason, "2")


def group(*rollouts: Rollout) -> Group:
    return Group("lease", "eval", 3, "g", "line", 0.0, rollouts)


def test_an_answer_record_holds_the_sampled_text_only():
    record = answer_record(PROMPT, rollout(1.0), lambda ids: " ".join(map(str, ids.tolist())))
    assert record == {
        "row": 5,
        "messages": [{"role": "user", "content": "1+1"}],
        "response": "10 11",
        "extracted": "2",
        "expected": "2",
        "accuracy": 1.0,
        "reward": 1.0,
        "reward_parts": {"accuracy": 1.0},
        "finish_reason": "stop",
        "num_tokens": 2,
        "versions": [4, 4],
    }


def test_a_row_without_a_known_answer_expects_what_it_has():
    cases = {"test_cases": {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "4\n"]}}
    messages = PROMPT.messages
    code = answer_record(Prompt(0, 0, 0, messages, cases), rollout(1.0), str)
    assert code["num_tests"] == 2
    free = answer_record(Prompt(0, 0, 0, messages, {"extra_info": {}}), rollout(1.0), str)
    assert code.keys() - free.keys() == {"num_tests"}
    assert "expected" not in code


def test_every_answer_to_a_row_is_a_line_and_so_is_a_row_without_one():
    lines = row_records(PROMPT, group(rollout(1.0), rollout(0.0)), str)
    assert [(line["row"], line["index"], line["accuracy"]) for line in lines] == [(5, 0, 1.0), (5, 1, 0.0)]
    assert row_records(PROMPT, group(), str) == [
        {
            "row": 5, "messages": [{"role": "user", "content": "1+1"}], "expected": "2", "response": None,
            "accuracy": 0.0, "finish_reason": "unanswered",
        }
    ]  # fmt: skip


def test_lines_are_put_behind_those_there_are(tmp_path: Path):
    for number in (1, 2):
        append_json_lines(tmp_path / "out" / "a.jsonl", [{"a": number}])
    assert (tmp_path / "out" / "a.jsonl").read_text() == '{"a": 1}\n{"a": 2}\n'


def test_lines_appear_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "deep" / "answers.jsonl"
    write_json_lines(path, [{"a": "ä"}, {"a": 2}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": "ä"}, {"a": 2}]

    def torn():
        yield {"a": 3}
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        write_json_lines(path, torn())
    assert '{"a": 2}' in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_learner_that_was_replaced_while_it_wrote_changes_no_file(tmp_path: Path):
    path, written = tmp_path / "answers.jsonl", list[str]()
    write_json_lines(path, [{"a": "the successor's"}])

    def lines():
        written.append("all")
        yield {"a": "mine"}

    def confirm() -> None:
        assert written == ["all"], "it is asked too early"
        raise LineageError("a newer learner has taken over")

    with pytest.raises(LineageError):
        write_json_lines(path, lines(), confirm)
    assert path.read_text() == '{"a": "the successor\'s"}\n'
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
