"""Rollouts as lines of a JSONL file: the answers of an evaluation, and rollouts that were trained on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.records import NO_VERSION, Group, Prompt, Rollout

Decode = Callable[[np.ndarray], str]
"""Token ids, int32 [T], to text without special tokens."""


def row_records(prompt: Prompt, group: Group, decode: Decode) -> list[dict[str, Any]]:
    """One line per answer to one row of an evaluation; a row without an answer gets one line that says so."""
    if not group.rollouts:
        asked = {"row": prompt.row, "messages": [dict(m) for m in prompt.messages], **_expected(prompt)}
        return [{**asked, "response": None, "accuracy": 0.0, "finish_reason": "unanswered"}]
    return [
        {"row": prompt.row, "index": index, **answer_record(prompt, rollout, decode)}
        for index, rollout in enumerate(group.rollouts)
    ]


def answer_record(prompt: Prompt, rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """One answer as a JSON object: prompt, response, extracted and expected answer, scores, versions that sampled it.

    ``expected`` is the row's answer; a row with tests has ``num_tests`` instead.
    """
    versions = [v for s in rollout.sequences for v in s.versions.tolist() if v != NO_VERSION]
    return {
        "row": prompt.row,
        "messages": [dict(m) for m in prompt.messages],
        "response": "".join(decode(s.token_ids[s.loss_mask]) for s in rollout.sequences),
        "extracted": rollout.extracted,
        **_expected(prompt),
        "accuracy": rollout.accuracy,
        "reward": rollout.reward,
        "reward_parts": dict(rollout.reward_parts),
        "finish_reason": rollout.finish_reason,
        "num_tokens": rollout.num_sampled,
        "versions": [min(versions), max(versions)] if versions else [],
        **_turn_fields(rollout, decode),
    }


def _expected(prompt: Prompt) -> dict[str, Any]:
    data = prompt.reward_data
    answer = {"expected": data["gt_answer"]} if "gt_answer" in data else {}
    return answer | ({"num_tests": len(data["test_cases"]["outputs"])} if "test_cases" in data else {})


def _turn_fields(rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """Of a rollout of an environment: its turns, and each sequence's whole text, the environment's included."""
    if not rollout.turns:
        return {}
    return {
        "score": rollout.score,
        "turns": [{"num_tokens": t.num_tokens, "reward": t.reward, "score": t.score} for t in rollout.turns],
        "sequences": [decode(s.token_ids) for s in rollout.sequences],
    }


def append_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append one object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write one object per line; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
    os.replace(partial, path)
