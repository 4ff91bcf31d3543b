"""A front whose calls a script answers, for chats and their dialects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.extensions.agents.test_chat import Server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with closing(Server(tmp_path_factory.mktemp("tokenizer"))) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.calls, shared.script = [], []
    return shared
