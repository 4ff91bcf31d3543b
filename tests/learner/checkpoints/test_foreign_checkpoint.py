"""Checkpoints that somebody forged: nothing in them runs, and they read no other file and take no more memory."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.errors import RunError
from async_rl.learner.checkpoints.digests import find_damage, write_manifest
from async_rl.learner.checkpoints.files import TrainerState, run_state
from async_rl.learner.checkpoints.stored_tensors import _Writer, load_tensors, stored_names
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.export.model import export_checkpoint
from tests.data.test_foreign_model import Bomb
from tests.learner.export.test_export import trained_checkpoint
from tests.refusal import refusal

STEP = "step-000001"
NAME = "model.model.norm.weight"
FILE = "shard-00001-model-00001-of-00001.safetensors"
INFO = "DCP_SHARDING_INFO"
"""The entry of a file's own metadata in which torch keeps where in its tensor each part lies."""


@dataclass(frozen=True)
class Whole:
    """The engine of a run with one checkpoint, and the run's directory."""

    engine: FsdpEngine
    run: Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    engine, _ = trained_checkpoint(root)
    return Whole(engine, root / "run")


@pytest.fixture
def run(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run. The working directory is its parent."""
    shutil.copytree(whole.run, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def forge(run: Path, name: str, content: bytes) -> None:
    """Replace a file of the checkpoint, and correct its digests, as who forges it does."""
    checkpoint = run / "checkpoints" / STEP
    (checkpoint / name).write_bytes(content)
    (checkpoint / "digests.json").unlink()
    write_manifest(checkpoint)
    assert find_damage(checkpoint) == ""


Header = dict[str, Any]


def forged(run: Path, change: Callable[[Header], None]) -> bytes:
    """The checkpoint's file of tensors, with its header changed."""
    content = (run / "checkpoints" / STEP / FILE).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    plain = json.dumps(header).encode()
    return len(plain).to_bytes(8, "little") + plain + content[end:]


def offsets(name: str, value: Any) -> Callable[[Header], None]:
    """A change of the place of a tensor's part."""

    def change(header: Header) -> None:
        info = json.loads(header["__metadata__"][INFO])
        info[name] = {"saved_offsets": value}
        header["__metadata__"][INFO] = json.dumps(info)

    return change


def resume_error(whole: Whole, run: Path) -> str:
    with pytest.raises(RunError) as refused:
        whole.engine.load(run / "checkpoints" / STEP)
    return str(refused.value)


def test_a_bomb_does_not_go_off_in_export_eval_or_resume(whole: Whole, run: Path, capsys: pytest.CaptureFixture[str]):
    bomb = pickle.dumps(Bomb())
    forge(run, FILE, len(bomb).to_bytes(8, "little") + bomb)
    (run.parent / "test.jsonl").write_text('{"messages": [{"role": "user", "content": "1+1="}], "gt_answer": "2"}\n')
    texts = [
        refusal(capsys, "export", str(run), "out"),
        refusal(capsys, "eval", str(run), "--dataset", "test.jsonl"),
        resume_error(whole, run),
    ]
    assert not Path("MARKER").exists()
    assert not Path("out").exists()
    for text in texts:
        assert f"{STEP}/" in text
        assert "use another checkpoint" in text


def shape(*sizes: int) -> Callable[[Header], None]:
    return lambda header: header[NAME].update(shape=list(sizes))


FORGED: dict[str, tuple[Callable[[Header], None], str]] = {
    "a part at a negative place": (offsets(NAME, [-1]), r"a part of .*, at \[-1\]"),
    "a part of a tensor of a terabyte": (offsets(NAME, [1 << 38]), "invalid fill tensor-volume"),
    "an absurd number": (offsets(NAME, [1 << 200]), "invalid fill tensor-volume"),
    "a place of another number of dimensions": (offsets(NAME, [0, 0]), "a part of"),
    "a place that is a text": (offsets(NAME, ["0"]), "TypeError"),
    "no places": (lambda header: header["__metadata__"].update({INFO: "{}"}), "KeyError"),
    "places that are no JSON": (lambda header: header["__metadata__"].update({INFO: "{"}), "JSONDecodeError"),
    "another shape": (shape(1 << 40), "SafetensorError"),
    "bytes beyond the end": (lambda header: header[NAME].update(data_offsets=[0, 1 << 40]), "SafetensorError"),
    "a negative place in the file": (lambda header: header[NAME].update(data_offsets=[-4, 60]), "SafetensorError"),
    "an unknown dtype": (lambda header: header[NAME].update(dtype="F7"), "SafetensorError"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), FORGED.values(), ids=FORGED)
def test_headers_that_can_not_be_true_are_refused(run: Path, change: Callable[[Header], None], expected: str):
    forge(run, FILE, forged(run, change))
    tracemalloc.start()
    with pytest.raises(RunError, match=expected) as refused:
        export_checkpoint(run, Path("out"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"{STEP}/*.safetensors: expected what torch writes, got: " in str(refused.value)
    assert "use another checkpoint" in str(refused.value)
    assert peak < 50e6


def test_a_part_that_is_there_twice_is_refused(run: Path):
    forge(run, FILE.replace("shard-00001", "shard-00002"), forged(run, lambda header: None))
    with pytest.raises(RunError, match="has overlapping chunks"):
        export_checkpoint(run, Path("out"))


def test_plain_safetensors_are_whole_tensors_and_a_pickle_beside_them_is_not_read(whole: Whole, run: Path):
    forge(run, FILE, forged(run, lambda header: header["__metadata__"].pop(INFO)))
    forge(run, ".metadata", pickle.dumps(Bomb()))
    export_checkpoint(run, Path("out"))
    expected, found = (load_tensors(path / "checkpoints" / STEP) for path in (whole.run, run))
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())
    assert not Path("MARKER").exists()
    # Nor is it where there is nothing else, as before this format.
    (run / "checkpoints" / STEP / FILE).unlink()
    with pytest.raises(RunError, match=r"expected a checkpoint with \*\.safetensors in .*, got none; use another"):
        load_tensors(run / "checkpoints" / STEP)


def test_a_data_file_that_leads_elsewhere_is_refused(run: Path):
    path = run / "checkpoints" / STEP / FILE
    path.rename(run.parent / "elsewhere")
    path.symlink_to(run.parent / "elsewhere")
    with pytest.raises(RunError, match=rf"{FILE}: expected a file of the checkpoint, got .*elsewhere"):
        stored_names(path.parent)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match=FILE):
        stored_names(path.parent)
    with pytest.raises(RunError, match="expected a regular file"):
        export_checkpoint(run, Path("out"))


@pytest.mark.parametrize("content", [b"", b"\x80", os.urandom(1000), (1 << 60).to_bytes(8, "little")])
def test_a_file_that_is_no_safetensors_is_refused(run: Path, content: bytes):
    forge(run, FILE, content)
    with pytest.raises(RunError, match=STEP):
        export_checkpoint(run, Path("out"))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
     torch.uint8, torch.bool, torch.float8_e4m3fn, torch.uint16],
)  # fmt: skip
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype):
    import torch.distributed.checkpoint as dcp

    wide = torch.arange(24).reshape(4, 6).to(dtype)
    tensors = {"model.a": wide, "model.b": wide.t(), "model.none": wide[:0], "model.one": wide[1, 2]}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    dcp.save(tensors, storage_writer=_Writer(str(tmp_path), save_distributed=True), no_dist=True)
    found = load_tensors(tmp_path)
    assert found.keys() == {"a", "b", "none", "one"}
    for name, expected in tensors.items():
        got = found[name.removeprefix("model.")]
        assert got.dtype == dtype
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize(("name", "content"), [
    ("engine.json", b"[]"), ("engine.json", b'{"num_updates": "7"}'), ("random-state-cpu-00000.bin", b"x" * 9),
    ("random-state-cpu-00000.bin", b""), ("engine.json", b"\xff"),
])  # fmt: skip
def test_other_files_of_the_engine_are_refused_by_name(whole: Whole, run: Path, name: str, content: bytes):
    forge(run, name, content)
    assert re.search(f"(?s){STEP}.*use another checkpoint", resume_error(whole, run))


WHOLE: dict[str, Any] = {"config": "", "queue": b"", "trainer": TrainerState().to_plain()}


@pytest.mark.parametrize("extra", [
    {}, WHOLE | {"config": 1}, WHOLE | {"queue": None}, WHOLE | {"trainer": []}, WHOLE | {"trainer": {}},
    WHOLE | {"trainer": WHOLE["trainer"] | {"step": "x"}}, WHOLE | {"trainer": WHOLE["trainer"] | {"digests": [1]}},
])  # fmt: skip
def test_a_state_that_is_no_trainers_is_refused_by_name(run: Path, extra: dict[str, Any]):
    checkpoint = run / "checkpoints" / STEP
    assert run_state(checkpoint, WHOLE)[1] == TrainerState()
    with pytest.raises(RunError, match=rf"{STEP}/extra\.msgpack: expected the config.*use another checkpoint"):
        run_state(checkpoint, extra)


def test_a_link_among_the_models_files_is_not_exported(run: Path):
    secret = run.parent / "secret"
    secret.write_text("key")
    (run / "checkpoints" / STEP / "hf" / "notes.txt").symlink_to(secret)
    with pytest.raises(RunError, match=r"hf/notes\.txt: expected a file of the checkpoint.*secret"):
        export_checkpoint(run, Path("out"))


@pytest.mark.parametrize("name", ["../../../secret", "/etc/hostname"])
def test_digests_of_files_elsewhere_are_refused(run: Path, name: str):
    (run.parent / "secret").write_text("key")
    manifest = run / "checkpoints" / STEP / "digests.json"
    manifest.write_text(f'{{"{name}": [3, "00"]}}')
    with pytest.raises(RunError, match="expected names of files of the checkpoint"):
        export_checkpoint(run, Path("out"))
