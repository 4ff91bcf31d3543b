"""notes.log: lines that a process has for the user of launch."""

from pathlib import Path

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
