"""Supervised training: it learns, measures what it says, and its model stops where the rows end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.config.generator import GeneratorConfig
from async_rl.extensions.offline.tasks import train
from async_rl.generator.hf.backend import TransformersBackend
from tests.extensions.offline.offline_run import metrics, offline_config
from tests.generator.leases import make_lease


def test_evaluations_are_of_the_weights_after_the_step_and_train_nothing(tmp_path: Path):
    # The learning rate moves nothing, and a step has all twelve rows: the training loss is that of the evaluation.
    still = {"steps": 3, "lr": 1e-30, "batch_size": 12}
    same = {"eval": {"same": str(tmp_path / "rows.jsonl")}, "eval_every": 2}
    train("sft", offline_config(tmp_path, "sft", sft=still | same))
    rows = metrics(tmp_path, "sft")
    assert [row.get("eval/same/loss") for row in rows] == [None, *[pytest.approx(rows[0]["loss"], rel=1e-6)] * 2]


def test_a_row_with_a_sequence_for_each_turn_is_one_row_of_a_batch(tmp_path: Path):
    # An earlier answer is shown as x, so a row of two turns has two sequences: 4 trained tokens, b<|end|> and d<|end|>.
    section = {"steps": 2, "batch_size": 2, "eval": {"same": str(tmp_path / "rows.jsonl")}}
    config = offline_config(tmp_path, "sft", sft=section)
    template = (
        "{% for m in messages %}{{ 'x' if m['role'] == 'assistant' and not loop.last else m['content'] }}{% endfor %}"
        "{% if not add_generation_prompt %}<|end|>{% endif %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    roles = ("user", "assistant", "user", "assistant")
    row = {"messages": [{"role": role, "content": text} for role, text in zip(roles, "abcd", strict=True)]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 3)
    train("sft", config)
    first, last = metrics(tmp_path, "sft")
    assert (first["tokens"], last["tokens"]) == (8, 8)
    assert last["eval/same/loss"] < first["loss"]


def test_a_base_model_that_learns_another_end_of_turn_stops_there_when_it_is_sampled(tmp_path: Path):
    # Its files say that <|end|> ends an answer, the template that <|system|> does: as ChatML on a base model.
    config = offline_config(tmp_path, "sft", sft={"steps": 60, "schedule": "constant"})
    path = tmp_path / "model" / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|end|>", "<|system|>"))
    row = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    train("sft", config)
    losses = [row["loss"] for row in metrics(tmp_path, "sft")]
    assert losses[0] > 3.0 > 0.1 > losses[-1]  # about ln(45) = 3.8 nats at random
    listed = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert listed == [0, 1]
    backend = TransformersBackend.from_files(tmp_path / "out", GeneratorConfig(batch_size=2), load_pretrained=True)
    lease = make_lease("a", temperature=0.01, max_new_tokens=20)
    backend.submit(lease, backend.encode_prompt(row["messages"][:1]))
    done = [sample for _ in range(25) for sample in backend.step()]
    assert {(sample.text, sample.finish_reason) for sample in done} == {("2", "stop")}
