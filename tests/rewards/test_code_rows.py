"""End to end on real rows: scripted answers, right and wrong, to rewards, groups and advantages."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from async_rl.config_file import parse_config
from async_rl.data import RowRules, load_rows
from async_rl.generator.backend import Sampled
from async_rl.generator.grading import Graded, ThreadGrader
from async_rl.learner.advantages import with_advantages
from async_rl.learner.batch import prepare_batch
from async_rl.loss_config import LossConfig
from async_rl.queue.messages import TakenGroup
from async_rl.records import Group, Lease, Prompt, Rollout, Sampling
from async_rl.rewards.records import Reward
from async_rl.rewards.registry import build_reward
from tests.rewards.code_answers import CODE_CONTESTS, MBPP

DATA = Path(__file__).resolve().parents[1] / "data"
ROWS = [
    (file, index, *programs)
    for file, answers in (("code_contests_6.jsonl", CODE_CONTESTS), ("mbpp_10.jsonl", MBPP))
    for index, programs in enumerate(answers)
    if programs is not None
]


@pytest.fixture(scope="module")
def reward() -> Iterator[Reward]:
    section = {"type": "code", "soft_overlong": False, "code": {"time_limit_s": 30.0, "total_time_limit_s": 100.0}}
    raw = {"run": {"dir": "run"}, "model": {"path": "m"}, "reward": section}
    with closing(build_reward(parse_config(raw, "the test"))) as built:
        yield built


def sampled_group(reward: Reward, prompt: Prompt, texts: list[str]) -> Group:
    """The texts graded by the generator's own grader, two at a time, and put in their order."""
    lease = Lease("lease", "train", prompt, len(texts), Sampling(1.0, 1.0, 0, 64, 64, ()), "lineage", 0, 4, 0, 1)
    samples = [
        Sampled("lease", index, np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32),
                np.full(3, -1, dtype=np.float32), np.full(3, 5, dtype=np.int32), "stop", text)
        for index, text in enumerate(texts)
    ]  # fmt: skip
    graded: list[Graded] = []
    with closing(ThreadGrader(reward, num_threads=2)) as grader:
        for sample in samples:
            grader.submit(lease, sample)
        while len(graded) < len(samples):
            graded += grader.collect()
    rollouts: dict[int, Rollout] = {}
    for one in graded:
        assert one.rollout is not None, one.error
        rollouts[one.index] = one.rollout
    ordered = tuple(rollouts[index] for index in range(len(texts)))
    return Group("lease", "train", prompt.position, "generator", "lineage", 1.0, ordered)


@pytest.mark.parametrize(("file", "index", "right", "wrong"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_right_programs_are_paid_and_pushed_up_and_wrong_ones_down(
    reward: Reward, file: str, index: int, right: str, wrong: str
):
    row = load_rows(str(DATA / file), rules=RowRules(needs=("test_cases",))).rows[index]
    prompt = Prompt(index, index, 0, row.messages, row.reward_data)
    texts = [
        f"I count.\n```python\n{right}\n```\nThat is it.",
        f"```python\n{wrong}\n```",
        f"First I thought\n```python\n{wrong}\n```\nbut no:\n```python\n{right}\n```",
        right,  # right, but in no fence
        "I don't know.",
    ]
    group = sampled_group(reward, prompt, texts)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert [rollout.accuracy for rollout in group.rollouts] == [1.0, 0.0, 1.0, 1.0, 0.0]
    taken = TakenGroup(group, prompt, 0.0, 5)
    prepared = prepare_batch([taken], mask_truncated=True, num_updates=1, known_weights=lambda _: True)
    trained = with_advantages(prepared, LossConfig())
    advantages = [0.0] * len(texts)
    for sequence in trained.updates[0]:
        advantages[trained.rollout_of[sequence.sequence_id]] = float(sequence.advantages[sequence.loss_mask][0])
    assert np.sign(advantages).tolist() == [1, -1, 1, -1, -1]
