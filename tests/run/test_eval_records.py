"""Answers as lines of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.records import Group, Prompt, Rollout
from async_rl.run.records.eval_records import answer_record, append_json_lines, row_records, write_json_lines
from tests.run.test_eval_figures import rollout

PROMPT = Prompt(3, 5, 0, ({"role": "user", "content": "1+1"},), {"gt_answer": "2"})


def group(*rollouts: Rollout) -> Group:
    return Group("lease", "eval", 3, "g", "line", 0.0, rollouts)


def test_an_answer_record_holds_the_sampled_text_only():
    record = answer_record(PROMPT, rollout(1.0), lambda ids: " ".join(map(str, ids.tolist())))
    assert record == {
        "row": 5, "messages": [{"role": "user", "content": "1+1"}], "response": "10 11", "extracted": "2",
        "expected": "2", "accuracy": 1.0, "reward": 1.0, "reward_parts": {"correct": 1.0}, "finish_reason": "stop",
        "num_tokens": 2, "versions": [4, 4],
    }  # fmt: skip
    # A row without a known answer expects what it has.
    cases = {"test_cases": {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "4\n"]}}
    code = answer_record(Prompt(0, 0, 0, PROMPT.messages, cases), rollout(1.0), str)
    assert code["num_tests"] == 2
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


def test_lines_are_put_behind_those_there_are_and_appear_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "deep" / "a.jsonl"
    for number in (1, 2):
        append_json_lines(path, [{"a": number}])
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'
    write_json_lines(path, [{"a": "ä"}, {"a": 2}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": "ä"}, {"a": 2}]

    def torn():
        yield {"a": 3}
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        write_json_lines(path, torn())
    assert '{"a": 2}' in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
