"""Supervised fine-tuning: ``async-rl sft CONFIG``, alone or under torchrun, trains on given answers and exports the
model.

The engine is that of reinforcement learning (same packing, ranks, checkpoints) with another loss. There is no queue and
no generator. Checkpoints and ``metrics.jsonl`` are in ``run.dir/sft``. The same command continues from the last
checkpoint. SIGTERM and SIGINT save the last step first, within ``checkpoint.grace_s`` seconds. The order of the rows
depends only on the seed and the step, so a resumed run sees the same batches.

``sft.data`` is read as ``data.train`` is (``data.files``). A row is one of

- ``{"prompt": text, "response": text}``: plain text, without a template. No special token is added but the
  end-of-sequence token after the response. The loss is on the response and that token.
- ``{"messages": [{"role": ..., "content": ...}, ...]}``: the chat template is applied turn by turn. The loss is on
  every assistant turn up to its end token. What the template writes in front of a turn (``add_generation_prompt``) is
  tokenised in one piece with the messages before it, as at sampling time. No system message is added. ``tools`` are
  the row's tool schemas, in place of those of ``data.tools``.

Other keys are ignored. Rows longer than ``sft.max_length`` are cut on the right.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.data import parse_tools
from async_rl.data.chat import load_tokenizer
from async_rl.data.files import Source, kind, parse_json
from async_rl.data.template import apply_template, check_arguments
from async_rl.errors import ConfigError, DataError, RunError, StoppedError
from async_rl.learner.checkpoint import checkpoint_name, latest_checkpoint, read_extra
from async_rl.learner.checkpoint_writer import CheckpointWriter
from async_rl.learner.engine import UpdateStats
from async_rl.learner.engine.fsdp_engine import FsdpEngine
from async_rl.learner.engine.optimizer import Schedule
from async_rl.learner.engine.ranks import Ranks, init_ranks
from async_rl.learner.export import check_export_target, export_checkpoint
from async_rl.learner.losses.objective import SupervisedObjective
from async_rl.learner.packing import TrainSequence
from async_rl.learner.resume import find_resume_point, take_over
from async_rl.output import logged
from async_rl.process.stop import StopRequest
from async_rl.run.directory import RunDir
from async_rl.run.lock import RunLock, acquire

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0
TICK_S = 0.5
"""Seconds between two signs of life for the other ranks while the first one waits for the files of a checkpoint."""
_LEARNED_BY = ("model", "lora", "optimizer", "sft")


def run_sft(config: Config) -> None:
    """Train ``model.path`` on ``sft.data`` and export the trained model to ``sft.out``. A finished run is left as it
    is.

    Raises:
        ConfigError: ``sft.data`` or ``sft.out`` is not set.
        DataError: a row is bad. The message names file and line.
        ModelError: the model is missing or can't be trained.
        RunError: ``sft.out`` holds other files, or the run directory belongs to other settings.
        TrainingError: another rank failed.
        SystemExit: a signal asked to stop. The code is 128 + signal, and the last step is saved.
    """
    for key in ("data", "out"):
        if not getattr(config.sft, key):
            raise ConfigError(f"sft.{key}: expected a value, got none; set it in the file or with --set")
    run_dir = Path(config.run.dir) / "sft"
    done = _steps_done(config, run_dir)
    out = Path(config.sft.out)
    if done == config.sft.steps and out.is_dir() and any(out.iterdir()):
        logger.info("finished already: %s holds the model of step %d", out, done)
        return
    check_export_target(out)
    ranks = init_ranks(config)
    with logged(logger, f"loading the model {config.model.path}"):
        engine = FsdpEngine(
            config, ranks, objective=SupervisedObjective(), schedule=_schedule(config),
            max_length=config.sft.max_length,
        )  # fmt: skip
    exit_code = _run_leader(config, ranks, engine, done) if ranks.is_leader else _follow(config, ranks, engine)
    if exit_code:
        raise SystemExit(exit_code)


def _follow(config: Config, ranks: Ranks, engine: FsdpEngine) -> int:
    """Run a rank other than 0. Returns the exit code that rank 0 chose."""
    with StopRequest(config.checkpoint.grace_s, on_request=ranks.pass_stop_on):
        return engine.follow()


def _run_leader(config: Config, ranks: Ranks, engine: FsdpEngine, done: int) -> int:
    """Run rank 0. Returns the exit code: 0, or 128 + signal."""
    cause, exit_code = "", 0
    with StopRequest(config.checkpoint.grace_s, elsewhere=ranks.stop_signal) as stop:
        try:
            with logged(logger, "testing the engine"):
                engine.self_test()
            lock = acquire(RunDir(Path(config.run.dir) / "sft"), "sft")
            try:
                _lead(config, engine, lock, done, stop.check)
            finally:
                lock.close()
        except StoppedError as stopped:
            stop.note_saved()
            logger.info("%s", stopped)
            exit_code = 128 + stop.signum
        except BaseException as error:
            cause = f"{type(error).__name__}: {error}"
            raise
        finally:
            engine.close(cause, exit_code=exit_code)
    return exit_code


def _lead(config: Config, engine: FsdpEngine, lock: RunLock, done: int, stop_signal: Callable[[], int]) -> None:
    """Train and export the model.

    Raises:
        StoppedError: ``stop_signal`` returned a signal after a step, and that step is saved.
    """
    run_dir = lock.path.parent
    rows = _load_rows(config)
    logger.info(
        "%d rows, %d tokens; %d steps of %d rows", len(rows), sum(len(r.token_ids) for r in rows),
        config.sft.steps, config.sft.batch_size,
    )  # fmt: skip
    point = find_resume_point(run_dir)
    take_over(run_dir, point, lineage="sft", confirm=lock.check)
    newest = point.checkpoint
    if newest is not None:
        with logged(logger, f"reading {newest}"):
            engine.load(newest)
        logger.info("going on from %s", newest)
    run_dir.mkdir(parents=True, exist_ok=True)
    _forget_metrics_after(run_dir / "metrics.jsonl", done)
    with closing(CheckpointWriter(engine, run_dir, config.checkpoint, lineage="sft", confirm=lock.check)) as writer:
        try:
            _make_steps(config, engine, writer, run_dir, rows, done, stop_signal)
        except Exception:
            with suppress(Exception):  # the error is the news; an older checkpoint stays
                _commit(engine, writer, wait=True)
            raise
    newest = latest_checkpoint(run_dir)
    if newest is None:
        raise RunError(
            f"expected a checkpoint in {run_dir} at the end of training, got none; this is a bug in "
            f"async-rl, please report it"
        )
    engine.close()  # the export of a large model may outlast the timeout of the other ranks
    with logged(logger, f"exporting the model to {config.sft.out}"):
        export_checkpoint(newest, Path(config.sft.out))
    logger.info("wrote %s", config.sft.out)


def _make_steps(
    config: Config, engine: FsdpEngine, writer: CheckpointWriter, run_dir: Path, rows: Sequence[TrainSequence],
    done: int, stop_signal: Callable[[], int],
) -> None:  # fmt: skip
    """Train, and write metrics and checkpoints. A checkpoint is written while the next steps are made.

    Raises:
        StoppedError: ``stop_signal`` returned a signal after a step, and that step is saved.
    """
    every = config.experimental.sft_checkpoint_every
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8", buffering=1) as metrics:
        for step, stats in _train(config, engine, rows, done):
            metrics.write(json.dumps(_metrics_row(step, stats)) + "\n")
            signum = stop_signal()
            is_last = bool(signum) or step == config.sft.steps
            is_due = is_last or bool(every and step % every == 0)
            _commit(engine, writer, wait=is_due)
            if is_due:
                writer.begin(step, {"step": step, "settings": _settings(config)})
                _commit(engine, writer, wait=is_last)
            if signum:
                raise StoppedError(
                    f"stopped by {signal.Signals(signum).name}: saved at step {step}; the same command resumes from "
                    f"{checkpoint_name(step)}"
                )


def _commit(engine: FsdpEngine, writer: CheckpointWriter, *, wait: bool) -> None:
    """Commit the checkpoint that is being written, if its files are written. With ``wait``, wait for them."""
    while wait and not writer.is_written(TICK_S):
        engine.tick()
    writer.poll()


def _train(
    config: Config, engine: FsdpEngine, rows: Sequence[TrainSequence], done: int
) -> Iterator[tuple[int, UpdateStats]]:
    """Make the steps that are left, and log progress. Yield the number of each step and its statistics."""
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
    if stats.padded_cost is not None:
        row["packing/padding"] = stats.padded_cost.padding
    # JSON has no NaN and no infinities.
    return {key: value if math.isfinite(value) else None for key, value in row.items()}


def batch_of(rows: Sequence[TrainSequence], step: int, *, batch_size: int, seed: int) -> list[TrainSequence]:
    """Return the rows of ``step``, counted from 0.

    Every epoch has its own random order, from ``seed``. The epochs are placed one after the other and cut into batches.
    """
    size = len(rows)
    positions = range(step * batch_size, (step + 1) * batch_size)
    epochs = range(positions[0] // size, positions[-1] // size + 1)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(size) for epoch in epochs}
    return [rows[orders[position // size][position % size]] for position in positions]


def _load_rows(config: Config) -> list[TrainSequence]:
    tokenizer = load_tokenizer(config.model.path, needs_template=False)
    rows = load_sft_rows(
        config.sft.data,
        tokenizer,
        max_length=config.sft.max_length,
        arguments=config.data.template_arguments,
    )
    longest = max(len(row.token_ids) for row in rows)
    if longest > config.longest_sequence:
        raise ConfigError(
            f"{config.longest_sequence_keys}: expected at least the longest row of sft.data, {longest} tokens, got "
            f"{config.longest_sequence}; raise it, or lower sft.max_length"
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
    """Return the settings that the trained weights depend on, by ``section.key``."""
    sections = config.model_dump(mode="json", include=set(_LEARNED_BY))
    flat = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    del flat["sft.out"]
    return flat | {
        "run.seed": config.run.seed,
        "data.chat_template_kwargs": config.data.chat_template_kwargs,
        "data.tools": config.data.tools,
    }


def _steps_done(config: Config, run_dir: Path) -> int:
    newest = find_resume_point(run_dir).checkpoint
    if newest is None:
        return 0
    extra = read_extra(newest)
    before: Mapping[str, Any] = extra["settings"]
    differing = [f"{k}: {before.get(k)!r} -> {v!r}" for k, v in _settings(config).items() if before.get(k) != v]
    if differing:
        raise RunError(
            f"{run_dir} belongs to other settings (old -> new: {'; '.join(differing)}); choose another run.dir, or "
            f"remove that directory"
        )
    return int(extra["step"])


def _forget_metrics_after(path: Path, done: int) -> None:
    """Remove the rows of steps after the checkpoint from the metrics file, because these steps are made again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines[:done] if line.endswith("\n")), encoding="utf-8")


def load_sft_rows(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> list[TrainSequence]:
    """Read and tokenise the rows of the dataset ``source``. The ``sequence_id`` of each is its row's index.

    ``arguments`` are the variables of the chat template in addition to the messages.

    Raises:
        DataError: the dataset can't be read, or has no row or a bad row. The message names the row's place.
        ModelError: the chat template does not read one of ``arguments``, or the tools of a row.
    """
    check_arguments(tokenizer, arguments)
    sequences: list[TrainSequence] = []
    reads_tools = "tools" in arguments
    for where, row in _read_rows(str(source)):
        own = arguments
        if "messages" in row and row.get("tools") is not None:
            own = {**arguments, "tools": _tools_of(row["tools"], where)}
            if not reads_tools:
                check_arguments(tokenizer, own)
                reads_tools = True
        token_ids, loss_mask = _encode_row(row, tokenizer, where, own)
        token_ids, loss_mask = token_ids[:max_length], loss_mask[:max_length]
        if not loss_mask.any():
            raise DataError(
                f"{where}: expected a token of the answer within the first {max_length} tokens, got none; raise "
                f"sft.max_length, or remove the row"
            )
        sequences.append(_train_sequence(len(sequences), token_ids, loss_mask))
    if not sequences:
        raise DataError(f"sft.data: expected at least one row in {source}, got none; add rows to it")
    return sequences


def _read_rows(source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row as a pair (its place, its fields). ``messages`` and ``tools`` may be JSON text, as in CSV."""
    try:
        dataset = Source(source)
    except DataError as error:
        raise DataError(f"sft.data: {error}") from None
    for where, row in dataset.records():
        if isinstance(row, DataError):
            raise DataError(f"{row}; correct the row")
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, got {kind(row)}; write the row as an object of fields")
        fields = dict(row)
        for key in ("messages", "tools"):
            if isinstance(text := fields.get(key), str) and text.lstrip()[:1] == "[":
                fields[key] = parse_json(text.encode(errors="replace"), f"{where}: {key}", "JSON")
        yield where, fields


def _tools_of(raw: Any, where: str) -> list[Any]:
    try:
        return parse_tools(json.dumps(raw))
    except ValueError as error:
        raise DataError(f"{where}: tools: {error}, or rename the column if it has something else") from None


def _encode_row(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str, arguments: Mapping[str, Any]
) -> tuple[list[int], np.ndarray]:
    match row:
        case {"messages": list(messages)}:
            segments = _chat_segments(messages, tokenizer, where, arguments)
        case {"prompt": str(prompt), "response": str(response)}:
            end = tokenizer.eos_token_id
            if not isinstance(end, int):
                raise DataError(
                    f"{where}: expected a tokenizer with an end-of-sequence token, which ends the response, got one "
                    f'without; set its eos_token, or write the row as "messages"'
                )
            segments = [(_encode(tokenizer, prompt), False), ([*_encode(tokenizer, response), end], True)]
        case _:
            raise DataError(
                f'{where}: expected "prompt" and "response" as text, or "messages" as a list, '
                f"got keys {sorted(row)}; correct the row"
            )
    token_ids = [token for tokens, _ in segments for token in tokens]
    loss_mask = np.array([trained for tokens, trained in segments for _ in tokens], dtype=np.bool_)
    loss_mask[:1] = False  # nothing predicts a first token
    return token_ids, loss_mask


def _chat_segments(
    messages: Sequence[Any], tokenizer: PreTrainedTokenizerBase, where: str, arguments: Mapping[str, Any]
) -> list[tuple[list[int], bool]]:
    """Split a row's text, up to the last assistant turn, into pairs (token ids, whether they are trained on)."""
    for message in messages:
        match message:
            case {"role": str(), "content": str()}:
                pass
            case _:
                raise DataError(
                    f'{where}: expected messages with "role" and "content" as text, got {message!r:.80}; '
                    f"correct the message"
                )
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        roles = [message["role"] for message in messages]
        raise DataError(
            f'{where}: expected at least one message with the role "assistant", got the roles {roles}; remove the row'
        )
    segments: list[tuple[list[int], bool]] = []
    done = ""
    for turn in turns:
        opened = _render(messages[:turn], tokenizer, where, arguments, open_turn=True)
        closed = _render(messages[: turn + 1], tokenizer, where, arguments, open_turn=False)
        if not opened.startswith(done) or not closed.startswith(opened):
            raise DataError(
                f"{where}: the chat template does not render message {turn} as a continuation of those before it (some "
                f"rewrite earlier turns); write one row per assistant message"
            )
        segments.append((_encode(tokenizer, opened[len(done) :]), False))
        answer = _encode(tokenizer, closed[len(opened) :])
        end = _end_of_turn(answer, tokenizer)
        segments += [(answer[:end], True), (answer[end:], False)]
        done = closed
    return segments


def _end_of_turn(answer: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens up to the turn's end token, included. What the template adds after it is never
    sampled.
    """
    special = set(tokenizer.all_special_ids)
    ends = [place for place, token in enumerate(answer) if token in special]
    return ends[-1] + 1 if ends else len(answer)


def _render(
    messages: Sequence[Mapping[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    arguments: Mapping[str, Any],
    *,
    open_turn: bool,
) -> str:
    if not messages:
        raise DataError(f"{where}: expected a message before the first assistant message, got none; add a user message")
    try:
        return str(apply_template(tokenizer, messages, arguments, open_turn=open_turn))
    except Exception as error:  # a template may raise anything; without a template transformers raises ValueError
        raise DataError(
            f"{where}: the chat template of model.path can't render the messages: {error}; change the row, or use a "
            f"model whose template accepts it"
        ) from error


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


def _train_sequence(index: int, token_ids: Sequence[int], loss_mask: np.ndarray) -> TrainSequence:
    size = len(token_ids)
    return TrainSequence(
        sequence_id=index,
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=np.zeros(size, dtype=np.float32),
        versions=np.zeros(size, dtype=np.int32),
        advantages=np.zeros(size, dtype=np.float32),
        temperature=1.0,
    )
