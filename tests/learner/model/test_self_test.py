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
from tests.families.catalogue import build as tiny
from tests.learner.model.families import (
    CONVOLUTION,
    EXPERTS,
    HALF_WINDOW,
    LATENT,
    LONGROPE,
    SHAPE,
    SPARSE,
    STATEFUL,
    WINDOW,
    causal_lm,
)  # fmt: skip

RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2 with windows": ("Qwen2", HALF_WINDOW),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 8}),
    "mistral with windows": ("Mistral", WINDOW),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "gemma3": ("Gemma3Text", {"head_dim": 8, **WINDOW}),
    "cohere2": ("Cohere2", WINDOW),
    "deepseek v3": ("DeepseekV3", LATENT),
    "phi3": ("Phi3", {}),
    "olmo3": ("Olmo3", WINDOW),
    "granite": ("Granite", {}),
    "glm4": ("Glm4", {"head_dim": 8}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "lfm2": ("Lfm2", CONVOLUTION, r"layers\.0\.conv\.out_proj differs by"),
    "lfm2 moe": ("Lfm2Moe", {**CONVOLUTION, **EXPERTS, "num_dense_layers": 1}, r"layers\.0\.conv\.out_proj differs by"),
    "minimax": (
        "MiniMax",
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "block_size": 4},
        r"layers\.0\.self_attn\.\S+ differs by",
    ),
    "windows of qwen2 moe": (
        "Qwen2Moe", {**HALF_WINDOW, **EXPERTS, "shared_expert_intermediate_size": 16}, r"self_attn\.o_proj differs by",
    ),
    "windows of phimoe": ("Phimoe", {**WINDOW, "num_local_experts": 4}, r"self_attn\.o_proj differs by"),
    "longrope": ("Phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE}, "longrope positions"),
    "dynamic rope": (
        "Llama",
        {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "dynamic positions depend on the longest sequence of a micro-batch above 64 tokens, and sequences may have 200",
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 8, **WINDOW}, "does not support s_aux"),
    "mimo v2 flash": ("MiMoV2Flash", {}, "does not support s_aux"),
    "granite swa": ("GraniteSWA", WINDOW, "does not support s_aux"),
    "doge": ("Doge", {}, "does not support attention_mask"),
    "gemma2": ("Gemma2", {"head_dim": 8}, "does not support softcap"),
    "deepseek v3.2": ("DeepseekV32", SPARSE, "it fails on sequences packed in a row: TypeError"),
    "glm dsa": ("GlmMoeDsa", SPARSE, "it fails on sequences packed in a row: TypeError"),
    "nemotron": ("Nemotron", {}, "expected packed_layout"),
    "llama 4": ("Llama4", {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 48}, "decoder layers"),
}  # fmt: skip
# Some of REFUSED go in padded rows. DeepSeek's choice of tokens differs with rounding, where scores are equal.
REFUSED_PADDED = ("longrope", "dynamic rope", "deepseek v3.2", "glm dsa", "llama 4")
PADDED: dict[str, tuple[str, dict[str, Any]]] = {
    **RIGHT,
    **STATEFUL,
    **{name: row[:2] for name, row in REFUSED.items() if name not in REFUSED_PADDED},
}  # fmt: skip


def build(family: str, settings: dict[str, Any], packing: Packing = "packed") -> PolicyModel:
    return PolicyModel(causal_lm(family, settings), packing)


@pytest.mark.parametrize("name", RIGHT)
def test_families_that_compute_the_same_are_accepted(name: str):
    check_packing(build(*RIGHT[name]), max_length=200)


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_do_not_are_refused_with_what_differs(name: str):
    family, settings, found = REFUSED[name]
    with pytest.raises(ModelError, match=found):
        check_packing(build(family, settings), max_length=200)


@pytest.mark.parametrize("name", PADDED)
def test_families_that_compute_the_same_in_padded_rows_are_accepted(name: str):
    check_packing(build(*PADDED[name], "padded"), max_length=200)


@pytest.mark.parametrize("name", STATEFUL)
def test_models_with_state_along_the_row_are_refused_packed(name: str):
    with pytest.raises(ModelError, match="can't be trained on packed rows"):
        check_packing(build(*STATEFUL[name]), max_length=200)


@pytest.mark.parametrize("name", REFUSED_PADDED)
def test_what_differs_in_padded_rows_too_is_refused(name: str):
    family, settings, _ = REFUSED[name]
    with pytest.raises(ModelError):
        check_packing(build(family, settings, "padded"), max_length=200)


class LooksAhead(nn.Module):
    """Adds a little of the token after, which may be padding."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.inner(hidden)
        return out + 1e-3 * torch.cat([out[:, 1:], torch.zeros_like(out[:, :1])], dim=1)


def test_a_model_whose_tokens_see_the_padding_is_refused():
    policy = build("Llama", {}, "padded")
    layer: Any = policy.decoder_layers[1]
    layer.mlp = LooksAhead(layer.mlp)
    with pytest.raises(ModelError, match=r"can't be trained on padded rows: the output of layers\.1\.mlp differs"):
        check_packing(policy, max_length=200)


class LeavesHooks(nn.Module):
    """Raises as a checkpointed layer does in torch 2.11: its hooks stay until the frame of its call is gone."""

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
    policy = build("Llama", {})
    layer: Any = policy.decoder_layers[1]
    layer.mlp = LeavesHooks(saved)
    with pytest.raises(ModelError, match="it fails on sequences packed in a row: ValueError: no such layer") as kept:
        check_packing(policy, max_length=200)
    torch.ones(2, requires_grad=True).exp()  # saves its result
    assert (len(saved), str(kept.value.__cause__)) == (0, "no such layer")


def test_logits_that_are_not_the_output_of_the_head_are_refused():
    policy = build("Llama", {})
    policy.logit_factor = 0.999
    with pytest.raises(ModelError, match=r"its logits differ by 1\.0e-03 of the largest"):
        check_packing(policy, max_length=200)
    # Qwen 2 ignores this key. The logits are below 1, where a cap of 30 would show only in the fourth digit.
    with pytest.raises(ModelError, match=r"its logits differ by .* of its head times 1, capped at 30"):
        check_packing(build("Qwen2", {"final_logit_softcapping": 30.0}), max_length=200)


def test_a_model_whose_tokens_see_later_ones_is_refused():
    with pytest.raises(ModelError, match="its tokens depend on later ones: without the last token of a sequence"):
        check_packing(PolicyModel(tiny("BERT without a causal mask"), "padded"), max_length=200)


def test_a_cap_on_attention_is_computed_by_attention_that_has_it():
    policy = PolicyModel(tiny("Gemma 2"), "padded")
    check_packing(policy, max_length=200)
    assert policy.causal_lm.config._attn_implementation == "eager"


def test_what_only_long_sequences_meet_is_accepted_for_short_ones():
    family, settings, _ = REFUSED["longrope"]
    check_packing(build(family, settings), max_length=32)
    family, settings, _ = REFUSED["windows of qwen2 moe"]
    wider = build(family, {**settings, "sliding_window": 64})
    check_packing(wider, max_length=64)
    with pytest.raises(ModelError, match="o_proj differs by"):
        check_packing(wider, max_length=65)


class Leaks(nn.Module):
    """Adds a little of the token before, whose sequence may be another."""

    def __init__(self, inner: nn.Module, share: float, *, only_backward: bool = False) -> None:
        super().__init__()
        self.inner, self.share, self.only_backward = inner, share, only_backward

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.inner(hidden)
        before = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], dim=1)
        return out + self.share * (before - before.detach() if self.only_backward else before)


@pytest.mark.parametrize(
    ("only_backward", "found"), [(False, r"layers\.1\.mlp differs"), (True, "the gradient at its")]
)
def test_a_leak_of_a_thousandth_along_the_row_is_found(only_backward: bool, found: str):
    policy = build("Llama", {})
    layer: Any = policy.decoder_layers[1]
    layer.mlp = Leaks(layer.mlp, 1e-3 if not only_backward else 0.1, only_backward=only_backward)
    with pytest.raises(ModelError, match=found):
        check_packing(policy, max_length=200)


def test_the_model_is_as_before_afterwards():
    policy = build("Qwen2", HALF_WINDOW)
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
    policy = build("Llama", {"num_hidden_layers": 5})
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
    config = transformers.LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"])
    independent = scoring(lambda ids, total: float(ids.sum()))
    leaking = scoring(lambda ids, total: float(ids.sum()) + 1e-3 * total)
    check_neighbours(independent, config, num_ranks=2)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM .* logprobs change by up to"):
        check_neighbours(leaking, config, num_ranks=2)
    # Experts compute tokens of several sequences together, so rounding may change.
    check_neighbours(leaking, transformers.MixtralConfig(**SHAPE), num_ranks=2)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_sequence_under_test_has_a_neighbour_on_any_number_of_ranks(packing: Packing):
    for num_ranks in range(1, 65):
        sequences = module._sequences(64, copies=num_ranks)
        ranks = pack(sequences, max_tokens=module.NEIGHBOURS_TOKENS, num_ranks=num_ranks, packing=packing)
        (batch,) = [b for rank in ranks for b in rank if 0 in b.sequence_ids]
        assert len(batch.sequence_ids) > 1, num_ranks
