"""Supervised warm start from a config to a Hugging Face directory: it learns, resumes exactly, and refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.cli.main import main
from async_rl.config.config import Config
from async_rl.config.generator import GeneratorConfig
from async_rl.config.loading import config_to_toml
from async_rl.data.chat import load_tokenizer
from async_rl.errors import ConfigError, DataError, ModelError, RunError
from async_rl.extensions.offline import run
from async_rl.extensions.offline.batches import batch_of
from async_rl.extensions.offline.tasks import train
from async_rl.generator.hf.backend import TransformersBackend
from async_rl.learner.checkpoints import writer
from async_rl.learner.checkpoints.digests import renew_entry
from async_rl.learner.checkpoints.files import checkpoint_name, latest_checkpoint, read_extra, write_extra
from tests.end_to_end.harness import wait_until
from tests.extensions.offline.offline_run import offline_config
from tests.extensions.offline.read import sft_rows
from tests.generator.leases import make_lease
from tests.learner.ranks import finish_ranks, run_ranks, start_ranks
from tests.learner.tiny import add_token, random_sequences, tiny_config, tiny_model, trained_tokens


def sft_config(root: Path, **settings: Any) -> Config:
    """Ten rows of adding digits; 12 steps of 4 rows, a checkpoint every 5."""
    if not (root / "model").exists():
        tiny_model(root / "model")
        rows = [
            {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]}
            for n in range(8)
        ]
        rows += [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}]
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {
        "data": str(root / "rows.jsonl"),
        "out": str(root / "out"),
        "steps": 12,
        "batch_size": 4,
        "lr": 1e-2,
        "checkpoint_every": 5,
        **settings,
    }
    checkpoint = {"every": 5, "keep_last": 1, "keep_every": 5}
    return tiny_config(root, "model", sft=section, checkpoint=checkpoint)


def metrics(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "run" / "sft" / "metrics.jsonl").read_text().splitlines()]


def exported(root: Path) -> dict[str, torch.Tensor]:
    return load_file(root / "out" / "model.safetensors")


def test_training_lowers_the_loss_and_writes_a_model_and_metrics(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    train("sft", sft_config(tmp_path, steps=40, schedule="constant"))
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 41))
    # About ln(45) = 3.8 nats at random; 40 steps get well below half of that.
    assert rows[0]["loss"] > 3.0
    assert rows[-1]["loss"] < 1.9
    assert {"loss", "lr", "tokens"} <= rows[0].keys()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_run_that_dies_and_resumes_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    train("sft", sft_config(tmp_path / "whole"))
    real_batch_of = run.batch_of

    def dies_in_step_8(rows: Any, step: int, **settings: Any) -> Any:
        if step == 7:
            raise KeyboardInterrupt
        return real_batch_of(rows, step, **settings)

    monkeypatch.setattr(run, "batch_of", dies_in_step_8)
    with pytest.raises(KeyboardInterrupt):
        train("sft", sft_config(tmp_path / "broken"))
    assert len(metrics(tmp_path / "broken")) == 7
    monkeypatch.setattr(run, "batch_of", real_batch_of)
    train("sft", sft_config(tmp_path / "broken"))
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    expected = exported(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported(tmp_path / "broken").items())


def test_steps_go_on_while_a_checkpoint_is_written_and_multiples_of_keep_every_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun = threading.Event()
    waited: list[bool] = []
    real_batch_of, real_write_manifest = run.batch_of, writer.write_manifest

    def begins_step_7(rows: Any, step: int, **settings: Any) -> Any:
        if step == 6:
            begun.set()
        return real_batch_of(rows, step, **settings)

    def written_after_step_7_has_begun(directory: Path) -> None:
        waited.append(begun.wait(60))
        real_write_manifest(directory)

    monkeypatch.setattr(run, "batch_of", begins_step_7)
    monkeypatch.setattr(writer, "write_manifest", written_after_step_7_has_begun)
    train("sft", sft_config(tmp_path))
    assert waited == [True] * 3  # steps 5, 10 and 12
    assert [path.name for path in sorted((tmp_path / "run" / "sft" / "checkpoints").glob("step-*"))] == [
        checkpoint_name(5), checkpoint_name(10), checkpoint_name(12),
    ]  # fmt: skip


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_last_step_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, signum: signal.Signals
):
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    train("sft", sft_config(tmp_path / "whole"))
    real_batch_of = run.batch_of

    def stopped_in_step_8(rows: Any, step: int, **settings: Any) -> Any:
        if step == 7:
            os.kill(os.getpid(), signum)
            wait_until("the request to stop", lambda: "saving, then ending" in caplog.text)
        return real_batch_of(rows, step, **settings)

    monkeypatch.setattr(run, "batch_of", stopped_in_step_8)
    caplog.set_level("INFO")
    with pytest.raises(SystemExit) as stopped:
        train("sft", sft_config(tmp_path / "stopped"))
    assert stopped.value.code == 128 + signum
    assert "saved at step 8; the same command resumes from step-000008" in caplog.text
    assert not (tmp_path / "stopped" / "out").exists()
    monkeypatch.setattr(run, "batch_of", real_batch_of)
    train("sft", sft_config(tmp_path / "stopped"))
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    expected = exported(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported(tmp_path / "stopped").items())


@pytest.mark.slow
def test_a_signal_at_one_of_two_ranks_saves_for_both(tmp_path: Path):
    (tmp_path / "sft.toml").write_text(config_to_toml(sft_config(tmp_path, steps=100_000)))
    ranks = start_ranks("supervised", tmp_path)
    wait_until(
        "the third step", lambda: (tmp_path / "run" / "sft" / "metrics.jsonl").exists() and len(metrics(tmp_path)) > 2
    )
    ranks[1].send_signal(signal.SIGTERM)
    results = finish_ranks(ranks)
    assert [code for code, _ in results] == [143, 143], "\n\n".join(output for _, output in results)
    saved = latest_checkpoint(tmp_path / "run" / "sft")
    assert saved is not None
    assert saved.name == checkpoint_name(len(metrics(tmp_path)))


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    train("sft", sft_config(tmp_path / "one"))
    (tmp_path / "two" / "sft.toml").write_text(config_to_toml(sft_config(tmp_path / "two")))
    run_ranks("supervised", tmp_path / "two")
    expected = exported(tmp_path / "one")
    for name, tensor in exported(tmp_path / "two").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-3, rtol=1e-3)


def test_a_finished_run_is_left_as_it_is(tmp_path: Path):
    config = sft_config(tmp_path, steps=2)
    train("sft", config)
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    train("sft", config)
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before
    assert len(metrics(tmp_path)) == 2


def test_evaluations_are_of_the_weights_after_the_step_and_train_nothing(tmp_path: Path):
    # The learning rate moves nothing, and a step has all ten rows: the training loss is that of the evaluation.
    data = str(tmp_path / "rows.jsonl")
    config = sft_config(tmp_path, steps=3, lr=1e-30, batch_size=10, eval={"same": data}, eval_every=2)
    train("sft", config)
    rows = metrics(tmp_path)
    assert [row.get("eval/same/loss") for row in rows] == [None, *[pytest.approx(rows[0]["loss"], rel=1e-6)] * 2]
    train("sft", sft_config(tmp_path, steps=3, lr=1e-30, batch_size=10))  # the same run, without the evaluation


def test_a_bad_row_of_an_evaluation_is_named(tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:1: "):
        train("sft", sft_config(tmp_path, eval={"held_out": str(tmp_path / "bad.jsonl")}))
    with pytest.raises(DataError, match=r"sft\.eval\.none: no dataset at"):
        train("sft", sft_config(tmp_path, eval={"none": "none.jsonl"}))


def test_a_run_of_an_older_version_goes_on(tmp_path: Path):
    # It knew neither sft.epochs nor how many steps its checkpoints' run has.
    train("sft", sft_config(tmp_path, steps=2))
    saved = latest_checkpoint(tmp_path / "run" / "sft")
    assert saved is not None
    extra = read_extra(saved)
    old = {key: value for key, value in extra["settings"].items() if key != "sft.epochs"}
    write_extra(saved, {"step": 2, "settings": old})
    renew_entry(saved, "extra.msgpack")
    shutil.rmtree(tmp_path / "out")
    train("sft", sft_config(tmp_path, steps=2))
    assert exported(tmp_path)
    assert len(metrics(tmp_path)) == 2


def test_two_epochs_train_on_every_row_twice(tmp_path: Path):
    # 10 rows in batches of 8: 20 rows are 8 + 8 + 4.
    config = sft_config(tmp_path, steps=None, epochs=2, batch_size=8)
    train("sft", config)
    rows = sft_rows(tmp_path / "rows.jsonl", load_tokenizer(str(tmp_path / "model")), max_length=50)
    assert len(metrics(tmp_path)) == 3
    assert sum(row["tokens"] for row in metrics(tmp_path)) == 2 * trained_tokens(rows)
    train("sft", config)  # finished


def test_adamw_beside_muon_has_the_rate_of_its_key_whatever_the_rate_of_the_section(tmp_path: Path):
    # Both have sft.lr = 0.01 as their highest rate. optimizer.lr, which sft does not read, is 1e-6.
    for name, more in (("own", {"adamw_lr": 1e-2}), ("same", {})):
        train(
            "sft",
            offline_config(tmp_path / name, "sft", sft={"steps": 3}, optimizer={"name": "muon", "lr": 1e-6, **more}),
        )
    assert metrics(tmp_path / "own") == metrics(tmp_path / "same")


@pytest.mark.slow
def test_a_checkpoint_answers_the_evaluation_sets_of_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = tmp_path / "tenths.py"
    code.write_text("def score(item):\n    return float(item.reward_data['gt_answer']) / 10\n")
    rows = "".join(f'{{"prompt": "{n}+1=", "gt_answer": "{n + 1}"}}\n' for n in range(8))
    (tmp_path / "asked.jsonl").write_text(rows)
    config = offline_config(
        tmp_path, "sft",
        sft={"steps": 2},
        data={"eval": {"sums": str(tmp_path / "asked.jsonl")}},
        reward={"type": f"{code}:score"},
        generator={"allow_code": [str(code)]},
        sampling={"max_prompt_tokens": 64, "max_new_tokens": 8},
    )  # fmt: skip
    train("sft", config)
    (tmp_path / "sft.toml").write_text(config_to_toml(config))
    capsys.readouterr()
    checkpoint = tmp_path / "run" / "sft" / "checkpoints" / "step-000002"
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(checkpoint), "--config", str(tmp_path / "sft.toml"), "--quiet", "--json"])
    assert not ended.value.code
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert (found["dataset"], found["figures"]["rows"], found["figures"]["unanswered"]) == ("sums", 8, 0)
    assert found["figures"]["accuracy"] == pytest.approx(0.45)  # the mean of 0.1 to 0.8


def test_steps_and_epochs_together_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"sft.*expected no value with steps = 12, got 2"):
        sft_config(tmp_path, epochs=2)


def test_a_changed_setting_is_refused_by_name(tmp_path: Path):
    train("sft", sft_config(tmp_path, steps=2))
    with pytest.raises(RunError, match=r"sft\.lr: 0\.01 -> 0\.02"):
        train("sft", sft_config(tmp_path, steps=2, lr=0.02))


def test_changed_rows_are_refused_at_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = sft_config(tmp_path, steps=None, epochs=2)
    with monkeypatch.context() as patch:
        patch.setattr(run, "export_checkpoint", Mock(side_effect=RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            train("sft", config)
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text + '{"prompt": "e", "response": "f"}\n')
    with pytest.raises(RunError, match=r"sft\.data: expected the rows .* choose another run\.dir"):
        train("sft", config)
    (tmp_path / "rows.jsonl").write_text(text)
    train("sft", config)
    assert exported(tmp_path)


@pytest.mark.parametrize("key", ["data", "out"])
def test_a_config_without_data_or_out_is_refused(tmp_path: Path, key: str):
    with pytest.raises(ConfigError, match=rf"sft\.{key}"):
        train("sft", sft_config(tmp_path, **{key: ""}))


def test_an_out_directory_with_files_is_refused_before_training(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(RunError, match="got one with files"):
        train("sft", sft_config(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_bad_row_stops_the_command_with_file_and_line(tmp_path: Path):
    config = sft_config(tmp_path)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": 3}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:11: "):
        train("sft", config)


@pytest.mark.parametrize("key", ["sft.data", "sft.eval.new"])
def test_a_row_with_a_token_beyond_the_embedding_is_refused_before_the_model_is_loaded(tmp_path: Path, key: str):
    config = sft_config(tmp_path)
    add_token(tmp_path / "model", "<new>")
    new = tmp_path / "new.jsonl"
    new.write_text('{"prompt": "a", "response": "<new>"}\n')
    changed = {"data": str(new)} if key == "sft.data" else {"eval": {"new": str(new)}}
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=rf"{re.escape(key)}: .* embedding of 45 rows has a row for, got <new> \(45\)"):
        train("sft", tiny_config(tmp_path, "model", sft=config.sft.model_dump() | changed))


def test_a_token_beyond_the_embedding_that_no_row_has_changes_nothing(tmp_path: Path):
    config = sft_config(tmp_path, steps=1)
    add_token(tmp_path / "model", "<new>")
    train("sft", config)
    assert "<new>" in load_tokenizer(tmp_path / "out").get_vocab()


def test_an_end_token_that_lora_cant_teach_is_said_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = sft_config(tmp_path, steps=1)
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][0] = weights["model.embed_tokens.weight"][1]
    save_file(weights, path, {"format": "pt"})
    train("sft", tiny_config(tmp_path, "model", sft=config.sft.model_dump(), lora={"rank": 2}))
    (said,) = [record.message for record in caplog.records if "never trained" in record.message]
    assert said.startswith("warning: lora.rank: LoRA can't teach the model to stop")
    assert (tmp_path / "out" / "config.json").exists()


def test_a_row_that_fits_no_micro_batch_is_refused_by_both_keys(tmp_path: Path):
    config = sft_config(tmp_path)
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"max_tokens": 6})})
    with pytest.raises(ConfigError, match=r"learner\.max_tokens: .* sft\.max_length"):
        train("sft", config)


def test_every_epoch_holds_every_row_once_in_another_order():
    rows = random_sequences(10, 4)
    stream = [row.sequence_id for step in range(5) for row in batch_of(rows, step, batch_size=4, seed=1)]
    first, second = stream[:10], stream[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert stream != [row.sequence_id for step in range(5) for row in batch_of(rows, step, batch_size=4, seed=2)]


def test_a_row_with_a_sequence_for_each_turn_is_one_row_of_a_batch(tmp_path: Path):
    # An earlier answer is shown as x, so a row of two turns has two sequences: 4 trained tokens, b<|end|> and d<|end|>.
    config = sft_config(tmp_path, steps=2, batch_size=2, eval={"same": str(tmp_path / "turns.jsonl")})
    template = (
        "{% for m in messages %}{{ 'x' if m['role'] == 'assistant' and not loop.last else m['content'] }}{% endfor %}"
        "{% if not add_generation_prompt %}<|end|>{% endif %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    roles = ("user", "assistant", "user", "assistant")
    row = {"messages": [{"role": role, "content": text} for role, text in zip(roles, "abcd", strict=True)]}
    (tmp_path / "turns.jsonl").write_text((json.dumps(row) + "\n") * 3)
    section = config.sft.model_copy(update={"data": str(tmp_path / "turns.jsonl")})
    train("sft", config.model_copy(update={"sft": section}))
    first, last = metrics(tmp_path)
    assert (first["tokens"], last["tokens"]) == (8, 8)
    assert last["eval/same/loss"] < first["loss"]


def test_a_base_model_that_learns_another_end_of_turn_stops_there_when_it_is_sampled(tmp_path: Path):
    # Its files say that <|end|> ends an answer, the template that <|system|> does: as ChatML on a base model.
    config = sft_config(tmp_path, steps=60, schedule="constant")
    path = tmp_path / "model" / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|end|>", "<|system|>"))
    row = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    train("sft", config)
    listed = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert listed == [0, 1]
    backend = TransformersBackend.from_files(tmp_path / "out", GeneratorConfig(batch_size=2), load_pretrained=True)
    lease = make_lease("a", temperature=0.01, max_new_tokens=20)
    backend.submit(lease, backend.encode_prompt(row["messages"][:1]))
    done = [sample for _ in range(25) for sample in backend.step()]
    assert {(sample.text, sample.finish_reason) for sample in done} == {("2", "stop")}
