"""The table of backends: every name has a row in both halves, unknown ones are refused, own ones follow the rules."""

from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.config.generator import AUTO_CANDIDATES, BACKENDS
from async_rl.config.loading import parse_config
from async_rl.errors import ConfigError
from async_rl.generator.fake import FakeBackend
from async_rl.generator.start.backends import FACTORIES, build_backend
from async_rl.process.user_code import code_digests

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "uniform_backend.py"
OWN = f"{EXAMPLE}:UniformBackend"


def config(backend: str, **sections: dict) -> Config:
    generator = {"backend": backend, "allow_code": [str(EXAMPLE)], **sections.pop("generator", {})}
    return parse_config({"run": {"dir": "run"}, "model": {"path": "model"}, "generator": generator, **sections}, "test")


def test_both_halves_of_the_table_have_the_same_names():
    assert FACTORIES.keys() == BACKENDS.keys()
    assert set(AUTO_CANDIDATES) <= BACKENDS.keys()


def test_an_unknown_name_is_refused_by_the_config():
    with pytest.raises(ConfigError, match=r"generator\.backend: .*expected one of auto, vllm, .*got 'vlm'"):
        config("vlm")


def test_an_unknown_name_is_refused_where_it_is_looked_up(tmp_path: Path):
    # A config that nobody checked, as a test or a later version may build it.
    known = config("fake")
    unchecked = known.model_copy(update={"generator": known.generator.model_copy(update={"backend": "vlm"})})
    with pytest.raises((ConfigError, ValueError), match=r"expected one of .*got 'vlm'"):
        build_backend(unchecked, tmp_path)


def test_a_named_backend_is_built_from_the_table(tmp_path: Path):
    backend = build_backend(config("fake"), tmp_path)
    assert isinstance(backend, FakeBackend)
    assert backend.capabilities is BACKENDS["fake"]


def test_an_evaluation_without_a_learner_needs_a_backend_that_loads_weights(tmp_path: Path):
    with pytest.raises(ConfigError, match="vllm can't load a model's own weights"):
        build_backend(config("vllm"), tmp_path, load_pretrained=True)


def test_an_own_backend_is_code_that_generators_must_allow(tmp_path: Path):
    assert config(OWN).code_names == (OWN,)
    with pytest.raises(ConfigError, match="this machine does not allow it"):
        build_backend(config(OWN, generator={"allow_code": []}), tmp_path)


def test_an_own_backend_must_be_the_learners(tmp_path: Path):
    with pytest.raises(ConfigError, match="sent no digest"):
        build_backend(config(OWN), tmp_path, code_digests={})
    with pytest.raises(ConfigError, match="expected the learner's source, SHA-256 0000"):
        build_backend(config(OWN), tmp_path, code_digests={OWN: "0" * 64})
    backend = build_backend(config(OWN), tmp_path, code_digests=code_digests([OWN]))
    assert type(backend).__name__ == "UniformBackend"


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("sampling", {"top_k": 3}, r"sampling\.top_p, sampling\.top_k: expected 1, 0 \(off\) with"),
        ("generator", {"kv_after_update": "recompute"}, r'generator\.kv_after_update: expected "keep"'),
        ("generator", {"tensor_parallel_size": 2}, r"generator\.tensor_parallel_size: expected 1 with"),
        ("model", {"routing_replay": True, "path": "model"}, r"model\.routing_replay: expected false with"),
    ],
)
def test_an_own_backend_is_not_asked_for_what_it_does_not_declare(tmp_path: Path, section, values, message):
    with pytest.raises(ConfigError, match=message):
        build_backend(config(OWN, **{section: values}), tmp_path)


def test_a_model_is_split_by_vllm_only(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"generator\.tensor_parallel_size: expected 1 with .* transformers"):
        config("transformers", generator={"tensor_parallel_size": 2})
    # Which backend auto chooses depends on the generator's machine.
    with pytest.raises(ConfigError, match=r"generator\.tensor_parallel_size: expected 1 with .* auto"):
        build_backend(config("auto", generator={"tensor_parallel_size": 2}), tmp_path)


@pytest.mark.parametrize("backend", ["vllm", "fake", "auto"])
def test_routes_are_reported_by_the_built_in_engine_only(backend: str):
    model = {"routing_replay": True, "path": "model"}
    with pytest.raises(ConfigError, match=rf"model\.routing_replay: expected false with generator.backend {backend}"):
        config(backend, model=model)
    assert config("transformers", model=model).model.routing_replay


def test_what_is_no_backend_is_refused_with_what_one_has(tmp_path: Path):
    source = tmp_path / "not_a_backend.py"
    source.write_text("class Mine:\n    pass\n")
    with pytest.raises(ConfigError, match=r"a class with an attribute capabilities .* and a classmethod from_files"):
        build_backend(config(f"{source}:Mine", generator={"allow_code": [str(source)]}), tmp_path)
