"""Make the data of the mathematics recipes: gsm8k_train, gsm8k_test, math_train and math500, as data/NAME.jsonl.

The rows come from the Hugging Face hub (this needs the package ``datasets`` and a network), or from local copies in any
format of docs/data.md. ``--only`` makes some of the files:

    python examples/gsm8k.py
    python examples/gsm8k.py --only gsm8k_train gsm8k_test
    python examples/gsm8k.py --gsm8k-train train.jsonl --gsm8k-test test.jsonl --math-train m.jsonl --math500 t.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from hub_rows import Row, converted, or_exit, report, write_rows

from async_rl.rewards.extraction import extract_boxed

__all__ = ["write_rows"]

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
_MARK = "####"


def gsm8k_row(raw: Row) -> tuple[str, str]:
    """Return the question and the final answer of a row of GSM8K: what follows ``####``, without thousands commas."""
    _, mark, answer = raw["answer"].rpartition(_MARK)
    if not mark or not answer.strip():
        raise ValueError(f"expected a final answer after {_MARK}, got {raw['answer'][-40:]!r}")
    return raw["question"], answer.strip().replace(",", "")


def math_row(raw: Row) -> tuple[str, str]:
    r"""Return the problem and the final answer of a row of MATH: the content of the last ``\boxed{}`` of its solution.

    MATH has a few solutions whose box has no braces, such as ``\boxed 7``.
    """
    answer = extract_boxed(raw["solution"]).answer
    if answer is None:
        _, mark, rest = raw["solution"].rpartition("\\boxed ")
        answer = rest.split("$")[0].strip() if mark else None
    if not answer:
        raise ValueError(f"expected a solution with \\boxed{{}}, got {raw['solution'][-40:]!r}")
    return raw["problem"], answer


def math500_row(raw: Row) -> tuple[str, str]:
    """Return the problem and the final answer of a row of MATH-500."""
    return raw["problem"], raw["answer"]


def rows_of(source: str, convert: Callable[[Row], tuple[str, str]]) -> Iterator[Row]:
    """Yield the rows of ``source`` in the form that a config expects.

    Raises:
        DataError: the source can't be read, or a row has other columns.
    """

    def row(raw: Row) -> Row:
        question, answer = convert(raw)
        return {"messages": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}], "gt_answer": answer}

    return converted(source, row)


FILES = {
    "gsm8k_train": ("train@openai/gsm8k:main", gsm8k_row),
    "gsm8k_test": ("test@openai/gsm8k:main", gsm8k_row),
    "math_train": ("train@DigitalLearningGmbH/MATH-lighteval", math_row),
    "math500": ("test@HuggingFaceH4/MATH-500", math500_row),
}
"""The source on the hub of each file, and the function that reads its rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (source, _) in FILES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=source, metavar="DATA")
    parser.add_argument("--only", nargs="+", choices=FILES, default=list(FILES), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("data"), metavar="DIR")
    options = parser.parse_args()
    for name in options.only:
        source = getattr(options, name)
        report(options.out / f"{name}.jsonl", source, rows_of(source, FILES[name][1]))


if __name__ == "__main__":
    or_exit(main)
