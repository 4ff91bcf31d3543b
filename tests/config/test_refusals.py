"""What a config is refused for: every mistake is named by its key, with what was expected, what was got, what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from async_rl.config.generator import BACKENDS
from async_rl.config.loading import apply_override, parse_config
from async_rl.errors import ConfigError
from tests.config.made import a_config, refusal

Sections = dict[str, dict[str, Any]]
JUDGE: dict[str, Any] = {"type": "judge", "judge": {"endpoint": "http://127.0.0.1:1/v1", "model": "m"}}
SCORER = {"model": "rm", "address": "tcp://127.0.0.1:5570"}
SCORED: Sections = {"reward": {"type": "model", "model": "judge"}, "queue": {"filter_range": []}}
FAKE, VLLM, ENGINE = ({"backend": name} for name in ("fake", "vllm", "transformers"))
WITH_VLLM = {"generate": True, "generate_backend": "vllm"}
TWO = {"a": "a.jsonl", "b": "b.jsonl"}
REPLAY = {"path": "m", "routing_replay": True}


def judged(**judge: Any) -> Sections:
    return {"reward": {**JUDGE, "judge": {**JUDGE["judge"], **judge}}}


def scored(**scorer: Any) -> Sections:
    return {**SCORED, "scorer": {"judge": {**SCORER, **scorer}}}


VALUES: list[tuple[Sections, str]] = [
    # Names of sections and keys.
    ({"samplin": {"group_size": 8}}, "samplin: unknown key; did you mean sampling?"),
    ({"queue": {"max_stalenes": 1}}, "queue.max_stalenes: unknown key; did you mean queue.max_staleness?"),
    ({"learner": {"max_steps": 5}}, "learner.max_steps: unknown key; TRL's max_steps is learner.steps here"),
    ({"learner": {"max_step": 1}}, "learner.max_step: unknown key; TRL's max_steps is learner.steps here"),
    ({"learner": {"ppo_mini_batch_size": 1}}, "ppo_mini_batch_size is learner.updates_per_batch here: the batch "),
    ({"loss": {"use_kl_loss": True}}, "loss.use_kl_loss: unknown key; verl's use_kl_loss is loss.kl_coef here"),
    ({"learner": {"max_token": 1}}, "learner.max_token: unknown key; did you mean learner.max_tokens?"),
    ({"learner": {"group_size": 1}}, "learner.group_size: unknown key; did you mean sampling.group_size?"),
    ({"learner": {"path": 1}}, "learner.path: unknown key; did you mean model.path or critic.path?"),
    ({"scorer": {"judge": {**SCORER, "port": 1}}}, "scorer.judge.port: unknown key"),
    ({"queue": {"adaptive": True}}, 'queue.adaptive: unknown key; remove it: queue.run_ahead = "auto"'),
    ({"experimental": {"linger_s": 5}}, "experimental.linger_s: unknown key; did you mean queue.linger_s?"),
    # Types.
    ({"queue": {"refill": "no"}}, "queue.refill: expected true or false, got 'no'"),
    ({"model": {"path": 3}}, "model.path: expected text in quotes, got 3"),
    ({"model": {"path": "m", "dtype": "fp8"}}, "model.dtype: expected 'auto', 'float32' or 'bfloat16', got 'fp8'"),
    ({"generator": {"devices": "0"}}, "generator.devices: expected a list, got '0'"),
    ({"data": {"eval": 3}}, "data.eval: expected a table, got 3"),
    ({"reward": {"scale": "big"}}, "reward.scale: expected a number, got 'big'"),
    ({"sampling": {"group_size": "8"}}, "sampling.group_size: expected a whole number, got '8'"),
    ({"sampling": {"group_size": True}}, "sampling.group_size: expected a whole number"),
    ({"data": {"columns": {"promt": "question"}}}, "data.columns.promt: expected 'messages', 'prompt', "),
    ({"data": {"columns": {"gt_answer": ""}}}, "data.columns.gt_answer: string should have at least 1 character"),
    ({"data": {"train": 3}}, "data.train: expected a file or data set in quotes, or a table of NAME = SOURCE, got 3"),
    ({"data": {"train": {}}}, "data.train: expected a file or data set in quotes, or a table of NAME = SOURCE, got {}"),
    # Ranges.
    ({"queue": {"max_staleness": -1}}, "queue.max_staleness: expected at least 0, got -1"),
    ({"optimizer": {"lr": 0}}, "optimizer.lr: expected more than 0, got 0"),
    ({"sampling": {"temperature": float("nan")}}, "sampling.temperature: expected"),
    ({"sampling": {"min_p": 1}}, "sampling.min_p: expected less than 1, got 1"),
    ({"sampling": {"stop_token_ids": [-1]}}, "sampling.stop_token_ids: expected token ids of at least 0, got [-1]"),
    ({"queue": {"filter_range": [0.1]}}, "queue.filter_range.1: expected a value, got none"),
    ({"loss": {"clip_low": 2}}, "loss.clip_low: expected at most 1, got 2"),
    *(
        ({"weights": {"port": port}}, "weights.port: expected a port such as 5556")
        for port in (0, 65535, "5556", "5556-5556", "9-2", "a-b", "1-70000", True)
    ),
    *(
        ({"log": {"rollouts_groups": value}}, " or 'all', got ")
        for value in (0, "some", 1.5)
    ),
    *(
        ({"log": {"profile": text}}, "log.profile: expected a step such as 3, or steps such as 3-5, got ")
        for text in ("0", "5-3", "3-", "three")
    ),
]  # fmt: skip
"""A name or a value that is wrong by itself: a row for each kind of mistake. Limits of keys are in docs/config.md."""
SETTINGS: list[tuple[Sections, str]] = [
    # Names of code, rewards and backends.
    ({"reward": {"type": "best"}}, "reward.type: expected boxed, "),
    ({"reward": {"accuracy": "boxes"}}, "reward.accuracy: expected boxed, "),
    ({"reward": {"accuracy": "none"}}, 'reward.accuracy: expected'),
    ({"reward": {"extra": {"best": 1.0}}}, "reward.extra"),
    ({"reward": {"extra": {"xml_format": 0.0}}}, "reward.extra"),
    ({"loss": {"function": "x.py"}}, "loss.function: expected module:function or file.py:function, got 'x.py'"),
    ({"loss": {"advantage_function": "x.py"}}, "loss.advantage_function: expected module:function"),
    ({"generator": {"backend": "vlm"}}, "generator.backend: expected one of auto, vllm, "),
    # Data.
    *(({"data": {"eval": {name: "f"}}}, f"got {name!r}; rename it") for name in ("a/b", "a b", "", ".")),
    ({"data": {"train": {"a b": "f"}}}, "data.train: expected names of letters, digits and _ . + -, got 'a b'"),
    ({"data": {"weights": {"f": 1}}}, "data.weights: expected data.train to be a table of NAME = SOURCE, got ''"),
    ({"data": {"train": TWO, "weights": {"a": 1}}}, "data.weights: expected a number for each source"),
    ({"data": {"train": TWO, "weights": {"a": 1, "b": 0}}}, "data.weights: expected whole numbers from 1 to 1000"),
    ({"data": {"tools": "[1]"}}, "data.tools: expected a JSON list of tool schemas"),
    ({"data": {"tools": "[{"}}, "data.tools: expected a JSON list of tool schemas, got text that is not JSON"),
    ({"data": {"chat_template_kwargs": {"tools": 1}}}, "data.chat_template_kwargs: expected"),
    # Backends that could not do what is asked.
    ({"sampling": {"deterministic": True}}, "sampling.deterministic: expected generator.backend "),
    (
        {"sampling": {"deterministic": True, "group_size": 8}, "generator": {**ENGINE, "batch_size": 4}},
        "generator.batch_size: expected at least sampling.group_size = 8",
    ),
    ({"sampling": {"temperature_end": 0.009}, "generator": VLLM}, "sampling.temperature_end: expected at least 0.01"),
    ({"eval": {"temperature": 0.001}, "generator": VLLM}, "eval.temperature: expected at least 0.01"),
    (
        {"data": {"eval": {"a": "f"}}, "eval": {"sets": {"a": {"temperature": 0.001}}}, "generator": VLLM},
        "eval.sets.a.temperature: expected at least 0.01",
    ),
    ({"eval": {"min_p": 0.1}, "generator": FAKE}, "eval.min_p: expected 0 (off) with generator.backend fake"),
    ({"learner": WITH_VLLM, "sampling": {"temperature": 0.001}}, 'with learner.generate_backend = "vllm": sampling.'),
    ({"learner": WITH_VLLM, "model": REPLAY, "generator": ENGINE}, 'with learner.generate_backend = "vllm": model.'),
    *(
        ({"model": REPLAY, "generator": {"backend": name}}, "model.routing_replay: expected false with ")
        for name in ("vllm", "fake", "auto")
    ),
    # Scorers and judges.
    ({**SCORED, "scorer": {"judge": {"model": "rm"}}}, "scorer.judge.address: expected a value, got none"),
    (scored(address="tcp://0.0.0.0:1"), "a host and a port that others connect to"),
    (scored(launch=False, device=1), "scorer.judge.device: expected no value with launch = false"),
    (scored(memory_fraction=0.5), "scorer.judge.memory_fraction: expected no value with backend "),
    ({"reward": {"type": "judge"}}, "reward.judge.endpoint: expected a value"),
    ({"reward": {**JUDGE, "judge": {"endpoint": "http://x/v1"}}}, "reward.judge.model: expected a value"),
    (judged(rubric_file="f"), "reward.judge.rubric_file: unknown key; write its text as reward.judge.rubric"),
    (judged(rubric="no place"), "reward.judge.rubric: expected {answer}"),
    (judged(max_score=0.0), "reward.judge.max_score: expected more than min_score"),
    *(
        (judged(endpoint=address), "reward.judge.endpoint: expected an address like https://host/v1")
        for address in ("http://user:secret@host/v1", "http://host:port/v1", "http:///v1", "http://ho st/v1",
                        "http://host/v1?key=secret")
    ),
]  # fmt: skip
"""What needs a word on how to correct it, behind a semicolon."""


@pytest.mark.parametrize(
    ("sections", "said"), [*VALUES, *SETTINGS], ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_mistake_is_refused_by_its_key_with_what_was_expected_what_was_got_and_a_remedy(
    sections: Sections, said: str
):
    (line,) = (line for line in refusal(**sections).splitlines() if said in line)
    assert re.match(r" *(with [^:]+: )?[\w.]+: (unknown key|(?![\w.]+: ).*expected .*got |string should)", line)
    assert (sections, said) in VALUES or "; " in line
    assert "secret" not in line


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ConfigError) as refused:
        parse_config({"run": {"dirr": "x"}, "modle": {}}, "f.toml")
    lines = str(refused.value).splitlines()
    assert lines[0] == "f.toml is not a valid config:"
    assert {line.strip() for line in lines[1:]} == {
        "run.dir: expected a value, got none; set it in the file or with --set",
        "run.dirr: unknown key; did you mean run.dir?",
        "model.path: expected a value, got none; set it in the file or with --set",
        "modle: unknown key; did you mean model?",
    }


@pytest.mark.parametrize("key", ["router_z_loss", "update_router_bias", "router_aux_loss_coef"])
def test_losses_and_bias_updates_of_routers_are_refused_with_the_only_loss_of_them(key: str):
    message = f"model.{key}: unknown key; loss.load_balancing_coef is the only loss of routers"
    assert message in refusal(model={key: 0.1})


@pytest.mark.parametrize("override", ["s", "=3", "k=3", ".k=3", "s.=3", "s..k=3", "run.dir.deep=1"])
def test_an_override_of_another_form_is_refused(override: str):
    with pytest.raises(ConfigError, match="--set"):
        apply_override({"run": {"dir": "r"}}, override)


GAE: Sections = {"sampling": {"group_size": 1}, "loss": {"advantage": "gae"}}


@pytest.mark.parametrize(
    "sections",
    [
        # Evaluations may be greedy; other backends than vLLM take any temperature.
        {"sampling": {"temperature": 0.01}, "eval": {"temperature": 0.0}, "generator": VLLM},
        {"sampling": {"temperature": 0.009}},
        *(
            {"sampling": {"deterministic": True, "group_size": 8}, "generator": {"backend": name, "batch_size": 8}}
            for name, backend in BACKENDS.items()
            if backend.deterministic
        ),
        # max_staleness 4: weights published every 5 versions lag by at most 4. Every second version they lag by at
        # most 1, and the last of 4 updates of a batch adds 3.
        {"weights": {"sync_every": 5}},
        {"weights": {"sync_every": 2}, "learner": {"updates_per_batch": 4}},
        {"weights": {"peers": True, "transport": "tcp"}},
        # One answer a prompt needs a filter that its accuracy can pass.
        {**GAE, "queue": {"filter_range": []}},
        {**GAE, "queue": {"filter_range": [0.0, 0.99]}},
        {**GAE, "environment": {"name": "mine.py"}},
        {**GAE, "reward": {"type": "code", "code": {"partial_credit": True}}},
        {**GAE, **judged(rubric="Is it right? {answer}")},
        # A learner may leave all samples to generators that join later.
        {"learner": {"generate": True, "generate_groups": 0}, "generator": {"count": 0}},
        # Something else to learn from than a reward; a reward model beside an accuracy.
        {"reward": {"type": "none", "extra": {"xml_format": 1.0}}, "queue": {"filter_range": []}},
        {
            "reward": {"type": "none"}, "queue": {"filter_range": []}, "scorer": {"big": SCORER},
            "distill": {"teacher": "big", "rewards": False}, "sampling": {"group_size": 1},
        },
        {"reward": {"type": "boxed", "model": "judge", "extra": {"model": 0.5}}, "scorer": {"judge": SCORER}},
        {"reward": {**JUDGE, "extra": {"boxed": 1.0}, "equality": "exact"}},
        {"data": {"curriculum": {"min_chance": 0.2, "chance": "failures"}}},
        {"data": {"curriculum": {"rest_epochs": 3, "unsolved_at": 0.0}}},
        {"data": {"curriculum": {"min_chance": 0.1, "rest_epochs": 2}}},  # the defaults, which a saved config has
    ],
    ids=str,
)  # fmt: skip
def test_what_is_just_inside_a_limit_is_allowed(sections: Sections):
    a_config(**sections)
