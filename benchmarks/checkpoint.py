"""How long a step waits for a checkpoint, beside the time of one copy of the state and of the whole save.

    python -m benchmarks.checkpoint [--megabytes 100] [--rounds 5] [--directory DIR]

A model of about ``--megabytes`` of float32 weights, with random weights, on one rank; its state (weights and two
moments) is three times as large. A round copies the state once, tensor by tensor, into memory that is used already;
saves in the background; and saves without the background. *pause* is the time until the learner may go on, *whole* the
time until the checkpoint is committed, with nothing else running. The first save, whose memory is new, is shown apart.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from async_rl.config.run import CheckpointConfig
from async_rl.learner.checkpoints.writer import CheckpointWriter
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.ranks import init_ranks
from tests.learner.tiny import random_sequences, tiny_config, tiny_model

WANTED_OF_WHOLE, WANTED_OF_COPY = 0.10, 1.5
_HIDDEN = 512
_LAYER_BYTES = 4 * (4 * _HIDDEN * _HIDDEN + 3 * _HIDDEN * 4 * _HIDDEN)


class Round(NamedTuple):
    """Seconds."""

    copy_s: float
    pause_s: float
    whole_s: float
    sync_s: float


def build_engine(root: Path, megabytes: int) -> FsdpEngine:
    """An engine that has made one step, so that its moments are not all zero."""
    num_layers = max(1, round(megabytes * 1e6 / _LAYER_BYTES))
    tiny_model(
        root / "model", hidden_size=_HIDDEN, intermediate_size=4 * _HIDDEN, num_hidden_layers=num_layers,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    config = tiny_config(root, "model")
    engine = FsdpEngine(config, init_ranks(config))
    engine.update(random_sequences(2, 12), version=0)
    return engine


def copy_time(engine: FsdpEngine) -> float:
    """Seconds of one copy of the state into memory that was used before."""
    state = [*engine.policy.tensors().values(), *engine.policy.optimizer.tensors().values()]
    copies = [tensor.clone() for tensor in state]
    began_at = time.perf_counter()
    for copy, tensor in zip(copies, state, strict=True):
        copy.copy_(tensor)
    return time.perf_counter() - began_at


def save_times(engine: FsdpEngine, run_dir: Path, step: int, *, asynchronous: bool) -> tuple[float, float]:
    """Seconds until the learner may go on, and until the checkpoint is committed."""
    config = CheckpointConfig(asynchronous=asynchronous, keep_last=1)
    writer = CheckpointWriter(engine, run_dir, config, lineage="benchmark", confirm=lambda: None)
    began_at = time.perf_counter()
    writer.begin(step, {"step": step})
    pause_s = time.perf_counter() - began_at
    writer.finish()
    whole_s = time.perf_counter() - began_at
    writer.close()
    return pause_s, whole_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; a temporary directory if unset")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        root = Path(name)
        engine = build_engine(root, arguments.megabytes)
        state = [*engine.policy.tensors().values(), *engine.policy.optimizer.tensors().values()]
        print(f"state: {sum(t.nbytes for t in state) / 1e6:.0f} MB in {len(state)} tensors")
        print(f"{'copy_s':>8} {'pause_s':>8} {'whole_s':>8} {'sync_s':>8} {'pause/copy':>11} {'pause/whole':>12}")
        pause_s, whole_s = save_times(engine, root / "run", 1, asynchronous=True)
        print(f"first save: a pause of {pause_s:.3f} s, {whole_s:.3f} s in all")
        rounds: list[Round] = []
        for number in range(arguments.rounds):
            copy_s = copy_time(engine)
            pause_s, whole_s = save_times(engine, root / "run", 2 * number + 2, asynchronous=True)
            _, sync_s = save_times(engine, root / "run", 2 * number + 3, asynchronous=False)
            rounds.append(Round(copy_s, pause_s, whole_s, sync_s))
            show(rounds[-1])
        print("medians:")
        medians = Round(*(statistics.median(values) for values in zip(*rounds, strict=True)))
        show(medians)
        is_met = (
            medians.pause_s <= WANTED_OF_WHOLE * medians.whole_s or medians.pause_s <= WANTED_OF_COPY * medians.copy_s
        )
        print(
            f"goal, a pause of at most {WANTED_OF_WHOLE:.0%} of the save or {WANTED_OF_COPY} copies: "
            f"{'met' if is_met else 'missed'}"
        )


def show(of: Round) -> None:
    print(
        f"{of.copy_s:8.3f} {of.pause_s:8.3f} {of.whole_s:8.3f} {of.sync_s:8.3f} {of.pause_s / of.copy_s:11.2f} "
        f"{of.pause_s / of.whole_s:12.2f}"
    )


if __name__ == "__main__":
    main()
