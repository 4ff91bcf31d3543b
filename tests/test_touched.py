"""A change concerns the suites of what changed and of what imports it directly."""

import pytest

from tests.touched import EXTENSIONS, touched

ALL = set(EXTENSIONS)


@pytest.mark.parametrize(
    ("changed", "suites"),
    [
        ("async_rl/extensions/ops/mirror/rules.py", {"ops"}),
        ("tests/extensions/agents/world.py", {"agents"}),
        ("packages/latex-answers/src/latex_answers/numbers.py", set[str]()),
        ("async_rl/learner/losses/policy.py", set[str]()),
        ("tests/queue/test_core.py", set[str]()),
        ("docs/reliability.md", set[str]()),
        ("pyproject.toml", ALL),
        ("tests/conftest.py", ALL),
        ("tests/data/rows_of_no_suite.jsonl", ALL),
    ],
)
def test_a_change_concerns_the_suites_that_may_fail_by_it(changed: str, suites: set[str]):
    assert touched([changed]) == suites


def test_a_module_of_an_extension_concerns_another_one_that_imports_it():
    assert touched(["async_rl/extensions/insight/comparison/summary.py"]) >= {"insight", "quickstart"}


def test_a_module_of_the_core_concerns_whoever_imports_it():
    assert touched(["async_rl/errors.py"]) == ALL
    assert "agents" in touched(["async_rl/environments/pool.py", "async_rl/generator/environment_rollouts.py"]) != ALL
