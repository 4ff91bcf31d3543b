"""Every shipped backend, and the example of an own one, keeps the promises of ``backend.Backend``."""

import ast
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from async_rl.config.config import Config
from async_rl.config.loading import load_config
from async_rl.generator.conformance import CHECKS, ConformanceError, Subject, check_backend
from async_rl.generator.fake import FakeBackend
from async_rl.generator.start.backends import build_backend
from async_rl.records import NO_VERSION
from async_rl.routes import RoutingShape
from tests.config.made import a_config
from tests.generator.tiny_model import make_model, weights_of, write_model
from tests.learner.moe import loaded, moe_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "uniform_backend.py"
NAMES = {check.__name__ for check in CHECKS}
NEEDS_EXPERTS = {"reports_the_routes_of_every_token"}
NEEDS_A_MODEL = NEEDS_EXPERTS | {
    "stops_at_stop_strings", "scores_what_it_sampled", "digests_tell_weights_apart", "tells_what_it_has_sampled",
}  # fmt: skip


def config(backend: str, *, deterministic: bool = False, **generator: Any) -> Config:
    generator = {"backend": backend, "batch_size": 4, **generator}
    sampling = {"deterministic": deterministic, "group_size": 4}
    return a_config(generator=generator, sampling=sampling, experimental={"fake": {"mean_tokens": 20.0}})


def tiny_weights() -> Callable[[int], Mapping[str, Any]]:
    """Weights of random tiny models, by version; the same object for the same version."""
    made: dict[int, Mapping[str, Any]] = {}
    return lambda version: made.setdefault(version, weights_of(make_model(version)))


def test_the_fake_backend_conforms(tmp_path: Path):
    made = config("fake", deterministic=True)
    ran = check_backend(Subject(lambda: build_backend(made, tmp_path), is_deterministic=True))
    assert set(ran) == NAMES - NEEDS_A_MODEL


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_transformers_backend_conforms(tmp_path: Path, deterministic: bool):
    write_model(tmp_path)
    made = config("transformers", deterministic=deterministic, num_threads=1)
    subject = Subject(lambda: build_backend(made, tmp_path), tiny_weights(), is_deterministic=deterministic)
    skipped = set() if deterministic else {"repeats_itself_if_deterministic"}
    assert set(check_backend(subject)) == NAMES - NEEDS_EXPERTS - skipped


def test_the_transformers_backend_conforms_with_experts(tmp_path: Path):
    directory = moe_model(tmp_path / "0")
    weights = [dict(loaded(moe_model(tmp_path / str(seed), seed=seed)).named_parameters()) for seed in range(2)]
    made = config("transformers", num_threads=1)
    subject = Subject(
        lambda: build_backend(made, directory), lambda version: weights[version % 2], routing=RoutingShape(3, 8, 2)
    )
    assert set(check_backend(subject)) == NAMES - {"repeats_itself_if_deterministic"}


def test_the_example_of_an_own_backend_conforms(tmp_path: Path):
    made = config(f"{EXAMPLE}:UniformBackend", allow_code=[str(EXAMPLE)])
    ran = check_backend(Subject(lambda: build_backend(made, tmp_path), is_deterministic=True))
    assert set(ran) == NAMES - NEEDS_A_MODEL - {"obeys_top_k_and_reports_what_it_left"}


def test_the_command_in_the_example_of_an_own_backend_is_a_config(tmp_path: Path):
    text = ast.get_docstring(ast.parse(EXAMPLE.read_text())) or ""
    shown = text[text.index("async-rl launch CONFIG ") : text.index("\n\nThe vocabulary")].replace("\\\n", " ")
    words = shlex.split(shown.replace("examples/uniform_backend.py", str(EXAMPLE)))[3:]
    assert set(words[::2]) == {"--set"}
    (tmp_path / "run.toml").write_text('[run]\ndir = "r"\n[model]\npath = "m"\n[data]\ntrain = "t.jsonl"\n')
    assert build_backend(load_config(tmp_path / "run.toml", words[1::2]), tmp_path).version == NO_VERSION


class Broken(FakeBackend):
    """The fake with one promise broken."""

    def __init__(self, promise: str) -> None:
        super().__init__(config("fake").generator)
        self._promise = promise

    def step(self):
        found = super().step()
        if self._promise == "versions":
            found = [replace(one, versions=one.versions + 1) for one in found]
        if self._promise == "indices":
            found = [replace(one, index=0) for one in found]
        return found

    def cancel(self, lease_id: str) -> None:
        if self._promise != "cancel":
            super().cancel(lease_id)


@pytest.mark.parametrize(
    ("promise", "message"),
    [
        ("versions", "expected the active version 1 only, got {2}"),
        ("indices", "expected one sample for each index"),
        ("cancel", "forgets_what_is_cancelled: expected no progress of a cancelled lease"),
    ],
)
def test_a_broken_promise_is_named(promise: str, message: str):
    with pytest.raises(ConformanceError, match=re.escape(message)):
        check_backend(Subject(lambda: Broken(promise)))
