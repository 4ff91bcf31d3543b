"""The quickstart's folder of a seed: its config names that seed, and another recipe begins anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from async_rl.config.loading import load_config
from async_rl.errors import RunError
from async_rl.extensions.quickstart.prepare import recipe_digest, write_config
from async_rl.extensions.quickstart.tasks import SUMS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_config_of_seed_0_is_that_of_the_checkout():
    assert SUMS.config_text(0) == (ROOT / "configs/quickstart.toml").read_text(encoding="utf-8")


def test_the_config_of_another_seed_names_that_seed_everywhere():
    config = load_config(write_config(SUMS, 3))
    assert config.run.seed == 3
    places = [config.model.path, config.data.train, *config.data.eval.values(), config.sft.data, config.sft.out]
    assert {Path(str(place)).parent for place in places} == {Path("runs/quickstart-task/seed-3")}
    assert "seed-0" not in SUMS.config_text(3)


def test_a_folder_that_cannot_be_made_is_said_with_what_to_do(folder: Path):
    (folder / "runs").write_text("a file, which stops root, too")
    with pytest.raises(RunError, match=r"can't write runs/\S+ in \S+: \w.*; start the quickstart in a directory"):
        write_config(SUMS, 0)


def test_another_recipe_empties_the_folder_and_the_same_one_keeps_it():
    made = SUMS.directory(0) / "sft.jsonl"
    write_config(SUMS, 0)
    made.touch()
    (made.parent / "recipe").write_text(recipe_digest(SUMS, 0))
    write_config(SUMS, 0)
    assert made.exists()
    write_config(replace(SUMS, sources=("tasks.py",)), 0)
    assert not made.exists()
    assert (made.parent / "quickstart.toml").read_text() == SUMS.config_text(0)
