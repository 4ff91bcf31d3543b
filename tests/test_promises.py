"""No sentence that promises something is without a test that holds it: the pages against ``tests/promises.toml``.

``python -m tests.test_promises`` prints the table.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

LEVELS = ("unit and component", "end to end", "long", "other environments")
"""The cheapest first."""


class Promise(NamedTuple):
    page: str
    says: list[str]
    """Words of the page, each of one sentence."""
    tests: list[str]
    """``path::function`` or ``path``, from ``tests/`` on."""

    def __str__(self) -> str:
        return f"{self.page}: {' ... '.join(self.says)}"


TABLE = tomllib.loads((TESTS / "promises.toml").read_text(encoding="utf-8"))
PROMISES = [Promise(**row) for row in TABLE["promises"]]
WITHOUT: dict[str, dict[str, list[str]]] = TABLE["without"]
"""Of each page that has a row for every promise: ``sections`` and ``sentences`` that promise nothing."""


class Sentence(NamedTuple):
    section: str
    text: str


def sentences(page: str) -> Iterator[Sentence]:
    """Those of paragraphs and lists, in one line each. A row of a table is one sentence; its head and code are none."""
    section = ""
    text = re.sub(r"^```.*$(.|\n)*?^```$|^\|.*\n\|[-|]+\|$", "", page, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=- |\||#)", text):
        line = " ".join(block.split())
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("|"):
            yield Sentence(section, line)
        else:
            found = re.split(r"(?<=\.) (?=[A-Z`*\[])", line.removeprefix("- "))
            yield from (Sentence(section, sentence) for sentence in found if sentence)


@cache
def sentences_of(path: str) -> list[Sentence]:
    return list(sentences((ROOT / path).read_text(encoding="utf-8")))


def marks(decorators: Iterable[ast.expr]) -> set[str]:
    """``slow`` of ``pytest.mark.slow``, with arguments or without; of marks of rows, those of the cheapest row."""
    found = set[str]()
    for decorator in decorators:
        if match := re.match(r"pytest\.mark\.(\w+)", ast.unparse(decorator)):
            found.add(match[1])
        if isinstance(decorator, ast.Call) and len(decorator.args) == 2 and isinstance(decorator.args[1], ast.List):
            rows = [set(re.findall(r"pytest\.mark\.(\w+)", ast.unparse(row))) for row in decorator.args[1].elts]
            found |= min(rows, key=lambda row: ("long" in row, "slow" in row), default=set())
    return found


@cache
def read_tests(path: str) -> dict[str, set[str]]:
    """The tests of a file and their marks, read and not imported: not every file can be imported everywhere."""
    if not (TESTS / path).exists():
        return {}
    body = ast.parse((TESTS / path).read_text(encoding="utf-8")).body
    own = set[str]()
    found: dict[str, set[str]] = {}
    for node in body:
        if isinstance(node, ast.Assign):
            names = {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            if names == {"pytestmark"}:
                own = marks(node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value])
            found |= {name: set() for name in names if name.startswith("Test")}
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found[node.name] = marks(node.decorator_list)
    return {name: marked | own for name, marked in found.items() if "skip" not in marked | own}


def named(test: str) -> dict[str, set[str]]:
    """The tests, and their marks, that a name of the table means."""
    path, _, function = test.partition("::")
    return {name: marked for name, marked in read_tests(path).items() if function in ("", name)}


def level(test: str) -> str:
    """Where ``test`` is run; a file by its cheapest test."""
    folder = test.partition("/")[0]

    def of(marked: set[str]) -> str:
        if folder == "vllm" or marked & {"gpu", "vllm", "agents"}:
            return "other environments"
        return "long" if "long" in marked else "end to end" if folder == "end_to_end" or "slow" in marked else LEVELS[0]

    return min((of(marked) for marked in named(test).values()), key=LEVELS.index, default=LEVELS[-1])


def test_every_promise_has_a_test():
    lost = [str(promise) for promise in PROMISES if not any(named(test) for test in promise.tests)]
    assert not lost, "promises without a test; keep one, or correct the page:\n" + "\n".join(lost)


def test_every_test_of_the_table_exists_and_runs_somewhere():
    gone = [f"{test}, of {promise}" for promise in PROMISES for test in promise.tests if not named(test)]
    assert not gone, "tests of the table that are gone, or skipped everywhere:\n" + "\n".join(gone)


def test_every_promise_is_a_sentence_of_its_page():
    strange = [
        f"{promise.page}: {words}"
        for promise in PROMISES
        for words in promise.says
        if sum(words in sentence.text for sentence in sentences_of(promise.page)) != 1
    ]
    assert not strange, "expected words of exactly one sentence of the page:\n" + "\n".join(strange)


@pytest.mark.parametrize("page", WITHOUT)
def test_every_sentence_is_promised_by_a_row_or_promises_nothing(page: str):
    quotes = [words for promise in PROMISES if promise.page == page for words in promise.says]
    known = [*quotes, *WITHOUT[page]["sentences"]]
    left = [s for s in sentences_of(page) if s.section not in WITHOUT[page]["sections"]]
    new = [sentence.text for sentence in left if not any(words in sentence.text for words in known)]
    assert not new, f"sentences of {page} without a row of tests/promises.toml:\n" + "\n".join(new)
    texts = [sentence.text for sentence in left]
    old = [words for words in WITHOUT[page]["sentences"] if not any(words in text for text in texts)]
    assert not old, f"not in {page} any more:\n" + "\n".join(old)


def test_a_sentence_ends_at_its_point_and_a_row_of_a_table_is_one():
    text = "# Top\n\nOne is\n0.5. `Two`: three.\n\n```toml\nNo. No.\n```\n"
    table = "\n| a | b |\n|---|---|\n| c | d. E |\n"
    low = "\n## Low\n\n- Four.\n- Five\n"
    top = [Sentence("Top", words) for words in ("One is 0.5.", "`Two`: three.", "| c | d. E |")]
    assert list(sentences(text + table + low)) == [*top, Sentence("Low", "Four."), Sentence("Low", "Five")]


def main() -> None:
    """Print each promise with its page and tests, the cheapest level first."""
    for promise in PROMISES:
        print(f"\n{promise}")
        for test in sorted(promise.tests, key=lambda test: LEVELS.index(level(test))):
            print(f"    {level(test):20} tests/{test}")
    levels = [{level(test) for test in promise.tests} for promise in PROMISES]
    counts = ", ".join(f"{name} {sum(name in held for held in levels)}" for name in LEVELS)
    print(f"\n{len(PROMISES)} promises; held by tests of level: {counts}")


if __name__ == "__main__":
    main()
