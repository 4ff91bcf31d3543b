"""With which settings the learner fits, and the table of docs/scaling.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.parallel import Layout, ParallelConfig
from async_rl.launch.checks.learner_memory import needed_bytes, propose, shape_of
from async_rl.learner.memory_plan import ModelShape, plan_memory
from benchmarks.memory_table import DEVICE_BYTES, ROWS, markdown, memory
from tests.learner.tiny import tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[3]


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


def proposed_sizes(config: Config, shape: ModelShape, num_ranks: int) -> list[dict[str, Any]]:
    """The sections ``parallel`` of all proposals from the weakest to the strongest, each for just what it takes."""
    found: list[dict[str, Any]] = []
    room = 1e12
    while (proposal := propose(shape, config, num_ranks, room, "cuda")) is not None:
        sizes = {k.removeprefix("parallel."): v for k, v in proposal.changes.items() if k.startswith("parallel.")}
        if sizes and sizes not in found:
            found.append(sizes)
        room = needed_bytes(proposal.plan, "cuda") * 0.999
    return found


def test_a_layout_that_the_model_can_have_is_proposed_where_settings_do_not_help(tmp_path: Path):
    sections = {"sampling": {"max_prompt_tokens": 1000, "max_new_tokens": 3000}, "optimizer": {"name": "adamw_8bit"}}
    config = tiny_config(tmp_path, "model", learner={"max_tokens": 4096}, **sections)
    # Llama 3 70B has 64 heads, and 8 for keys and values: 2, 4 or 8 ranks can share them.
    dense = ModelShape(8192, 28672, 80, 8192, 1024, 128256, is_tied=False, num_heads=64, num_key_heads=8)
    found = proposed_sizes(config, dense, 32)
    assert found[:2] == [{"sequence": 2}, {"sequence": 4}]
    shared = [{"tensor": 2}, {"tensor": 4}, {"tensor": 8}, {"tensor": 8, "sequence": 2}, {"tensor": 8, "sequence": 4}]
    assert [sizes for sizes in found if "tensor" in sizes] == shared
    # With 3 of them none can.
    odd = replace(dense, keys=384, num_key_heads=3)
    assert not any("tensor" in sizes for sizes in proposed_sizes(config, odd, 32))
    # Qwen3 30B-A3B has 128 experts.
    experts = ModelShape(
        2048, 768, 48, 4096, 512, 151936, is_tied=False, num_experts=128, experts_per_token=8, num_heads=32,
        num_key_heads=4,
    )  # fmt: skip
    assert proposed_sizes(config, experts, 8)[0] == {"experts": 2}
    # Whatever is proposed is a layout.
    for shape in (dense, odd, experts):
        for sizes in proposed_sizes(config, shape, 16):
            assert Layout.of(ParallelConfig(**sizes), 16).num_ranks == 16


def test_the_table_of_the_page_is_current_and_all_of_it_fits():
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert markdown() in page, "the page ends with what python -m benchmarks.memory_table prints"
    assert all(memory(*row)[-1] <= DEVICE_BYTES for row in ROWS)
