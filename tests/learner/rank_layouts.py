"""Layouts of the learner's ranks, and one step under each. A row of ``LAYOUTS`` is all that a new layout needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from async_rl.config.config import Config
from async_rl.extensions.offline.slopes import SlopeObjective
from async_rl.learner.checkpoints.stored_tensors import OPTIMIZER, load_tensors
from async_rl.learner.ranks import Ranks, init_ranks
from async_rl.learner.sequences import TrainSequence
from tests.learner.rank_scenarios import (
    PLAIN,
    laid_out_engine,
    leads,
    save,
    sequences_with_a_group,
    stop_following,
    with_reference,
)
from tests.learner.ranks import run_ranks
from tests.learner.tiny import random_sequences, tiny_config, tiny_model, trained_tokens

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shards 2": (2, {}),
    "replicas 2": (2, {"replicas": 2}),
    "replicas 2 x shards 2": (4, {"replicas": 2}),
    "tensor 2": (2, {"tensor": 2}),
    "shards 2 x tensor 2": (4, {"tensor": 2}),
    "experts 2": (2, {"experts": 2}),
    "experts 2 of shards 4": (4, {"experts": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "pipeline 2 x shards 2": (4, {"pipeline": 2}),
    "pipeline 4": (4, {"pipeline": 4}),
    "pipeline 2 x tensor 2": (4, {"pipeline": 2, "tensor": 2}),
    "pipeline 2 x experts 2": (4, {"pipeline": 2, "experts": 2}),
    "pipeline 2 x sequence 2": (4, {"pipeline": 2, "sequence": 2}),
    "sequence 2": (2, {"sequence": 2}),
    "sequence 4": (4, {"sequence": 4}),
    "sequence 8": (8, {"sequence": 8}),
    "shards 2 x sequence 2": (4, {"sequence": 2}),
    "replicas 2 x sequence 2": (4, {"replicas": 2, "sequence": 2}),
    "sequence 2 x tensor 2": (4, {"sequence": 2, "tensor": 2}),
    "experts 2 of sequence 2": (2, {"sequence": 2, "experts": 2}),
}
"""Name -> number of ranks, and the section ``parallel``."""

_SHAPE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
}
"""Model -> its name in the classes of transformers, and its own settings."""
LORA = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "o_proj"]}}


def model_for(parallel: Mapping[str, Any], model: str) -> str:
    """``model``, or one with experts for a layout that divides these."""
    return "qwen3_moe" if "experts" in parallel else model


def layout_model(directory: Path, name: str, models: Mapping[str, tuple[str, dict[str, Any]]] = MODELS) -> Path:
    """Write the random model ``name`` of ``models`` with a tokenizer of one token a character."""
    return layout_weights(tiny_model(directory), name, models)


def layout_weights(directory: Path, name: str, models: Mapping[str, tuple[str, dict[str, Any]]] = MODELS) -> Path:
    """Write the model ``name`` of ``models``, of the vocabulary of the model in ``directory``, in its place."""
    vocabulary = transformers.AutoConfig.from_pretrained(directory).vocab_size
    class_name, own = models[name]
    torch.manual_seed(0)
    settings = {"vocab_size": vocabulary, **_SHAPE, **own}
    config = getattr(transformers, f"{class_name}Config")(**{k: v for k, v in settings.items() if v is not None})
    getattr(transformers, f"{class_name.removesuffix('Text')}ForCausalLM")(config).save_pretrained(directory)
    return directory


def layout_config(directory: Path, model: str, parallel: dict[str, Any], *, lora: bool) -> Config:
    """A step that reports its gradient, in several micro-batches of 40 tokens, however many ranks share one."""
    max_tokens = 40 // parallel.get("sequence", 1)
    sections = PLAIN | {"learner": {"max_tokens": max_tokens}, "parallel": parallel} | (LORA if lora else {})
    return tiny_config(directory, model, **sections)


def layout_sequences() -> list[TrainSequence]:
    """Ten of 6 to 30 tokens; the first three share a prompt."""
    more = random_sequences(4, 25, seed=1, spread=5)
    return [*sequences_with_a_group(), *(replace(s, sequence_id=10 + i) for i, s in enumerate(more))]


def run_layout(
    config: Config, ranks: Ranks, target: Path, sequences: list[TrainSequence] | None = None, **engine_settings: Any
) -> None:
    """Score, make two steps, save and publish, on all ranks; rank 0 writes what came out to ``target``."""
    engine = laid_out_engine(config, ranks, **engine_settings)
    if not leads(engine):
        return
    engine.self_test()
    target.mkdir(parents=True)
    first = sequences or layout_sequences()
    if config.loss.needs_reference:
        first = with_reference(engine, first)
    scores = engine.score_policy(first)
    recorded = [replace(sequence, is_recorded=True) for sequence in first]
    stats = [engine.update(recorded, version=0)]
    if config.loss.reference_every:  # with the second step
        assert_equal(engine.score(first, of="reference"), {i: one.logprobs for i, one in scores.items()})
    stats.append(engine.update(first[:5], version=0))
    if not engine_settings:
        assert stats[0].tokens.keys() == scores.keys()
        for sequence_id, tokens in stats[0].tokens.items():
            np.testing.assert_allclose(tokens.logprobs, scores[sequence_id].logprobs, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(tokens.entropies, scores[sequence_id].entropies, rtol=1e-3, atol=1e-3)
    if config.loss.reference_every and not config.loss.reference_decay:
        assert_equal(engine.score(first, of="reference"), engine.score(first, of="policy"))
    save(engine, target / "checkpoint", 2)
    published = {name: tensor.detach().clone() for name, tensor in engine.gather()}
    found = {
        "loss": [s.loss for s in stats],
        "grad_norm": [s.grad_norm for s in stats],
        "tokens": [s.tokens_trained for s in stats],
        "flops": [s.cost.flops for s in stats if s.cost is not None],
        "skipped": [s.skipped_sequence_ids for s in stats],
        "routing": [s.routing for s in stats],
        "scores": {i: (one.logprobs, one.entropies) for i, one in sorted(scores.items())},
    }
    torch.save((found, published), target / "found.pt")
    stop_following(engine)


def assert_equal(got: Mapping[int, np.ndarray], expected: Mapping[int, np.ndarray]) -> None:
    assert all(np.array_equal(got[i], values) for i, values in expected.items())


def value_sequences() -> list[TrainSequence]:
    """Those of ``layout_sequences``, with the slopes of a mean over their trained tokens."""
    sequences = layout_sequences()
    return [replace(s, slopes=s.advantages / trained_tokens(sequences)) for s in sequences]


def run_case(directory: Path, ranks: Ranks, name: str, model: str, *, lora: bool, of_values: bool) -> None:
    """``run_layout`` for the model in ``directory / model``, which has a value head if ``of_values``."""
    config = layout_config(directory, model, {} if name == "alone" else LAYOUTS[name][1], lora=lora)
    target, settings = case_directory(directory, name, model, lora=lora), dict[str, Any]()
    if of_values:
        settings = {"sequences": value_sequences(), "objective": SlopeObjective(), "head": "value"}
    run_layout(config, ranks, target, **settings)


def run_cases(directory: Path) -> None:
    """What each rank does: the cases of ``cases.json``, one after the other."""
    ranks = init_ranks(tiny_config(directory, "qwen2"))
    cases, of_values = json.loads((directory / "cases.json").read_text(encoding="utf-8"))
    for name, model, lora in cases:
        run_case(directory, ranks, name, model, lora=lora, of_values=of_values)
    ranks.close()


def compare_layouts(directory: Path, cases: Sequence[tuple[str, str, bool]], *, of_values: bool = False) -> None:
    """Compare a step under each layout with that of one process: layout, model, and whether it has adapters."""
    alone = init_ranks(tiny_config(directory, "qwen2"))
    for model, lora in {(model, lora) for _, model, lora in cases}:
        run_case(directory, alone, "alone", model, lora=lora, of_values=of_values)
    for size in sorted({LAYOUTS[name][0] for name, _, _ in cases}):
        of_size = [case for case in cases if LAYOUTS[case[0]][0] == size]
        (directory / "cases.json").write_text(json.dumps([of_size, of_values]), encoding="utf-8")
        run_ranks("laid_out", directory, world_size=size, timeout_s=max(300, 30 * len(of_size)))
    for name, model, lora in cases:
        results = (case_directory(directory, layout, model, lora=lora) for layout in (name, "alone"))
        assert_same(*results)


def pass_on(directory: Path) -> None:
    """What each rank does: under each layout of ``chain.json``, load the newest checkpoint of the chain and save it as
    the next.
    """
    names, number, lora = json.loads((directory / "chain.json").read_text(encoding="utf-8"))
    ranks = init_ranks(tiny_config(directory, "qwen3_moe"))
    for name in names:
        config = layout_config(directory, "qwen3_moe", LAYOUTS[name][1], lora=lora)
        engine = laid_out_engine(config, ranks)
        if leads(engine):
            engine.load(directory / "chain" / str(number))
            save(engine, directory / "chain" / str(number + 1), 1)
            stop_following(engine)
        number += 1
    ranks.close()


def case_directory(directory: Path, name: str, model: str, *, lora: bool) -> Path:
    """Where the results of a case are."""
    return directory / "results" / name / f"{model}{' with adapters' if lora else ''}"


def assert_same(case: Path, alone: Path) -> None:
    """Losses, gradients, scores and published weights differ by at most 1e-5."""
    (found, published), (expected, of_one) = (torch.load(d / "found.pt", weights_only=False) for d in (case, alone))
    for key in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, atol=1e-5, err_msg=f"{case}: {key}")
    assert found["skipped"] == expected["skipped"]
    assert found["scores"].keys() == expected["scores"].keys()
    for sequence_id, values in expected["scores"].items():
        np.testing.assert_allclose(found["scores"][sequence_id], values, rtol=1e-5, atol=1e-5)
    moments, of_one_moments = (load_tensors(d / "checkpoint", OPTIMIZER) for d in (case, alone))
    for kind, got, wanted in (("moment", moments, of_one_moments), ("weight", published, of_one)):
        assert got.keys() == wanted.keys(), case
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                got[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name, k=kind: f"{case}: {k} {n}: {m}"
            )
