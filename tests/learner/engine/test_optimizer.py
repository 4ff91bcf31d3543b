"""Learning rates by hand, and each optimizer by hand, against torch's, resumed, and on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from async_rl.config.learner import OptimizerConfig
from async_rl.learner.engine.optimizer import Schedule, build_optimizer, total_norm


def schedule(kind: str, *, warmup: int = 0) -> Schedule:
    return Schedule(kind=kind, lr=1.0, warmup_updates=warmup, total_updates=10 + warmup, min_ratio=0.2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # 0.2 + 0.8 * (1 - n / 10) at n = 0, 5, 10, 20.
        ("linear", [1.0, 0.6, 0.2, 0.2]),
        # 0.2 + 0.8 * (1 + cos(pi n / 10)) / 2.
        ("cosine", [1.0, 0.6, 0.2, 0.2]),
        ("constant", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_rate_falls_to_its_floor_and_stays_there(kind: str, expected: list[float]):
    assert [schedule(kind).lr_at(n) for n in (0, 5, 10, 20)] == pytest.approx(expected)


def test_warm_up_rises_in_equal_parts_and_then_the_schedule_begins():
    # Four warm-up updates: 1/4, 2/4, 3/4, 4/4; the fifth starts the cosine at its top.
    assert [schedule("cosine", warmup=4).lr_at(n) for n in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_weight_decay_pulls_matrices_only():
    matrix, norm = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
    optimizer = build_optimizer({"matrix": matrix, "norm": norm}, OptimizerConfig(weight_decay=0.5))
    matrix.grad, norm.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step(0.1)
    # With a zero gradient only decay is left: 1 - lr * decay = 1 - 0.1 * 0.5.
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(norm.detach(), torch.ones(2))


def test_state_is_there_before_the_first_step():
    optimizer = build_optimizer({"matrix": Parameter(torch.ones(2, 2))}, OptimizerConfig())
    assert {name: tuple(t.shape) for name, t in optimizer.tensors().items()} == {
        "exp_avg.matrix": (2, 2),
        "exp_avg_sq.matrix": (2, 2),
    }


def test_norm_of_all_gradients_is_the_root_of_their_squares():
    # sqrt(3² + 4² + 12²).
    assert total_norm([torch.tensor([[3.0, 4.0]]), torch.tensor([12.0])]) == pytest.approx(13.0)
    assert total_norm([]) == 0.0
