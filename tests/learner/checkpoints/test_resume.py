"""A start resumes the newest whole checkpoint, whatever is damaged. They are torch's, of two small tensors."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from async_rl.errors import LineageError, RunError
from async_rl.learner.checkpoints import digests
from async_rl.learner.checkpoints.digests import find_damage
from async_rl.learner.checkpoints.files import read_extra, write_extra, write_model_files
from async_rl.learner.checkpoints.resume import find_resume_point, take_over
from async_rl.learner.checkpoints.stored_tensors import TrainingState, load_training_state, write_training_state
from async_rl.learner.export.model import export_checkpoint
from async_rl.learner.ranks import Place, Ranks
from tests.learner.saves_at_once import SavesAtOnce, write_checkpoint

RANKS = Ranks(Place(0, 0, 1), torch.device("cpu"), None)
FILE = "shard-00001-model-00001-of-00001.safetensors"


class TensorEngine(SavesAtOnce):
    """Its model is a tensor filled with the step."""

    def __init__(self, step: int) -> None:
        self.tensors = {"w": torch.full((64, 8), float(step))}
        self.moments = {"w.exp_avg": torch.full((64, 8), float(-step))}

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        state = TrainingState.of(self.tensors, self.moments, num_updates=7, ranks=RANKS)
        write_training_state(directory, state, RANKS)
        write_extra(directory, extra)
        write_model_files(directory, {"config.json": b"{}"})


def write(run_dir: Path, step: int, *, lineage: str = "l1") -> Path:
    return write_checkpoint(TensorEngine(step), run_dir, step, {"step": step}, keep_last=2, lineage=lineage)


def check_whole(checkpoint: Path) -> int:
    """The step of a checkpoint whose content is that of its name."""
    step = int(checkpoint.name.removeprefix("step-"))
    loaded = TensorEngine(0)
    assert load_training_state(checkpoint, loaded.tensors, loaded.moments, ranks=RANKS) == 7
    assert (loaded.tensors["w"] == step).all()
    assert (loaded.moments["w.exp_avg"] == -step).all()
    assert read_extra(checkpoint) == {"step": step}
    return step


def resume(run_dir: Path) -> int:
    """Resume, and write the next two checkpoints; the step that was resumed."""
    point = find_resume_point(run_dir)
    assert point.checkpoint is not None
    step = check_whole(point.checkpoint)
    take_over(run_dir, point, lineage="l2", confirm=lambda: None)
    for later in (step + 2, step + 4):
        write(run_dir, later, lineage="l2")
    assert find_resume_point(run_dir).checkpoint == run_dir / "checkpoints" / f"step-{step + 4:06d}"
    return step


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    for step in (2, 4):
        write(tmp_path / "run", step)
    return tmp_path / "run"


def test_every_file_of_a_checkpoint_has_a_digest(run_dir: Path):
    checkpoint = run_dir / "checkpoints" / "step-000004"
    assert find_damage(checkpoint) == ""
    paths = sorted(p for p in checkpoint.rglob("*") if p.is_file())
    assert [p.name for p in paths] == [
        "digests.json", "engine.json", "extra.msgpack", "config.json", "random-state-cpu-00000.bin", FILE,
    ]  # fmt: skip
    for path in paths:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert path.name in find_damage(checkpoint)
        path.unlink()
        assert path.name in find_damage(checkpoint)
        path.write_bytes(data)
    assert find_damage(checkpoint) == ""


def test_a_damaged_checkpoint_is_kept_aside_and_the_one_before_it_is_resumed(
    run_dir: Path, caplog: pytest.LogCaptureFixture
):
    path = run_dir / "checkpoints" / "step-000004" / FILE
    path.write_bytes(path.read_bytes()[:-1])
    point = find_resume_point(run_dir)
    assert f"the checkpoint step-000004 is damaged: {path}: expected" in caplog.text
    # Only a learner that the queue has attached may change the run.
    assert names(run_dir) == ["latest", "step-000002", "step-000004"]
    take_over(run_dir, point, lineage="l2", confirm=lambda: None)
    assert names(run_dir) == ["latest", "step-000002", "step-000004.damaged-1"]
    assert (run_dir / "checkpoints" / "latest").read_text() == "step-000002\n"
    assert resume(run_dir) == 2


@pytest.mark.parametrize("latest", [None, b"", b"\xff\xfe", b"step-000006\n", b"../step-000004\n", b"step-0000"])
def test_a_latest_that_names_nothing_is_replaced_by_the_newest_whole_checkpoint(run_dir: Path, latest: bytes | None):
    path = run_dir / "checkpoints" / "latest"
    if latest is None:
        path.unlink()
    else:
        path.write_bytes(latest)
    assert resume(run_dir) == 4


def test_without_a_whole_checkpoint_the_files_and_a_remedy_are_named(run_dir: Path):
    for name in ("step-000002/extra.msgpack", f"step-000004/{FILE}"):
        path = run_dir / "checkpoints" / name
        path.rename(path.with_suffix(".copy"))
    with pytest.raises(RunError, match=rf"step-000004/{FILE}.*step-000002/extra\.msgpack.*--fresh"):
        find_resume_point(run_dir)
    path = run_dir / "checkpoints" / "step-000004" / FILE
    path.with_suffix(".copy").rename(path)
    assert resume(run_dir) == 4


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_a_file_that_can_not_be_opened_now_is_not_damaged(run_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    def refuse(path: Path) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(digests, "digest_of", refuse)
    with pytest.raises(RunError, match=rf"can't read .*step-000004/.*{os.strerror(code)}; correct that"):
        find_resume_point(run_dir)
    monkeypatch.undo()
    assert resume(run_dir) == 4


def test_a_run_without_checkpoints_begins_at_its_start(tmp_path: Path):
    assert find_resume_point(tmp_path).checkpoint is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-000002\n")
    with pytest.raises(RunError, match=r"checkpoints/latest: .*there are: none.*got 'step-000002'.*--fresh"):
        find_resume_point(tmp_path)


def test_a_learner_that_another_one_has_overtaken_moves_nothing_aside(run_dir: Path):
    (run_dir / "checkpoints" / "step-000004" / FILE).unlink()
    point = find_resume_point(run_dir)

    def confirm() -> None:
        raise LineageError("a newer learner took over")

    with pytest.raises(LineageError):
        take_over(run_dir, point, lineage="l2", confirm=confirm)
    assert names(run_dir) == ["latest", "step-000002", "step-000004"]
    write(run_dir, 6)
    with pytest.raises(LineageError, match="as the latest checkpoint, got step-000006"):
        take_over(run_dir, point, lineage="l2", confirm=lambda: None)


def test_a_damaged_checkpoint_is_not_exported(run_dir: Path, tmp_path: Path):
    (run_dir / "checkpoints" / "step-000004" / "engine.json").write_text("{}")
    with pytest.raises(RunError, match=r"step-000004 is damaged: .*engine\.json.*export another"):
        export_checkpoint(run_dir, tmp_path / "out")
