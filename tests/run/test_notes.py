"""notes.log: lines that a process has for the user of launch."""

import io
from pathlib import Path

from rich.console import Console

from async_rl.launch.live_view import PlainView
from async_rl.run.directory import RunDir
from async_rl.run.notes import NotesTail, tell


def test_only_new_and_complete_lines_are_read(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    tell(run_dir, "of an earlier start")
    tail = NotesTail(run_dir.notes)
    assert tail.poll() == []
    tell(run_dir, "two\nlines become one")
    with run_dir.notes.open("a") as file:
        file.write("half of ")
        file.flush()
        assert tail.poll() == ["two lines become one"]
        file.write("a line\n")
    assert tail.poll() == ["half of a line"]


def test_the_view_of_launch_shows_them(tmp_path: Path):
    shown = io.StringIO()
    view = PlainView(Console(file=shown), tmp_path / "metrics.jsonl", num_steps=2)
    tell(RunDir(tmp_path), "wandb did not start")
    view.refresh([])
    assert shown.getvalue() == "wandb did not start\n"
