"""Make the data of the recipe of supervised fine-tuning, data/limo_sft.jsonl, from LIMO (GAIR, Apache 2.0).

The rows come from the Hugging Face hub (this needs the package ``datasets`` and a network), or from a local copy in any
format of docs/data.md:

    python examples/limo.py
    python examples/limo.py --limo limo.jsonl

A row of LIMO has a question, a long solution and the answer. The solution becomes the assistant's message.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gsm8k import INSTRUCTION
from hub_rows import Row, converted, or_exit, report


def limo_row(raw: Row) -> Row:
    """Return the chat of question and solution."""
    messages = [
        {"role": "user", "content": f"{raw['question']}\n\n{INSTRUCTION}"},
        {"role": "assistant", "content": raw["solution"]},
    ]
    return {"messages": messages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limo", default="GAIR/LIMO", metavar="DATA")
    parser.add_argument("--out", type=Path, default=Path("data"), metavar="DIR")
    options = parser.parse_args()
    report(options.out / "limo_sft.jsonl", options.limo, converted(options.limo, limo_row))


if __name__ == "__main__":
    or_exit(main)
