"""Make the pairs of the recipes that learn from preferences: data/ultrafeedback_*.jsonl and data/skywork_*.jsonl.

The rows come from the Hugging Face hub (this needs the package ``datasets`` and a network), or from local copies in any
format of docs/data.md. ``--only`` makes some of the files:

    python examples/preferences.py --only ultrafeedback_train ultrafeedback_test
    python examples/preferences.py --only skywork_train --skywork-train pairs.jsonl

Both data sets have whole conversations as ``chosen`` and ``rejected``. UltraFeedback (MIT) also has the prompt alone,
as text, and scores. Skywork's, whose terms are on its page on the hub, is one split, of which the last 1 % is held out.
Pairs whose two answers are the same, or belong to different prompts, say nothing: they are left out, and counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from hub_rows import Row, converted, or_exit, report

SIDES = ("chosen", "rejected")
FILES = {
    "ultrafeedback_train": "train_prefs@HuggingFaceH4/ultrafeedback_binarized",
    "ultrafeedback_test": "test_prefs@HuggingFaceH4/ultrafeedback_binarized",
    "skywork_train": "train[:99%]@Skywork/Skywork-Reward-Preference-80K-v0.2",
    "skywork_test": "train[99%:]@Skywork/Skywork-Reward-Preference-80K-v0.2",
}
"""The source on the hub of each file."""


def pair(raw: Row) -> Row:
    """Return the two conversations of a row. They must end with an answer."""
    for side in SIDES:
        if not isinstance(raw[side], list) or not raw[side] or raw[side][-1]["role"] != "assistant":
            raise ValueError(f"expected {side} as messages that end with an assistant's, got {raw[side]!r:.60}")
    return {side: [{"role": turn["role"], "content": turn["content"]} for turn in raw[side]] for side in SIDES}


def comparable(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the pairs of two answers to one prompt. Print how many others there are."""
    others = 0
    for row in rows:
        chosen, rejected = (row[side] for side in SIDES)
        if chosen[:-1] == rejected[:-1] and chosen[-1] != rejected[-1]:
            yield row
        else:
            others += 1
    print(f"{others} pairs are left out: their answers are the same, or their prompts differ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, source in FILES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=source, metavar="DATA")
    parser.add_argument("--only", nargs="+", choices=FILES, default=list(FILES), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("data"), metavar="DIR")
    options = parser.parse_args()
    for name in options.only:
        source = getattr(options, name)
        report(options.out / f"{name}.jsonl", source, comparable(converted(source, pair)))


if __name__ == "__main__":
    or_exit(main)
