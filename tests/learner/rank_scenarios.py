"""What rank processes of the tests do: ``python -m tests.learner.rank_scenarios SCENARIO DIRECTORY``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from async_rl.errors import TrainingError
from async_rl.learner.parallel import Ranks, init_ranks
from tests.learner.tiny import random_sequences, tiny_config, with_behavior

# Budgets that leave one rank idle, split unevenly, and take everything at once.
VARIANTS: dict[str, dict[str, Any]] = {
    "small": {"learner": {"max_tokens": 32}},
    "large": {"learner": {"max_tokens": 4096}},
    "gathered": {"learner": {"max_tokens": 64, "reshard": "none"}},
    "recomputed": {"learner": {"max_tokens": 64}, "model": {"gradient_checkpointing": True}},
}
# The first moment is then the gradient itself, and nothing is clipped away.
PLAIN = {"optimizer": {"lr": 1e-3, "beta1": 0.0, "max_grad_norm": 1e9, "schedule": "cosine"}}


def engine_config(directory: Path, variant: dict[str, Any]) -> Any:
    return tiny_config(directory, "model", **(PLAIN | variant))


def batch_for(step: int) -> list[Any]:
    """Seven sequences of 10 to 30 tokens; number 3 is far above the skip threshold."""
    sequences = random_sequences(7, 20, seed=step, spread=10)
    sequences[3] = with_behavior(sequences[3], -12.0)
    return sequences


def updates(directory: Path) -> None:
    """For every variant two steps, the second on one sequence alone, saved; then a load of one rank's checkpoint."""
    from async_rl.learner.fsdp_engine import FsdpEngine

    ranks = init_ranks(engine_config(directory, {}))
    for name, variant in VARIANTS.items():
        engine = FsdpEngine(engine_config(directory, variant), ranks)
        if not ranks.is_leader:
            follow_once(engine)
            continue
        engine.tick()
        stats = [engine.update(batch_for(0), version=0)]
        target = directory / "two" / name
        save(engine, target / "first", 1)
        stats.append(engine.update(batch_for(1)[:1], version=0))
        save(engine, target / "second", 2)
        (target / "stats.json").write_text(json.dumps([asdict(s) for s in stats]))
        if name == "large":
            engine.load(directory / "one" / "first")
            engine.update(batch_for(1)[:1], version=0)
            save(engine, target / "from_one", 2)
        stop_following(engine)
    fail_between_commands(directory, FsdpEngine(engine_config(directory, {}), ranks))


def fail_between_commands(directory: Path, engine: Any) -> None:
    """Rank 0 gives up with a cause; what the other rank hears goes to ``two/cause.txt``."""
    if engine._ranks.is_leader:
        engine.close("StaleRolloutError: group 5f3a is too old")
        return
    try:
        engine.follow()
    except TrainingError as error:
        (directory / "two" / "cause.txt").write_text(str(error))


def save(engine: Any, directory: Path, step: int) -> None:
    directory.mkdir(parents=True)
    engine.save(directory, {"step": step})


def follow_once(engine: Any) -> None:
    """Follow until ``stop_following``, and keep the process group for the next engine."""
    engine._ranks.close, kept = (lambda: None), engine._ranks.close
    engine.follow()
    engine._ranks.close = kept


def stop_following(engine: Any) -> None:
    engine._ranks.close, kept = (lambda: None), engine._ranks.close
    engine.close()
    engine._ranks.close = kept


def ranks_with_timeout(directory: Path, timeout_s: float) -> Ranks:
    return init_ranks(tiny_config(directory, "model", learner={"distributed_timeout_s": timeout_s}))


def talking(directory: Path) -> None:
    """Frames of different sizes out and back; then rank 0 waits longer than the timeout, ticking."""
    ranks = ranks_with_timeout(directory, 3.0)
    outgoing = [bytes([rank]) * (1 + 1000 * rank) for rank in range(ranks.world_size)]
    own = ranks.scatter(outgoing) if ranks.is_leader else ranks.receive()
    assert own == outgoing[ranks.rank]
    assert ranks.gather(own) == (outgoing if ranks.is_leader else [])
    if ranks.is_leader:
        for _ in range(4):
            threading.Event().wait(1.0)
            ranks.broadcast(b"tick")
        ranks.broadcast(b"close")
    else:
        while ranks.receive() != b"close":
            pass
    ranks.close()


def follower_fails(directory: Path) -> None:
    """Rank 1 fails in the middle of a step; rank 0 is in the step's collective by then."""
    ranks = ranks_with_timeout(directory, 60.0)
    with ranks.together("update"):
        if ranks.rank == 1:
            raise ValueError("no memory left on device 1")
        ranks.barrier()


def follower_is_killed(directory: Path) -> None:
    ranks = ranks_with_timeout(directory, 60.0)
    with ranks.together("update"):
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.barrier()


def supervised(directory: Path) -> None:
    from async_rl.config_file import load_config
    from async_rl.learner.sft import run_sft

    run_sft(load_config(directory / "sft.toml"))


SCENARIOS = (updates, talking, follower_fails, follower_is_killed, supervised)

if __name__ == "__main__":
    {scenario.__name__: scenario for scenario in SCENARIOS}[sys.argv[1]](Path(sys.argv[2]))
