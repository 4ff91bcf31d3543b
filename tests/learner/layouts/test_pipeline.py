"""The order in which stages compute, by hand; two stages compute what one process computes, however they do it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import pytest
import torch
from torch import Tensor

from async_rl.learner.layouts.pipeline import Pipeline
from async_rl.learner.phases import PhaseClock
from async_rl.learner.ranks import init_ranks
from tests.learner.layouts.staged import STAGED, staged_config
from tests.learner.rank_layouts import assert_same, run_layout
from tests.learner.ranks import run_ranks
from tests.learner.tiny import tiny_model


class InThreads(Pipeline):
    """A stage in a thread, which exchanges tensors by queues: (sender, receiver) -> queue."""

    def __init__(self, index: int, num_stages: int, queues: dict[tuple[int, int], Queue[Tensor]]) -> None:
        self.index, self.num_stages, self.is_last = index, num_stages, index == num_stages - 1
        self._dtype, self._queues, self._sending = torch.float32, queues, []

    def _exchange(
        self,
        *,
        down: Tensor | None = None,
        up: Tensor | None = None,
        from_before: tuple[int, int] | None = None,
        from_after: tuple[int, int] | None = None,
    ) -> Tensor | None:
        for tensor, peer in ((down, self.index + 1), (up, self.index - 1)):
            if tensor is not None and (self.index, peer) in self._queues:
                self._queues[self.index, peer].put(tensor.clone())
        for shape, peer in ((from_before, self.index - 1), (from_after, self.index + 1)):
            if shape is not None and (peer, self.index) in self._queues:
                return self._queues[peer, self.index].get(timeout=60)
        return None


def train_in_threads(num_stages: int, num_tokens: list[int]) -> tuple[list[str], list[float]]:
    """What each stage did, and the gradients of the stages' weights. Stage s multiplies by its weight, s + 1; the loss
    of a micro-batch is the sum over its tokens.
    """
    pairs = [(s, s + 1) for s in range(num_stages - 1)]
    queues: dict[tuple[int, int], Queue[Tensor]] = {p: Queue() for a, b in pairs for p in ((a, b), (b, a))}
    done = [""] * num_stages
    weights = [torch.tensor(s + 1.0, requires_grad=True) for s in range(num_stages)]

    def run(stage: int) -> None:
        pipeline = InThreads(stage, num_stages, queues)

        def forward(index: int, received: Tensor | None) -> Tensor:
            done[stage] += f"F{index} "
            hidden = weights[stage] * (torch.ones(num_tokens[index], 1) if received is None else received)
            return hidden.sum() if pipeline.is_last else hidden

        def backward(index: int, output: Tensor, gradient: Tensor | None) -> None:
            done[stage] += f"B{index} "
            output.backward(gradient)

        pipeline.train([(n, 1) for n in num_tokens], forward, backward, PhaseClock(torch.device("cpu")))

    with ThreadPoolExecutor(num_stages) as threads:
        list(threads.map(run, range(num_stages)))
    return [order.strip() for order in done], [0.0 if w.grad is None else float(w.grad) for w in weights]


def test_forward_and_backward_passes_alternate_once_the_pipeline_is_full():
    orders, gradients = train_in_threads(3, [2, 1, 4, 1, 2])
    assert orders == [
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]
    # 10 tokens of 1 x 2 x 3: each weight's gradient is 10 times the product of the other two.
    assert gradients == [60.0, 30.0, 20.0]


def test_fewer_micro_batches_than_stages_pass_through():
    orders, gradients = train_in_threads(4, [3])
    assert orders == ["F0 B0"] * 4
    assert gradients == [72.0, 36.0, 24.0, 18.0]  # 3 x 24 / weight


@pytest.mark.slow
def test_two_stages_take_the_steps_of_one_process(tmp_path: Path):
    tiny_model(tmp_path / "model", num_hidden_layers=3)
    alone = init_ranks(staged_config(tmp_path, {}, stages=1))
    for name, sections in STAGED.items():
        run_layout(staged_config(tmp_path, sections, stages=1), alone, tmp_path / "alone" / name)
    run_ranks("staged", tmp_path)
    for name in STAGED:
        assert_same(tmp_path / "staged" / name, tmp_path / "alone" / name)
    # The head's copy of the embedding follows it through steps in bfloat16, bit for bit.
    embedding, head = (torch.load(tmp_path / f"tied_{rank}.pt") for rank in range(2))
    assert torch.equal(embedding, head)
    found, _ = torch.load(tmp_path / "alone" / "skipped" / "found.pt", weights_only=False)
    assert all(loss != 0.0 for loss in found["loss"])
