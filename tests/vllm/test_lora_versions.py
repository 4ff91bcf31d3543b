"""Versions that are only adapters, in the real vLLM: a request is sampled to its end with the version it began with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rl.config.config import Config
from async_rl.generator.conformance import CHECKS, Subject, check_backend
from async_rl.generator.start.backends import build_backend
from async_rl.generator.vllm.backend import VllmBackend
from async_rl.queue.parity import ProbeSequence
from async_rl.weights.adapters import ADAPTER_BASE, BaseWeights, merge, peft_name
from tests.generator.leases import run_all, submit
from tests.generator.tiny_model import scores
from tests.vllm.tiny import IS_INTERPRETED, TOLERANCE, make_config, make_model, write_files

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RANK, ALPHA = 4, 3.0
SCALE = 1.5
"""ALPHA / sqrt(RANK): rank-stabilised."""
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapters_of(seed: int) -> dict[str, Tensor]:
    found, generator = {}, torch.Generator().manual_seed(seed)
    for name, module in make_model(0).named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in TARGETS:
            found[peft_name(name, "A")] = 0.1 * torch.randn(RANK, module.in_features, generator=generator)
            found[peft_name(name, "B")] = 0.1 * torch.randn(module.out_features, RANK, generator=generator)
    return found


def merged(seed: int) -> PreTrainedModel:
    model, adapters = make_model(0), adapters_of(seed)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and peft_name(name, "A") in adapters:
            a, b = (adapters[peft_name(name, letter)] for letter in "AB")
            module.weight.data = merge(module.weight.data, a, b, scale=SCALE)
    return model


def build(root: Path) -> VllmBackend:
    """The engine of the model without adapters, in files below ``root``."""
    torch.set_num_threads(1)
    base, directory = root / "base", root / "scratch"
    for path in (base, directory):
        path.mkdir()
    make_model(0).save_pretrained(base)
    write_files(directory)
    (directory / ADAPTER_BASE).write_bytes(BaseWeights.of(str(base)).to_json())
    built = build_backend(config_of(base), directory)
    assert isinstance(built, VllmBackend)
    return built


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
    with closing(build(tmp_path_factory.mktemp("backend"))) as built:
        yield built


@pytest.mark.long
def test_the_backend_conforms(tmp_path: Path):
    length = 48 if IS_INTERPRETED else 300
    subject = Subject(lambda: build(tmp_path), adapters_of, max_new_tokens=length, limit_s=300.0, keeps_version=True)
    ran = check_backend(subject)
    not_run = {check.__name__ for check in CHECKS} - set(ran)
    assert not_run == {"repeats_itself_if_deterministic", "reports_the_routes_of_every_token"}


def config_of(base: Path) -> Config:
    """At staleness 0, so that two versions may be in flight."""
    raw = make_config().model_dump()
    raw["model"]["path"] = str(base)
    raw["queue"]["max_staleness"] = 0
    lora = {"rank": RANK, "alpha": ALPHA, "rank_stabilized": True, "targets": list(TARGETS)}
    raw["lora"] |= lora | {"publish": "adapters"}
    return Config.model_validate(raw, strict=False)


def test_two_versions_in_flight_score_as_the_models_that_they_make(backend):
    backend.activate(3, adapters_of(1))
    submit(backend, "old", group_size=4, max_new_tokens=60)
    while not backend.progress()["old"]:
        backend.step()
    # Nothing is running with version 4 yet, so version 5 takes its place.
    for version in (4, 5):
        assert backend.activate(version, adapters_of(version - 2)) > 0
    submit(backend, "new", group_size=4, max_new_tokens=60)
    backend.step()
    assert {rollout.version for rollout in backend._running.values()} == {3, 5}
    backend.activate(6, adapters_of(4))
    submit(backend, "third", group_size=2, max_new_tokens=5)
    backend.step()
    if any(rollout.version == 3 for rollout in backend._running.values()):
        assert all(rollout.version != 6 for rollout in backend._running.values()), "two versions at most"
    finished = run_all(backend)
    assert len(finished) == 10
    for (lease_id, _), sampled in finished.items():
        version = {"old": 3, "new": 5}.get(lease_id, 6)
        assert set(sampled.versions.tolist()) == {version}
        model = merged({3: 1, 5: 3, 6: 4}[version])
        np.testing.assert_allclose(sampled.logprobs, scores(model, sampled), atol=TOLERANCE)
        others = np.abs(sampled.logprobs - scores(make_model(0), sampled))
        assert others.max() > 1e-2, "the adapters must be large enough to be seen"


def test_given_tokens_are_scored_with_the_newest_adapters_which_its_digests_tell_apart(backend):
    backend.activate(7, adapters_of(5))
    first = dict(backend.digests())
    given = ProbeSequence(np.arange(3, 43, dtype=np.int32), 32)
    ids = torch.from_numpy(given.token_ids.astype(np.int64))
    with torch.no_grad():
        logprobs = merged(5)(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[-32:, 0]
    np.testing.assert_allclose(backend.score_tokens([given], 1.0), logprobs.numpy(), atol=TOLERANCE)
    backend.activate(8, adapters_of(6))
    assert {n for n, d in backend.digests().items() if first[n] != d} == {n for n in first if ".lora_" in n}
    backend.activate(7, adapters_of(5))
    assert backend.digests() == first
    # Files of versions that nothing samples with are gone.
    assert len(list(backend._lora._directory.iterdir())) == 1
