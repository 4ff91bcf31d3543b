"""A checkpoint becomes a directory that transformers loads, with equal logits, or nothing at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from async_rl.errors import RunError
from async_rl.learner.checkpoints.files import TrainerState
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.export import model as export
from async_rl.learner.export.model import export_checkpoint
from async_rl.learner.loop.start import _wrap_up
from async_rl.run.directory import RunDir
from tests.learner.model.reference import engine_of
from tests.learner.saves_at_once import write_checkpoint
from tests.learner.tiny import random_sequences, tiny_config, tiny_model

TOKEN_IDS = torch.arange(4, 20)[None]


def trained_checkpoint(root: Path, *, tied: bool = True) -> tuple[FsdpEngine, Path]:
    tiny_model(root / "model", tied=tied)
    engine = engine_of(tiny_config(root, "model", optimizer={"lr": 1e-2}))
    assert engine.update(random_sequences(4, 12), version=0).stepped
    return engine, write_checkpoint(engine, root / "run", 1, {})


def test_an_export_lists_every_token_that_ends_a_turn_and_keeps_the_generation_config(tmp_path: Path):
    # A base model whose files know another end than the template: as ChatML on a model that ends with <|endoftext|>.
    model = tiny_model(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7], "top_p": 0.5}))
    template = (model / "chat_template.jinja").read_text().replace("<|end|>", "<|system|>")
    (model / "chat_template.jinja").write_text(template)
    engine = engine_of(tiny_config(tmp_path, "model"))
    checkpoint = write_checkpoint(engine, tmp_path / "run", 1, {})
    export_checkpoint(checkpoint, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found == {"eos_token_id": [0, 7, 1], "top_p": 0.5}  # <|system|> is token 1


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_with_the_logits_of_the_engine_and_its_tokenizer(tmp_path: Path, tied: bool):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine, checkpoint = trained_checkpoint(tmp_path, tied=tied)
    export_checkpoint(checkpoint, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    untrained = reference(TOKEN_IDS).logits
    missing = reference.load_state_dict(dict(engine.gather()), strict=False)
    assert missing.missing_keys == (["lm_head.weight"] if tied else [])
    with torch.no_grad():
        assert torch.equal(exported(TOKEN_IDS).logits, reference(TOKEN_IDS).logits)
    assert not torch.equal(exported(TOKEN_IDS).logits, untrained)
    assert exported.config.tie_word_embeddings is tied
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template
    assert tokenizer("a+b=")["input_ids"] == AutoTokenizer.from_pretrained(tmp_path / "model")("a+b=")["input_ids"]


def test_a_run_directory_exports_its_latest_with_the_mode_that_the_umask_allows(tmp_path: Path):
    trained_checkpoint(tmp_path)
    before = os.umask(0o027)
    try:
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}  # 666 without 027


def test_a_directory_with_files_and_a_missing_checkpoint_are_refused(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    _, checkpoint = trained_checkpoint(tmp_path)
    with pytest.raises(RunError, match="got one with files"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["precious.txt"]
    with pytest.raises(RunError, match="expected a checkpoint"):
        export_checkpoint(tmp_path / "nothing", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_export_at_the_end_of_a_run_replaces_what_a_killed_learner_left(tmp_path: Path):
    trained_checkpoint(tmp_path)
    run_dir = RunDir(tmp_path / "run")
    for remains in (run_dir.export, tmp_path / "run" / ".export.1.partial"):
        remains.mkdir()
        (remains / "half.safetensors").touch()
    _wrap_up(run_dir, TrainerState(step=1, version=1), export=True, confirm=lambda: None)
    assert not list(run_dir.path.rglob("half.safetensors"))
    assert (run_dir.export / "model.safetensors").is_file()
    assert run_dir.is_finished


def test_an_export_that_fails_halfway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise OSError("no space left on device")

    _, checkpoint = trained_checkpoint(tmp_path)
    monkeypatch.setattr(export.shutil, "copy2", fails)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(OSError, match="no space"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
