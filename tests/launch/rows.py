"""Rows of ``metrics.jsonl``, as a learner writes them."""

import json
from pathlib import Path


def a_row(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "version": step, "time_s": 2.0 * step, "tokens/trained": 64, **more}


def append(path: Path, *rows: dict[str, float]) -> None:
    with path.open("a") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows))
