"""Learning rates by hand, and each optimizer by hand, against torch's, resumed, and on two ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from async_rl.config.learner import ModelConfig, OptimizerConfig, OptimizerName
from async_rl.errors import ConfigError, RunError
from async_rl.learner.memory_plan import state_bytes
from async_rl.learner.model.policy_model import PolicyModel, load_model
from async_rl.learner.optimizers.compact_adamw import EightBit, rounded_at_random
from async_rl.learner.optimizers.muon import hidden_matrices
from async_rl.learner.optimizers.optimizer import Schedule, build_optimizer, check_optimizer, total_norm
from tests.learner.model.reference import engine_of
from tests.learner.moe import moe_model
from tests.learner.rank_scenarios import OPTIMIZERS, optimized
from tests.learner.ranks import run_ranks
from tests.learner.tiny import tiny_config, tiny_model


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        # 0.2 + 0.8 * (1 - n / 10) at n = 0, 5, 10, 20.
        ("linear", 0, {0: 1.0, 5: 0.6, 10: 0.2, 20: 0.2}),
        # 0.2 + 0.8 * (1 + cos(pi n / 10)) / 2.
        ("cosine", 0, {0: 1.0, 5: 0.6, 10: 0.2, 20: 0.2}),
        ("constant", 0, {0: 1.0, 20: 1.0}),
        # Four warm-up updates: 1/4, 2/4, 3/4, 4/4; the fifth starts the cosine at its top.
        ("cosine", 4, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 9: 0.6}),
    ],
)
def test_the_rate_rises_in_equal_parts_falls_to_its_floor_and_stays_there(
    kind: Any, warmup: int, expected: dict[int, float]
):
    schedule = Schedule(kind=kind, lr=1.0, warmup_updates=warmup, total_updates=10 + warmup, min_ratio=0.2)
    assert {update: schedule.lr_at(update) for update in expected} == pytest.approx(expected)


def test_weight_decay_pulls_matrices_only():
    matrix, norm = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
    optimizer = build_optimizer({"matrix": matrix, "norm": norm}, OptimizerConfig(weight_decay=0.5))
    matrix.grad, norm.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step(0.1)
    # With a zero gradient only decay is left: 1 - lr * decay = 1 - 0.1 * 0.5.
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(norm.detach(), torch.ones(2))


def test_norm_of_all_gradients_is_the_root_of_their_squares():
    # sqrt(3² + 4² + 12²).
    assert total_norm([torch.tensor([[3.0, 4.0]]), torch.tensor([12.0])]) == pytest.approx(13.0)
    assert total_norm([]) == 0.0


def optimizer_config(name: str, **keys: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"name": name, "weight_decay": 0.0} | keys)


def test_random_rounding_takes_a_neighbour_and_is_right_on_average():
    # bfloat16 has 7 bits after the leading one: 1 + 1/128 follows 1. A quarter of the way there, one in four goes up.
    values = torch.tensor([1 + 1 / 512, -(1 + 1 / 512), 1.0]).repeat(10_000, 1)
    rounded = rounded_at_random(values, torch.Generator().manual_seed(0)).float()
    assert set(rounded.unique().tolist()) == {-1 - 1 / 128, -1.0, 1.0, 1 + 1 / 128}
    # Of 10000 draws at 1/4, the share has a standard deviation of 0.0043.
    torch.testing.assert_close(
        (rounded != rounded.sign()).float().mean(0), torch.tensor([0.25, 0.25, 0.0]), atol=0.015, rtol=0
    )


def fitted(name: str, num_steps: int) -> tuple[float, dict[str, Tensor]]:
    """The mean error of the last steps of a linear regression with noise, and the optimizer's state after it."""
    generator = torch.Generator().manual_seed(0)
    target, weight = torch.randn(16, 70, generator=generator), Parameter(torch.zeros(16, 70))
    optimizer = build_optimizer({"weight": weight}, optimizer_config(name))
    errors = []
    for step in range(num_steps):
        inputs = torch.randn(32, 70, generator=generator)
        noise = torch.randn(32, 16, generator=generator)
        error = (inputs @ (weight - target).T + noise).square().mean()
        error.backward()
        optimizer.step(0.02 * (1 - step / num_steps))
        weight.grad = None
        errors.append(float((weight.detach() - target).square().mean()))
    return sum(errors[-50:]) / 50, optimizer.tensors()


@pytest.mark.parametrize("name", ["adamw_bf16", "adamw_8bit"])
def test_compact_state_trains_as_well_as_float32(name: str):
    exact, _ = fitted("adamw", 1500)
    compact, _ = fitted(name, 1500)
    assert exact < 0.01  # of 1 at the beginning
    assert compact == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("name", ["adamw_bf16", "adamw_8bit"])
def test_the_mean_of_the_square_goes_on_falling_when_gradients_become_small(name: str):
    weight = Parameter(torch.zeros(8, 64))
    optimizer = build_optimizer({"weight": weight}, optimizer_config(name))
    for step in range(1000):
        weight.grad = torch.ones(8, 64) if step == 0 else torch.zeros(8, 64)
        optimizer.step(1e-3)
    # 0.001 * 1² at the first step, and 0.999 of it at each of 999 others. 512 values, each with an error of 5 %.
    means = second_moment(optimizer.tensors())
    assert float(means.mean()) == pytest.approx(0.001 * 0.999**999, rel=0.02)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_every_optimizer_goes_against_the_gradient_and_has_the_state_that_is_planned(name: OptimizerName):
    layer, table = parameters = [Parameter(torch.ones(8, 128)) for _ in range(2)]
    optimizer = build_optimizer({"layer": layer, "table": table}, optimizer_config(name), ["layer"])
    for parameter in parameters:
        parameter.grad = torch.ones(8, 128)
    optimizer.step(0.1)
    assert all(float(parameter.detach().max()) < 1 for parameter in parameters)
    for of, is_table in (("layer", False), ("table", True)):
        num_bytes = sum(tensor.nbytes for key, tensor in optimizer.tensors().items() if key.endswith(of))
        assert num_bytes == state_bytes(name, is_table=is_table) * 1024  # a matrix has 1024 weights


def test_a_missing_package_and_a_device_without_kernels_are_named(monkeypatch: pytest.MonkeyPatch):
    def quantize(*arguments: object, **options: object) -> None:
        raise NotImplementedError("no backend")

    eight_bit, cpu = optimizer_config("adamw_8bit"), torch.device("cpu")
    monkeypatch.setattr(importlib.import_module("bitsandbytes.functional"), "quantize_blockwise", quantize)
    with pytest.raises(ConfigError, match=r'bitsandbytes has no kernels for cpu.*choose "adamw_bf16"'):
        check_optimizer(eight_bit, cpu)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ConfigError, match=r'optimizer.name = "adamw_8bit".*pip install .async-rl\[quantized\]'):
        check_optimizer(eight_bit, cpu)
    check_optimizer(optimizer_config("adamw_bf16"), cpu)


def test_muon_of_one_number_by_hand():
    # The norm makes 5 a 1. f(x) = 3.4445 x - 4.775 x^3 + 2.0315 x^5 five times:
    x = 1.0
    for _ in range(5):
        x = 3.4445 * x - 4.775 * x**3 + 2.0315 * x**5
    weight = Parameter(torch.tensor([[2.0]]))
    optimizer = build_optimizer({"w": weight}, optimizer_config("muon", weight_decay=0.5), ["w"])
    weight.grad = torch.tensor([[5.0]])
    optimizer.step(0.1)
    # 2 (1 - 0.1 * 0.5) - 0.1 * 0.2 * sqrt(1) * x.
    assert float(weight.detach()) == pytest.approx(1.9 - 0.02 * x, rel=1e-6)
    # The momentum is 0.05 * 5.
    torch.testing.assert_close(optimizer.tensors()["momentum.w"], torch.tensor([[0.25]]))


@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_muon_takes_the_steps_of_torch_and_experts_one_by_one(shape: tuple[int, int]):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2, *shape, generator=generator)
    ours = [Parameter(start.clone()), Parameter(start[0].clone())]
    theirs = [Parameter(matrix.clone()) for matrix in start]
    optimizer = build_optimizer(
        {"experts": ours[0], "matrix": ours[1]}, optimizer_config("muon", weight_decay=0.1), ["experts", "matrix"]
    )
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradients = torch.randn(2, *shape, generator=generator)
        ours[0].grad, ours[1].grad = gradients, gradients[0]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step(0.1)
        reference.step()
    # torch computes the updates, each of root mean square 0.02 or so, in bfloat16.
    expected = torch.stack([p.detach() for p in theirs])
    torch.testing.assert_close(ours[0].detach(), expected, atol=3e-3, rtol=0)
    torch.testing.assert_close(ours[1].detach(), ours[0][0].detach(), atol=1e-6, rtol=0)


def test_muon_leaves_the_rest_to_adamw_with_its_own_rate():
    matrix, rest = Parameter(torch.zeros(2, 2)), Parameter(torch.zeros(2, 2))
    config = optimizer_config("muon", lr=0.1, adamw_lr=0.3)
    optimizer = build_optimizer({"matrix": matrix, "rest": rest}, config, ["matrix"])
    assert set(optimizer.tensors()) == {"momentum.matrix", "exp_avg.rest", "exp_avg_sq.rest"}
    matrix.grad, rest.grad = torch.zeros(2, 2), torch.ones(2, 2)
    optimizer.step(0.05)  # half of the highest rate
    # AdamW's first step is its learning rate.
    torch.testing.assert_close(rest.detach(), torch.full((2, 2), -0.15))


def test_muon_trains_matrices_of_layers_and_no_embedding_bias_or_convolution(directory: Path, tmp_path: Path):
    policy = PolicyModel(load_model(ModelConfig(path=str(directory / "model"))))
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.split(".")[-2] for name in hidden_matrices(policy)} == set(names)
    assert len(hidden_matrices(policy)) == 2 * len(names)
    experts = hidden_matrices(PolicyModel(load_model(ModelConfig(path=str(moe_model(tmp_path, "gpt_oss"))))))
    assert "model.layers.0.mlp.experts.down_proj" in experts
    assert not any(name.endswith("bias") for name in experts)


def second_moment(tensors: Mapping[str, Tensor]) -> Tensor:
    if "exp_avg_sq.weight" in tensors:
        return tensors["exp_avg_sq.weight"].float()
    return EightBit(torch.device("cpu")).read([t for name, t in tensors.items() if name.endswith(".weight")])[1]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each optimizer made of a model on one rank (``ranks_1/``)."""
    root = tmp_path_factory.mktemp("optimizers")
    tiny_model(root / "model")
    optimized(root)
    return root


@pytest.fixture(scope="module")
def two_ranks(directory: Path) -> Path:
    run_ranks("optimized", directory)
    return directory


def differing(left: Path, right: Path) -> list[str]:
    """The names of the tensors that two checkpoints do not have with the same bits."""
    one, other = (torch.load(path.with_suffix(".pt")) for path in (left, right))
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_resumed_step_has_the_bits_of_an_uninterrupted_one(directory: Path, case: str):
    assert_resumed(directory / "ranks_1" / case)


def assert_resumed(path: Path) -> None:
    assert differing(path / "second", path / "resumed") == []
    assert differing(path / "first", path / "second")


def test_the_state_of_another_optimizer_is_refused(directory: Path):
    path = directory / "ranks_1" / "adamw_bf16, all weights" / "first"
    config = tiny_config(directory, "model", optimizer={"name": "adamw_8bit"})
    with pytest.raises(RunError, match=r"is another optimizer's: optimizer.exp_avg.*resume with the optimizer.name"):
        engine_of(config).load(path)


@pytest.mark.slow
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_two_ranks_load_the_bits_of_one_and_resume_to_the_bit(two_ranks: Path, case: str):
    path = two_ranks / "ranks_2" / case
    assert_resumed(path)
    assert differing(two_ranks / "ranks_1" / case / "first", path / "of_one") == []


@pytest.mark.slow
@pytest.mark.parametrize("what", ["all weights", "adapters"])
def test_muon_takes_the_steps_of_one_rank_on_two(two_ranks: Path, what: str):
    one, two = (torch.load(two_ranks / f"ranks_{n}" / f"muon, {what}" / "second.pt") for n in (1, 2))
    torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-5)
