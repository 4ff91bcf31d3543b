"""The tables of scorers, and the keys that name them."""

from typing import Any

import pytest

from async_rl.config.config import Config
from async_rl.config.loading import config_from_toml, config_to_toml, load_config, parse_config
from async_rl.errors import ConfigError

JUDGE = {"model": "rm", "address": "tcp://127.0.0.1:5570"}

ASKS: dict[str, Any] = {"type": "judge", "judge": {"endpoint": "http://x/v1", "model": "m"}}
SOLVED = {"curriculum": {"solved_at": 0.9}}


def raw(**sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": {"dir": "r"},
        "model": {"path": "m"},
        "queue": {"filter_range": []},
        "reward": {"type": "model", "model": "judge"},
        "scorer": {"judge": JUDGE},
        **sections,
    }


def refusal(**sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_config(raw(**sections), "test")
    return str(refused.value)


def test_a_reward_model_is_a_scorer_that_reward_model_names():
    config = parse_config(raw(), "test")
    assert config.scorers_by_use == {"reward.model": "judge"}
    assert config.reward.asks_scorer
    assert config_from_toml(config_to_toml(config), "copy") == config


def test_a_table_of_a_scorer_is_read_from_a_file_and_set_by_an_override(tmp_path: Any):
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\ndir = "r"\n[model]\npath = "m"\n[queue]\nfilter_range = []\n[reward]\ntype = "model"\nmodel = "judge"\n'
        '[scorer.judge]\nmodel = "rm"\naddress = "tcp://127.0.0.1:5570"\n',
        encoding="utf-8",
    )
    config = load_config(path, ["scorer.judge.max_tokens=99"])
    assert (config.scorer["judge"].model, config.scorer["judge"].max_tokens) == ("rm", 99)


def test_vllm_is_an_engine_of_reward_models():
    judge = {**JUDGE, "backend": "vllm", "memory_fraction": 0.3}
    config = parse_config(raw(scorer={"judge": judge}), "test")
    assert (config.scorer["judge"].backend, config.scorer["judge"].memory_fraction) == ("vllm", 0.3)
    assert parse_config(raw(), "test").scorer["judge"].backend == "transformers"
    assert config_from_toml(config_to_toml(config), "copy") == config


def test_a_reward_model_may_be_one_of_several_rewards():
    reward = {"type": "boxed", "model": "judge", "extra": {"model": 0.5}}
    config = Config.model_validate(raw(reward=reward, queue={}))  # the accuracy is that of boxed
    assert config.queue.filter_range == (0.01, 0.99)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"scorer": {"judge": {"model": "rm"}}}, "scorer.judge.address: expected a value, got none"),
        ({"scorer": {"judge": {**JUDGE, "port": 1}}}, "scorer.judge.port: unknown key"),
        (
            {"scorer": {"judge": {**JUDGE, "address": "tcp://0.0.0.0:1"}}},
            "a host and a port that others connect to",
        ),
        ({"queue": {}}, "queue.filter_range: expected [] with an accuracy"),
        ({"data": SOLVED}, "data.curriculum: expected none with an accuracy"),
        ({"reward": ASKS, "scorer": {}, "queue": {}, "data": SOLVED}, "data.curriculum: expected none with an accur"),
        (
            {"reward": {**ASKS, "judge": {**ASKS["judge"], "rubric": "Q {answer}", "rubric_file": "f"}}, "scorer": {}},
            "rubric_file: expected no value with rubric",
        ),
        (
            {"scorer": {"judge": {**JUDGE, "launch": False, "device": 1}}},
            "device: expected no value with launch = false",
        ),
        ({"scorer": {"judge": {**JUDGE, "backend": "sglang"}}}, "scorer.judge.backend: expected"),
        (
            {"scorer": {"judge": {**JUDGE, "memory_fraction": 0.5}}},
            "memory_fraction: expected no value with backend transformers, which does not read it, got 0.5",
        ),
    ],
)
def test_what_would_score_nothing_is_refused_by_name(sections: dict[str, Any], message: str):
    assert message in refusal(**sections)
