"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from async_rl.run.following.sinks import Row, Settings, Sink

# wandb's reports about itself go to the same server, and wait for it at the end, also in offline mode.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb


class Wandb(Sink):
    """A run there, or the files of one, which ``wandb sync`` sends."""

    def __init__(self, settings: Settings) -> None:
        private: dict[str, Any] = {
            "console": "off", "silent": True, "init_timeout": settings["limit_s"], "x_stats_pid": settings["stats_pid"],
        }  # fmt: skip
        if "finish_timeout" in wandb.Settings.model_fields:  # else the parent ends this process, with the last rows
            private |= {"finish_timeout": settings["finish_s"], "finish_timeout_raises": True}
        try:
            self._run = wandb.init(
                project=settings["project"], name=settings["name"], id=settings["id"], resume="allow",
                dir=settings["directory"], mode=settings["mode"], config=settings["config"],  # pyright: ignore[reportArgumentType]
                settings=wandb.Settings(**private),
            )  # fmt: skip
        except Exception:
            wandb.teardown()  # else the id stays in use, and the next attempt fails
            raise
        # Rows carry their own step: wandb's own counter rejects the smaller steps that follow a rollback.
        self._run.define_metric("*", step_metric="step")
        self.place = os.path.dirname(self._run.dir)
        self.remedy = f"wandb sync {self.place}"

    def write(self, row: Row) -> None:
        self._run.log(dict(row))

    def table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({"rollouts": table, "step": step})

    def finish(self, *, is_failed: bool) -> None:
        self._run.finish(exit_code=int(is_failed))
        wandb.teardown()  # its service writes the last rows of a file when it ends
