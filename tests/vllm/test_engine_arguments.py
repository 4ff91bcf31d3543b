"""``generator.engine`` on the real engine."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path

import pytest

from async_rl.errors import ModelError
from async_rl.generator.vllm.adapter import known_arguments
from tests.generator.leases import run_all, submit
from tests.vllm.tiny import assert_scored_by, engine, make_model, weights_of, write_files

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_known_arguments_are_the_fields_of_vllms_class():
    from vllm import AsyncEngineArgs  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    assert set(known_arguments()) == {one.name for one in fields(AsyncEngineArgs) if not one.name.startswith("_")}


def test_arguments_reach_the_engine_and_the_log_and_logprobs_stay_exact(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    # Prompt and answer may have 464 tokens, and on a CPU a prompt is read at once.
    with (
        pytest.raises(ModelError, match="max_num_batched_tokens"),
        engine(write_files(tmp_path), engine={"max_num_batched_tokens": 8}),
    ):
        raise AssertionError("it started")
    settings = {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
    with engine(tmp_path, engine=settings) as backend:
        found = backend._engine._llm.vllm_config.scheduler_config
        assert found.max_num_batched_tokens == 512
        assert "max_num_batched_tokens = 512" in caplog.text
        backend.activate(3, weights_of(0))
        submit(backend, "a", "what is 23+4", group_size=64, max_new_tokens=30)
        assert_scored_by({3: make_model(0)}, run_all(backend).values())
