"""Adapters: only they are trained and saved; what is published, scored and exported is the model they make."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from async_rl.config.learner import LoraConfig
from async_rl.errors import ConfigError, ModelError, RunError
from async_rl.extensions.offline.tasks import train
from async_rl.learner.checkpoints.digests import write_manifest
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.export.model import export_adapter, export_checkpoint
from async_rl.learner.model.lora import merge
from async_rl.learner.ranks import init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner.rank_scenarios import ADAPTED, LORA, adapted_config, batch_for, save, train_adapters, with_reference
from tests.learner.ranks import run_ranks
from tests.learner.tiny import tiny_config, tiny_model

TOKEN_IDS = torch.arange(4, 20)[None]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and what one rank made of it with adapters (``ranks_1/plain``)."""
    root = tmp_path_factory.mktemp("lora")
    tiny_model(root / "model")
    train_adapters(make_engine(root), root / "ranks_1" / "plain")
    write_manifest(root / "ranks_1" / "plain" / "first")
    return root


@pytest.fixture(scope="module")
def two_ranks(directory: Path) -> Path:
    run_ranks("adapted", directory)
    return directory / "ranks_2"


def make_engine(root: Path, **variant: Any) -> FsdpEngine:
    config = adapted_config(root, variant)
    return FsdpEngine(config, init_ranks(config))


def weights_of(engine: FsdpEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.gather()}


def plain_model(directory: Path, weights: dict[str, Tensor]) -> Any:
    """Transformers' own model with these weights, as a generator has them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    wrong = model.load_state_dict(weights, strict=False)
    assert not wrong.unexpected_keys
    assert set(wrong.missing_keys) <= {"lm_head.weight"}
    return model


def plain_scores(model: Any, sequence: TrainSequence) -> np.ndarray:
    token_ids = torch.from_numpy(sequence.token_ids).long()
    with torch.no_grad():
        logprobs = model(input_ids=token_ids[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, token_ids[1:, None])[:, 0].numpy()[sequence.loss_mask[1:]]


def test_a_merged_weight_is_w_plus_scale_times_b_a():
    # B A = [[1], [2]] [[3, 4]] = [[3, 4], [6, 8]]; scale 0.5; W = ones.
    weight, a, b = torch.ones(2, 2), torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0], [2.0]])
    torch.testing.assert_close(merge(weight, a, b, scale=0.5), torch.tensor([[2.5, 3.0], [4.0, 5.0]]))


def test_a_rank_stabilised_scale_is_alpha_over_the_root_of_the_rank():
    # 16 / 64 = 0.25, 16 / 8 = 2.
    scales = [LoraConfig(rank=64, alpha=16.0, rank_stabilized=stable).scale for stable in (False, True)]
    assert scales == [0.25, 2.0]


def test_the_defaults_are_seven_projections_and_no_adapters():
    config = LoraConfig()
    assert not config.is_set
    assert config.targets == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_adapters_begin_as_no_change_and_publish_the_names_of_a_full_run(directory: Path):
    stored = load_file(directory / "model" / "model.safetensors")
    published = weights_of(make_engine(directory))
    config = tiny_config(directory, "model")
    full = FsdpEngine(config, init_ranks(config))
    assert list(published) == [name for name, _ in full.gather()]
    assert all(torch.equal(published[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("tied", [True, False])
def test_published_weights_give_the_logprobs_of_the_model_with_adapters(tmp_path: Path, tied: bool):
    tiny_model(tmp_path / "model", tied=tied)
    engine = make_engine(tmp_path)
    before = weights_of(engine)
    train_adapters(engine, tmp_path / "out")
    published = weights_of(engine)
    model = plain_model(tmp_path / "model", published)
    moved = {n.rpartition(".")[0].rpartition(".")[2] for n, t in published.items() if not torch.equal(t, before[n])}
    assert moved == set(LoraConfig().targets)
    scores, apart = engine.score(batch_for(0), of="policy"), engine.score(batch_for(0), of="reference")
    for sequence in batch_for(0):
        own = scores[sequence.sequence_id]
        np.testing.assert_allclose(own, plain_scores(model, sequence), atol=1e-5, rtol=0)
        assert np.abs(own - apart[sequence.sequence_id]).max() > 1e-2, "the step must be large enough to be seen"


def test_only_adapters_are_trained_and_saved(directory: Path):
    first = directory / "ranks_1" / "plain" / "first"
    # Two layers of seven projections, A and B each.
    adapters = load_tensors(first)
    assert len(adapters) == 2 * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in adapters)
    assert {tuple(t.shape) for n, t in adapters.items() if "q_proj" in n} == {(4, 16), (16, 4)}
    moments = load_tensors(first, OPTIMIZER)
    assert {name.partition(".")[2] for name in moments} == set(adapters)
    engine = make_engine(directory)
    assert sum(p.numel() for p in engine.policy.parameters.values()) == sum(t.numel() for t in adapters.values())


def test_frozen_weights_are_kept_in_the_dtype_they_compute_in_and_adapters_in_float32(directory: Path):
    engine = make_engine(directory, model={"dtype": "bfloat16"})
    dtypes = {p.requires_grad: p.dtype for p in engine.policy.model.parameters()}
    engine.close()
    assert dtypes == {False: torch.bfloat16, True: torch.float32}


def test_sft_trains_adapters_and_writes_a_merged_model(directory: Path, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 4)
    settings = {"data": str(tmp_path / "rows.jsonl"), "out": str(tmp_path / "out"), "steps": 2, "batch_size": 2}
    train("sft", tiny_config(tmp_path, directory / "model", lora=LORA, sft=settings | {"lr": 1e-2}))
    before, after = (load_file(d / "model.safetensors") for d in (directory / "model", tmp_path / "out"))
    moved = {n.rpartition(".")[0].rpartition(".")[2] for n in before if not torch.equal(before[n], after[n])}
    assert moved == set(LoraConfig().targets)


def test_a_restored_engine_goes_on_bit_for_bit(directory: Path):
    resumed = make_engine(directory)
    resumed.load(directory / "ranks_1" / "plain" / "first")
    # As train_adapters did after it had saved.
    resumed.update(with_reference(resumed, batch_for(1)[:1]), version=1)
    expected = np.load(directory / "ranks_1" / "plain" / "weights.npz")
    after = weights_of(resumed)
    assert set(after) == set(expected.files)
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ADAPTED)
def test_two_ranks_train_the_adapters_of_one(directory: Path, two_ranks: Path, variant: str):
    name = variant if variant in ("bfloat16", "4 bits") else "plain"
    if name != "plain":
        engine = make_engine(directory, **ADAPTED[variant])
        train_adapters(engine, directory / "ranks_1" / name)
        engine.close()
    for file in ("weights", "reference", "policy"):
        one = np.load(directory / "ranks_1" / name / f"{file}.npz")
        two = np.load(two_ranks / variant / f"{file}.npz")
        assert set(one.files) == set(two.files)
        # In bfloat16, whose eps is 2 ** -8, other sums on two ranks round otherwise; scores are sums over a sequence.
        near = 1e-5 if name != "bfloat16" else 0.02 if file == "weights" else 0.05
        for key in one.files:
            np.testing.assert_allclose(two[key], one[key], atol=near, rtol=near, err_msg=f"{file} {key}")


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_read_by_one(directory: Path, two_ranks: Path):
    engine = make_engine(directory)
    engine.load(two_ranks / "plain" / "first")
    one = make_engine(directory)
    one.load(directory / "ranks_1" / "plain" / "first")
    expected = weights_of(one)
    for name, tensor in weights_of(engine).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-5)


def test_the_reference_is_the_model_without_adapters_and_no_second_one_is_loaded(directory: Path, tmp_path: Path):
    engine = make_engine(directory)
    assert engine.policy.reference is None
    config = tiny_config(directory, "model")
    untrained = FsdpEngine(config, init_ranks(config)).score(batch_for(0), of="policy")
    train_adapters(engine, tmp_path / "trained")
    for sequence_id, logprobs in engine.score(batch_for(0), of="reference").items():
        np.testing.assert_allclose(logprobs, untrained[sequence_id], atol=1e-6, rtol=0)


def test_another_reference_may_be_named(directory: Path):
    tiny_model(directory / "other", seed=5)
    loss = {"preset": "grpo", "kl_coef": 0.1, "kl_reference": str(directory / "other")}
    config = tiny_config(directory, "model", lora=LORA, loss=loss)
    engine = FsdpEngine(config, init_ranks(config))
    other = load_file(directory / "other" / "model.safetensors")
    expected = plain_scores(plain_model(directory / "model", other), batch_for(0)[0])
    np.testing.assert_allclose(engine.score(batch_for(0)[:1], of="reference")[0], expected, atol=1e-5, rtol=0)


def test_an_export_is_the_merged_model(directory: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    checkpoint = directory / "ranks_1" / "plain" / "first"
    export_checkpoint(checkpoint, tmp_path / "out")
    engine = make_engine(directory)
    engine.load(checkpoint)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    for name, tensor in engine.gather():
        torch.testing.assert_close(exported[name], tensor, atol=1e-6, rtol=0)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("lora", [{}, {"rank_stabilized": True}])
def test_an_exported_adapter_is_one_that_peft_loads(directory: Path, tmp_path: Path, lora: dict[str, Any]):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = make_engine(directory, lora=lora)
    engine.update(with_reference(engine, batch_for(0)), version=0)
    save(engine, tmp_path / "saved", 1)
    write_manifest(tmp_path / "saved")
    export_adapter(tmp_path / "saved", tmp_path / "adapter")
    export_checkpoint(tmp_path / "saved", tmp_path / "merged")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    for name, tensor in engine.gather():
        torch.testing.assert_close(exported[name], tensor, atol=1e-6, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    untouched = base(TOKEN_IDS).logits
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(TOKEN_IDS).logits
        merged = plain_model(directory / "model", weights_of(engine))(TOKEN_IDS).logits
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=0)
    assert (adapted - untouched).abs().max() > 1e-2


def test_adapters_without_their_model_and_a_full_checkpoint_without_adapters_are_not_exported(tmp_path: Path):
    tiny_model(tmp_path / "model")
    save(make_engine(tmp_path), tmp_path / "adapters", 1)
    config = tiny_config(tmp_path, "model")
    save(FsdpEngine(config, init_ranks(config)), tmp_path / "full", 1)
    for name in ("adapters", "full"):
        write_manifest(tmp_path / name)
    with pytest.raises(RunError, match=r"expected a checkpoint of adapters \(lora.rank\)"):
        export_adapter(tmp_path / "full", tmp_path / "out")
    tiny_model(tmp_path / "model", seed=1)
    with pytest.raises(RunError, match=r"belong to other weights .* put the model back that the run began with"):
        export_checkpoint(tmp_path / "adapters", tmp_path / "out")
    with pytest.raises(RunError, match=r"belong to other weights"):
        make_engine(tmp_path).load(tmp_path / "adapters")
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ModelError, match="holds adapters only, and the model that they belong to is gone"):
        export_checkpoint(tmp_path / "adapters", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("lm_head", "lm_head is not in a decoder layer"),
        ("embed_tokens", "model.embed_tokens is not in a decoder layer"),
        ("input_layernorm", r"expected linear layers, but model.layers.0.input_layernorm is a Qwen2RMSNorm"),
        ("qkv_proj", r"Qwen2ForCausalLM has no layer named 'qkv_proj'; .* q_proj, up_proj, v_proj"),
    ],
)
def test_targets_that_can_have_no_adapter_are_refused_by_name(directory: Path, target: str, message: str):
    config = tiny_config(directory, "model", lora={"rank": 2, "targets": ["q_proj", target]})
    with pytest.raises(ModelError, match=f"lora.targets: .*{message}"):
        FsdpEngine(config, init_ranks(config))


@pytest.mark.parametrize("targets", [[], ["self_attn.q_proj"], ["q_proj", "q_proj"], [""]])
def test_targets_are_last_parts_of_names(tmp_path: Path, targets: list[str]):
    with pytest.raises(ConfigError, match=r"lora.targets"):
        tiny_config(tmp_path, "model", lora={"rank": 2, "targets": targets})
