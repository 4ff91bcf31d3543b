"""The table of backends: every name has a row in both halves, unknown ones are refused, own ones follow the rules."""

from pathlib import Path

import pytest

from async_rl.config.config import Config
from async_rl.config.generator import AUTO_CANDIDATES, BACKENDS
from async_rl.errors import ConfigError
from async_rl.generator.start.backends import FACTORIES, build_backend
from async_rl.process.user_code import code_digests
from tests.config.made import a_config

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "uniform_backend.py"
OWN = f"{EXAMPLE}:UniformBackend"


def config(backend: str, **sections: dict) -> Config:
    generator = {"backend": backend, "allow_code": [str(EXAMPLE)], **sections.pop("generator", {})}
    return a_config(generator=generator, **sections)


def test_both_halves_of_the_table_have_the_same_names():
    assert FACTORIES.keys() == BACKENDS.keys()
    assert set(AUTO_CANDIDATES) <= BACKENDS.keys()


def test_an_evaluation_without_a_learner_needs_a_backend_that_loads_weights(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"UniformBackend can't load a model's own weights"):
        build_backend(config(OWN), tmp_path, load_pretrained=True)


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
        ("generator", {"tensor_parallel_size": 2}, r"generator\.tensor_parallel_size: expected 1 with"),
        ("model", {"routing_replay": True, "path": "model"}, r"model\.routing_replay: expected false with"),
    ],
)
def test_an_own_backend_is_not_asked_for_what_it_does_not_declare(tmp_path: Path, section, values, message):
    with pytest.raises(ConfigError, match=message):
        build_backend(config(OWN, **{section: values}), tmp_path)


def test_what_is_no_backend_is_refused_with_what_one_has(tmp_path: Path):
    source = tmp_path / "not_a_backend.py"
    source.write_text("class Mine:\n    pass\n")
    with pytest.raises(ConfigError, match=r"a class with an attribute capabilities .* and a classmethod from_files"):
        build_backend(config(f"{source}:Mine", generator={"allow_code": [str(source)]}), tmp_path)
