from __future__ import annotations

import os

import pytest

from async_rl.process.child import set_torch_defaults

NAMES = ("TORCH_CPP_LOG_LEVEL", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("given", "is_learner", "expected"),
    [
        ({}, True, ("ERROR", "expandable_segments:True", None)),
        ({}, False, ("FATAL", None, None)),
        ({NAMES[0]: "INFO"}, False, ("INFO", None, None)),
        ({NAMES[1]: "backend:native"}, True, ("ERROR", "backend:native", None)),
        ({NAMES[2]: "max_split_size_mb:64"}, True, ("ERROR", None, "max_split_size_mb:64")),
    ],
)
def test_torch_gets_our_defaults_unless_the_user_has_set_others(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], is_learner: bool, expected: tuple[str | None, ...]
):
    for name in NAMES:
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    set_torch_defaults(is_learner=is_learner)
    assert tuple(os.environ.get(name) for name in NAMES) == expected
