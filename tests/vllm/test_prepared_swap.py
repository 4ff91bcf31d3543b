"""Versions made ready in vLLM's workers beside decoding: on a model of 67 MB, whose preparation takes many steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.errors import WeightsError
from tests.end_to_end.harness import wait_until
from tests.vllm.test_processes import descendants
from tests.vllm.tiny import engine, make_model, run_all, scores, submit, weights_of, write_files

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

# A layer has 4 h^2 weights in its attention and 3 h (4 h) in its MLP: 16.8 MB. The head is not tied: packed apart.
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}
SIZE_BYTES = 4 * 16 * 512**2 * 4
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def weights() -> list[dict[str, torch.Tensor]]:
    return [weights_of(seed, **SHAPE) for seed in range(2)]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    directory = write_files(tmp_path_factory.mktemp("model"), **SHAPE)
    with engine(directory, batch_size=8, kv_after_update="recompute") as backend:
        yield backend


@pytest.fixture
def backend(started, weights) -> Iterator:
    """The one engine, with the weights of seed 0 as version 3."""
    started.activate(3, weights[0])
    yield started
    for lease_id in list(started.progress()):
        started.cancel(lease_id)


def digests_of(backend, version: int, weights: dict[str, torch.Tensor], *, prepared: bool) -> dict[str, str]:
    """What the workers hold once this version is active, prepared or loaded by vLLM's own update in a pause."""
    assert backend._prepares
    backend._prepares = prepared
    try:
        backend.activate(version, weights)
    finally:
        backend._prepares = True
    return dict(backend.digests())


def test_tokens_keep_coming_while_a_version_is_prepared_and_are_stamped_by_the_one_before(backend, weights):
    submit(backend, "a", group_size=8, max_new_tokens=300)
    while backend.num_tokens < 16:
        backend.step()
    # Versions are prepared one after the other until enough tokens have come meanwhile: one would do on most machines.
    finished, came, version, num_leases = [], 0, 3, 1
    while came < 16:
        before, version = backend.num_tokens, version + 1
        while not backend.prepare(version, weights[(version + 1) % 2]):
            finished += backend.step()
            # However many steps it takes, some rollouts are running when the version becomes the active one.
            while backend.num_running < 8:
                num_leases += 1
                submit(backend, f"{num_leases}", group_size=1, seed=num_leases, max_new_tokens=300)
        came += backend.num_tokens - before
        assert backend.version == version - 1
        backend.activate(version, weights[(version + 1) % 2])
    finished += run_all(backend).values()
    assert len(finished) == 8 + num_leases - 1
    assert any({3, 4} <= set(sampled.versions.tolist()) for sampled in finished)
    models = [make_model(seed, **SHAPE) for seed in range(2)]
    for sampled in finished:
        assert set(sampled.versions.tolist()) <= set(range(3, version + 1))
        assert sampled.versions.tolist() == sorted(sampled.versions)
        # Version 3 is of seed 0, version 4 of seed 1, and so on.
        for number in np.unique(sampled.versions).tolist():
            mine = sampled.versions == number
            expected = scores(models[(number + 1) % 2], sampled)[mine]
            np.testing.assert_allclose(sampled.logprobs[mine], expected, atol=TOLERANCE)


def test_a_prepared_version_is_to_the_byte_what_vllms_own_update_makes_of_it(backend, weights):
    held = [digests_of(backend, 4 + seed, weights[seed], prepared=True) for seed in range(2)]
    assert held[0].keys() == held[1].keys()
    # But for the norms, whose weights are all ones in a model that was never trained.
    changed = {name for name in held[0] if held[0][name] != held[1][name]}
    assert {name for name in held[0] if "norm" not in name and "bias" not in name} == changed
    for version, (seed, prepared) in enumerate([(0, False), (1, False), (0, True), (1, True)], 6):
        assert digests_of(backend, version, weights[seed], prepared=prepared) == held[seed]


def test_a_failed_preparation_leaves_the_old_weights_whole_and_says_why(backend, weights):
    held = dict(backend.digests())
    submit(backend, "a", group_size=8, max_new_tokens=200)
    staging = backend._staging
    transfer = {"path": staging.path, "size_bytes": staging.size_bytes, "rows": staging.rows}
    backend._engine.set_up_transfer({**transfer, "rows": [r for r in staging.rows if r[0] != "model.norm.weight"]})
    try:
        with pytest.raises(WeightsError, match=r"current version: worker 0: .*missing \['model.norm.weight'\]"):
            backend.activate(4, weights[1])
    finally:
        backend._engine.set_up_transfer(transfer)
    assert backend.version == 3
    assert backend.digests() == held
    model = make_model(0, **SHAPE)
    for sampled in run_all(backend).values():
        assert set(sampled.versions.tolist()) == {3}
        np.testing.assert_allclose(sampled.logprobs, scores(model, sampled), atol=TOLERANCE)
    # And it takes the next version as if nothing had been.
    backend.activate(4, weights[1])
    assert backend.digests() != held


def test_a_version_takes_the_place_of_another_one_that_is_being_prepared(backend, weights):
    backend.activate(4, weights[1])
    held = dict(backend.digests())
    backend.activate(5, weights[0])
    assert not backend.prepare(6, weights[0])
    backend.activate(7, weights[1])
    assert backend.version == 7
    assert backend.digests() == held


def anonymous_bytes(pids: set[int]) -> int:
    """Memory of these processes that no other one shares."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_what_was_swapped_out_is_freed(backend, weights):
    import os

    workers = {pid for pid in descendants(os.getpid()) if "Worker" in Path(f"/proc/{pid}/comm").read_text()}
    assert workers
    for version in range(4, 7):
        backend.activate(version, weights[version % 2])
    at_first = anonymous_bytes(workers)
    for version in range(7, 19):
        backend.activate(version, weights[version % 2])
    # Twelve versions of 67 MB have gone since; a worker that kept them would have grown by 805 MB. It may hold one that
    # is given back beside decoding, and what malloc keeps of freed blocks goes up and down by another.
    wait_until(
        "vLLM's worker to free what it does not use",
        lambda: anonymous_bytes(workers) < at_first + 2 * SIZE_BYTES,
        deadline_s=30,
    )


def test_layers_that_the_double_buffer_does_not_know_are_named():
    from async_rl.generator.vllm.weights import obstacle

    class Whole(torch.nn.Module):
        def process_weights_after_loading(self) -> None: ...

    assert obstacle(torch.nn.Linear(2, 2), torch.device("cpu")) == ""
    assert obstacle(torch.nn.Linear(2, 2), torch.device("cuda")).startswith("the model is on cuda")
    assert obstacle(Whole(), torch.device("cpu")) == "Whole processes its weights as a whole"
