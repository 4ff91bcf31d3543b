"""The quickstart with a model of another family: warm start and a short run, by the commands that a user types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.extensions.quickstart import sums
from tests.end_to_end.harness import check_ledger, metrics, roles, write_config
from tests.vllm.families import make_family

SHAPE: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3}
PARITY = ("parity/max", "parity/sampled_max")


class Learned(NamedTuple):
    """Shares of right answers in the evaluations, and the largest difference (nats) in any parity check."""

    accuracy_before: float
    accuracy_after: float
    parity: float


def learn_sums(
    directory: Path, family: str, *, backend: str, num_steps: int = 12, parallel: Mapping[str, int] | None = None,
    num_ranks: int = 1, **changes: Any,
) -> Learned:  # fmt: skip
    """Make the task and a model of ``family``, with ``changes`` of its shape; warm-start and train it.

    A second call with the same ``directory`` takes the task and the warm start of the first. ``num_ranks`` ranks of the
    learner are laid out as the section ``parallel`` says.
    """
    if not (directory / "warm").exists():
        _make_task(directory, family, changes)
        _start(directory, "sft", {**_settings(directory, num_steps), "model": {"path": str(directory / "base")}})
    settings = _settings(directory, num_steps)
    settings["learner"] |= {"nproc": num_ranks}
    settings |= {
        "model": {"path": str(directory / "warm")},
        "parallel": dict(parallel or {}),
        "generator": {"backend": backend, "batch_size": 64, "num_threads": 1},
    }
    run_dir = _start(directory, "launch", settings)
    rows = metrics(run_dir)
    check_ledger(run_dir)
    accuracies = [row["eval/held_out/accuracy"] for row in rows if "eval/held_out/accuracy" in row]
    return Learned(accuracies[0], accuracies[-1], max(row[key] for row in rows for key in PARITY if key in row))


def _make_task(directory: Path, family: str, changes: dict[str, Any]) -> None:
    sums.write_task(directory, seed=0)
    held_out = directory / "held_out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:128]))
    sums.write_model(directory / "base", seed=0)
    shape = SHAPE | {"vocab_size": len(sums.CHARACTERS) + 3, "initializer_range": 0.02} | changes
    make_family(family, 0, **shape).save_pretrained(directory / "base")


def _settings(directory: Path, num_steps: int) -> dict[str, Any]:
    """The settings that warm start and run share, by section."""
    sft = {"data": str(directory / "sft.jsonl"), "out": str(directory / "warm"), "steps": 400, "batch_size": 64}
    return {
        "data": {
            "train": str(directory / "train.jsonl"), "eval": {"held_out": str(directory / "held_out.jsonl")},
            "system_prompt": "",
        },
        "sampling": {"group_size": 8, "max_new_tokens": 40, "max_prompt_tokens": 16},
        "reward": {"type": "boxed"},
        "learner": {"steps": num_steps, "groups_per_step": 8, "max_tokens": 8192, "num_threads": 1},
        "optimizer": {"lr": 2e-4, "warmup_steps": 2},
        "queue": {"max_staleness": 4},
        "checkpoint": {"every": 1000},
        "eval": {"every": num_steps},
        "experimental": {"parity_every": 4},
        "sft": {**sft, "lr": 3e-3, "warmup_steps": 20, "schedule": "linear"},
    }  # fmt: skip


def _start(directory: Path, command: str, settings: Mapping[str, Any]) -> Path:
    """Run ``command`` with ``settings`` to its end, in a new run directory, which is returned."""
    run_dir = directory / f"{command}-{len(list(directory.glob(f'{command}-*')))}"
    run_dir.mkdir()
    path = write_config(run_dir / "config.toml", {**settings, "run": {"dir": str(run_dir / "run")}})
    with roles(run_dir / "logs") as start:
        start(command, command, str(path)).succeed(600.0)
    return run_dir / "run"
