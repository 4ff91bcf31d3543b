"""The section of teachers, and what it can't be combined with."""

from typing import Any

import pytest

from async_rl.config.loading import config_from_toml, config_to_toml, parse_config
from async_rl.errors import ConfigError
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


def test_the_reward_none_needs_something_else_to_learn_from_and_nothing_that_chooses_by_accuracy():
    none, off = {"type": "none"}, {"filter_range": []}
    with pytest.raises(
        ConfigError, match=r"reward.type: expected a reward that scores answers, unless distill.teacher"
    ):
        parse_config({**raw(reward=none, queue=off), "scorer": {}, "distill": {}}, "test")
    with pytest.raises(ConfigError, match=r"queue.filter_range: expected \[\] with reward.type = 'none'"):
        parse_config(raw(reward=none), "test")
    with pytest.raises(ConfigError, match=r"data.curriculum: expected none with reward.type = 'none'"):
        parse_config(raw(reward=none, queue=off, data={"curriculum": {"unsolved_at": 0.0}}), "test")
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


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"loss": {"best_k": 2}}, "loss.best_k: expected 0"),
        ({"loss": {"length_bonus": 0.5}}, "loss.length_bonus: expected 0"),
        ({"loss": {"advantage_function": "mine.py:f"}}, "loss.advantage_function: expected no value"),
        ({"loss": {"preset": "ppo"}}, "loss.advantage: expected no critic"),
        ({"loss": {"kl_coef": 0.1, "kl_placement": "reward"}}, 'loss.kl_placement: expected "loss"'),
        ({"loss": {"kl_coef": 0.1, "kl_placement": "advantage"}}, 'loss.kl_placement: expected "loss"'),
        ({"data": {"curriculum": {"solved_at": 1.0}}}, "data.curriculum: expected none"),
    ],
)
def test_what_needs_rewards_is_refused_if_the_teacher_alone_counts(sections: dict[str, Any], message: str):
    alone = raw(distill={"teacher": "big", "rewards": False}, queue={"filter_range": []})
    with pytest.raises(ConfigError) as refused:
        parse_config(alone | sections, "test")
    assert f"{message} with distill.rewards = false, got" in str(refused.value)
    parse_config(alone | sections | {"distill": {"teacher": "big"}}, "with rewards")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"distill": {"teacher": "none"}}, "distill.teacher: expected the name of a scorer"),
        ({"distill": {"teachers": {"maths": "big"}}}, "distill.teachers: expected sources of data.train = ['']"),
        (
            {"distill": {"teachers": {"a": "big"}}, "data": {"train": {"a": "a.jsonl", "b": "b.jsonl"}}},
            "expected a teacher for each source of data.train, got none for 'b'",
        ),
        ({"distill": {"rewards": False}, "scorer": {}}, "distill.rewards: expected a teacher in distill.teacher"),
        ({"distill": {"form": "loss"}, "scorer": {}}, "distill.form: expected a teacher in distill.teacher"),
        (
            {
                "distill": {"teacher": "big", "rewards": False},
                "queue": {"filter_range": []},
                "loss": {"advantage": "gae"},
            },
            "loss.advantage: expected no critic with distill.rewards = false",
        ),
        ({"distill": {"teacher": "big", "rewards": False}}, "queue.filter_range: expected [] with distill.rewards"),
        ({"distill": {"teacher": "big", "top_k": 3}}, 'distill.top_k: expected 0 with distill.form = "advantage"'),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p, top_k, min_p: expected no limit with a teacher"),
        ({"generator": {"backend": "fake"}}, "generator.backend: expected a backend that samples with model.path"),
        (
            {"distill": {"teacher": "big", "form": "loss", "top_k": 3}, "parallel": {"tensor": 2}},
            "parallel.tensor: expected 1 with distill.top_k",
        ),
        (
            {"distill": {"teacher": "big", "form": "loss"}, "loss": {"function": "mine.py:f"}},
            'distill.form: expected "advantage" with loss.function',
        ),
        (
            {"reward": {"type": "model", "model": "big"}, "queue": {"filter_range": []}},
            "distill.teacher: expected another scorer than reward.model",
        ),
    ],
)
def test_what_does_not_go_with_a_teacher_is_refused_by_name(sections: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as refused:
        parse_config(raw() | sections, "test")
    assert message in str(refused.value)
