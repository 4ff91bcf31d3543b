"""Settings of every test."""

import pytest
from hypothesis import settings

from tests.examples import QUICK

settings.load_profile(QUICK)  # before any test module is read; --hypothesis-profile=full replaces it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=20, help="kills at random moments in the fault test, 20 a run")
