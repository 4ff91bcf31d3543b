"""Checkpoints that somebody forged: nothing in them runs, and they read no other file and take no more memory."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex

from async_rl.cli.main import main
from async_rl.errors import RunError
from async_rl.learner.checkpoints.digests import find_damage, write_manifest
from async_rl.learner.checkpoints.files import TrainerState, run_state
from async_rl.learner.checkpoints.stored_tensors import _OnlyTensors, load_tensors, stored_names
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.export.model import export_checkpoint
from tests.learner.export.test_export import trained_checkpoint

STEP = "step-000001"
NAME = "model.model.norm.weight"
FIRST = MetadataIndex(NAME, torch.Size([0]))


class Bomb:
    """Creates the file MARKER in the working directory when somebody unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("MARKER", "w")


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


def metadata_of(run: Path) -> Metadata:
    return pickle.loads((run / "checkpoints" / STEP / ".metadata").read_bytes())


def forge_metadata(run: Path, change: Callable[[Metadata], None]) -> None:
    metadata = metadata_of(run)
    change(metadata)
    forge(run, ".metadata", pickle.dumps(metadata))


def forge_item(run: Path, content: bytes) -> None:
    """Replace what is stored of ``NAME`` by ``content``, at the end of its file."""
    path = run / "checkpoints" / STEP / "__0_0.distcp"
    place = _StorageInfo(path.name, path.stat().st_size, len(content))
    forge_metadata(run, lambda metadata: metadata.storage_data.update({FIRST: place}))
    forge(run, path.name, path.read_bytes() + content)


def saved(value: Any, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **settings)
    return buffer.getvalue()


def zipped(change: Callable[[str, bytes], bytes], *, method: int = zipfile.ZIP_STORED) -> bytes:
    """What torch saves of ``NAME``, with changed entries."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(torch.ones(16)))) as source,
        zipfile.ZipFile(buffer, "w", method) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, change(entry.filename.rpartition("/")[2], source.read(entry)))
    return buffer.getvalue()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that refuses its input; its message."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err
    return output.err


def resume_error(whole: Whole, run: Path) -> str:
    with pytest.raises(RunError) as refused:
        whole.engine.load(run / "checkpoints" / STEP)
    return str(refused.value)


def as_bytes(metadata: Metadata) -> None:
    """Let the metadata say that the bytes of ``NAME`` are a pickle, as it does for what is no tensor."""
    metadata.state_dict_metadata[NAME] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(NAME)] = metadata.storage_data.pop(FIRST)


BOMBS: dict[str, Callable[[Path], None]] = {
    "metadata": lambda run: forge(run, ".metadata", pickle.dumps(Bomb())),
    "a tensor of the metadata": lambda run: forge_metadata(
        run, lambda metadata: metadata.state_dict_metadata.update({NAME: Bomb()})  # pyright: ignore
    ),
    "a key of the metadata": lambda run: forge_metadata(
        run, lambda metadata: metadata.storage_data.update({Bomb(): None})
    ),
    "an old protocol": lambda run: forge(run, ".metadata", pickle.dumps(Bomb(), protocol=0)),
    "a tensor's bytes": lambda run: forge_item(run, saved(Bomb())),
    "a tensor's bytes, in the old form": lambda run: forge_item(
        run, saved(Bomb(), _use_new_zipfile_serialization=False)
    ),
}  # fmt: skip


def byte_item(run: Path) -> None:
    forge_item(run, saved(Bomb()))
    forge_metadata(run, as_bytes)


@pytest.mark.parametrize("bomb", [*BOMBS.values(), byte_item], ids=[*BOMBS, "bytes that are no tensor"])
def test_a_bomb_does_not_go_off_in_export_eval_or_resume(
    whole: Whole, run: Path, capsys: pytest.CaptureFixture[str], bomb: Callable[[Path], None]
):
    bomb(run)
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


def test_what_nobody_reads_of_the_metadata_may_be_anything_and_still_does_not_run(whole: Whole, run: Path):
    forge_metadata(run, lambda metadata: setattr(metadata, "planner_data", Bomb()))
    export_checkpoint(run, Path("out"))
    expected, found = (load_tensors(path / "checkpoints" / STEP) for path in (whole.run, run))
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())
    assert not Path("MARKER").exists()


def test_a_byte_item_that_torch_would_unpickle_is_refused_by_the_planner_too():
    class Item:
        dest_index = FIRST

    with pytest.raises(RunError, match=f"got bytes for {NAME}"):
        _OnlyTensors().load_bytes(Item(), io.BytesIO())  # pyright: ignore[reportArgumentType]


def place(**changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        metadata.storage_data[FIRST] = replace(metadata.storage_data[FIRST], **changes)

    return change


def tensor(**changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata[NAME]
        metadata.state_dict_metadata[NAME] = replace(entry, **changes)

    return change


def chunk(offset: int, size: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([offset]), torch.Size([size]))


FORGED: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "a file of the directory above": (place(relative_path="../secret"), r"the file '\.\./secret'"),
    "an absolute path": (place(relative_path="/etc/passwd"), "the file '/etc/passwd'"),
    "a file that is not there": (place(relative_path="__7_0.distcp"), r"__7_0\.distcp, which can't be read"),
    "a negative offset": (place(offset=-1), "a place that is no file, offset and length"),
    "an offset beyond the end": (place(offset=1 << 40), "bytes in __0_0.distcp, which has"),
    "an absurd length": (place(length=1 << 61), "bytes in __0_0.distcp, which has"),
    "an absurd number": (place(length=1 << 200), "a place that is no file, offset and length"),
    "a transformation": (place(transform_descriptors=["zstd"]), "a transformation of"),
    "another shape": (tensor(size=torch.Size([1 << 40])), "chunks that don't cover"),
    "a tensor of a terabyte": (
        tensor(size=torch.Size([1 << 38]), chunks=[chunk(0, 1 << 38)]), r"bytes for a part of .* 1099511627776 bytes"
    ),
    "a part twice": (tensor(chunks=[chunk(0, 8), chunk(0, 8)]), "chunks that don't cover"),
    "parts with a gap": (tensor(chunks=[chunk(0, 8), chunk(9, 7)]), "chunks that don't cover"),
    "a part beyond the end": (tensor(chunks=[chunk(0, 8), chunk(9, 8)]), "chunks that don't cover"),
    "parts of another number of dimensions": (
        tensor(chunks=[ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([16, 1]))]), "chunks that don't cover"
    ),
    "a list of itself": (tensor(chunks=[chunk(0, 0)] * 100_000), "or too many"),
    "no dtype": (tensor(properties=None), "a tensor without a dtype"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), FORGED.values(), ids=FORGED)
def test_metadata_that_does_not_agree_with_the_files_is_refused(
    run: Path, change: Callable[[Metadata], None], expected: str
):
    (run / "checkpoints" / "secret").write_bytes(b"secret" * 1000)
    forge_metadata(run, change)
    tracemalloc.start()
    with pytest.raises(RunError, match=expected) as refused:
        export_checkpoint(run, Path("out"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"{STEP}/.metadata: expected what torch writes" in str(refused.value)
    assert "use another checkpoint" in str(refused.value)
    assert "secretsecret" not in str(refused.value)
    assert peak < 50e6


def test_a_data_file_that_leads_elsewhere_is_refused(run: Path):
    path = run / "checkpoints" / STEP / "__0_0.distcp"
    path.rename(run.parent / "elsewhere")
    path.symlink_to(run.parent / "elsewhere")
    with pytest.raises(RunError, match=r"__0_0\.distcp.*leads to .*elsewhere"):
        stored_names(path.parent)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match=r"__0_0\.distcp"):
        stored_names(path.parent)
    with pytest.raises(RunError, match="expected a regular file"):
        export_checkpoint(run, Path("out"))


HUGE = b"\x80\x04\x96" + (1 << 40).to_bytes(8, "little") + b"."  # a bytearray of a terabyte
MEMO = b"\x80\x04Nr\xff\xff\xff\x3f."  # place 2**30 of the memo
DEEP = b"\x80\x04}(" + b")" + b"\x85" * 200_000 + b"Nu."  # a tuple of many levels as the key of a dict


@pytest.mark.parametrize("content", [HUGE, MEMO, DEEP, b"", b"\x80", os.urandom(1000)])
def test_metadata_that_is_no_metadata_is_refused(run: Path, content: bytes):
    forge(run, ".metadata", content)
    with pytest.raises(RunError, match=r"\.metadata: expected what torch writes for a checkpoint's tensors, got: "):
        export_checkpoint(run, Path("out"))


def long_pickle(name: str, data: bytes) -> bytes:
    return data + b"x" * 100_000 if name == "data.pkl" else data


ITEMS: dict[str, tuple[bytes, str]] = {
    "another shape": (saved(torch.ones(17)), "one of another shape"),
    "another dtype": (saved(torch.ones(16, dtype=torch.float16)), "one of another shape, or of torch.float16"),
    "fewer bytes than its shape": (zipped(lambda name, data: data[:32] if name == "0" else data), "32 bytes"),
    "compressed bytes": (zipped(lambda _, data: data, method=zipfile.ZIP_DEFLATED), "or a compressed one"),
    "another byte order": (zipped(lambda name, data: b"big" if name == "byteorder" else data), "the byte order b'big'"),
    "a pickle of a megabyte": (zipped(long_pickle), "data.pkl of"),
    "a list": (saved([1, 2]), "list, which is no plain tensor"),
    "no archive": (b"x" * 2000, "BadZipFile"),
}


@pytest.mark.parametrize(("content", "expected"), ITEMS.values(), ids=ITEMS)
def test_a_stored_tensor_that_is_another_one_is_refused(run: Path, content: bytes, expected: str):
    forge_item(run, content)
    with pytest.raises(RunError, match=expected) as refused:
        export_checkpoint(run, Path("out"))
    assert f"__0_0.distcp: {NAME}: expected a tensor of shape [16] and torch.float32" in str(refused.value)


def test_strides_are_kept_and_may_not_lead_beyond_the_bytes(run: Path):
    def wide(name: str, data: bytes) -> bytes:
        return data.replace(b"K\x01\x85", b"K\x02\x85") if name == "data.pkl" else data  # stride 1 -> 2

    forge_item(run, zipped(wide))
    with pytest.raises(RunError, match="64 bytes"):
        load_tensors(run / "checkpoints" / STEP)
    forge_item(run, saved(torch.arange(32.0)[::2]))
    assert torch.equal(load_tensors(run / "checkpoints" / STEP)["model.norm.weight"], torch.arange(0.0, 32.0, 2))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
     torch.uint8, torch.bool, torch.float8_e4m3fn, torch.uint16],
)  # fmt: skip
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype):
    import torch.distributed.checkpoint as dcp

    wide = torch.arange(24).reshape(4, 6).to(dtype)
    tensors = {"model.a": wide, "model.b": wide.t(), "model.none": wide[:0], "model.one": wide[1, 2]}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
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
    text = resume_error(whole, run)
    assert STEP in text
    assert "use another checkpoint" in text


WHOLE: dict[str, Any] = {"config": "", "queue": b"", "trainer": TrainerState().to_plain()}


@pytest.mark.parametrize("extra", [
    {}, WHOLE | {"config": 1}, WHOLE | {"queue": None}, WHOLE | {"trainer": []}, WHOLE | {"trainer": {}},
    WHOLE | {"trainer": WHOLE["trainer"] | {"step": "1"}}, WHOLE | {"trainer": WHOLE["trainer"] | {"digests": [1]}},
    WHOLE | {"trainer": WHOLE["trainer"] | {"bound_state": {"unknown": 1}}},
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
