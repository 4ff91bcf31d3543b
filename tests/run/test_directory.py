"""Files of a run that are replaced as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.run.directory import replaced


def replace(path: Path, *, fails: bool) -> None:
    with replaced(path) as partial:
        partial.write_text("new")
        if fails:
            raise RuntimeError("replaced by another learner")


def test_a_file_keeps_its_content_and_the_first_error_shows_whatever_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "ledger.json"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="another learner"):
        replace(path, fails=True)
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.json"]

    def fail(path: Path, missing_ok: bool = False) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(RuntimeError, match="another learner"):
        replace(path, fails=True)
    assert path.read_text() == "old"
    replace(path, fails=False)  # nothing is left to remove, so a disk that can't remove files stops nothing
    assert path.read_text() == "new"
