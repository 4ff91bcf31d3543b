"""Make the data of the mathematics recipes: gsm8k_train.jsonl, gsm8k_test.jsonl and math500.jsonl in data/.

``configs/gsm8k_qwen2.5_0.5b.toml`` and ``configs/one_node_8gpu.toml`` read these files. The rows come from the Hugging
Face hub (this needs the package ``datasets`` and a network), or from local copies in any format of docs/data.md:

    python examples/gsm8k.py
    python examples/gsm8k.py --gsm8k-train train.jsonl --gsm8k-test test.jsonl --math500 math500.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from async_rl.data.files import Source
from async_rl.errors import DataError

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
_MARK = "####"


def gsm8k_row(raw: Mapping[str, str]) -> tuple[str, str]:
    """Return the question and the final answer of a row of GSM8K: what follows ``####``, without thousands commas."""
    _, mark, answer = raw["answer"].rpartition(_MARK)
    if not mark or not answer.strip():
        raise ValueError(f"expected a final answer after {_MARK}, got {raw['answer'][-40:]!r}")
    return raw["question"], answer.strip().replace(",", "")


def math500_row(raw: Mapping[str, str]) -> tuple[str, str]:
    """Return the problem and the final answer of a row of MATH-500."""
    return raw["problem"], raw["answer"]


def rows_of(source: str, convert: Callable[[Mapping[str, str]], tuple[str, str]]) -> Iterator[dict[str, object]]:
    """Yield the rows of ``source`` in the form that a config expects.

    Raises:
        DataError: the source can't be read, or a row has other columns.
    """
    for where, raw in Source(source).records():
        if isinstance(raw, DataError):
            raise raw
        try:
            question, answer = convert(raw)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            cause = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{where}: {cause}; expected rows as the hub has them, choose another file") from error
        yield {"messages": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}], "gt_answer": answer}


def write_rows(path: Path, rows: Iterator[dict[str, object]]) -> int:
    """Write the rows to ``path``, completely or not at all. Return their number."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, path)
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k-train", default="train@openai/gsm8k:main", metavar="DATA")
    parser.add_argument("--gsm8k-test", default="test@openai/gsm8k:main", metavar="DATA")
    parser.add_argument("--math500", default="test@HuggingFaceH4/MATH-500", metavar="DATA")
    parser.add_argument("--out", type=Path, default=Path("data"), metavar="DIR")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, source, convert in (
        ("gsm8k_train", options.gsm8k_train, gsm8k_row),
        ("gsm8k_test", options.gsm8k_test, gsm8k_row),
        ("math500", options.math500, math500_row),
    ):
        path = options.out / f"{name}.jsonl"
        print(f"reading {source}", file=sys.stderr, flush=True)
        print(f"{path}: {write_rows(path, rows_of(source, convert))} rows", flush=True)


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
