"""Overlap with the engines' compute replaced by timed waits, as on devices of their own.

Everything else is real: the queue server and the generators are processes, weights travel, leases are admitted. The
fake backend waits for each decode step and draws log-normal answer lengths from the lease's seed, so that both sides
of a comparison draw alike; the timed engine waits for each update.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import tomli_w
import torch

from async_rl.colocated.sampler import LearnerSampler
from async_rl.config.config import Config
from async_rl.config.loading import load_config
from async_rl.learner.interface import PolicyScores, ScoredBy, UpdateStats
from async_rl.learner.loop.start import LearnerContext, train_with
from async_rl.learner.sampling import RankSampler, SamplingOrder
from async_rl.learner.sequences import TrainSequence

GROUPS_PER_STEP = 32
GROUP_SIZE = 8
MAX_RUNNING = 64
MEAN_TOKENS = 32.0
SIGMA = 1.0
DECODE_STEP_S = 0.01
WARMUP_STEPS = 5


@dataclass(frozen=True, slots=True)
class TimedResult:
    """One run: seconds a step, and what a step costs each side.

    ``learner_idle`` is the share of time in which the learner waited, ``idle_used`` the share of that in which its
    device sampled, and ``learner_share`` the share of the groups that it sampled.
    """

    num_generators: int
    max_staleness: int
    step_s: float
    generate_s: float
    train_s: float
    staleness_mean: float
    dropped_share: float
    learner_idle: float
    generators_idle: float
    idle_used: float
    learner_share: float

    @property
    def efficiency(self) -> float:
        """Steps/s over ``1 / max(gen, train)``."""
        return max(self.generate_s, self.train_s) / self.step_s

    @property
    def balance(self) -> float:
        return self.generate_s / self.train_s


class TimedEngine:
    """An engine whose update takes exactly ``train_s`` seconds and whose weights are one small tensor.

    ``sampler`` samples on its device while the learner waits. None: nothing does.
    """

    def __init__(self, train_s: float, sampler: RankSampler | None = None) -> None:
        self._train_s, self._sampler = train_s, sampler
        self._weights = torch.zeros(1024)

    def sample(self, order: SamplingOrder) -> None:
        assert self._sampler is not None
        self._sampler.resume(order, [("weights", self._weights)])

    def stop_sampling(self) -> float:
        assert self._sampler is not None
        self._sampler.pause()
        return self._sampler.busy_s

    def update(self, sequences: Sequence[TrainSequence], *, version: int) -> UpdateStats:
        end = time.monotonic() + self._train_s
        tokens = sum(int(s.loss_mask.sum()) for s in sequences)
        time.sleep(max(0.0, end - time.monotonic()))
        return UpdateStats(
            stepped=True, reason="", loss=0.0, grad_norm=0.0, lr=0.0, tokens_trained=tokens, ratio_mean=1.0,
            ratio_max=1.0, clip_fraction=0.0, ess=1.0, entropy=0.0, mean_abs_log_ratio=0.0,
        )  # fmt: skip

    def score(self, sequences: Sequence[TrainSequence], *, of: ScoredBy) -> dict[int, np.ndarray]:
        return {s.sequence_id: np.zeros(int(s.loss_mask.sum()), np.float32) for s in sequences}

    def score_policy(self, sequences: Sequence[TrainSequence]) -> dict[int, PolicyScores]:
        return {i: PolicyScores(values, values) for i, values in self.score(sequences, of="policy").items()}

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weights", self._weights

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """There is nothing to save."""

    def begin_save(self, directory: Path, extra: Mapping[str, Any]) -> Future[None]:
        done = Future[None]()
        done.set_result(None)
        return done

    def load(self, directory: Path) -> None:
        """There is nothing to restore."""

    def tick(self) -> None:
        if self._sampler is not None:
            self._sampler.check()

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()


def timed_config(
    directory: Path,
    *,
    num_generators: int,
    max_staleness: int,
    steps: int,
    generates: bool = False,
    run_ahead: str = "bound",
) -> Config:
    data = directory / "train.jsonl"
    rows = ({"messages": [{"role": "user", "content": f"{i}"}], "gt_answer": str(i)} for i in range(4096))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = directory / "model"  # of no size: nobody loads it
    model.mkdir()
    (model / "config.json").write_text("{}")
    path = directory / "config.toml"
    config: dict[str, Any] = {
        "run": {"dir": str(directory / "run")},
        "model": {"path": str(model)},
        "data": {"train": str(data), "system_prompt": ""},
        "sampling": {"group_size": GROUP_SIZE, "max_new_tokens": 1024, "max_prompt_tokens": 64},
        "reward": {"soft_overlong": False},
        "queue": {
            "max_staleness": max_staleness,
            "run_ahead": run_ahead,
            "filter_range": [],
            "lease_timeout_s": 60.0,
        },
        "loss": {"mask_truncated": False},
        "learner": {"steps": steps, "groups_per_step": GROUPS_PER_STEP, "generate": generates},
        "generator": {
            "backend": "fake",
            "batch_size": MAX_RUNNING // num_generators,
        },
        "experimental": {"fake": {"mean_tokens": MEAN_TOKENS, "sigma": SIGMA, "step_time_s": DECODE_STEP_S}},
        "checkpoint": {"every": 0},
        "eval": {"every": 0},
        "log": {"rollouts_every": 0},
    }
    path.write_text(tomli_w.dumps(config))
    return load_config(path)


def _train(config: Config, train_s: float, num_generators: int) -> list[dict[str, Any]]:
    """Train with so many generators, each in a process of its own, and return the rows of the metrics."""
    report: list[str] = []
    sampler = LearnerSampler(config, rank=0, device=torch.device("cpu"), report=report.append)
    generates = config.learner.generate
    engine = TimedEngine(train_s, sampler if generates else None)
    generators: list[subprocess.Popen[bytes]] = []

    def start_generators(address: str) -> None:
        command = [sys.executable, "-m", "async_rl", "generator", "--connect", address]
        for _ in range(num_generators):
            generators.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    try:
        context = LearnerContext(on_queue=start_generators, sampling=engine if generates else None)
        return train_with(config, engine, context)
    finally:
        for process in generators:
            process.send_signal(signal.SIGTERM)
        for process in generators:
            process.wait(30)


def measure_timed(
    *,
    num_generators: int,
    max_staleness: int,
    steps: int,
    shortage: float = 1.0,
    warmup_steps: int = WARMUP_STEPS,
    generates: bool = False,
    run_ahead: str = "bound",
) -> TimedResult:
    """One run in which the decode time of a step, spread over the generators' slots, is ``shortage`` times the time of
    its training; 1: both are balanced.

    If it ``generates``, the learner's device samples while it waits, with as many slots as a generator.
    """
    train_s = GROUPS_PER_STEP * GROUP_SIZE * MEAN_TOKENS * DECODE_STEP_S / MAX_RUNNING / shortage
    with tempfile.TemporaryDirectory() as scratch:
        config = timed_config(
            Path(scratch),
            num_generators=num_generators,
            max_staleness=max_staleness,
            steps=warmup_steps + steps + max_staleness + 1,
            generates=generates,
            run_ahead=run_ahead,
        )
        rows = _train(config, train_s, num_generators)
        ledger = json.loads((Path(config.run.dir) / "ledger.json").read_text())["groups"]
    # No lease goes past the last step, so the last ones run dry: they belong to the run's end, not to its pace.
    window = [row for row in rows if "version" in row][warmup_steps : warmup_steps + steps]
    used = [row["idle/learner_used"] for row in window if generates]
    own = [row["learner_sampled/groups"] / GROUPS_PER_STEP for row in window if generates]
    stale = sum(ledger["dropped"].get(cause, 0) for cause in ("stale", "cancelled", "too_slow"))
    return TimedResult(
        num_generators=num_generators,
        max_staleness=max_staleness,
        step_s=(window[-1]["time_s"] - window[0]["time_s"]) / (len(window) - 1),
        generate_s=mean(row["time/generate_s"] for row in window if "time/generate_s" in row),
        train_s=mean(row["time/train_s"] + row["time/publish_s"] for row in window),
        staleness_mean=mean(row["staleness/mean"] for row in window),
        dropped_share=stale / max(ledger["issued"], 1),
        learner_idle=mean(row["idle/learner"] for row in window),
        generators_idle=mean(row["idle/generators"] for row in window),
        idle_used=mean(used) if used else 0.0,
        learner_share=mean(own) if own else 0.0,
    )
