"""A file of a finished run is damaged: each command that reads it goes on, or refuses it with its name and a remedy."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from async_rl.cli.main import main
from async_rl.config.loading import load_config
from async_rl.errors import UserError
from async_rl.learner.checkpoints.fork import find_fork_point, fork_run, must_fork
from async_rl.learner.checkpoints.resume import find_resume_point
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.loop.start import _record_changes, _restore, _take_files_over
from async_rl.learner.ranks import init_ranks
from async_rl.run.directory import RunDir
from async_rl.run.lock import acquire
from async_rl.run.queue_files import RunFiles
from async_rl.run.reuse import check_place, prepare_run_dir
from tests.damage import damage
from tests.learner.rank_layouts import layout_model
from tests.learner.resumed_run import answered, build_run

SEED = 0
BESIDE = "beside"
"""The folder with what ``eval --out`` writes, in addition to the run's own."""


@dataclass(frozen=True)
class Finished:
    """A finished run: its files, and its engine."""

    directory: Path
    engine: FsdpEngine


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    root = tmp_path_factory.mktemp("finished")
    layout_model(root / "model", "qwen2")
    for name, content in (("steps", "4"), ("bound", "1"), ("sections.json", "{}")):
        (root / name).write_text(content)
    run = build_run(root)
    run_dir = prepare_run_dir(run.config)
    engine = FsdpEngine(run.config, init_ranks(run.config))
    run.engine = engine  # pyright: ignore[reportAttributeAccessIssue]
    run.start(answer=answered)
    with run_dir.metrics.open("a") as metrics:
        for step, accuracy in ((0, 0.25), (4, 0.5)):
            row = {"step": step, "time_s": 9.0, "eval/test/accuracy": accuracy, "eval/test/rows": 4}
            metrics.write(json.dumps(row) + "\n")
    files = RunFiles(run.path, "tcp://127.0.0.1:9")
    files.record(run_dir.run_id)
    files.write_last(run_dir.run_id, run.queue_state.stats().ledger)
    run_dir.config_changes.write_text(json.dumps({"step": 2, "changed": {"optimizer.lr": [1.0, 2.0]}}) + "\n")
    run_dir.origin.write_text(json.dumps({"run_dir": str(root / "old"), "run_id": "abc", "step": 0}))
    run_dir.mark_finished({"step": 4})
    acquire(run_dir, "learner").close()
    (run.path / BESIDE).mkdir()
    figures = [
        {"model": name, "dataset": "test", "figures": {"accuracy": 0.5, "rows": 4, "samples": 2}} for name in "ab"
    ]
    (run.path / BESIDE / "figures.json").write_text(json.dumps(figures))
    yield Finished(run.path, engine)
    engine.close()


def fork(run: Path, _: FsdpEngine) -> None:
    config = load_config(run / "config.toml", [f"run.dir={run.parent / 'fork'}", "learner.steps=9"])
    point = find_fork_point(str(run))
    assert must_fork(point, config, fresh=False)
    prepare_run_dir(config)
    fork_run(point, config)


def resume(run: Path, engine: FsdpEngine) -> None:
    """What ``launch`` and the learner read before the first step."""
    place = [f"run.dir={run}"]
    config = load_config(run / "config.toml", place)
    check_place(config, run / "config.toml", place)
    acquire(RunDir(run), "learner").close()
    run_dir = prepare_run_dir(config)
    assert run_dir.run_id
    point = find_resume_point(run)
    restored = _restore(engine, point.checkpoint, config)
    with ExitStack() as written:
        _take_files_over(run_dir, point, restored.state, config, written, confirm=lambda: None)
        _record_changes(run_dir, restored, config)


def command(*words: str) -> Callable[[Path, FsdpEngine], None]:
    """A command line; RUN is the run, OUT a place for its output."""

    def run_it(run: Path, _: FsdpEngine) -> None:
        main([word.replace("RUN", str(run)).replace("OUT", str(run.parent / "out")) for word in words])

    return run_it


COMMANDS: dict[str, Callable[[Path, FsdpEngine], None]] = {
    "compare": command("compare", "RUN"),
    "status": command("status", "RUN", "--timeout", "0.1"),
    "eval --compare": command("eval", "--compare", "RUN"),
    "eval --compare OUT": command("eval", "--compare", f"RUN/{BESIDE}"),
    "export": command("export", "RUN", "OUT"),
    "--from": fork,
    "resume": resume,
}

JSONS: tuple[Any, ...] = ("x", None, [], {}, -1, 1e308, float("inf"), float("nan"), 10**40, True, [1], {"a": 1})


def spoil(path: Path, random: Random) -> str:
    """Damage a file as a disk does, or as a program does that writes another value."""
    if not path.stat().st_size or (path.suffix in (".json", ".jsonl") and random.random() < 0.4):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        number = random.randrange(len(lines)) if lines else 0
        plain = json.loads(lines[number]) if lines and lines[number] else None
        value = random.choice(JSONS)
        if isinstance(plain, dict) and plain and random.random() < 0.8:
            key = random.choice(sorted(plain))
            plain, what = plain | {key: value}, f"{key} = {value}"
            if random.random() < 0.2:
                del plain[key]
                what = f"no {key}"
        else:
            plain, what = value, f"only {value}"
        lines[number : number + 1] = [json.dumps(plain)]
        path.write_text("".join(f"{line}\n" for line in lines))
        return f"{path}: {what}"
    if random.random() < 0.1:
        data = bytearray(path.read_bytes())
        place = random.randrange(len(data))
        data[place : place + 64] = bytes(min(64, len(data) - place))
        path.write_bytes(data)
        return f"zeros in {path} at {place}"
    return damage(path, random)


def outcome(what: str, run: Path, hurt: Path, reader: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command, and check its end."""
    try:
        reader()
        code, text = 0, ""
    except SystemExit as ended:
        code, text = ended.code, ""
    except UserError as error:
        code, text = 2, str(error)
    except BaseException as error:
        raise AssertionError(what) from error
    output = capsys.readouterr()
    text += output.err
    assert "Traceback" not in output.out + text, what
    assert code in (0, None, 2), what
    if code == 2:
        assert hurt.name in text or hurt.parent.name in text or str(run) in text, f"{what}: {text}"
    return "refused" if code == 2 else "done"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "num_damages", [pytest.param(12, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.long)]
)
def test_every_command_survives_damage(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_damages: int
):
    ends: Counter[tuple[str, str]] = Counter()
    handlers = logging.getLogger().handlers[:]
    for number in range(num_damages):
        random = Random(f"{SEED} {number}")
        run = tmp_path / str(number) / "run"
        shutil.copytree(finished.directory, run)
        hurt = random.choice(sorted(path for path in run.rglob("*") if path.is_file()))
        what = f"number {number}: {spoil(hurt, random)}"
        for name, reader in COMMANDS.items():
            end = outcome(f"{name}, {what}", run, hurt, partial(reader, run, finished.engine), capsys)
            ends[name, end] += 1
        shutil.rmtree(run.parent)
    logging.getLogger().handlers[:] = handlers
    print(dict(ends))
    assert all(ends[name, "done"] for name in COMMANDS), "each command goes on with some damages"
