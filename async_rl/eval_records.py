"""Answers of an evaluation to its figures and its file; shared by evaluation during training and offline."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.records import NO_VERSION, Group, Prompt, Rollout

Decode = Callable[[np.ndarray], str]
"""Token ids, int32 [T], to text without special tokens."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of solving a problem in ``k`` tries from ``num_samples`` (Chen et al. 2021, eq. 1).

    Raises:
        ValueError: k is not in 1..num_samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"expected k between 1 and {num_samples} samples, got {k}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def eval_metrics(dataset: str, groups: Sequence[tuple[Prompt, Group]]) -> dict[str, float]:
    """Accuracy (mean over answers), pass@k for k = samples a row, answer length and the versions that sampled."""
    answers = [r for _, g in groups for r in g.rollouts]
    if not answers:
        return {f"eval/{dataset}/rows": 0}
    solved = [
        pass_at_k(len(g.rollouts), sum(r.accuracy >= 1.0 for r in g.rollouts), len(g.rollouts))
        for _, g in groups
        if g.rollouts
    ]
    versions = [int(v) for r in answers for s in r.sequences for v in np.unique(s.versions) if v != NO_VERSION]
    figures = {
        "accuracy": float(np.mean([r.accuracy for r in answers])),
        "pass_at_k": float(np.mean(solved)),
        "length_mean": float(np.mean([r.num_sampled for r in answers])),
        "truncated": float(np.mean([r.finish_reason == "length" for r in answers])),
        "rows": len(groups),
    }
    if any(r.turns for r in answers):
        figures |= {
            "score": float(np.mean([r.score for r in answers])),
            "turns": float(np.mean([len(r.turns) for r in answers])),
        }
    if versions:
        figures |= {"version_min": min(versions), "version_max": max(versions)}
    return {f"eval/{dataset}/{key}": value for key, value in figures.items()}


def answer_record(prompt: Prompt, rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """One answer as a JSON object: what was asked, said, read from it and expected, and which versions said it."""
    versions = [v for s in rollout.sequences for v in s.versions.tolist() if v != NO_VERSION]
    return {
        "row": prompt.row,
        "messages": [dict(m) for m in prompt.messages],
        "response": "".join(decode(s.token_ids[s.loss_mask]) for s in rollout.sequences),
        "extracted": rollout.extracted,
        "expected": prompt.reward_data.get("gt_answer"),
        "accuracy": rollout.accuracy,
        "reward": rollout.reward,
        "reward_parts": dict(rollout.reward_parts),
        "finish_reason": rollout.finish_reason,
        "num_tokens": rollout.num_sampled,
        "versions": [min(versions), max(versions)] if versions else [],
        **_turn_fields(rollout, decode),
    }


def _turn_fields(rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """Of a rollout that an environment played: its turns, and each token sequence whole, what was told included."""
    if not rollout.turns:
        return {}
    return {
        "score": rollout.score,
        "turns": [{"num_tokens": t.num_tokens, "reward": t.reward, "score": t.score} for t in rollout.turns],
        "sequences": [decode(s.token_ids) for s in rollout.sequences],
    }


def write_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One object a line; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
    os.replace(partial, path)
