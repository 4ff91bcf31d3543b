"""Which models may be trained on packed or padded rows: each family computes the same as alone, or is refused by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from async_rl.errors import ModelError
from async_rl.learner.data.packing import Packing, pack
from async_rl.learner.model import self_test as module
from async_rl.learner.model.policy_model import PolicyModel
from async_rl.learner.model.self_test import check_neighbours, check_packing
from async_rl.learner.sequences import TrainSequence
from tests.families.catalogue import LONGROPE, build

DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "LFM 2": ({}, r"layers\.0\.conv\.out_proj differs by"),
    "MiniMax": ({}, r"layers\.0\.self_attn\.\S+ differs by"),
    "Qwen 2 MoE, windows": ({}, r"self_attn\.o_proj differs by"),
    "Phi 3": (LONGROPE, "longrope positions"),
    "Llama": (DYNAMIC, "dynamic positions depend on .* above 64 tokens, and sequences may have 200"),
    "GPT-OSS": ({}, "does not support s_aux"),
    "Doge": ({}, "does not support attention_mask"),
    "Gemma 2": ({}, "does not support softcap"),
    "GLM DSA": ({}, "it fails on sequences packed in a row: TypeError"),
    "Nemotron": ({}, "expected packed_layout"),
    "Llama 4": ({}, "decoder layers"),
    "Mamba 2": ({}, "can't be trained on packed rows"),
    "RecurrentGemma": ({}, "can't be trained on packed rows"),
}
"""Family -> settings, and why it is refused in packed rows."""


def policy_of(family: str, packing: Packing = "packed", **settings: Any) -> PolicyModel:
    return PolicyModel(build(family, **settings), packing)


@pytest.mark.parametrize("name", ["Llama", "Qwen 2, windows", "Gemma 3", "Qwen 3 MoE", "DeepSeek-V3"])
def test_families_that_compute_the_same_are_accepted(name: str):
    check_packing(policy_of(name), max_length=200)


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_do_not_are_refused_with_what_differs(name: str):
    settings, found = REFUSED[name]
    with pytest.raises(ModelError, match=found):
        check_packing(policy_of(name, **settings), max_length=200)


@pytest.mark.parametrize("name", ["Phi 3", "Llama", "GLM DSA", "Llama 4"])
def test_what_differs_in_padded_rows_too_is_refused(name: str):
    with pytest.raises(ModelError):
        check_packing(policy_of(name, "padded", **REFUSED[name][0]), max_length=200)


class Leaks(nn.Module):
    """Adds a share of the token before, whose sequence may be another, or of the one after, which may be padding."""

    def __init__(self, inner: nn.Module, share: float, *, of_next: bool = False, only_backward: bool = False) -> None:
        super().__init__()
        self.inner, self.share, self.of_next, self.only_backward = inner, share, of_next, only_backward

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.inner(hidden)
        nothing = torch.zeros_like(out[:, :1])
        other = torch.cat([out[:, 1:], nothing] if self.of_next else [nothing, out[:, :-1]], dim=1)
        return out + self.share * (other - other.detach() if self.only_backward else other)


@pytest.mark.parametrize(
    ("packing", "leak", "found"),
    [
        ("packed", {"share": 1e-3}, r"on packed rows: the output of layers\.1\.mlp differs"),
        ("packed", {"share": 0.1, "only_backward": True}, "the gradient at its"),
        ("padded", {"share": 1.5e-4, "of_next": True}, r"on padded rows: the output of layers\.1\.mlp differs"),
    ],
)
def test_a_leak_along_the_row_is_found(packing: Packing, leak: dict[str, Any], found: str):
    policy = policy_of("Llama", packing)
    layer: Any = policy.decoder_layers[1]
    layer.mlp = Leaks(layer.mlp, **leak)
    with pytest.raises(ModelError, match=found):
        check_packing(policy, max_length=200)


class LeavesHooks(nn.Module):
    """Raises as a checkpointed layer does in torch 2.12: its hooks stay until the frame of its call is gone."""

    def __init__(self, saved: list[Tensor]) -> None:
        super().__init__()
        self.saved = saved

    def forward(self, hidden: Tensor) -> Tensor:
        hooks = self.pushed_hooks()
        next(hooks)
        raise ValueError("no such layer")

    def pushed_hooks(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: self.saved.append(t) or t, lambda t: t):
            yield


def test_a_layer_that_raises_leaves_no_hooks_for_what_is_computed_next():
    saved: list[Tensor] = []
    policy = policy_of("Llama")
    layer: Any = policy.decoder_layers[1]
    layer.mlp = LeavesHooks(saved)
    with pytest.raises(ModelError, match="it fails on sequences packed in a row: ValueError: no such layer") as kept:
        check_packing(policy, max_length=200)
    torch.ones(2, requires_grad=True).exp()  # saves its result
    assert (len(saved), str(kept.value.__cause__)) == (0, "no such layer")


def test_logits_that_are_not_the_output_of_the_head_are_refused():
    policy = policy_of("Llama")
    policy.logit_factor = 0.999
    with pytest.raises(ModelError, match=r"its logits differ by 1\.0e-03 of the largest"):
        check_packing(policy, max_length=200)
    # Qwen 2 ignores this key. The logits are below 1, where a cap of 30 would show only in the fourth digit.
    with pytest.raises(ModelError, match=r"its logits differ by .* of its head times 1, capped at 30"):
        check_packing(policy_of("Qwen 2", final_logit_softcapping=30.0), max_length=200)


def test_a_model_whose_tokens_see_later_ones_is_refused():
    with pytest.raises(ModelError, match="its tokens depend on later ones: without the last token of a sequence"):
        check_packing(policy_of("BERT without a causal mask", "padded"), max_length=200)


def test_what_only_long_sequences_meet_is_accepted_for_short_ones():
    check_packing(policy_of("Phi 3", **LONGROPE), max_length=32)
    wider = policy_of("Qwen 2 MoE, windows", sliding_window=64)
    check_packing(wider, max_length=64)
    with pytest.raises(ModelError, match="o_proj differs by"):
        check_packing(wider, max_length=65)


def test_the_model_is_as_before_afterwards():
    policy = policy_of("Qwen 2, windows")
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    check_packing(policy, max_length=200)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in policy.parameters())
    config: Any = policy.causal_lm.config
    assert (config.sliding_window, config._attn_implementation) == (8, "async_rl_packed")
    assert [layer.self_attn.sliding_window for layer in cast(Any, policy.decoder_layers)] == [None, 8]
    assert not any(submodule._forward_hooks for submodule in policy.modules())


def test_of_a_large_model_only_layers_up_to_the_last_new_kind_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_FEW_PARAMETERS", 0)
    policy = policy_of("Llama", num_hidden_layers=5)
    layers = policy.decoder_layers
    run: list[int] = []
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: run.append(index))
    check_packing(policy, max_length=200)
    assert set(run) == {0}
    cast(Any, layers[3]).mlp = Leaks(cast(Any, layers[3]).mlp, 1e-3)
    with pytest.raises(ModelError, match=r"layers\.3\.mlp"):
        check_packing(policy, max_length=200)
    assert policy.decoder_layers is layers


def scoring(score: Callable[[np.ndarray, int], float]) -> Callable[[Sequence[TrainSequence]], dict[int, np.ndarray]]:
    """An engine whose logprobs of a sequence are a function of it and of the row's tokens."""

    def of_row(sequences: Sequence[TrainSequence]) -> dict[int, np.ndarray]:
        total = sum(int(sequence.token_ids.sum()) for sequence in sequences)
        return {s.sequence_id: np.array([score(s.token_ids, total)], np.float32) for s in sequences}

    return of_row


def test_values_that_change_with_the_neighbours_are_refused():
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"])
    independent = scoring(lambda ids, total: float(ids.sum()))
    leaking = scoring(lambda ids, total: float(ids.sum()) + 1e-3 * total)
    check_neighbours(independent, config, num_ranks=2)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM .* logprobs change by up to"):
        check_neighbours(leaking, config, num_ranks=2)
    # Experts compute tokens of several sequences together, so rounding may change.
    check_neighbours(leaking, transformers.MixtralConfig(), num_ranks=2)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_sequence_under_test_has_a_neighbour_on_any_number_of_ranks(packing: Packing):
    for num_ranks in range(1, 65):
        sequences = module._sequences(64, copies=num_ranks)
        ranks = pack(sequences, max_tokens=module.NEIGHBOURS_TOKENS, num_ranks=num_ranks, packing=packing)
        (batch,) = [b for rank in ranks for b in rank if 0 in b.sequence_ids]
        assert len(batch.sequence_ids) > 1, num_ranks
