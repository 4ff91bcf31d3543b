"""Config: derived values, files and overrides, TOML there and back; addresses."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.config import Config
from async_rl.config.data import EvalSetConfig
from async_rl.config.loading import apply_override, changed_keys, load_config
from async_rl.config.queue import WeightsConfig
from async_rl.config.section import OnResume, on_resume
from async_rl.errors import AddressError
from async_rl.net.address import check_address, is_loopback, local_host_towards, refuse_open_bind
from tests.config.made import a_config, copy_of

NAMES = st.from_regex(r"\A\w[\w.+-]{0,9}\Z")


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
    assert config.eval.of("a").every == copy_of(config).eval.of("a").every == 50


def test_derived_values_follow_their_keys():
    assert a_config(learner={"max_tokens": 1000}, parallel={"sequence": 3}).longest_sequence == 3000
    assert a_config(sampling={"max_new_tokens": 400}).cache_length == 100
    assert a_config(sampling={"max_new_tokens": 100_000}).cache_length == 1024
    assert a_config(sampling={"max_new_tokens": 1}, reward={"soft_overlong": False}).cache_length == 1
    assert a_config(learner={"groups_per_step": 3}).max_filtered == 300
    assert a_config(learner={"steps": 10, "updates_per_batch": 2}).temperature_steps == 20
    assert a_config(learner={"steps": 10, "updates_per_batch": 2, "epochs_per_batch": 2}).temperature_steps == 40
    assert a_config(sampling={"temperature_end": 0.9, "temperature_steps": 7}).temperature_steps == 7
    assert a_config(learner={"generate": True, "generate_groups": 0}, generator={"count": 0}).samples_here
    assert not a_config(generator={"count": 0}).samples_here
    for text, steps in (("", []), ("3", [3]), ("3-5", [3, 4, 5])):
        assert list(a_config(log={"profile": text}).log.profiled_steps) == steps
    # Published every third version and trained on twice: 2 + 1 = 3 versions old at times.
    assert a_config(weights={"sync_every": 3}, learner={"updates_per_batch": 2}).lowest_bound == 3
    assert a_config(learner={"updates_per_batch": 2, "epochs_per_batch": 2}).lowest_bound == 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [(5556, range(5556, 5558)), ("5556-5575", range(5556, 5576)), (" 1 - 2 ", range(1, 3)), (None, None)],
)
def test_a_port_for_weights_is_a_number_or_a_range(value: Any, expected: range | None):
    assert WeightsConfig(port=value).ports == expected


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("s.k=3", 3),
        ("s.k=true", True),
        ("s.k=[1, 2]", [1, 2]),
        ("s.k = 'quoted'", "quoted"),
        ("s.k=bare words", "bare words"),
        ("s.k=a=b", "a=b"),
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


def some_of(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=strategies)


@given(
    some_of(
        queue=some_of(max_staleness=st.integers(0, 9), filter_range=st.sampled_from([[], [0.0, 0.5]])),
        loss=some_of(skip_threshold=st.sampled_from([0, 2.0])),
        sampling=some_of(stop=st.lists(st.text(min_size=1), max_size=3)),
        data=some_of(eval=st.dictionaries(NAMES, st.text())),
        learner=some_of(devices=st.lists(st.integers(0, 7), min_size=1, max_size=1)),
    )
)
def test_the_toml_of_a_config_reads_back_equal(sections: dict[str, dict[str, Any]]):
    sections.setdefault("data", {}).update(train={"a": "a.jsonl", "b": "b.jsonl"}, weights={"b": 3, "a": 1})
    config = a_config(**sections)
    assert copy_of(config) == config


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
    assert is_loopback(local_host_towards("tcp://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("queue.max_bytes", OnResume.FREE),
        ("queue.max_staleness", OnResume.RECORDED),
        ("queue.filter_range", OnResume.NEVER),
        ("generator.backend", OnResume.RECORDED),  # as its section
        ("generator.count", OnResume.FREE),  # other than its section
        ("data.eval.held_out", OnResume.RECORDED),  # as the table that it is in
        ("scorer.big.model", OnResume.FREE),
        ("loss.preset", OnResume.NEVER),
    ],
)
def test_the_innermost_field_says_whether_a_resumed_run_may_change_a_key(key: str, expected: OnResume):
    assert on_resume(Config, key) is expected
