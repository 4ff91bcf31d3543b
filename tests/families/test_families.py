"""Every family is computed right or refused by name, by the learner and by the built-in engine. The page that lists
them says the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.families.catalogue import FAMILIES
from tests.families.page import Result, built_in_engine, learner, page, without_figures

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("side", [learner, built_in_engine], ids=["learner", "built-in engine"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_side_computes_a_family_right_or_refuses_it(name: str, side: Callable[[str], Result]):
    result = side(name)
    assert result.is_right, result
    assert bool(result.reason) == (result.way == "refused")


def test_the_page_of_families_says_what_is_measured():
    fresh = without_figures(page())
    assert fresh == without_figures(PAGE.read_text(encoding="utf-8")), (
        "docs/families.md is out of date: python -m tests.families.page > docs/families.md"
    )
