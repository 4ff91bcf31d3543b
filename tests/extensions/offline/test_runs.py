"""What sft, rm and dpo share, from a config to a Hugging Face directory: a run resumes to the bit, on any number of
ranks, killed anywhere, and refuses what would spoil it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.data.chat import load_tokenizer
from async_rl.errors import ConfigError, DataError, ModelError, RunError
from async_rl.extensions.offline.batches import batch_of
from async_rl.extensions.offline.tasks import train
from async_rl.learner.checkpoints.files import latest_checkpoint
from async_rl.run.directory import checkpoint_name
from tests.end_to_end.harness import wait_until
from tests.extensions.offline.offline_run import begin, exported, in_step, metrics, offline_config
from tests.fault_points import OFFLINE_FAULT_POINTS
from tests.forked import preload
from tests.learner.ranks import finish_ranks, kill_at, run_ranks, start_ranks
from tests.learner.tiny import add_token, random_sequences

preload("tests.extensions.offline.offline_run")

ALL = (
    "offline.reference_scored", "learner.forward", "learner.backward", "offline.trained", "learner.checkpoint_writing",
    "learner.checkpoint_saved", "learner.checkpoint_written", "offline.trained_all",
)  # fmt: skip
OF_TWO = (ALL[0], "learner.forward-rank-1", "learner.backward-rank-1", *ALL[1:])
LORA = {"lora": {"rank": 4, "alpha": 8.0}}
KTO = {"dpo": {"loss": "kto"}}
SHARED = {"parallel": {"sequence": 2}}
SLOW, LONG = pytest.mark.slow, pytest.mark.long


def assert_same_bits(root: Path, expected: Path, command: str) -> None:
    assert metrics(root, command) == metrics(expected, command)
    found, weights = exported(root), exported(expected)
    assert [name for name, tensor in weights.items() if not torch.equal(found[name], tensor)] == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of sft."""
    directory = tmp_path_factory.mktemp("whole")
    train("sft", offline_config(directory, "sft"))
    return directory


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_last_step_and_the_same_command_goes_on(
    tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture, signum: signal.Signals
):
    def ask_to_stop() -> None:
        os.kill(os.getpid(), signum)
        wait_until("the request to stop", lambda: "saving, then ending" in caplog.text)

    caplog.set_level("INFO")
    config = offline_config(tmp_path, "sft", sft={"checkpoint_every": 5})
    with in_step(8, ask_to_stop), pytest.raises(SystemExit) as stopped:
        train("sft", config)
    assert stopped.value.code == 128 + signum
    assert "saved at step 8; the same command resumes from step-000008" in caplog.text
    assert not (tmp_path / "out").exists()
    train("sft", config)
    assert_same_bits(tmp_path, whole, "sft")


@pytest.mark.slow
def test_a_signal_at_one_of_two_ranks_saves_for_both(tmp_path: Path):
    begin(tmp_path / "two", "sft", sft={"steps": 100_000})
    ranks = start_ranks("offline", tmp_path / "two")
    written = tmp_path / "two" / "run" / "sft" / "metrics.jsonl"
    wait_until("the third step", lambda: written.exists() and len(metrics(tmp_path / "two", "sft")) > 2)
    ranks[1].send_signal(signal.SIGTERM)
    results = finish_ranks(ranks)
    assert [code for code, _ in results] == [143, 143], "\n\n".join(output for _, output in results)
    saved = latest_checkpoint(tmp_path / "two" / "run" / "sft")
    assert saved is not None
    assert saved.name == checkpoint_name(len(metrics(tmp_path / "two", "sft")))


def test_every_fault_point_of_training_on_given_rows_is_tested():
    assert set(OFFLINE_FAULT_POINTS) <= set(ALL)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("command", "points", "sections"),
    [
        pytest.param("dpo", ("offline.reference_scored", "learner.backward"), {}, marks=SLOW, id="some"),
        pytest.param("dpo", ALL, KTO, marks=LONG, id="kto"),
        pytest.param("dpo", ALL, LORA, marks=LONG, id="adapters"),
        *(
            pytest.param(command, OF_TWO, sections, marks=LONG, id=f"{command}, two ranks, {sections}")
            for command, sections in (("sft", {}), ("dpo", {}), ("dpo", SHARED), ("rm", {}), ("rm", SHARED))
        ),
    ],
)
def test_a_run_killed_at_every_fault_point_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, command: str, points: tuple[str, ...], sections: dict[str, Any]
):
    world_size = 2 if points is OF_TWO else 1
    points = points if command == "dpo" else tuple(p for p in points if p != "offline.reference_scored")
    own = {"steps": 6 * len(points) + 6} | sections.get(command, {})
    undisturbed, killed = (begin(tmp_path / n, command, **sections | {command: own}) for n in ("whole", "killed"))
    run_ranks("offline", undisturbed, world_size=world_size)
    for point in points:
        kill_at(point, "offline", killed, world_size=world_size)
    (killed / "point").write_text("")
    run_ranks("offline", killed, world_size=world_size)
    assert_same_bits(killed, undisturbed, command)


@pytest.mark.parametrize(
    ("command", "sections"),
    [
        pytest.param("sft", {}, marks=SLOW),
        pytest.param("dpo", SHARED, marks=SLOW),
        pytest.param("rm", SHARED | LORA, marks=SLOW),
        pytest.param("dpo", KTO, marks=LONG),
        *(
            pytest.param(command, sections, marks=LONG)
            for command in ("dpo", "rm")
            for sections in (LORA, {"parallel": {"pipeline": 2}}, {"parallel": {"tensor": 2}})
        ),
    ],
)
def test_two_ranks_learn_what_one_learns(tmp_path: Path, command: str, sections: dict[str, Any]):
    of_one = {key: value for key, value in sections.items() if key != "parallel"}
    settings = {command: {"steps": 4, "lr": 1e-3, **sections.get(command, {})}, "learner": {"max_tokens": 64}}
    train(command, offline_config(begin(tmp_path / "one", command, **of_one | settings), command, **of_one | settings))
    run_ranks("offline", begin(tmp_path / "two", command, **sections | settings))
    for one, two in zip(metrics(tmp_path / "one", command), metrics(tmp_path / "two", command), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    expected = exported(tmp_path / "one")
    for key, tensor in exported(tmp_path / "two").items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-3, rtol=1e-3)


def test_a_finished_run_is_left_as_it_is_and_another_setting_is_refused_by_name(whole: Path):
    before = (whole / "out" / "model.safetensors").stat().st_mtime_ns
    train("sft", offline_config(whole, "sft", sft={"eval_every": 3}))  # trains nothing, so it may change
    assert (whole / "out" / "model.safetensors").stat().st_mtime_ns == before
    assert len(metrics(whole, "sft")) == 12
    with pytest.raises(RunError, match=r"sft\.lr: 0\.01 -> 0\.02"):
        train("sft", offline_config(whole, "sft", sft={"lr": 0.02}))


@pytest.mark.parametrize(
    ("command", "sections", "old", "new"),
    [
        ("sft", {}, '"0+1="', '"9+1="'),
        ("dpo", KTO, "false", "true"),
        ("rm", {}, '"rejected"', '"margin": 0.5, "rejected"'),
    ],
)
def test_a_resumed_run_refuses_other_rows(tmp_path: Path, command: str, sections: dict[str, Any], old: str, new: str):
    config = offline_config(tmp_path, command, **{command: {"steps": 1}} | sections)
    train(command, config)
    shutil.rmtree(tmp_path / "out")  # as if it had been killed before the export
    path = tmp_path / "rows.jsonl"
    text = path.read_text()
    path.write_text(text.replace(old, new))
    with pytest.raises(RunError, match=rf"{command}\.data: expected the rows that .* was trained on, got others"):
        train(command, config)
    path.write_text(text)
    train(command, config)
    assert exported(tmp_path)


def test_every_epoch_holds_every_row_once_in_another_order():
    rows = random_sequences(10, 4)
    stream = [row.sequence_id for step in range(5) for row in batch_of(rows, step, batch_size=4, seed=1)]
    first, second = stream[:10], stream[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert stream != [row.sequence_id for step in range(5) for row in batch_of(rows, step, batch_size=4, seed=2)]


def test_two_epochs_train_on_every_row_twice(tmp_path: Path):
    # 12 rows in batches of 9 are 9 + 9 + 6. An answer n + 1 is one token, or two from 10 on, and its end is one more.
    config = offline_config(tmp_path, "sft", sft={"steps": None, "epochs": 2, "batch_size": 9})
    train("sft", config)
    assert len(metrics(tmp_path, "sft")) == 3
    assert sum(row["tokens"] for row in metrics(tmp_path, "sft")) == 2 * (9 * 2 + 3 * 3)
    train("sft", config)  # finished
    with pytest.raises(ConfigError, match="expected no value with steps = 12, got 2"):
        offline_config(tmp_path, "sft", sft={"epochs": 2})


def test_adamw_beside_muon_has_the_rate_of_its_key_whatever_the_rate_of_the_section(tmp_path: Path):
    # Both have sft.lr = 0.01 as their highest rate. optimizer.lr, which sft does not read, is 1e-6.
    for name, more in (("own", {"adamw_lr": 1e-2}), ("same", {})):
        optimizer = {"name": "muon", "lr": 1e-6, **more}
        train("sft", offline_config(tmp_path / name, "sft", sft={"steps": 3}, optimizer=optimizer))
    assert metrics(tmp_path / "own", "sft") == metrics(tmp_path / "same", "sft")


@pytest.mark.parametrize("key", ["data", "out"])
def test_a_config_without_data_or_out_is_refused(tmp_path: Path, key: str):
    with pytest.raises(ConfigError, match=rf"dpo\.{key}: expected a value"):
        train("dpo", offline_config(tmp_path, "dpo", dpo={key: ""}))


def test_an_out_directory_with_files_is_refused_before_training(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(RunError, match="got one with files"):
        train("sft", offline_config(tmp_path, "sft"))
    assert not (tmp_path / "run").exists()


def test_a_bad_row_of_an_evaluation_is_named(tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text("{}\n")
    for name, message in (("bad.jsonl", r"bad\.jsonl:1: "), ("none.jsonl", r"sft\.eval\.held_out: no dataset at")):
        with pytest.raises(DataError, match=message):
            train("sft", offline_config(tmp_path, "sft", sft={"eval": {"held_out": str(tmp_path / name)}}))


def test_a_row_with_a_token_beyond_the_embedding_is_refused_before_the_model_is_loaded(tmp_path: Path):
    config = offline_config(tmp_path, "sft", sft={"steps": 1, "eval": {"new": str(tmp_path / "new.jsonl")}})
    add_token(tmp_path / "model", "<new>")
    (tmp_path / "new.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    train("sft", config)  # no row has the token
    assert "<new>" in load_tokenizer(tmp_path / "out").get_vocab()
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "model" / "model.safetensors").unlink()
    for key in ("sft.eval.new", "sft.data"):
        (tmp_path / ("new.jsonl" if "eval" in key else "rows.jsonl")).write_text(
            '{"prompt": "", "response": "<new>"}\n'
        )
        with pytest.raises(ModelError, match=rf"{re.escape(key)}: .* embedding of 45 rows .* got <new> \(45\)"):
            train("sft", config)


def test_a_row_that_fits_no_micro_batch_is_refused_by_both_keys(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"learner\.max_tokens: .* sft\.max_length"):
        train("sft", offline_config(tmp_path, "sft", learner={"max_tokens": 6}))
