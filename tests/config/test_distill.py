"""The section of teachers."""

from typing import Any

from async_rl.config.loading import config_from_toml, config_to_toml, parse_config
from async_rl.queue.core.admission import QueueSettings

TEACHER = {"model": "big", "address": "tcp://127.0.0.1:5571"}
OTHER = {"model": "other", "address": "tcp://127.0.0.1:5572"}


def raw(*, scorer: dict[str, Any] | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": {"dir": "r"},
        "model": {"path": "m"},
        "scorer": scorer or {"big": TEACHER},
        "distill": {"teacher": "big"},
        **sections,
    }


def test_teachers_by_source_and_one_for_all_others():
    config = parse_config(
        raw(
            scorer={"big": TEACHER, "other": OTHER},
            data={"train": {"maths": "a.jsonl", "code": "b.jsonl"}},
            distill={"teacher": "big", "teachers": {"code": "other"}},
        ),
        "test",
    )
    assert [config.distill.teacher_of(source) for source in ("maths", "code")] == ["big", "other"]
    assert config.scorers_by_use == {"distill.teacher": "big", "distill.teachers.code": "other"}
    assert config_from_toml(config_to_toml(config), "copy") == config


def test_a_teacher_alone_needs_no_second_answer_to_a_prompt():
    alone = {"teacher": "big", "rewards": False}
    config = parse_config(raw(distill=alone, queue={"filter_range": []}, sampling={"group_size": 1}), "test")
    assert config.sampling.group_size == 1


def test_the_reward_none_needs_something_else_to_learn_from():
    none, off = {"type": "none"}, {"filter_range": []}
    parse_config(raw(reward=none, queue=off), "test")
    parse_config({**raw(reward={**none, "extra": {"xml_format": 1.0}}, queue=off), "scorer": {}, "distill": {}}, "test")


def test_the_queue_reserves_bytes_for_a_teachers_scores():
    def worst(**distill: Any) -> int:
        section = (
            {"distill": {"teacher": "big", "form": "loss", **distill}} if distill else {"distill": {}, "scorer": {}}
        )
        settings = QueueSettings.from_config(
            parse_config(raw() | {"sampling": {"group_size": 2, "max_new_tokens": 100}} | section, "test"),
            vocab_size=None,
        )
        return settings.worst_case_bytes

    # 4 bytes a sampled token, and 8 for each of the likeliest tokens: 2 rollouts of 100 tokens.
    assert worst(top_k=0) - worst() == 2 * 100 * 4
    assert worst(top_k=5) - worst(top_k=0) == 2 * 100 * 40
