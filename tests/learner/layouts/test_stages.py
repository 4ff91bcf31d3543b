"""Models cut down to stages: which layers, what one stage passes on, and which models can't be divided."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from async_rl.config.learner import ModelConfig
from async_rl.errors import ConfigError, ModelError
from async_rl.learner.data.packing import Packing, pack
from async_rl.learner.layouts.stages import Stage, check_stages, layer_bounds
from async_rl.learner.losses.batch import TokenLogprobs
from async_rl.learner.model.policy_model import PolicyModel, load_model, to_device
from tests.families.catalogue import build
from tests.learner.rank_scenarios import sequences_with_a_group
from tests.learner.tiny import tiny_model


def test_the_last_stage_has_no_more_layers_than_another():
    assert layer_bounds(4, 2) == [0, 2, 4]
    assert layer_bounds(7, 3) == [0, 2, 5, 7]  # 2, 3 and 2
    assert layer_bounds(11, 4) == [0, 3, 6, 9, 11]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="at most 2 stages, one for each decoder layer of the model, got 3"):
        layer_bounds(2, 3)


def gradients(model: PolicyModel, scored: TokenLogprobs, received: Tensor | None = None) -> dict[str, Tensor]:
    scored.logprobs.sum().backward()
    found = {name: p.grad for name, p in model.causal_lm.named_parameters() if p.grad is not None}
    return found if received is None or received.grad is None else found | {"received": received.grad}


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("tied", [True, False])
def test_two_stages_compute_what_the_whole_model_computes(tmp_path: Path, tied: bool, packing: Packing):
    tiny_model(tmp_path, tied=tied, num_hidden_layers=3)
    whole = PolicyModel(load_model(ModelConfig(path=str(tmp_path))), packing)
    first, second = (copy.deepcopy(whole) for _ in range(2))
    stages = [Stage(model, torch.float32, index=i, num_stages=2) for i, model in enumerate((first, second))]
    ((micro_batch,),) = pack(sequences_with_a_group(), max_tokens=200, num_ranks=1, packing=packing)
    batch = to_device(micro_batch, torch.device("cpu"), packing)

    hidden: Tensor = first(batch)
    received = hidden.detach().requires_grad_()
    assert hidden.shape == (len(micro_batch.token_ids), stages[0].width)
    with stages[1].entered(batch, received):
        scored = second(batch)
    expected = whole(batch)
    torch.testing.assert_close(scored, expected)
    found = gradients(second, scored, received)
    hidden.backward(found.pop("received"))
    embedding = "model.embed_tokens.weight"
    of_first = {name: p.grad for name, p in first.causal_lm.named_parameters() if p.grad is not None}
    if tied:
        # The embedding of the first stage and the head of the second are the same weights.
        found[embedding] = found[embedding] + of_first.pop(embedding)
    assert not found.keys() & of_first.keys()
    wanted = gradients(whole, expected)
    assert (found | of_first).keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close((found | of_first)[name], tensor, msg=lambda m, n=name: f"{n}: {m}")


def test_each_tensor_has_one_owner_and_a_tied_embedding_a_copy(tmp_path: Path):
    tiny_model(tmp_path, num_hidden_layers=4)
    whole = PolicyModel(load_model(ModelConfig(path=str(tmp_path))))
    names = whole.tensor_names()
    models = [copy.deepcopy(whole) for _ in range(4)]
    stages = [Stage(model, torch.float32, index=i, num_stages=4) for i, model in enumerate(models)]
    for index, (stage, model) in enumerate(zip(stages, models, strict=True)):
        present = stage.present(names)
        assert present == model.tensor_names()
        assert {stage.owner(name) for name in present} - {index} == ({0} if stage.copied else set())
        assert (stage.tied_weight is not None) == (index in (0, 3))
        assert sum(len(list(layer.parameters())) > 0 for layer in model.decoder_layers) == 1
    assert [stage.copied for stage in stages] == [None, None, None, "model.embed_tokens.weight"]
    assert stages[3].present(names)[-1] == "model.norm.weight"
    owned = stages[3].owned(dict.fromkeys(["model.embed_tokens.weight", "model.norm.weight"], Tensor()))
    assert list(owned) == ["model.norm.weight"]


@pytest.mark.parametrize("name", ["Gemma", "Granite", "Qwen 2, windows", "Mixtral", "Gemma 2"])
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
        ("GPT-J", "it fails: "),  # its layers return more than hidden states
    ],
)
def test_models_that_cannot_be_divided_are_refused_by_name(name: str, finding: str):
    with pytest.raises(ModelError, match=f"parallel.pipeline: .*can't be divided into stages: .*{finding}"):
        check_stages(PolicyModel(build(name), "padded"))


def test_the_check_leaves_a_model_of_one_kind_of_layer_as_it_was(tmp_path: Path):
    tiny_model(tmp_path, num_hidden_layers=1)
    policy = PolicyModel(load_model(ModelConfig(path=str(tmp_path))))
    check_stages(policy)
    assert isinstance(policy.causal_lm.get_input_embeddings(), nn.Embedding)
    assert len(policy.decoder_layers) == 1
