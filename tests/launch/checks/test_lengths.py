"""The longest rollout must fit a micro-batch."""

from __future__ import annotations

import re

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import parse_config
from async_rl.errors import ConfigError
from async_rl.launch.checks.data import check_lengths
from async_rl.queue.storage.payloads import in_blocks
from async_rl.records import BYTES_PER_TOKEN


def config_of(*, max_tokens: int, sequence: int, max_bytes: int = 1 << 30, groups: int = 1) -> Config:
    """Rollouts have up to 16 + 48 = 64 tokens."""
    raw = {
        "run": {"dir": "r"},
        "model": {"path": "nowhere"},
        "sampling": {"max_prompt_tokens": 16, "max_new_tokens": 48},
        "generator": {"backend": "fake"},
        "learner": {"max_tokens": max_tokens, "groups_per_step": groups},
        "queue": {"max_bytes": max_bytes},
        "parallel": {"sequence": sequence},
    }
    return parse_config(raw, "test")


@pytest.mark.parametrize(("max_tokens", "sequence"), [(64, 1), (32, 2), (22, 3)])
def test_a_rollout_that_fits_the_ranks_of_a_micro_batch_is_allowed(max_tokens: int, sequence: int):
    list(check_lengths(config_of(max_tokens=max_tokens, sequence=sequence), []))


@pytest.mark.parametrize(
    ("max_tokens", "sequence", "message"),
    [
        (63, 1, "learner.max_tokens: expected at least 64 (sampling.max_prompt_tokens + max_new_tokens = 16 + 48), "
         "got 63; raise learner.max_tokens to 64"),
        # 64 / 3 is 21 and a rest.
        (21, 3, "learner.max_tokens x parallel.sequence = 21 x 3: expected at least 64 (sampling.max_prompt_tokens + "
         "max_new_tokens = 16 + 48), got 63; raise learner.max_tokens to 22"),
    ],
)  # fmt: skip
def test_a_rollout_of_one_token_more_is_refused_with_the_arithmetic(max_tokens: int, sequence: int, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        list(check_lengths(config_of(max_tokens=max_tokens, sequence=sequence), []))


def test_a_step_that_does_not_fit_the_queue_is_refused_before_anything_starts():
    # 256 groups of 8 rollouts, each in whole blocks of a disk.
    needed = 256 * in_blocks(8 * (64 * BYTES_PER_TOKEN + 1024) + 4096)
    list(check_lengths(config_of(max_tokens=64, sequence=1, max_bytes=needed, groups=256), []))
    with pytest.raises(ConfigError, match=rf"queue\.max_bytes: expected at least {needed}, which one step of 256"):
        list(check_lengths(config_of(max_tokens=64, sequence=1, max_bytes=needed - 1, groups=256), []))
