"""Every layout of the ranks computes what one process computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_rl.config.parallel import Layout, ParallelConfig
from async_rl.errors import ConfigError
from async_rl.learner.checkpoints.stored_tensors import MODEL, OPTIMIZER, REFERENCE, load_tensors
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from tests.learner.engine.shared_cases import compare_with_one_process
from tests.learner.rank_layouts import (
    LAYOUTS,
    MODELS,
    compare_layouts,
    layout_config,
    layout_model,
    model_for,
    run_layout,
)
from tests.learner.rank_scenarios import save
from tests.learner.ranks import run_ranks
from tests.learner.tiny import tiny_config

CASES = [
    ("shards 2", "qwen2", True),
    ("replicas 2", "qwen2", False),
    ("replicas 2 x shards 2", "qwen3", False),
    ("replicas 2 x shards 2", "llama", True),
    ("replicas 2 x shards 2", "qwen3_moe", False),
    ("tensor 2", "qwen2", True),
    ("shards 2 x tensor 2", "qwen3", False),
    ("experts 2", "qwen3_moe", True),
    ("experts 2 of shards 4", "qwen3_moe", False),
    ("pipeline 2", "llama", False),
    ("pipeline 2 x shards 2", "qwen3", False),
    ("pipeline 4", "qwen3_moe", True),
    ("sequence 2", "llama", True),
    ("sequence 4", "qwen2", False),
    ("shards 2 x sequence 2", "qwen3_moe", False),
    ("replicas 2 x sequence 2", "qwen3", False),
    ("sequence 2 x tensor 2", "llama", True),
    ("experts 2 of sequence 2", "qwen3_moe", False),
]
"""Layout, model, and whether it has adapters. The quick suite has each layout and each model, not every pair."""
EVERY_CASE = [
    (name, model, lora)
    for name, (_, parallel) in LAYOUTS.items()
    for model in MODELS
    for lora in (False, True)
    if model == model_for(parallel, model)
]


def compare(directory: Path, cases: list[tuple[str, str, bool]]) -> None:
    for model in {"qwen2", *(model for _, model, _ in cases)}:
        layout_model(directory / model, model)
    compare_layouts(directory, cases)


def assert_same_bits(checkpoint: Path, expected: Path) -> None:
    for prefix in (MODEL, OPTIMIZER):
        got, wanted = (load_tensors(directory, prefix) for directory in (checkpoint, expected))
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items()), checkpoint
        assert any(tensor.abs().sum() > 0 for tensor in wanted.values())


@pytest.mark.slow
def test_a_step_is_the_same_under_every_layout(tmp_path: Path):
    compare(tmp_path, CASES)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_step_is_the_same_under_every_layout_with_every_model(tmp_path: Path):
    compare(tmp_path, EVERY_CASE)


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(False, marks=pytest.mark.slow, id="all weights"),
        pytest.param(True, marks=pytest.mark.long, id="adapters"),
    ],
)
def test_a_checkpoint_passes_through_every_layout_unchanged(tmp_path: Path, lora: bool):
    layout_model(tmp_path / "qwen3_moe", "qwen3_moe")
    alone = init_ranks(tiny_config(tmp_path, "qwen3_moe"))
    run_layout(layout_config(tmp_path, "qwen3_moe", {}, lora=lora), alone, tmp_path / "alone")
    shutil.copytree(tmp_path / "alone" / "checkpoint", tmp_path / "chain" / "0")
    number = 0
    for size in sorted({size for size, _ in LAYOUTS.values()}, reverse=True):
        names = [name for name, (of_layout, _) in LAYOUTS.items() if of_layout == size]
        (tmp_path / "chain.json").write_text(json.dumps([names, number, lora]), encoding="utf-8")
        run_ranks("passed_on", tmp_path, world_size=size)
        number += len(names)
    again = FsdpEngine(layout_config(tmp_path, "qwen3_moe", {}, lora=lora), alone)
    again.load(tmp_path / "chain" / str(number))
    number += 1
    save(again, tmp_path / "chain" / str(number), 1)
    for link in range(1, number + 1):
        assert_same_bits(tmp_path / "chain" / str(link), tmp_path / "chain" / "0")


@pytest.mark.parametrize(
    ("keys", "num_ranks", "data_ranks", "reporters"),
    [
        ({"replicas": 2, "sequence": 2, "tensor": 2}, 16, [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4, [0, 4, 8, 12]),
        ({"pipeline": 2, "tensor": 2}, 8, [0, 0, 1, 1, 0, 0, 1, 1], [4, 6]),  # those of the last stage report
    ],
)
def test_the_innermost_dimension_has_neighbouring_ranks(
    keys: dict[str, int], num_ranks: int, data_ranks: list[int], reporters: list[int]
):
    layout = Layout.of(ParallelConfig(**keys), num_ranks)
    assert [layout.data_rank(rank) for rank in range(num_ranks)] == data_ranks
    assert [rank for rank in range(num_ranks) if layout.is_reporter(rank)] == reporters


@pytest.mark.parametrize(
    ("keys", "num_ranks", "message"),
    [
        ({"replicas": 2, "tensor": 4}, 12, r"multiple of replicas 2 x tensor 4 = 8, got 12; start 8 ranks"),
        ({"replicas": 3, "sequence": 2, "experts": 3}, 12, r"parallel.experts: .* = 4, got 3; start more ranks"),
        ({"tensor": 2, "experts": 2}, 4, r"parallel.experts: expected 1 with parallel.tensor = 2, .* got 2; set one"),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused_with_the_arithmetic(
    keys: dict[str, int], num_ranks: int, message: str
):
    with pytest.raises(ConfigError, match=message):
        Layout.of(ParallelConfig(**keys), num_ranks)


MOVES = ["adapters, a reference that moves", "a reference that moves"]
TENSOR = [*MOVES, "gemma3", "recomputed in part", "a reference of its own, entropy", "replayed routes",
          "sampling masks"]  # fmt: skip
MORE = ["gemma", "gemma2", "mistral", "qwen2_moe", "recomputed", "kept for a step", "compiled", "published adapters",
        "one sequence for two ranks", "adapters beside a reference"]  # fmt: skip
EXPERTS = ["replayed routes", "recomputed in part", "one sequence for two ranks"]
PIPELINE = ["recomputed, kept for a step", "padded, kept for a micro-batch", "published adapters, 8-bit means",
            "adapters on 8-bit weights", *MOVES, "skipped", "replayed routes"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "names"),
    [
        pytest.param({}, ["4 bits", *MOVES, "replayed routes"], id="shards"),
        pytest.param({}, ["compiled"], id="shards, more", marks=pytest.mark.long),
        pytest.param({"tensor": 2}, TENSOR, id="tensor"),
        pytest.param({"tensor": 2}, MORE, id="tensor, more", marks=pytest.mark.long),
        pytest.param({"experts": 2}, EXPERTS, id="experts"),
        pytest.param({"pipeline": 2}, PIPELINE, id="pipeline"),
        pytest.param({"sequence": 2}, ["replayed routes", "sampling masks"], id="sequence"),
    ],
)
def test_settings_and_families_compute_the_same_on_two_ranks_as_alone(
    tmp_path: Path, parallel: dict[str, int], names: list[str]
):
    compare_with_one_process(tmp_path, names, parallel)

    def figures(name: str) -> list[Any]:
        paths = (tmp_path / run / name / "found.pt" for run in ("two", "alone"))
        return [torch.load(path, weights_only=False)[0] for path in paths]

    found, alone = figures(names[-1])
    if not parallel.keys() <= {"experts"}:  # the work of ranks that share a micro-batch is counted once
        assert found["flops"] == alone["flops"]
    for name in set(MOVES).intersection(names):
        policy, reference = (load_tensors(tmp_path / "two" / name / "checkpoint", of) for of in (MODEL, REFERENCE))
        if not name.startswith("adapters"):
            began = load_file(tmp_path / "qwen2" / "model.safetensors")
            policy = {n: began[n].mul(0.4).add(tensor, alpha=0.6) for n, tensor in policy.items()}
        assert reference.keys() == policy.keys()
        assert all(torch.equal(reference[n], tensor) for n, tensor in policy.items())
    # Ranks of experts without a sequence route a dummy, and those of a tensor count the same tokens twice.
    if "replayed routes" in names and parallel.keys().isdisjoint({"experts", "tensor"}):
        found, alone = figures("replayed routes")
        assert found["routing"] == alone["routing"] != [None, None]
    if "skipped" in names:
        assert all(loss != 0.0 for loss in figures("skipped")[1]["loss"])
