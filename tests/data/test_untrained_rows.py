"""An end token whose row of the head LoRA leaves as it is, and that the model therefore never samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from async_rl.config.config import Config
from async_rl.data.untrained_rows import untrained_end
from tests.learner.tiny import SPECIAL, tiny_config, tiny_model

END, USER = SPECIAL.index("<|end|>"), SPECIAL.index("<|user|>")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def config_of(root: Path, changed: Mapping[str, str], *, rank: int | None = 4, tied: bool = False) -> Config:
    """A config whose model has another row for the end token in the matrices that ``changed`` names."""
    weights = load_file(tiny_model(root / "model", tied=tied) / "model.safetensors")
    for name, kind in changed.items():
        rows = weights[{"head": HEAD, "embedding": EMBEDDING}[name]]
        mean = (rows.sum(dim=0) - rows[END]) / (len(rows) - 1)
        rows[END] = {"zero": 0 * mean, "mean": mean, "twin": rows[USER], "near": 1.001 * rows[USER]}[kind]
    save_file(weights, root / "model" / "model.safetensors", {"format": "pt"})
    return tiny_config(root, "model", **({} if rank is None else {"lora": {"rank": rank}}))


@pytest.mark.parametrize("kind", ["zero", "mean", "twin", "near"])
def test_an_end_token_whose_row_of_the_head_was_never_trained_is_named(tmp_path: Path, kind: str):
    said = untrained_end(config_of(tmp_path, {"head": kind, "embedding": kind}))
    assert said.startswith("lora.rank: LoRA can't teach the model to stop: the row in lm_head.weight of <|end|> (0), ")
    assert "train without lora.rank, or take a model, or a chat template, with an end token" in said


def test_the_embedding_of_a_tied_model_is_its_head(tmp_path: Path):
    said = untrained_end(config_of(tmp_path, {"embedding": "twin"}, tied=True))
    assert "the row in model.embed_tokens.weight of <|end|>" in said


@pytest.mark.parametrize(
    ("changed", "rank"),
    [({}, 4), ({"embedding": "twin"}, 4), ({"head": "twin"}, None)],
    ids=["trained", "head trained", "without LoRA"],
)
def test_an_end_token_that_can_be_learned_is_not_named(tmp_path: Path, changed: dict[str, str], rank: int | None):
    assert untrained_end(config_of(tmp_path, changed, rank=rank)) == ""
