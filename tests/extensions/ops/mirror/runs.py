"""Run directories of a few files, what a mirror of one has, the clock of who waits for it, and kills."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from async_rl.config.config import Config
from async_rl.config.loading import config_to_toml
from async_rl.config.run import CheckpointConfig
from async_rl.extensions.ops.mirror import copier as copiers
from async_rl.extensions.ops.mirror import fetch as fetching
from async_rl.extensions.ops.mirror.copier import Copier
from async_rl.extensions.ops.mirror.fetch import fetch
from async_rl.extensions.ops.mirror.manifest import Manifest, newest_manifest
from async_rl.extensions.ops.mirror.store import Store
from async_rl.learner.checkpoints.digests import find_damage, write_manifest
from async_rl.run.directory import RunDir

URL = "memory://bucket/run"
PAGE = Path(__file__).parents[4] / "docs" / "reliability.md"


def ignore(_line: str) -> None: ...


def make_run(path: Path, *steps: int, run_id: str = "run-a") -> RunDir:
    """A run with checkpoints of these steps."""
    run = RunDir(path)
    path.mkdir(parents=True)
    (path / "run_id").write_text(f"{run_id}\n")
    run.config.write_text(config_to_toml(config_of(path)))
    (path / "queue.keys").write_text("secret")
    (path / "queue").mkdir()
    (path / "queue" / "index.sqlite").write_text("journal")
    for step in steps:
        save(run, step)
    return run


def save(run: RunDir, step: int, content: str = "") -> None:
    """Make ``step`` steps, each with a row, and a checkpoint of the last one."""
    name = f"step-{step:06d}"
    root = run.checkpoints / name
    (root / "hf").mkdir(parents=True)
    (root / "extra.msgpack").write_bytes(b"extra" + content.encode())
    (root / "hf" / "config.json").write_text(f"{name}{content}")
    write_manifest(root)
    rows = "".join(json.dumps({"step": one}) + "\n" for one in range(1, step + 1))
    run.trained.write_text(rows)
    run.metrics.write_text(rows)
    (run.checkpoints / "latest").write_text(f"{name}\n")


def begun(run: RunDir, url: str = URL, **config: Any) -> Copier:
    copier = Copier(run, Store(url), CheckpointConfig(**config), files_every_s=0.0)
    copier.begin(ignore)
    return copier


def manifest_at(url: str = URL) -> Manifest:
    found = newest_manifest(Store(url))
    assert found is not None
    return found


def objects(url: str = URL) -> list[str]:
    store = Store(url)
    return [name for folder in ("manifests", "files", "checkpoints") for name in store.names(folder)]


def contents(root: Path) -> dict[str, bytes]:
    """Path -> content of what a mirror should have of the run in ``root``."""
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    gone = {"queue.keys", "queue/index.sqlite", "mirror.json", "run.lock"}
    return {name: path.read_bytes() for name, path in found.items() if name not in gone}


def config_of(path: Path, url: str = URL, **sections: dict[str, Any]) -> Config:
    raw: dict[str, Any] = {
        "run": {"dir": str(path)}, "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "learner": {"steps": 4},
        "checkpoint": {"mirror": url},
    }  # fmt: skip
    return Config.model_validate({**raw, **sections})


def mirrored_run(path: Path, *, has_ended: bool = False, is_finished: bool = False) -> RunDir:
    """A run whose mirror has the steps 2 and 4, of a process that is dead."""
    run = make_run(path / "run")
    for step in (2, 4):
        save(run, step)
        if step == 4 and is_finished:
            run.mark_finished({"step": 4})
        assert begun(run).sync(is_last=step == 4 and has_ended)
    return run


def copied(path: Path, run: RunDir) -> RunDir:
    shutil.copytree(run.path, path / "copy")
    return RunDir(path / "copy")


def fetched_from_mirror(path: Path) -> str:
    """The checkpoint with which somebody goes on from the mirror now. It is whole."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    fetch(Store(URL), manifest_at(), RunDir(path), ignore)
    name = RunDir(path).latest_checkpoint
    assert name is not None
    assert find_damage(path / "checkpoints" / name) == ""
    return name


class Clock:
    """The clock of who waits for a mirror. It goes on while somebody sleeps, and ``meanwhile`` is called then."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.now, self.meanwhile = 0.0, meanwhile

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


def rows_of(title: str) -> list[str]:
    """The first cells of the table below a title of the page."""
    table = PAGE.read_text().split(f"\n### {title}\n")[1].split("\n##")[0]
    return [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")][1:]


class Killed(BaseException):
    """This process is killed."""


@contextlib.contextmanager
def kill_before(number: int) -> Iterator[list[str]]:
    """Die before the operation ``number`` that changes the store or the run directory. Yield those that were begun."""
    begun_operations: list[str] = []

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: MemoryFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:
            if name != "open" or args == ("wb",):
                if len(begun_operations) == number:
                    raise Killed
                begun_operations.append(f"{name} {path}")
            return real(self, path, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in ("open", "pipe_file", "get_file", "rm_file"):
            patched.setattr(MemoryFileSystem, name, dying(name, getattr(MemoryFileSystem, name)))
        patched.setattr(copiers, "_NUM_THREADS", 1)
        patched.setattr(fetching, "_NUM_THREADS", 1)
        yield begun_operations
