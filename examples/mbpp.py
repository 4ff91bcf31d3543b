"""Make the data of the code recipe, data/mbpp_train.jsonl, from MBPP (CC BY 4.0, Austin et al. 2021).

The rows come from the Hugging Face hub (this needs the package ``datasets`` and a network), or from a local copy in any
format of docs/data.md:

    python examples/mbpp.py
    python examples/mbpp.py --mbpp mbpp.jsonl

A row of MBPP has a task in words, a reference program, and asserts. They become the text of ``check(candidate)``, as in
HumanEval. The prompt shows the first assert, because the task alone does not name the function.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from hub_rows import Row, converted, or_exit, report


def tested_function(code: str, first_assert: str) -> str:
    """Return the name of the function of ``code`` that ``first_assert`` calls."""
    defined = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(ast.parse(first_assert)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in defined:
            return node.func.id
    raise ValueError(f"expected an assert that calls one of {sorted(defined)}, got {first_assert!r}")


def mbpp_row(raw: Row) -> Row:
    """Return the row for ``reward.type = "code"``: the tests are Python text that defines ``check(candidate)``."""
    asserts = list(raw["test_list"])
    name = tested_function(raw["code"], asserts[0])
    lines = [*(raw.get("test_setup_code") or "").splitlines(), f"{name} = candidate", *asserts]
    body = "\n".join(f"    {line}" for text in lines for line in text.splitlines())
    question = f"{raw['text']}\n\nYour function must pass this test:\n\n{asserts[0]}"
    return {
        "messages": [{"role": "user", "content": question}],
        "test": f"def check(candidate):\n{body}\n",
        "entry_point": name,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbpp", default="train@google-research-datasets/mbpp:full", metavar="DATA")
    parser.add_argument("--out", type=Path, default=Path("data"), metavar="DIR")
    options = parser.parse_args()
    report(options.out / "mbpp_train.jsonl", options.mbpp, converted(options.mbpp, mbpp_row))


if __name__ == "__main__":
    or_exit(main)
