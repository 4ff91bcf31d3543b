"""Where an offline evaluation gets its settings from: a config, a run, the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.config.data import EvalSetConfig
from async_rl.errors import AddressError, ConfigError, DataError
from async_rl.extensions.insight.evaluation.offline import EvalSettings, eval_settings, run_config_of, run_eval
from tests.extensions.insight.evaluation.options import eval_options

RUN = """
[run]
dir = "runs/x"

[model]
path = "base"

[data]
train = "train.jsonl"
system_prompt = "Be brief."

[data.eval]
math = "math.jsonl"
chat = "chat.jsonl"

[sampling]
max_new_tokens = 200
max_prompt_tokens = 100

[reward]
type = "mine.py:right"

[generator]
backend = "vllm"
allow_code = ["mine.py"]
devices = [3]

[queue]
lease_timeout_s = 10.0

[eval]
num_samples = 2

[eval.sets.math]
num_samples = 8
temperature = 0.6
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with one checkpoint and an export."""
    (tmp_path / "run" / "checkpoints" / "step-000002").mkdir(parents=True)
    (tmp_path / "run" / "export").mkdir()
    (tmp_path / "run" / "config.toml").write_text(RUN)
    (tmp_path / "run" / "run_id").write_text("abc")
    return tmp_path / "run"


def settings(model: object, **options: Any) -> EvalSettings:
    return eval_settings([str(model)], eval_options(**options))


@pytest.mark.parametrize("part", [".", "checkpoints", "checkpoints/step-000002", "export"])
def test_a_checkpoint_is_asked_as_its_run_asks(run: Path, part: str):
    found = settings(run / part)
    config = found.config
    assert (config.system_prompt, config.reward.type, config.data.eval) == (
        "Be brief.", "mine.py:right", {"math": "math.jsonl", "chat": "chat.jsonl"},
    )  # fmt: skip
    assert config.model.path == str(run / part)
    assert config.eval.of("math") == EvalSetConfig(num_samples=8, temperature=0.6)
    assert found.notes[0] == f"settings: {run / 'config.toml'} (--config FILE takes them from another file)"


def test_only_a_config_that_somebody_named_says_which_code_may_run(run: Path):
    assert settings(run).config.generator.allow_code == ()
    assert settings("base", config=run / "config.toml").config.generator.allow_code == ("mine.py",)
    overrides = ("generator.allow_code=['mine.py']",)
    assert settings(run, overrides=overrides).config.generator.allow_code == ("mine.py",)
    assert settings("base", datasets=("a.jsonl",), reward__type="b.py:f").config.generator.allow_code == ("b.py",)


JUDGE = '[reward.judge]\nendpoint = "http://x/v1"\nmodel = "m"\n'


@pytest.mark.parametrize(
    ("reward", "key", "section", "reason"),
    [
        (
            "judge",
            "reward.judge.api_key_env",
            JUDGE + 'api_key_env = "OTHERS"\n',
            "what OTHERS has is sent to http://x",
        ),
        ("judge", "reward.judge.cache", JUDGE + 'cache = "/home/me/.bashrc"\n', "written to .*bashrc"),
        ("code", "reward.code.allow_unsafe", "[reward.code]\nallow_unsafe = true\n", "without the sandbox"),
    ],
)
def test_only_a_config_that_somebody_named_says_what_touches_this_machine(
    run: Path, reward: str, key: str, section: str, reason: str
):
    file = run / "config.toml"
    file.write_text(RUN.replace("mine.py:right", reward).replace("10.0", "100.0") + section)
    with pytest.raises(ConfigError, match=rf"{key}: .*{reason}.*--config"):
        settings(run)
    assert settings("base", config=file).config.reward.type == reward
    override = f"{key}={'true' if reward == 'code' else 'mine'}"
    assert settings(run, overrides=(override,)).config.reward.type == reward
    assert settings(run, reward__type="boxed").config.reward.type == "boxed"
    file.write_text(RUN.replace("mine.py:right", "judge") + JUDGE)
    assert settings(run).config.reward.asks_judge


def test_what_is_of_the_runs_machines_is_left_out(run: Path):
    generator = settings(run).config.generator
    assert (generator.backend, generator.devices) == ("transformers", None)
    assert settings(run).notes[1].endswith("vllm in the config, which is not installed here: transformers samples")
    assert settings(run, generator__backend="vllm").config.generator.backend == "vllm"


def test_a_config_beside_the_weights_does_not_say_what_vllm_loads(run: Path):
    (run / "config.toml").write_text(RUN + '[generator.engine]\nblock_size = 32\nreasoning_parser_plugin = "x.py"\n')
    with pytest.raises(ConfigError, match=r"generator\.engine\.reasoning_parser_plugin: .*run code.*--config"):
        settings(run, generator__backend="vllm")
    assert settings("base", config=run / "config.toml", generator__backend="vllm").config.generator.engine


def test_the_command_line_wins_over_the_config_and_over_its_sets(run: Path):
    config = settings(
        run, eval__num_samples=4, eval__temperature=0.0, eval__top_p=0.9, eval__top_k=7, eval__max_new_tokens=50,
        sampling__max_prompt_tokens=60, eval__max_rows=5, data__system_prompt="", generator__batch_size=3,
        run__seed=9, reward__type="exact",
    ).config  # fmt: skip
    assert (
        config.eval.of("math")
        == config.eval.of("chat")
        == EvalSetConfig(num_samples=4, top_p=0.9, top_k=7, max_new_tokens=50, max_rows=5)
    )
    assert (config.system_prompt, config.reward.type) == ("", "exact")
    # In the run such a reward would outlast its leases; here there are none.
    assert settings(run, reward__type="code").config.reward.code.total_time_limit_s == 60
    assert (config.sampling.max_prompt_tokens, config.generator.batch_size, config.run.seed) == (60, 3, 9)


def test_several_answers_are_sampled_unless_the_command_line_says_greedy(run: Path):
    # Greedy answers are all the same, so pass@4 would be the accuracy.
    raw = RUN.replace("[sampling]", "[sampling]\ntemperature = 0.7") + "[eval.sets.chat]\ntemperature = 0.0\n"
    (run / "config.toml").write_text(raw)
    found = settings(run, eval__num_samples=4).config.eval
    assert [found.of(name).temperature for name in ("math", "chat", "other")] == [0.6, 0.7, 0.7]
    for greedy in ({"eval__num_samples": 1}, {"eval__num_samples": 4, "eval__temperature": 0.0},
                   {"eval__num_samples": 4, "overrides": ("eval.temperature=0.0",)}):  # fmt: skip
        assert settings(run, **greedy).config.eval.of("chat").temperature == 0, greedy


def test_data_sets_of_the_command_line_replace_those_of_the_config(run: Path):
    config = settings(run, datasets=("data/test.v2.jsonl", "math=other.jsonl", "test@owner/set:main")).config
    assert config.data.eval == {"test": "data/test.v2.jsonl", "math": "other.jsonl", "set": "test@owner/set:main"}
    # A set that keeps its name keeps its keys; one that is gone has none left to contradict.
    assert config.eval.of("math").num_samples == 8
    assert settings(run, datasets=("a=b/c=d.jsonl",)).config.data.eval == {"a": "b/c=d.jsonl"}
    assert settings(run, datasets=("b=c/d.jsonl",)).config.eval.sets == {}
    with pytest.raises(ConfigError, match="--dataset: expected names that differ, got a, a"):
        settings("base", datasets=("x/a.jsonl", "y/a.jsonl"))


def test_a_model_of_no_run_is_asked_by_the_defaults_if_there_is_something_to_ask():
    found = settings("owner/model", datasets=("a.jsonl",))
    assert (found.notes, found.config.reward.type, found.config.eval.of("a")) == ((), "boxed", EvalSetConfig())
    assert run_config_of("owner/model") is None
    with pytest.raises(ConfigError, match=r"expected --dataset FILE, or a config with data\.eval"):
        settings("owner/model")
    with pytest.raises(ConfigError, match=r"no config file at nowhere\.toml"):
        settings("owner/model", config=Path("nowhere.toml"))


def test_another_reward_needs_no_reward_model(run: Path):
    judged = RUN.replace('type = "mine.py:right"', 'type = "model"\nmodel = "judge"').replace(
        "[queue]", '[scorer.judge]\nmodel = "rm"\naddress = "tcp://127.0.0.1:1"\n\n[queue]\nfilter_range = []'
    )
    (run / "config.toml").write_text(judged)
    asks = eval_settings([str(run)], eval_options()).config
    assert (asks.reward.model, list(asks.scorer)) == ("judge", ["judge"])
    boxed = eval_settings([str(run)], eval_options(reward__type="boxed")).config
    assert (boxed.reward.type, boxed.reward.model, boxed.scorer) == ("boxed", None, {})


def test_a_scorer_on_another_machine_is_not_asked_without_keys(run: Path):
    there = '[scorer.{}]\nmodel = "rm"\naddress = "tcp://10.0.0.3:{}"\n'
    remote = there.format("judge", 1) + there.format("big", 2)
    sections = remote + '[distill]\nteacher = "big"\n'
    judged = RUN.replace('type = "mine.py:right"', 'type = "model"\nmodel = "judge"') + sections
    (run / "config.toml").write_text(judged.replace("[queue]", "[queue]\nfilter_range = []"))
    asks = settings(run)
    with pytest.raises(AddressError, match=r"scorer\.judge\.address: tcp://10\.0\.0\.3:1 is on another machine"):
        run_eval([str(run)], asks)
    # The data set, which is not there, is read after this check; the teacher is not asked.
    for found, insecure in ((asks, True), (settings(run, reward__type="boxed"), False)):
        with pytest.raises(DataError, match=r"math\.jsonl"):
            run_eval([str(run)], found, insecure=insecure)
