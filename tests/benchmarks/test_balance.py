"""The figure behind ``benchmarks/balance.py``, which is arithmetic: the same on every machine."""

from __future__ import annotations

from async_rl.learner.data.balance import Work
from benchmarks.balance import balance_of, make_step, work_of_shape


def test_ranks_wait_little_for_each_other_with_long_sequences():
    step, work = make_step(seed=0), work_of_shape("0.5B")
    by_work = balance_of(step, work, max_tokens=32_768)
    by_tokens = balance_of(step, work, max_tokens=32_768, by=Work())
    assert by_tokens.lockstep > 1.2
    assert by_work.lockstep < 1.04
    assert by_work.of_ideal < 1.05
    assert by_work.num_rounds <= by_tokens.num_rounds


def test_long_prompts_are_repeated_little():
    # 8,000 tokens of prompt for answers of 500: one micro-batch each would take three times as long.
    step, work = make_step(num_groups=32, prompt=8000, median=500.0, seed=0), work_of_shape("7B")
    assert balance_of(step, work, max_tokens=32_768).of_ideal < 1.2
