"""Config: strict sections, keys that agree, files and overrides, TOML there and back; addresses."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from async_rl.config.config import Config
from async_rl.config.data import EvalSetConfig
from async_rl.config.generator import BACKENDS
from async_rl.config.loading import (
    apply_override,
    changed_keys,
    config_to_toml,
    load_config,
    load_run_config,
    parse_config,
)
from async_rl.config.queue import WeightsConfig
from async_rl.config.section import OnResume, on_resume
from async_rl.errors import AddressError, ConfigError
from async_rl.net.address import check_address, is_loopback, local_host_towards, refuse_open_bind

NAMES = st.from_regex(r"\A\w[\w.+-]{0,9}\Z")


def a_config(**sections: dict[str, Any]) -> Config:
    return parse_config({"run": {"dir": "r"}, "model": {"path": "m"}, **sections}, "test")


def refusal(**sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        a_config(**sections)
    return str(refused.value)


def test_run_dir_and_model_path_are_all_that_is_needed():
    config = a_config()
    assert (config.queue.max_staleness, config.learner.groups_per_step, config.sampling.group_size) == (4, 32, 8)


def test_missing_and_unknown_keys_and_sections_are_named_all_at_once():
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


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("queue", "max_staleness", -1, "at least 0, got -1"),
        ("optimizer", "lr", 0, "more than 0, got 0"),
        ("loss", "clip_low", 2, "at most 1, got 2"),
        ("queue", "refill", "no", "true or false, got 'no'"),
        ("model", "path", 3, "text in quotes, got 3"),
        ("model", "dtype", "fp8", "'auto', 'float32' or 'bfloat16', got 'fp8'"),
        ("generator", "devices", "0", "a list, got '0'"),
        ("data", "eval", 3, "a table, got 3"),
        ("reward", "scale", "big", "a number, got 'big'"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(section: str, key: str, value: object, expected: str):
    raw: dict[str, dict[str, object]] = {"run": {"dir": "r"}, "model": {"path": "m"}}
    raw.setdefault(section, {})[key] = value
    with pytest.raises(ConfigError) as refused:
        parse_config(raw, "f.toml")
    assert f"  {section}.{key}: expected {expected}" in str(refused.value).splitlines()


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("learner", "max_step", "did you mean TRL's max_steps? It is learner.steps here (docs/coming_from.md)"),
        ("sampling", "num_generation", "did you mean TRL's num_generations? It is sampling.group_size here"),
        ("learner", "max_token", "did you mean learner.max_tokens?"),
        ("learner", "group_size", "did you mean sampling.group_size?"),
        ("learner", "path", "did you mean model.path or critic.path?"),
    ],
)
def test_a_misspelt_or_misplaced_key_is_refused_with_the_one_that_was_meant(section: str, key: str, meant: str):
    assert f"{section}.{key}: unknown key; {meant}" in refusal(**{section: {key: 1}})


@pytest.mark.parametrize("key", ["router_z_loss", "update_router_bias", "router_aux_loss_coef"])
def test_losses_and_bias_updates_of_routers_are_refused_with_the_reason(key: str):
    assert f"model.{key}: losses of routers and updates of their bias are not supported" in refusal(model={key: 0.1})


def test_a_column_of_an_unknown_field_is_refused_with_the_fields_there_are():
    found = refusal(data={"columns": {"promt": "question", "gt_answer": ""}})
    assert "data.columns.promt: expected 'messages', 'prompt', " in found
    assert "data.columns.gt_answer: string should have at least 1 character" in found


def test_deterministic_sampling_needs_an_engine_whose_batches_are_fixed_and_room_for_a_group():
    deterministic = {"deterministic": True, "group_size": 8}
    found = refusal(sampling=deterministic)
    fixed = " or ".join(name for name, backend in BACKENDS.items() if backend.deterministic)
    assert f"sampling.deterministic: expected generator.backend {fixed}, got 'auto'" in found
    found = refusal(sampling=deterministic, generator={"backend": "transformers", "batch_size": 4})
    assert "generator.batch_size: expected at least sampling.group_size = " in found
    for generator in ({"backend": "transformers", "batch_size": 8}, {"backend": "fake", "batch_size": 1}):
        assert a_config(sampling=deterministic, generator=generator).sampling.deterministic


def test_vllm_takes_no_determinism_and_no_temperature_that_it_would_change():
    vllm = {"backend": "vllm"}
    found = refusal(sampling={"deterministic": True}, generator=vllm)
    assert "sampling.deterministic: expected generator.backend " in found
    assert ", got 'vllm'" in found
    found = refusal(sampling={"temperature_end": 0.009}, generator=vllm)
    assert "sampling.temperature_end: expected at least 0.01 with generator.backend vllm" in found
    assert "eval.temperature: expected at least 0.01 with generator.backend vllm, got 0.001" in refusal(
        eval={"temperature": 0.001}, generator=vllm
    )
    assert a_config(sampling={"temperature": 0.01}, generator=vllm, eval={"temperature": 0.0})
    assert a_config(sampling={"temperature": 0.009}).sampling.temperature == 0.009
    found = refusal(data={"eval": {"a": "f"}}, eval={"sets": {"a": {"temperature": 0.001}}}, generator=vllm)
    assert "eval.sets.a.temperature: expected at least 0.01 with generator.backend vllm" in found


def test_a_set_of_evaluations_has_its_own_keys_and_the_common_ones_else():
    sets = {"math": {"num_samples": 8, "temperature": 0.6, "top_p": 0.95, "every": 100}}
    config = a_config(data={"eval": {"math": "f", "other": "g"}}, eval={"max_rows": 9, "top_k": 5, "sets": sets})
    assert config.eval.of("math") == EvalSetConfig(
        every=100, num_samples=8, temperature=0.6, top_p=0.95, top_k=5, max_rows=9
    )
    assert config.eval.of("other") == EvalSetConfig(top_k=5, max_rows=9)
    # 0 is a value of its own, not "none".
    assert a_config(data={"eval": {"a": "f"}}, eval={"sets": {"a": {"every": 0}}}).eval.of("a").every == 0
    # A key of a set wins over that of the section, even with the value that is the default of both.
    config = a_config(data={"eval": {"a": "f"}}, eval={"every": 7, "sets": {"a": {"every": 50}}})
    again = parse_config(tomllib.loads(config_to_toml(config)), "again")
    assert config.eval.of("a").every == again.eval.of("a").every == 50
    assert config.eval.of("a").num_samples == again.eval.of("a").num_samples == 1
    assert config_to_toml(again) == config_to_toml(config)


def test_a_set_of_evaluations_must_have_a_name_for_files():
    for name in ("a/b", "a b", "", "."):
        found = refusal(data={"eval": {name: "f"}})
        assert f"data.eval: expected names of letters, digits and _ . + -, got {name!r}" in found


@pytest.mark.parametrize(("key", "value"), [("equality", "exact"), ("require_format", False), ("format", 0.1)])
def test_keys_of_answers_need_one_reward_that_reads_them(key: str, value: object):
    judge = {"endpoint": "http://127.0.0.1:8000/v1", "model": "m"}
    a_config(reward={"type": "judge", "judge": judge, "extra": {"boxed": 1.0}, key: value})
    a_config(reward={"type": "exact", key: value})
    assert "got an environment; leave the key out" in refusal(environment={"name": "mine.py"}, reward={key: value})


def test_keys_of_a_curriculum_without_effect_are_refused():
    def found(**curriculum: object) -> str:
        return refusal(data={"curriculum": curriculum})

    assert 'min_chance: expected chance = "learnability" or "failures" with it' in found(min_chance=0.2, solved_at=1.0)
    assert "rest_epochs: expected solved_at or unsolved_at with it" in found(rest_epochs=3, chance="failures")
    for curriculum in (
        {"min_chance": 0.2, "chance": "failures"},
        {"rest_epochs": 3, "unsolved_at": 0.0},
        {"min_chance": 0.1, "rest_epochs": 2},  # the defaults, which a saved config has
    ):
        a_config(data={"curriculum": curriculum})


@pytest.mark.parametrize("groups", [1, 7, "all"])
def test_rollouts_are_logged_by_number_or_all(groups: Any):
    assert a_config(log={"rollouts_groups": groups}).log.rollouts_groups == groups


@pytest.mark.parametrize(("text", "steps"), [("", []), ("3", [3]), ("3-5", [3, 4, 5])])
def test_one_step_or_several_are_profiled(text: str, steps: list[int]):
    assert list(a_config(log={"profile": text}).log.profiled_steps) == steps


@pytest.mark.parametrize("text", ["0", "5-3", "3-", "three"])
def test_other_steps_to_profile_are_refused(text: str):
    found = refusal(log={"profile": text})
    assert f"log.profile: expected a step such as 3, or steps such as 3-5, got {text!r}" in found


@pytest.mark.parametrize("groups", [0, "some", 1.5])
def test_other_numbers_of_logged_rollouts_are_refused(groups: Any):
    assert "log.rollouts_groups" in refusal(log={"rollouts_groups": groups})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("sampling", "temperature", 0),
        ("sampling", "temperature", float("nan")),
        ("sampling", "group_size", True),
        ("sampling", "group_size", "8"),
        ("optimizer", "lr", -1.0),
        ("queue", "max_staleness", -1),
        ("queue", "filter_range", [0.1]),
        ("loss", "skip_threshold", 0.5),
        ("run", "seed", 2**31),
    ],
)
def test_values_of_a_wrong_type_or_range_are_refused_by_key(section: str, key: str, value: Any):
    base = {"run": {"dir": "r"}, "model": {"path": "m"}}
    with pytest.raises(ConfigError, match=rf"{section}\.{key}"):
        parse_config(base | {section: base.get(section, {}) | {key: value}}, "test")


GAME: dict[str, Any] = {"name": "mine.py"}
GAE: dict[str, Any] = {"advantage": "gae"}
GENERATES: dict[str, Any] = {"generate": True}
WITH_VLLM: dict[str, Any] = GENERATES | {"generate_backend": "vllm"}
ENGINE: dict[str, Any] = {"backend": "transformers"}


def test_a_learner_that_samples_with_vllm_has_vllm_s_limits():
    said = 'with learner.generate_backend = "vllm": '
    assert f"{said}sampling.temperature: " in refusal(learner=WITH_VLLM, sampling={"temperature": 0.001})
    model = {"path": "m", "routing_replay": True}
    assert f"{said}model.routing_replay: " in refusal(learner=WITH_VLLM, model=model, generator=ENGINE)


def test_a_learner_may_sample_in_layouts_whose_ranks_can_hold_the_whole_model():
    alone = a_config(learner=GENERATES | {"generate_groups": 0}, generator={"count": 0})
    assert alone.samples_here
    assert not a_config(generator={"count": 0}).samples_here
    a_config(learner=GENERATES | {"nproc": 4}, parallel={"sequence": 2, "replicas": 2}, lora={"rank": 4})


def test_one_answer_a_prompt_needs_a_filter_that_its_accuracy_can_pass():
    one: dict[str, Any] = {"sampling": {"group_size": 1}, "loss": GAE}
    a_config(**one, queue={"filter_range": []})
    a_config(**one, queue={"filter_range": [0.0, 0.99]})
    a_config(**one, environment=GAME)
    a_config(**one, reward={"type": "code", "code": {"partial_credit": True}})
    judge = {"endpoint": "http://127.0.0.1:1/v1", "model": "m", "rubric": "Is it right? {answer}"}
    a_config(**one, reward={"type": "judge", "judge": judge})  # its accuracy is the score's place in its range


def test_the_bound_of_cross_checks_is_inside():
    # max_staleness 4: weights published every 5 versions lag by at most 4. Every second version they lag by at most 1,
    # and the last of 4 updates of a batch adds 3.
    assert a_config(weights={"sync_every": 5}).weights.sync_every == 5
    assert a_config(weights={"sync_every": 2}, learner={"updates_per_batch": 4}).weights.sync_every == 2
    assert "learner.updates_per_batch: expected at most" in refusal(learner={"epochs_per_batch": 8})


def test_a_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        a_config().queue.max_staleness = 3  # type: ignore[misc]


def test_derived_values_follow_their_keys():
    assert a_config(learner={"max_tokens": 1000}, parallel={"sequence": 3}).longest_sequence == 3000
    assert a_config(sampling={"max_new_tokens": 400}).cache_length == 100
    assert a_config(sampling={"max_new_tokens": 100_000}).cache_length == 1024
    assert a_config(sampling={"max_new_tokens": 1}, reward={"soft_overlong": False}).cache_length == 1
    assert a_config(learner={"groups_per_step": 3}).max_filtered == 300
    assert a_config(learner={"steps": 10, "updates_per_batch": 2}).temperature_steps == 20
    assert a_config(learner={"steps": 10, "updates_per_batch": 2, "epochs_per_batch": 2}).temperature_steps == 40
    assert a_config(sampling={"temperature_end": 0.9, "temperature_steps": 7}).temperature_steps == 7
    assert "boxed" in a_config().system_prompt
    assert a_config(data={"system_prompt": ""}).system_prompt == ""
    assert "<answer>" in a_config(reward={"type": "think_answer_tags"}).system_prompt


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("s.k=3", 3),
        ("s.k=3.0", 3.0),
        ("s.k=true", True),
        ("s.k=[1, 2]", [1, 2]),
        ("s.k = 'quoted'", "quoted"),
        ("s.k=bare words", "bare words"),
        ("s.k=tcp://h:1", "tcp://h:1"),
        ("s.k=a=b", "a=b"),
        ("s.k=", ""),
        ('s.k={"a": "x", "b": {"c": [1, null]}}', {"a": "x", "b": {"c": [1, None]}}),
        ('s.k={a = "x"}', {"a": "x"}),
        ("s.k={not json", "{not json"),
        ('s.k=[{"a": 1}]', '[{"a": 1}]'),  # data.tools takes the text of a list
    ],
)
def test_an_override_is_toml_or_a_json_object_or_else_a_bare_string(override: str, value: Any):
    raw: dict[str, Any] = {}
    apply_override(raw, override)
    assert raw == {"s": {"k": value}}


def test_overrides_go_deep_win_in_order_and_keep_their_neighbours(tmp_path: Path):
    path = tmp_path / "c.toml"
    path.write_text('[run]\ndir = "r"\nseed = 1\n[model]\npath = "m"\n')
    config = load_config(path, ["experimental.fake.accuracy=0.25", "run.seed=2", "run.seed=3"])
    assert (config.experimental.fake.accuracy, config.run.seed, config.run.dir) == (0.25, 3, "r")


@pytest.mark.parametrize("override", ["s", "=3", "k=3", ".k=3", "s.=3", "s..k=3", "run.dir.deep=1"])
def test_an_override_of_another_form_is_refused(override: str):
    with pytest.raises(ConfigError, match="--set"):
        apply_override({"run": {"dir": "r"}}, override)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "queue": st.fixed_dictionaries(
                {}, optional={"max_staleness": st.integers(0, 9), "filter_range": st.sampled_from([[], [0.0, 0.5]])}
            ),
            "loss": st.fixed_dictionaries({}, optional={"skip_threshold": st.sampled_from([0, 2.0])}),
            "sampling": st.fixed_dictionaries({}, optional={"stop": st.lists(st.text(min_size=1), max_size=3)}),
            "data": st.fixed_dictionaries({}, optional={"eval": st.dictionaries(NAMES, st.text())}),
            "learner": st.fixed_dictionaries(
                {}, optional={"devices": st.lists(st.integers(0, 7), min_size=1, max_size=1)}
            ),
        },
    )
)
def test_the_toml_of_a_config_reads_back_equal(sections: dict[str, dict[str, Any]]):
    config = a_config(**sections)
    assert parse_config(tomllib.loads(config_to_toml(config)), "again") == config


def test_the_difference_names_nested_keys_old_and_new():
    old, new = a_config(), a_config(experimental={"fake": {"accuracy": 1.0}}, data={"eval": {"a": "f"}})
    assert changed_keys(old, new) == {"data.eval.a": (None, "f"), "experimental.fake.accuracy": (0.5, 1.0)}
    assert changed_keys(old, old) == {}


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("tcp://127.0.0.1:5555", ("127.0.0.1", 5555)),
        ("tcp://[::1]:1", ("::1", 1)),
        ("tcp://*:*", ("*", 0)),
        ("tcp://node-3.cluster_a:65535", ("node-3.cluster_a", 65535)),
    ],
)
def test_an_address_is_host_and_port(address: str, parts: tuple[str, int]):
    assert check_address(address) == parts


@given(st.text(max_size=40))
def test_any_other_text_is_refused_and_never_crashes(text: str):
    try:
        host, port = check_address(text)
    except AddressError:
        return
    assert text.startswith("tcp://")
    assert host
    assert 0 <= port <= 65535


def test_only_loopback_may_be_bound_without_saying_so():
    for address in ("tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://[::1]:0"):
        refuse_open_bind(address, insecure=False)
    for address in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.0.0.1:0", "tcp://[::]:0"):
        with pytest.raises(AddressError, match="--insecure"):
            refuse_open_bind(address, insecure=False)
        refuse_open_bind(address, insecure=True)
    assert not is_loopback("no-such-host.invalid")


def test_the_host_towards_loopback_is_loopback():
    assert is_loopback(local_host_towards("tcp://127.0.0.1:9"))


def test_a_lag_that_is_held_needs_a_bound_that_is_equal():
    assert a_config().learner.fixed_lag is None
    assert a_config(learner={"fixed_lag": 2}, queue={"max_staleness": 2}).learner.fixed_lag == 2
    assert a_config(learner={"fixed_lag": 0}, queue={"max_staleness": 0}).learner.fixed_lag == 0


def test_the_lowest_bound_is_the_age_that_some_batches_have():
    # Published every third version and trained on twice: 2 + 1 = 3 versions old at times.
    assert a_config(weights={"sync_every": 3}, learner={"updates_per_batch": 2}).lowest_bound == 3
    assert a_config(learner={"updates_per_batch": 2, "epochs_per_batch": 2}).lowest_bound == 3


@pytest.mark.parametrize(
    ("value", "expected"), [(5556, range(5556, 5558)), ("5556-5575", range(5556, 5576)), (" 1 - 2 ", range(1, 3))]
)
def test_a_port_for_weights_is_a_number_or_a_range(value: object, expected: range):
    assert WeightsConfig(port=value).ports == expected  # type: ignore[arg-type]
    assert WeightsConfig().ports is None


@pytest.mark.parametrize("value", [0, 65535, "5556", "5556-5556", "9-2", "a-b", "1-70000", True])
def test_other_ports_for_weights_are_refused(value: object):
    with pytest.raises(ValueError, match="expected a port such as 5556"):
        WeightsConfig(port=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["auto", "gloo", "nccl"])
def test_generators_fetch_from_each_other_only_by_tcp(transport: str):
    assert WeightsConfig(peers=True, transport="tcp").peers
    with pytest.raises(ValueError, match=r'weights\.peers: expected false .* set weights\.transport = "tcp"'):
        WeightsConfig(peers=True, transport=transport)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_transports_that_choose_their_own_ports_take_none(transport: str):
    with pytest.raises(ValueError, match=r"weights\.port: expected no value with weights\.transport"):
        WeightsConfig(port=5556, transport=transport)  # type: ignore[arg-type]


TWO = {"a": "a.jsonl", "b": "b.jsonl"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": 3}, "data.train: expected a file or data set in quotes, or a table of NAME = SOURCE, got 3"),
        ({"train": {}}, "data.train: expected a file or data set in quotes, or a table of NAME = SOURCE, got {}"),
        ({"train": {"a": ""}}, "data.train: expected a file or data set in quotes, or a table of NAME = SOURCE"),
        ({"train": {"a b": "f"}}, "data.train: expected names of letters, digits and _ . + -, got 'a b'"),
        (
            {"train": "f", "weights": {"f": 1}},
            "data.weights: expected data.train to be a table of NAME = SOURCE, got 'f'",
        ),
        ({"weights": {"f": 1}}, "data.weights: expected data.train to be a table of NAME = SOURCE, got ''"),
        ({"train": TWO, "weights": {"a": 1}}, "for each source of data.train = ['a', 'b'], got numbers for ['a']"),
        ({"train": TWO, "weights": {"a": 1, "b": 0}}, "data.weights: expected whole numbers from 1 to 1000, got b = 0"),
        ({"train": TWO, "weights": {"a": 1, "b": 0.5}}, "data.weights.b: expected a whole number, got 0.5"),
    ],
)
def test_sources_and_weights_that_make_no_sense_are_refused(data: dict[str, Any], message: str):
    assert message in refusal(data=data)


def test_sources_and_weights_survive_the_saved_config():
    config = a_config(data={"train": TWO, "weights": {"b": 3, "a": 1}})
    assert parse_config(tomllib.loads(config_to_toml(config)), "copy") == config


def test_min_p_and_stop_tokens_need_a_backend_that_obeys_them():
    fake = {"backend": "fake"}
    assert a_config(sampling={"min_p": 0.1, "stop_token_ids": [3]}, eval={"min_p": 0.5}).sampling.stop_token_ids == (3,)
    assert "sampling.min_p: expected 0 (off) with generator.backend fake" in refusal(
        sampling={"min_p": 0.1}, generator=fake
    )
    assert "eval.min_p: expected 0 (off) with generator.backend fake" in refusal(eval={"min_p": 0.1}, generator=fake)
    found = refusal(sampling={"stop_token_ids": [3]}, generator=fake)
    assert (
        "sampling.stop_token_ids: expected [] with generator.backend fake, which supports nothing else, got [3]"
        in found
    )
    assert "sampling.min_p: expected less than 1, got 1" in refusal(sampling={"min_p": 1})
    assert "sampling.stop_token_ids: expected token ids of at least 0, got [-1]" in refusal(
        sampling={"stop_token_ids": [-1]}
    )


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("queue.max_bytes", OnResume.FREE),
        ("queue.max_staleness", OnResume.RECORDED),
        ("queue.filter_range", OnResume.NEVER),
        ("checkpoint.every", OnResume.FREE),  # as its section
        ("generator.backend", OnResume.RECORDED),  # as its section
        ("generator.count", OnResume.FREE),  # other than its section
        ("data.eval.held_out", OnResume.RECORDED),  # as the table that it is in
        ("scorer.big.model", OnResume.FREE),
        ("experimental.vllm.runner", OnResume.FREE),
        ("loss.preset", OnResume.NEVER),
    ],
)
def test_the_innermost_field_says_whether_a_resumed_run_may_change_a_key(key: str, expected: OnResume):
    assert on_resume(Config, key) is expected


def test_the_bound_that_lowered_itself_is_refused_in_a_new_config_and_dropped_from_that_of_a_run(tmp_path: Path):
    keys = {"queue": {"adaptive": True}, "experimental": {"adaptive_max_kl": 0.1}}
    with pytest.raises(ConfigError, match=r'queue\.adaptive: unknown key; remove it: queue\.run_ahead = "auto" keeps'):
        a_config(**keys)
    written = 'run.dir = "r"\nmodel.path = "m"\n[queue]\nadaptive = true\nmax_staleness = 7\n[experimental]\n'
    (tmp_path / "config.toml").write_text(f"{written}adaptive_min_ess = 0.9\nadaptive_max_kl = 0.1\n")
    assert load_run_config(tmp_path / "config.toml").queue.max_staleness == 7
