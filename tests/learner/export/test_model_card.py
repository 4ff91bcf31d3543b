"""Every export has a model card that says what the run's files say, and names no directory of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from async_rl.cli.main import main
from async_rl.learner.checkpoints.files import write_extra
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.export.model import export_adapter
from async_rl.learner.export.model_card import CARD, write_model_card
from async_rl.learner.ranks import init_ranks
from async_rl.run.records.step_log import read_metrics
from tests.learner.rank_layouts import layout_model
from tests.learner.resumed_run import answered, build_run


def trained_run(root: Path, **sections: object) -> Path:
    """A finished run of 4 steps with three evaluations, of which one is of a later step."""
    layout_model(root / "model", "qwen2")
    for name, content in (("steps", "4"), ("bound", "1"), ("sections.json", json.dumps(sections))):
        (root / name).write_text(content)
    run = build_run(root)
    run.engine = FsdpEngine(run.config, init_ranks(run.config))  # pyright: ignore[reportAttributeAccessIssue]
    run.start(answer=answered)
    with (run.path / "metrics.jsonl").open("a") as metrics:
        for step, accuracy in ((0, 0.25), (4, 0.5), (9, 0.75)):
            figures = {"accuracy": accuracy, "accuracy_se": 0.125, "rows": 8}
            named = {f"eval/test/{name}": value for name, value in figures.items()}
            metrics.write(json.dumps({"step": step, "time_s": 9.0, **named}) + "\n")
    return run.path


def test_the_card_of_a_run_says_data_reward_steps_staleness_and_versions(tmp_path: Path):
    run = trained_run(tmp_path)
    (tmp_path / "model" / CARD).write_text("---\nlicense: apache-2.0\n---\n")
    (run / "code_digests.json").write_text('{"my/own.py:score": "12ab"}')
    with pytest.raises(SystemExit, match="0"):
        main(["export", str(run), str(tmp_path / "out"), "--quiet"])
    card = ModelCard.load(tmp_path / "out" / CARD)
    assert card.data.to_dict() == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["async-rl", "reinforcement-learning"],
    }
    assert str(tmp_path) not in card.content
    facts = dict(line[2:].split(": ", 1) for line in card.text.splitlines() if line.startswith("- "))
    assert facts["Base model"] == "`model`"
    assert facts["Data"] == "`none.jsonl`"
    assert (facts["Reward"], facts["Licence"]) == ("`boxed`", "`apache-2.0`")
    assert facts["Source of"] == "`own.py:score`, SHA-256 12ab"
    assert int(facts["Longest answer, in tokens"]) > 0
    assert '[{"role": "user"' in card.text
    assert facts["Steps"] == "4; version 4 of the weights"
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "version" in row]
    tokens = [row["tokens/trained"] for row in rows]
    mean = sum(row["staleness/mean"] * count for row, count in zip(rows, tokens, strict=True)) / sum(tokens)
    assert facts["Staleness of the trained tokens"] == f"mean {mean:.3g} versions, at most 1 (bound 1)"
    assert facts["Evaluation on `test`"] == ("accuracy 0.25 at step 0, 0.5 at step 4 (8 rows, standard error 0.125)")
    assert "async-rl " in facts["Exported with"]
    assert "torch " in facts["Exported with"]


def card_of(directory: Path, settings: dict[str, Any], **extra: Any) -> ModelCard:
    """The card of a checkpoint of ``async-rl sft`` in ``directory / "run"``."""
    checkpoint, target = directory / "run" / "sft" / "checkpoints" / "step-000007", directory / "out"
    checkpoint.mkdir(parents=True)
    target.mkdir()
    write_extra(checkpoint, {"step": 7, "settings": settings, **extra})
    write_model_card(checkpoint, target)
    return ModelCard.load(target / CARD)


def test_names_of_the_hub_are_metadata_if_this_machine_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in ("models--owner--base", "datasets--owner--sums"):
        (tmp_path / "cache" / folder).mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    of_data = "train[:5%]@owner/sums:main"
    settings = {"model.path": "owner/base", "sft.data": of_data, "sft.lr": 0.5, "sft.eval.held": "my/rows"}
    card = card_of(tmp_path, settings, num_steps=9, rows="")
    assert card.data.to_dict() == {
        "base_model": "owner/base", "datasets": ["owner/sums"], "library_name": "transformers",
        "pipeline_tag": "text-generation", "tags": ["async-rl", "sft"],
    }  # fmt: skip
    assert card.text.startswith("\n# run-sft\n")
    assert f"- Data: `{of_data}`\n" in card.text
    assert "- Steps: 7 of 9\n" in card.text


def test_text_of_a_config_is_no_markup_of_the_card(tmp_path: Path):
    content = card_of(tmp_path, {"model.path": "/home/me/a`b\n# c\x1b", "sft.data": "/home/me/rows.jsonl"}).content
    assert "- Base model: `a'b # c\\x1b`\n" in content
    assert "- Data: `rows.jsonl`\n" in content
    assert "/home" not in content


def test_an_adapter_has_a_card_and_a_card_among_the_models_files_is_kept(tmp_path: Path):
    run = trained_run(tmp_path, lora={"rank": 2})
    export_adapter(run, tmp_path / "adapter")
    card = ModelCard.load(tmp_path / "adapter" / CARD)
    assert card.data.to_dict()["library_name"] == "peft"
    assert card.data.to_dict()["tags"] == ["async-rl", "reinforcement-learning", "lora"]
    assert "- LoRA rank: 2\n" in card.text
    (tmp_path / "adapter" / CARD).write_text("mine")
    write_model_card(sorted((run / "checkpoints").iterdir())[-1], tmp_path / "adapter")
    assert (tmp_path / "adapter" / CARD).read_text() == "mine"
