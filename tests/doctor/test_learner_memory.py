"""Whether the learner fits, what the doctor proposes, and the table of docs/scaling.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.parallel import Layout
from async_rl.doctor.learner_memory import check_learner_memory, needed_bytes, propose, shape_of
from async_rl.doctor.scaling import DEVICE_BYTES, ROWS, markdown, memory
from async_rl.learner.memory_plan import plan_memory
from tests.learner.tiny import tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[2]


def config_of(directory: Path, **sections: Any) -> Config:
    lengths = {"max_prompt_tokens": 1000, "max_new_tokens": 1000}
    learner = {"max_tokens": 8192, "reshard": "none"} | sections.pop("learner", {})
    return tiny_config(directory, "model", sampling=lengths, learner=learner, **sections)


def test_what_fits_is_proposed_with_as_few_changes_as_it_takes(tmp_path: Path):
    tiny_model(tmp_path / "model", intermediate_size=1024)
    config, shape = config_of(tmp_path), shape_of(tmp_path / "model")
    enough = needed_bytes(plan_memory(shape, config, Layout(shards=2), device="cpu"), "cpu")
    first = propose(shape, config, 2, enough, "cpu")
    assert first is not None
    assert first.changes == {}
    other = config_of(tmp_path, learner={"reshard": "full"}, model={"gradient_checkpointing": "selective"})
    for_other = needed_bytes(plan_memory(shape, other, Layout(shards=2), device="cpu"), "cpu")
    less = propose(shape, config, 2, for_other, "cpu")
    assert less is not None
    assert less.changes == {"learner.reshard": "full", "model.gradient_checkpointing": "selective"}
    assert str(less) == "2 ranks --set learner.reshard=full --set model.gradient_checkpointing=selective"
    least = propose(shape, config, 2, 0.2 * enough, "cpu")
    assert least is not None
    assert least.changes["learner.max_tokens"] in (4096, 2048)  # the longest sequence has 2000
    assert propose(shape, config, 2, 0.01 * enough, "cpu") is None


def test_the_doctor_says_what_a_rank_takes_and_how_it_fits(tmp_path: Path):
    tiny_model(tmp_path / "model", intermediate_size=1024)
    config = config_of(tmp_path)
    enough = needed_bytes(plan_memory(shape_of(tmp_path / "model"), config, Layout(), device="cpu"), "cpu")
    (fits,) = check_learner_memory(config, 1, enough, "cpu")
    assert (fits.state, fits.fix) == ("OK", "")
    assert "each of 1 ranks takes about" in fits.found
    (fails,) = check_learner_memory(config, 1, enough / 2, "cpu")
    assert fails.state == "FAIL"
    assert "--set model.gradient_checkpointing=" in fails.fix
    (close,) = check_learner_memory(config, 1, enough / 1.1 * 0.9, "cpu")  # within the prediction's error
    assert close.state == "WARN"
    (hopeless,) = check_learner_memory(config, 1, 1000, "cpu")
    assert "take a smaller model" in hopeless.fix


def test_a_model_that_is_not_here_is_not_predicted(tmp_path: Path):
    (found,) = check_learner_memory(config_of(tmp_path), 1, 1e9, "cpu")
    assert found.state == "OK"
    assert "not predicted" in found.found


def test_the_table_of_the_page_is_current_and_all_of_it_fits():
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert markdown() in page, "put the output of python -m async_rl.doctor.scaling at the end of docs/scaling.md"
    assert all(memory(*row)[-1] <= DEVICE_BYTES for row in ROWS)
