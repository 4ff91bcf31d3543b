"""Prints how many right answers are accepted, how many wrong ones refused, and the processor time of a comparison.

Run: ``python benchmarks/accuracy.py``. If math-verify is installed, it is measured in the same process on the same
pairs: ``pip install math-verify==0.9.0``. Each comparison begins with two texts; both sides are warmed up first.

The sets: ``published`` are cases of the tests of math-verify, lm-eval and sympy. ``written`` was written for this
package, with answers as people and models write them. Both were seen while this reader was developed, and math-verify's
own cases while that was. ``tests/data/SOURCES.md`` has sources and licences.
"""

import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from latex_answers import equal

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
SETS = {
    "published by math-verify": ("math_pairs.jsonl", "math-verify"),
    "published by others": ("math_pairs.jsonl", ""),
    "written": ("math_rewritings.jsonl", ""),
}
Judge = Callable[[str, str], bool]


def by_math_verify() -> Judge:
    """math-verify with its default settings. Both answers are in a box, as it expects of a model's answer."""
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    def boxed(text: str) -> str:
        return text if "\\boxed" in text else f"\\boxed{{{text}}}"

    return lambda answer, gold: bool(verify(parse(boxed(gold)), parse(boxed(answer))))


def pairs(file: str, source: str) -> list[tuple[str, str, bool]]:
    """(answer, gold, whether it is right) of a set. ``math_pairs`` holds the cases of several sources."""
    rows = [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").splitlines()]
    if file == "math_pairs.jsonl":
        rows = [row for row in rows if row["source"].startswith("math-verify") == bool(source)]
    return [(row.get("answer", row.get("prediction")), row["gold"], row.get("right", row.get("equal"))) for row in rows]


def share(hits: list[bool]) -> str:
    return f"{sum(hits):>4} of {len(hits):<4} {sum(hits) / len(hits):>6.1%}"


def main() -> None:
    judges: dict[str, Judge] = {"latex-answers": equal}
    if find_spec("math_verify") is not None:
        judges["math-verify"] = by_math_verify()
    for name, judge in judges.items():
        judge("1+x", "x+1")
        print(f"\n{name:<28}{'right accepted':<22}{'wrong refused':<22}CPU ms a pair")
        for title, (file, source) in SETS.items():
            rows = pairs(file, source)
            begin = time.process_time()
            verdicts = [judge(answer, gold) for answer, gold, _ in rows]
            took_ms = (time.process_time() - begin) / len(rows) * 1000
            accepted = [verdict for verdict, (_, _, is_right) in zip(verdicts, rows) if is_right]
            refused = [not verdict for verdict, (_, _, is_right) in zip(verdicts, rows) if not is_right]
            print(f"  {title:<26}{share(accepted):<22}{share(refused):<22}{took_ms:.2f}")


if __name__ == "__main__":
    main()
