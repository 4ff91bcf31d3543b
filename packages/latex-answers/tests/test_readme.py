"""What README.md says is so: its programs run, and its examples are judged as it says."""

import re
from pathlib import Path

import pytest

from latex_answers import equal

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (yes|no) \|", README, re.MULTILINE)


@pytest.mark.parametrize("program", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_its_programs_run(program: str):
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize(("gold", "answer", "verdict"), ROWS)
def test_its_examples_are_judged_as_it_says(gold: str, answer: str, verdict: str):
    assert len(ROWS) > 20
    assert equal(answer, gold) == (verdict == "yes")
