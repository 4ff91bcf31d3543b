"""The tables of scorers, and the keys that name them: reward models and teachers."""

from typing import Any

import pytest

from async_rl.queue.core.admission import QueueSettings
from tests.config.made import a_config, copy_of

JUDGE = {"model": "rm", "address": "tcp://127.0.0.1:5570"}
BIG = {"model": "big", "address": "tcp://127.0.0.1:5571"}
OFF = {"filter_range": []}
SCORED: dict[str, Any] = {"queue": OFF, "reward": {"type": "model", "model": "judge"}, "scorer": {"judge": JUDGE}}
TAUGHT: dict[str, Any] = {"scorer": {"big": BIG}, "distill": {"teacher": "big"}}


@pytest.mark.parametrize(
    ("sections", "uses"),
    [
        (SCORED, {"reward.model": "judge"}),
        (
            SCORED | {"scorer": {"judge": {**JUDGE, "backend": "vllm", "memory_fraction": 0.3}}},
            {"reward.model": "judge"},
        ),
        (TAUGHT, {"distill.teacher": "big"}),
        (
            {
                "scorer": {"big": BIG, "other": JUDGE},
                "data": {"train": {"maths": "a.jsonl", "code": "b.jsonl"}},
                "distill": {"teacher": "big", "teachers": {"code": "other"}},
            },
            {"distill.teacher": "big", "distill.teachers.code": "other"},
        ),
    ],
    ids=["reward model", "reward model in vLLM", "teacher", "teacher of a source"],
)
def test_scorers_are_used_by_the_keys_that_name_them(sections: dict[str, Any], uses: dict[str, str]):
    config = a_config(**sections)
    assert config.scorers_by_use == uses
    assert copy_of(config) == config
    assert config.distill.teacher_of("code") == uses.get("distill.teachers.code", uses.get("distill.teacher"))


def test_the_queue_reserves_bytes_for_a_teachers_scores():
    def worst(**distill: Any) -> int:
        taught = TAUGHT | {"distill": {"teacher": "big", "form": "loss", **distill}} if distill else {}
        config = a_config(sampling={"group_size": 2, "max_new_tokens": 100}, **taught)
        return QueueSettings.from_config(config, vocab_size=None).worst_case_bytes

    # 4 bytes a sampled token, and 8 for each of the likeliest tokens: 2 rollouts of 100 tokens.
    assert worst(top_k=0) - worst() == 2 * 100 * 4
    assert worst(top_k=5) - worst(top_k=0) == 2 * 100 * 40
