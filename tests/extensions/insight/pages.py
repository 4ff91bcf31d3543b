"""Run directories with rollouts, and pages read back."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.run.records.token_columns import PLACES, TokenTable, columns_path, write_token_columns
from tests.extensions.insight.runs import eval_row, step_row, write_run


def a_run(path: Path, *, num_steps: int = 4, **sections: Any) -> Path:
    """Write a run of a few steps with evaluations, a ledger and a note."""
    dropped = {"stale": 2, "expired": 0}
    ledger = {
        "groups": {"issued": 10, "trained": 6, "filtered": 2, "in_flight": 0, "dropped": dropped},
        "rollouts": {"issued": 40, "trained": 23, "filtered": 8, "failed": 0, "masked": {"truncated": 1},
                     "dropped": {"stale": 8}},
        "tokens": {"received": 400, "trained": 300, "filtered": 60, "masked": {"truncated": 10},
                   "dropped": {"stale": 30}},
    }  # fmt: skip
    rows = [
        eval_row(0, 0.25),
        *(step_row(step, lag_1__tokens=100, mismatch_kl__lag_1=1e-4) for step in range(1, num_steps + 1)),
    ]
    run = write_run(path, [*rows, eval_row(num_steps, 0.75)], ledger=ledger, **sections)
    (run / "notes.log").write_text("wandb did not answer\n", encoding="utf-8")
    return run


def a_rollout(**fields: Any) -> dict[str, Any]:
    """A record of a rollout as the learner writes it."""
    return {
        "position": 3, "lease_id": "a", "generator": "generator-0", "trained_at": 4, "masked": False, "index": 0,
        "row": 7, "messages": [{"role": "user", "content": "1+1="}], "response": "2", "extracted": "2",
        "expected": "2", "accuracy": 1.0, "reward": 1.0, "reward_parts": {"correct": 1.0}, "finish_reason": "stop",
        "num_tokens": 3, "versions": [2, 3], **fields,
    }  # fmt: skip


def write_rollouts(run: Path, step: int, records: list[dict[str, Any]]) -> None:
    """Write the texts of a step, and its row of ``summaries.jsonl``, as the learner does."""
    _write_lines(run / "rollouts" / f"step-{step:06d}.jsonl", records)
    firsts = [record for record in records if record["index"] == 0]
    row = {
        "step": step, "version": 4,
        "positions": [first["position"] for first in firsts], "rows": [first["row"] for first in firsts],
        "sizes": [sum(record["position"] == first["position"] for record in records) for first in firsts],
        **{name: [record[key] for record in records] for name, key in _SUMMARY.items()},
        "staleness": [one["trained_at"] - one["versions"][0] if one["versions"] else None for one in records],
        "cause": ["filter" if record["masked"] else "" for record in records],
    }  # fmt: skip
    with (run / "rollouts" / "summaries.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


_SUMMARY = {"reward": "reward", "accuracy": "accuracy", "tokens": "num_tokens", "finish": "finish_reason"}


def write_answers(run: Path, name: str, step: int, records: list[dict[str, Any]]) -> None:
    """Write the answers of an evaluation as the learner does."""
    _write_lines(run / "eval" / f"{name}-step-{step:06d}.jsonl", records)


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")


def an_answer(row: int, **fields: Any) -> dict[str, Any]:
    """A record of an answer of an evaluation."""
    return {
        "row": row, "index": 0, "messages": [{"role": "user", "content": "1+1="}], "response": "2", "expected": "2",
        "accuracy": 1.0, "reward": 1.0, "reward_parts": {"correct": 1.0}, "finish_reason": "stop", "num_tokens": 3,
        "versions": [2, 2], **fields,
    }  # fmt: skip


def blobs(page: str) -> dict[str, bytes]:
    """The blocks of data in a page, by id, unpacked."""
    found = re.findall(r'<script type="text/plain" id="([\w-]+)">([A-Za-z0-9+/=]*)</script>', page)
    return {name: gzip.decompress(base64.b64decode(text)) for name, text in found}


def header(chunk: bytes) -> dict[str, Any]:
    (size,) = struct.unpack("<I", chunk[:4])
    return json.loads(chunk[4 : 4 + size])


def write_tokens(run: Path, step: int, position: int, *, texts: list[str], size: int = 3, version: int = 2) -> None:
    """Write the columns of one rollout: one given token, then sampled ones of ``version``, learned at version 4."""
    names = ("behavior_logprobs", "logprobs", "entropies", "advantages")
    numbers: dict[str, np.ndarray] = {name: np.full(size, -0.25, np.float32) for name in names}
    numbers["behavior_logprobs"][0] = np.nan
    table = TokenTable(
        places=dict(zip(PLACES, np.array([[position], [0], [0], [4]]), strict=True)),
        sizes=np.array([size]),
        numbers={**numbers, "token_ids": np.arange(size), "versions": np.array([-1, *[version] * (size - 1)])},
        texts=texts,
        outcomes=["given", *["trained"] * (size - 2), "stale"],
    )
    write_token_columns(columns_path(run / "rollouts" / f"step-{step:06d}.jsonl"), table)


def columns(chunk: bytes) -> dict[str, list[float]]:
    """The columns of a chunk, as the page's script reads them."""
    (size,) = struct.unpack("<I", chunk[:4])
    planes = np.frombuffer(chunk[4 + size :], np.uint8).reshape(4, -1)
    values = np.ascontiguousarray(planes.T).view(np.float32).ravel()
    names = header(chunk)["columns"]
    return dict(zip(names, values.reshape(len(names), -1).tolist(), strict=True))
