"""Two ranks, one of which is stopped at each phase of a step: rank 1 until it is reported, then rank 0 for good."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from async_rl.extensions.ops import rank_watch
from async_rl.learner import ranks as ranks_module
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.run.directory import RunDir
from tests.learner.rank_scenarios import batch_for, ranks_with_timeout, save, tiny_config


def start(directory: Path) -> None:
    """Each report is a line of ``reports-RANK``, after the phase in which rank 1 is. Rank 0's let rank 1 go on.

    A rank that is reported at 3 s has until 10 s to come; the model is loaded without such limits.
    """
    ranks_module.STORE_TIMEOUT_S = 1.0
    ranks = ranks_with_timeout(directory, 200.0)
    ranks.end_watch()
    config, phase = tiny_config(directory, "model", experimental={"distributed_timeout_s": 6.0}), directory / "phase"
    (directory / f"pid-{ranks.rank}").write_text(str(os.getpid()))
    engine = FsdpEngine(config, ranks)

    def report(_: RunDir, line: str) -> None:
        with (directory / f"reports-{ranks.rank}").open("a") as file:
            file.write(f"{phase.read_text()}: {line}\n")
        if ranks.is_leader:
            os.kill(int((directory / "pid-1").read_text()), signal.SIGCONT)

    def stop_once_before(name: str, owner: Any, method: str) -> None:
        called: Callable[..., Any] = getattr(owner, method)

        def stopping(*arguments: Any, **keywords: Any) -> Any:
            setattr(owner, method, called)
            phase.write_text(name)
            os.kill(os.getpid(), signal.SIGSTOP)
            return called(*arguments, **keywords)

        setattr(owner, method, stopping)

    rank_watch.tell = report
    _set_pg_timeout(timedelta(seconds=10))
    ranks.end_watch = rank_watch.watch_rank(config, ranks.rank, lambda: ranks.command)
    if not ranks.is_leader:
        policy = engine.policy
        stop_once_before("forward", policy.passes, "accumulate")
        stop_once_before("backward", torch.autograd, "backward")
        stop_once_before("clip", policy.passes, "total_norm")
        stop_once_before("optimizer", policy.optimizer, "step")
        stop_once_before("gather of a version", policy, "gather")
        stop_once_before("checkpoint", ranks, "exchange_saved")
        engine.follow()
    engine.update(batch_for(0), version=0)
    dict(engine.gather())
    save(engine, directory / "saved", 1)
    os.kill(os.getpid(), signal.SIGSTOP)
