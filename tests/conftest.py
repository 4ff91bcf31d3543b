"""Settings of every test: hypothesis draws the same examples each time, and a busy machine is no failure."""

import pytest
from hypothesis import settings

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=20, help="kills at random moments in the fault test, 20 a run")
