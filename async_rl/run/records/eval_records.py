"""Compute the figures of an evaluation (accuracy, pass@k, ...) from its groups, and write its answers as JSON lines.

The functions get the groups of one evaluation set, one group for each row of the set. They return figures by name, or
JSON objects. The learner calls them during training, and ``async-rl eval`` calls them after it. The learner also logs
rollouts that it trained as such JSON objects.

A row that could not be sampled (its prompt is too long, or every attempt failed) has a group without rollouts. The row
counts as wrong in all figures of accuracy, so that these are means over all rows. ``unanswered`` is the number of such
rows. Lengths, rewards and scores are means over the answers that exist.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from async_rl.records import NO_VERSION, WITHOUT_REWARD, Group, Prompt, Rollout
from async_rl.rewards.answers import VoteKey, majority
from async_rl.run.directory import replaced


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return an unbiased estimate of pass@k, the probability that at least one of ``k`` answers to a row is correct.

    The estimate uses ``num_samples`` answers, of which ``num_correct`` are correct. The formula is eq. 1 of Chen et al.
    2021, for ``k`` between 1 and ``num_samples``.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def eval_metrics(
    dataset: str, groups: Sequence[tuple[Prompt, Group]], *, vote_key: VoteKey | None = None
) -> dict[str, float]:
    """Return the figures of the evaluation set ``dataset`` by their keys in ``metrics.jsonl``.

    The keys have the form ``eval/<dataset>/<figure>``. ``groups`` and ``vote_key`` are used as in ``eval_figures``.
    """
    found = eval_figures([group.rollouts for _, group in groups], vote_key=vote_key)
    return {f"eval/{dataset}/{key}": value for key, value in found.items()}


def eval_figures(rows: Sequence[Sequence[Rollout]], *, vote_key: VoteKey | None = None) -> dict[str, float]:
    """Return the figures of an evaluation set by name. ``metric_table.EVAL_FIGURES`` describes each figure.

    Args:
        rows: the rollouts of each dataset row; empty for a row without an answer.
        vote_key: maps an answer to a key. In the majority vote, answers with the same key count as the same answer. The
            result has no majority figure if ``vote_key`` is None, or if no rollout has an extracted answer.
    """
    if not rows:
        return {"rows": 0}
    answered = [row for row in rows if row]
    accuracies = [float(np.mean([r.accuracy for r in row])) if row else 0.0 for row in rows]
    found: dict[str, float] = {"accuracy": float(np.mean(accuracies))}
    if len(rows) > 1:
        found["accuracy_se"] = float(np.std(accuracies, ddof=1) / math.sqrt(len(rows)))
    found |= _pass_figures(answered, len(rows))
    if answered and max(map(len, answered)) > 1:
        found["best_of_n"] = sum(max(r.accuracy for r in row) for row in answered) / len(rows)
        found["reward_best_of_n"] = float(np.mean([max(r.reward for r in row) for row in answered]))
        if vote_key is not None and any(rollout.extracted is not None for row in answered for rollout in row):
            found["majority_at_n"] = sum(_voted_accuracy(row, vote_key) for row in answered) / len(rows)
    found |= {"rows": len(rows), "unanswered": len(rows) - len(answered)}
    return found | (_answer_figures(answered) if answered else {})


def _pass_figures(answered: Sequence[Sequence[Rollout]], num_rows: int) -> dict[str, float]:
    """Return the figures ``pass_at_1``, ``pass_at_2``, ``pass_at_4``, ... and ``pass_at_k``, as means over all rows.

    In ``pass_at_k``, k is the number of answers per row. If rows have different numbers of answers, k is the smallest.
    An answer counts as correct only if its accuracy is 1. A row without an answer counts as 0. There is no figure if an
    accuracy is outside 0..1, because it is then the reward of a function without an accuracy.

    Args:
        answered: the rollouts of each row that has an answer.
        num_rows: the number of all rows.
    """
    if not answered:
        return {"pass_at_k": 0.0}
    if not all(0.0 <= rollout.accuracy <= 1.0 for row in answered for rollout in row):
        return {}
    num_samples = min(map(len, answered))
    tries = {f"pass_at_{2**i}": 2**i for i in range(num_samples.bit_length())} | {"pass_at_k": num_samples}
    solved = [(len(row), sum(r.accuracy >= 1.0 for r in row)) for row in answered]
    return {name: sum(pass_at_k(n, c, k) for n, c in solved) / num_rows for name, k in tries.items()}


def _voted_accuracy(row: Sequence[Rollout], vote_key: VoteKey) -> float:
    chosen = majority([rollout.extracted for rollout in row], vote_key)
    return 0.0 if chosen is None else row[chosen].accuracy


def _answer_figures(answered: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    answers = [rollout for row in answered for rollout in row]
    found: dict[str, float] = {
        "samples": max(map(len, answered)),
        "reward": float(np.mean([r.reward for r in answers])),
        "length_mean": float(np.mean([r.num_sampled for r in answers])),
        "truncated": float(np.mean([r.finish_reason == "length" for r in answers])),
    }
    if failed := sum(r.finish_reason in WITHOUT_REWARD for r in answers):
        found["failed"] = failed
    if any(r.turns for r in answers):
        found |= {
            "score": float(np.mean([r.score for r in answers])),
            "score_best_of_n": float(np.mean([max(r.score for r in row) for row in answered])),
            "turns": float(np.mean([len(r.turns) for r in answers])),
        }
    versions = [int(v) for r in answers for s in r.sequences for v in np.unique(s.versions) if v != NO_VERSION]
    return found | ({"version_min": min(versions), "version_max": max(versions)} if versions else {})


Decode = Callable[[np.ndarray], str]
"""A function that converts token ids, int32 [T], to text, as ``data.answer_text.answer_decoder`` does."""


def row_records(prompt: Prompt, group: Group, decode: Decode) -> list[dict[str, Any]]:
    """Return the JSON objects that record the answers to one row of an evaluation set, one object for each answer.

    ``prompt`` is the row, and ``group`` has its answers. A row without an answer has one object, with the
    ``finish_reason`` ``unanswered``.
    """
    if not group.rollouts:
        asked = {"row": prompt.row, "messages": [dict(m) for m in prompt.messages], **_expected(prompt)}
        return [{**asked, "response": None, "accuracy": 0.0, "finish_reason": "unanswered"}]
    return [
        {"row": prompt.row, "index": index, **answer_record(prompt, rollout, decode)}
        for index, rollout in enumerate(group.rollouts)
    ]


def answer_record(prompt: Prompt, rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """Return the JSON object that records one answer: prompt, response, expected answer, rewards, weights versions.

    If the dataset row has test cases, the object has their number as ``num_tests``. If a reward judged parts of the
    answer, it has ``spans``: pairs of the number of sampled tokens up to the part's end, and its reward.
    """
    versions = [v for s in rollout.sequences for v in s.versions.tolist() if v != NO_VERSION]
    return {
        "row": prompt.row,
        **({"source": prompt.source} if prompt.source else {}),
        "messages": [dict(m) for m in prompt.messages],
        "response": "".join(decode(s.token_ids[s.loss_mask]) for s in rollout.sequences),
        "extracted": rollout.extracted,
        **_expected(prompt),
        "accuracy": rollout.accuracy,
        "reward": rollout.reward,
        "reward_parts": dict(rollout.reward_parts),
        **({"metrics": dict(rollout.metrics)} if rollout.metrics else {}),
        "finish_reason": rollout.finish_reason,
        "num_tokens": rollout.num_sampled,
        **({"spans": [[span.end, span.reward] for span in rollout.spans]} if rollout.spans else {}),
        "versions": [min(versions), max(versions)] if versions else [],
        **_turn_fields(rollout, decode),
        **({"session": msgspec.to_builtins(rollout.session)} if rollout.session is not None else {}),
    }


def _expected(prompt: Prompt) -> dict[str, Any]:
    data = prompt.reward_data
    answer = {"expected": data["gt_answer"]} if "gt_answer" in data else {}
    cases = data.get("test_cases")  # of any form if the reward runs no programs
    outputs = cases.get("outputs", "1") if isinstance(cases, dict) else None
    return answer | ({"num_tests": len(outputs)} if isinstance(outputs, list | str) else {})


def _turn_fields(rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """Return the fields of ``answer_record`` that only a rollout with an environment has: score, turns and sequences.

    ``sequences`` has the text of each token sequence, including the environment's tokens. Return an empty mapping if
    the rollout has no turns.
    """
    if not rollout.turns:
        return {}
    return {
        "score": rollout.score,
        "turns": [{"num_tokens": t.num_tokens, "reward": t.reward, "score": t.score} for t in rollout.turns],
        "sequences": [decode(s.token_ids) for s in rollout.sequences],
    }


def append_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append ``records`` to a file, one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_json_lines(path: Path, records: Iterable[dict[str, Any]], confirm: Callable[[], None] = lambda: None) -> None:
    """Write ``records`` to a file, one JSON object per line. The file is written completely or not at all.

    ``confirm`` is called when all is written, right before the file appears. If it raises, there is no file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, confirm) as partial, partial.open("w", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
