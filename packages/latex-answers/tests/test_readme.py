"""What README.md says is so: its programs run, and its examples are judged as it says."""

import re
from pathlib import Path

import pytest

from latex_answers import equal

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def examples() -> list[tuple[str, str, bool]]:
    """Each (gold, answer, whether they are equal) of the table."""
    table = README.split("| gold | equal | not equal |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[re.findall("`(.+?)`", cell) for cell in line.split("|")[1:4]] for line in table.splitlines()]
    return [
        (gold, answer, verdict)
        for (gold,), right, wrong in rows
        for verdict, answers in ((True, right), (False, wrong))
        for answer in answers
    ]


@pytest.mark.parametrize("program", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_its_programs_run(program: str):
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize(("gold", "answer", "is_equal"), examples())
def test_its_examples_are_judged_as_it_says(gold: str, answer: str, is_equal: bool):
    assert equal(answer, gold) == is_equal
