"""Supervised warm start: ``async-rl sft CONFIG``, alone or under torchrun. Rows in, a Hugging Face directory out.

The engine is that of reinforcement learning (same packing, ranks, checkpoints) with another loss. What it writes lies
under ``run.dir/sft``: ``checkpoints/`` and ``metrics.jsonl``. The same command goes on from the last checkpoint; the
order of the rows is a function of the seed and the step, so a resumed run sees what the first would have seen.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.data.chat import load_tokenizer
from async_rl.errors import ConfigError, RunError
from async_rl.learner.checkpoint.directory import latest_checkpoint, read_extra, write_checkpoint
from async_rl.learner.checkpoint.export import check_export_target, export_checkpoint
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.engine.optimizer import Schedule
from async_rl.learner.engine.protocol import UpdateStats
from async_rl.learner.engine.ranks import init_ranks
from async_rl.learner.losses.objective import SupervisedObjective
from async_rl.learner.packing import TrainSequence
from async_rl.learner.sft.rows import load_sft_rows

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0
_LEARNED_BY = ("model", "lora", "optimizer", "sft")


def run_sft(config: Config) -> None:
    """Train ``model.path`` on ``sft.data`` and export it to ``sft.out``. A finished one is left as it is.

    Raises:
        ConfigError: ``sft.data`` or ``sft.out`` is not set.
        DataError: a row is bad; the message names file and line.
        ModelError: the model is missing or unfit.
        RunError: ``sft.out`` holds something else; or the run directory belongs to other settings.
        TrainingError: another rank failed.
    """
    for key in ("data", "out"):
        if not getattr(config.sft, key):
            raise ConfigError(f"sft.{key}: needed, but not set")
    run_dir = Path(config.run.dir) / "sft"
    done = _steps_done(config, run_dir)
    out = Path(config.sft.out)
    if done == config.sft.steps and out.is_dir() and any(out.iterdir()):
        logger.info("finished already: %s holds the model of step %d", out, done)
        return
    check_export_target(out)
    ranks = init_ranks(config)
    engine: FsdpEngine | None = None
    try:
        engine = FsdpEngine(
            config, ranks, objective=SupervisedObjective(config.sft.aggregation), schedule=_schedule(config)
        )
        if ranks.is_leader:
            _lead(config, engine, run_dir, done)
        else:
            engine.follow()
    except BaseException as error:
        if engine is not None and ranks.is_leader:
            engine.close(f"{type(error).__name__}: {error}")
        raise
    if ranks.is_leader:
        engine.close()


def _lead(config: Config, engine: FsdpEngine, run_dir: Path, done: int) -> None:
    rows = _load_rows(config)
    logger.info(
        "%d rows, %d tokens; %d steps of %d rows", len(rows), sum(len(r.token_ids) for r in rows),
        config.sft.steps, config.sft.batch_size,
    )  # fmt: skip
    newest = latest_checkpoint(run_dir)
    if newest is not None:
        engine.load(newest)
        logger.info("going on from %s", newest)
    run_dir.mkdir(parents=True, exist_ok=True)
    _forget_metrics_after(run_dir / "metrics.jsonl", done)
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8", buffering=1) as metrics:
        for step, stats in _train(config, engine, rows, done):
            metrics.write(json.dumps(_metrics_row(step, stats)) + "\n")
            every = config.sft.checkpoint_every
            if step == config.sft.steps or (every and step % every == 0):
                extra = {"step": step, "settings": _settings(config)}
                newest = write_checkpoint(engine, run_dir, step, extra, keep_last=config.checkpoint.keep_last)
    if newest is None:
        raise RunError(f"expected a checkpoint under {run_dir} at the end of training, got none")
    export_checkpoint(newest, Path(config.sft.out))
    logger.info("wrote %s", config.sft.out)


def _train(
    config: Config, engine: FsdpEngine, rows: Sequence[TrainSequence], done: int
) -> Iterator[tuple[int, UpdateStats]]:
    """One optimizer step after another: the steps done, and its statistics. A line of progress now and then."""
    said, said_step, tokens = time.monotonic(), done, 0
    for step in range(done + 1, config.sft.steps + 1):
        batch = batch_of(rows, step - 1, batch_size=config.sft.batch_size, seed=config.run.seed)
        stats = engine.update(batch, version=0)
        if not stats.stepped:
            logger.warning("step %d: the optimizer step is skipped: %s", step, stats.reason)
        tokens += stats.tokens_trained
        elapsed = time.monotonic() - said
        if elapsed >= PROGRESS_S or step == config.sft.steps:
            logger.info(
                "step %d/%d  loss %.4f  lr %.2e  %.1f steps/s  %.0f trained tokens/s", step, config.sft.steps,
                stats.loss, stats.lr, (step - said_step) / elapsed, tokens / elapsed,
            )  # fmt: skip
            said, said_step, tokens = time.monotonic(), step, 0
        yield step, stats


def _metrics_row(step: int, stats: UpdateStats) -> dict[str, float | None]:
    row = {
        "step": step,
        "loss": stats.loss,
        "lr": stats.lr,
        "tokens": stats.tokens_trained,
        "grad_norm": stats.grad_norm,
    }
    # JSON has no other word for what is not finite.
    return {key: value if math.isfinite(value) else None for key, value in row.items()}


def batch_of(rows: Sequence[TrainSequence], step: int, *, batch_size: int, seed: int) -> list[TrainSequence]:
    """The rows of a step (from 0): the stream of all epochs, each in a new seeded order, cut every ``batch_size``."""
    size = len(rows)
    positions = range(step * batch_size, (step + 1) * batch_size)
    epochs = range(positions[0] // size, positions[-1] // size + 1)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(size) for epoch in epochs}
    return [rows[orders[position // size][position % size]] for position in positions]


def _load_rows(config: Config) -> list[TrainSequence]:
    tokenizer = load_tokenizer(config.model.path, needs_template=False)
    rows = load_sft_rows(Path(config.sft.data), tokenizer, max_length=config.sft.max_length)
    longest = max(len(row.token_ids) for row in rows)
    if longest > config.learner.max_tokens:
        raise ConfigError(
            f"learner.max_tokens: expected at least the longest row of sft.data, {longest} tokens, got "
            f"{config.learner.max_tokens}; raise it, or lower sft.max_length"
        )
    return rows


def _schedule(config: Config) -> Schedule:
    return Schedule(
        kind=config.sft.schedule,
        lr=config.sft.lr,
        warmup_updates=config.sft.warmup_steps,
        total_updates=config.sft.steps,
        min_ratio=config.optimizer.min_lr_ratio,
    )


def _settings(config: Config) -> dict[str, Any]:
    """What the trained weights depend on, flat."""
    sections = config.model_dump(mode="json", include=set(_LEARNED_BY))
    flat = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    for place in ("sft.out", "sft.checkpoint_every"):
        del flat[place]
    return flat | {"run.seed": config.run.seed}


def _steps_done(config: Config, run_dir: Path) -> int:
    newest = latest_checkpoint(run_dir)
    if newest is None:
        return 0
    extra = read_extra(newest)
    before: Mapping[str, Any] = extra["settings"]
    differing = [f"{k}: {before.get(k)!r} -> {v!r}" for k, v in _settings(config).items() if before.get(k) != v]
    if differing:
        raise RunError(
            f"{run_dir} belongs to other settings ({'; '.join(differing)}); choose another run.dir, or remove it"
        )
    return int(extra["step"])


def _forget_metrics_after(path: Path, done: int) -> None:
    """Drop rows of steps that the checkpoint does not hold; they will be written again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines[:done] if line.endswith("\n")), encoding="utf-8")
