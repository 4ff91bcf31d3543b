"""Models cut down to stages: which layers, what one stage passes on, and which models can't be divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.errors import ConfigError, ModelError
from async_rl.learner.layouts.pipeline import Pipeline
from async_rl.learner.layouts.stages import check_stages, layer_bounds
from async_rl.learner.model.policy_model import PolicyModel
from async_rl.learner.phases import PhaseClock
from tests.families.catalogue import build
from tests.learner.ranks import run_ranks
from tests.learner.tiny import tiny_model


def test_the_last_stage_has_no_more_layers_than_another():
    assert layer_bounds(4, 2) == [0, 2, 4]
    assert layer_bounds(7, 3) == [0, 2, 5, 7]  # 2, 3 and 2
    assert layer_bounds(11, 4) == [0, 3, 6, 9, 11]
    with pytest.raises(ConfigError, match="at most 2 stages, one for each decoder layer of the model, got 3"):
        layer_bounds(2, 3)


@pytest.mark.parametrize("name", ["Gemma", "Qwen 2, windows", "Mixtral", "Gemma 2"])
def test_models_that_scale_embeddings_or_mix_layers_can_be_divided(name: str):
    model = build(name)
    policy = PolicyModel(model, "packed" if name != "Gemma 2" else "padded")
    before = list(model.named_modules())
    check_stages(policy)
    assert list(model.named_modules()) == before


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("GPT-2", r"one norm and a head, got others in transformer\.wpe, transformer\.ln_f; leave the key out"),
        ("OLMo", "got none in a norm"),
        ("Zamba", r"in two stages the decoder's output differs by \d"),  # its layers see the embeddings, too
        ("Zamba 2", "some of its layers share weights"),
        ("Falcon", "it fails: "),  # its layers return more than hidden states
    ],
)
def test_models_that_cannot_be_divided_are_refused_by_name(name: str, finding: str):
    with pytest.raises(ModelError, match=f"parallel.pipeline: .*can't be divided into stages: .*{finding}"):
        check_stages(PolicyModel(build(name), "padded"))


@pytest.mark.slow
def test_the_heads_copy_of_the_embedding_follows_it_bit_for_bit(tmp_path: Path):
    tiny_model(tmp_path / "model", num_hidden_layers=3)
    run_ranks("staged", tmp_path)
    embedding, head = (torch.load(tmp_path / f"tied_{rank}.pt") for rank in range(2))
    assert torch.equal(embedding, head)


class OneStage(Pipeline):
    """A stage whose neighbours send ones at once."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.index, self.num_stages, self.is_last = index, num_stages, index == num_stages - 1
        self._dtype, self._sending = torch.float32, []

    def _exchange(self, **sent: Any) -> Tensor | None:
        shape = sent.get("from_before") if self.index else None
        shape = shape if self.is_last else shape or sent.get("from_after")
        return None if shape is None else torch.ones(shape)


@pytest.mark.parametrize(
    ("stage", "order"),
    [
        (0, "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
        (1, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"),
        (2, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"),
    ],
)
def test_forward_and_backward_passes_alternate_once_the_pipeline_is_full(stage: int, order: str):
    done: list[str] = []
    weight = torch.ones(1, requires_grad=True)

    def forward(index: int, received: Tensor | None) -> Tensor:
        done.append(f"F{index}")
        hidden = weight * (torch.ones(2, 1) if received is None else received)
        return hidden.sum() if stage == 2 else hidden

    def backward(index: int, output: Tensor, gradient: Tensor | None) -> None:
        done.append(f"B{index}")
        output.backward(gradient)

    OneStage(stage, 3).train([(2, 1)] * 5, forward, backward, PhaseClock(torch.device("cpu")))
    assert " ".join(done) == order
