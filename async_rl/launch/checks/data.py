"""Checks of the data: its rows, their prompts as the tokenizer and the chat template render them, and lengths."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from async_rl.config.config import Config
from async_rl.config.generator import has_model
from async_rl.data.chat import context_length, count_unknown, load_tokenizer, render_prompt, vocabulary_size
from async_rl.data.dataset import LoadedRows, Row, load_rows_of, load_train_rows
from async_rl.data.spellings import GUARD, control_of
from async_rl.data.vocabulary import check_embedded, num_beyond
from async_rl.errors import ConfigError, DataError, naming
from async_rl.launch.checks.finding import Finding
from async_rl.output import size_text
from async_rl.queue.server.settings import settings_of
from async_rl.records import TEXT_ROLE

TRAIN = "data.train"
NUM_TOKENIZED = 100
"""Number of prompts in which ``check_tokenizer`` looks for text that the tokenizer does not know."""
_SHOWN_CHARS = 2000


def check_train_is_set(config: Config) -> None:
    """Check that ``data.train`` is set, or what takes its place.

    Raises:
        ConfigError: the key is unset.
    """
    if not config.has_train:
        raise ConfigError("data.train: expected a file or data set, but the key is unset; set data.train")


def load_all_rows(config: Config) -> dict[str, LoadedRows]:
    """Load the training set and all evaluation sets. Return them by their keys, such as ``data.train``, that first.

    Raises:
        ConfigError: ``data.train`` is not set.
        DataError: a file is missing, or a row is malformed. The message names the config key, the file and the line.
    """
    check_train_is_set(config)
    with naming(TRAIN, DataError):
        loaded = {TRAIN: load_train_rows(config)}
    for name, source in config.data.eval.items():
        key = f"data.eval.{name}"
        with naming(key, DataError):
            loaded[key] = load_rows_of(config, source)
    return loaded


def describe_rows(loaded: Mapping[str, LoadedRows], source: str | None = None) -> Iterator[Finding]:
    """Yield a finding for each of the sets, by their keys. ``source`` is ``data.source``."""
    for key, rows in loaded.items():
        text = f"{len(rows.rows)} rows"
        if key == TRAIN and source:
            text = f"{source} gives the rows, which are checked when they come"
        if rows.num_skipped:
            text = f"{text}, skipped {rows.num_skipped} bad rows, the first: {rows.first_skipped}"
            yield Finding(key, "WARN", text, fix="correct the file if these rows matter")
        else:
            yield Finding(key, "OK", text)


def check_lengths(config: Config, rows: Sequence[Row]) -> Iterator[Finding]:
    """Check that the longest rollout fits the learner and the model, that a step of the largest groups fits the queue,
    and that not all prompts of ``rows`` are too long.

    Raises:
        ConfigError: ``learner.max_tokens``, ``queue.max_bytes``, the model's context length or
            ``sampling.max_prompt_tokens`` is too small.
    """
    sampling, limit = config.sampling, config.longest_sequence
    longest = sampling.max_prompt_tokens + sampling.max_new_tokens
    what = f"sampling.max_prompt_tokens + max_new_tokens = {sampling.max_prompt_tokens} + {sampling.max_new_tokens}"
    if longest > limit:
        raise ConfigError(
            f"{config.longest_sequence_keys}: expected at least {longest} ({what}), got {limit}; raise "
            f"learner.max_tokens to {-(-longest // config.parallel.sequence)}, or lower the other two"
        )
    settings_of(config)  # raises if one step does not fit
    context = context_length(config.model.path) if has_model(config.generator.backend) else None
    if context is not None and longest > context:
        room = context - sampling.max_new_tokens
        lower = f"lower sampling.max_prompt_tokens to at most {room}, or lower" if room > 0 else "lower"
        raise ConfigError(
            f"{what} = {longest} tokens: expected at most {context}, the model's context length "
            f"(max_position_embeddings in its config.json); {lower} sampling.max_new_tokens"
        )
    drops = config.data.on_long_prompt == "drop" and has_model(config.generator.backend)
    if drops and rows and all(row.messages for row in rows):
        _check_prompts(config, rows)
    yield Finding("lengths", "OK", f"rollouts of up to {longest} tokens fit the learner, the model and the queue")


def _check_prompts(config: Config, rows: Sequence[Row]) -> None:
    tokenizer = _tokenizer(config)
    limit, shortest = config.sampling.max_prompt_tokens, None
    for row in rows:
        size = len(render_prompt(tokenizer, row.messages, config.data.template_arguments))
        if size <= limit:
            return
        shortest = size if shortest is None else min(shortest, size)
    raise ConfigError(
        f"sampling.max_prompt_tokens: none of the {len(rows)} prompts of data.train has at most {limit} tokens (the "
        f'shortest has {shortest}); raise it, shorten data.system_prompt, or set data.on_long_prompt = "truncate"'
    )


def check_queue_bytes(config: Config) -> Iterator[Finding]:
    """Warn if ``queue.max_bytes`` allows fewer groups in flight than the staleness bound."""
    settings = settings_of(config)
    if settings.bytes_for_bound <= settings.queue.max_bytes:
        return
    text = (
        f"{size_text(settings.queue.max_bytes)} hold {settings.queue.max_bytes // settings.reserved_bytes} groups in "
        f"flight, each of up to {size_text(settings.reserved_bytes)}; queue.max_staleness = "
        f"{settings.queue.max_staleness} allows {settings.bytes_for_bound // settings.reserved_bytes}, so generators "
        f"may wait for room"
    )
    fix = f"queue.max_bytes = {settings.bytes_for_bound}, or a lower sampling.max_new_tokens"
    yield Finding("queue.max_bytes", "WARN", text, fix=fix)


def check_tokenizer(config: Config, rows: Sequence[Row]) -> Iterator[Finding]:
    """Check that the model's embedding has a row for each token of the prompts of ``rows`` and of the evaluations.

    Warn if the tokenizer does not know all text of the first prompts of ``rows``.

    Raises:
        ModelError: it has not.
    """
    path, arguments = config.model.path, config.data.template_arguments
    tokenizer, num_rows = _tokenizer(config), vocabulary_size(path)
    text = f"{type(tokenizer).__name__}, {len(tokenizer)} tokens"
    if number := num_beyond(tokenizer, num_rows):
        text += f", {number} of them without a row in the model's embedding, so that no text may contain them"
    prompts = [row.messages for row in rows[:NUM_TOKENIZED] if row.messages]
    if not prompts or not has_model(config.generator.backend):
        yield Finding("tokenizer", "OK", text)
        return
    if number:
        held_out = [load_rows_of(config, source).rows for source in config.data.eval.values()]
        for row in (one for one in chain(rows, *held_out) if one.messages):
            check_embedded(render_prompt(tokenizer, row.messages, arguments), num_rows, tokenizer, "data")
    unknown, total = count_unknown(tokenizer, prompts, arguments)
    if not unknown:
        yield Finding("tokenizer", "OK", text)
        return
    which = "prompt" if len(prompts) == 1 else f"{len(prompts)} prompts"
    text += f"; {unknown:,} of {total:,} tokens of the first {which} are unknown to it ({tokenizer.unk_token!r}), so "
    fix = "use a model whose tokenizer knows the characters of your data, or change the data"
    yield Finding("tokenizer", "WARN", f"{text}the model can't read that text", fix=fix)


def _tokenizer(config: Config) -> Any:
    return load_tokenizer(config.model.path, needs_template=config.data.prompt_format == "chat")


def show_first_prompt(config: Config, rows: Sequence[Row]) -> Iterator[Finding]:
    """Show the first prompt of the training set, rendered with the chat template."""
    if not rows or not rows[0].messages:
        yield Finding("template", "skip", "the environment writes the prompts" if rows else "there is no row yet")
        return
    tokenizer, messages = _tokenizer(config), rows[0].messages
    ids = render_prompt(tokenizer, messages, config.data.template_arguments)
    limit, text = config.sampling.max_prompt_tokens, str(tokenizer.decode(ids))
    description = f"first prompt: {len(ids)} tokens (limit {limit}), shown below"
    if messages[0].get("role") == TEXT_ROLE:
        description = f"plain text, {description}"
    is_long = len(ids) > limit
    fix = 'raise sampling.max_prompt_tokens, or set data.on_long_prompt = "truncate"' if is_long else ""
    yield Finding("template", "WARN" if is_long else "OK", description, fix, details=text[:_SHOWN_CHARS])


def find_spellings(config: Config, rows: Sequence[Row]) -> Iterator[Finding]:
    """Warn if training rows spell control tokens."""
    if config.data.prompt_format == "chat":
        chats = [(f"row {number}", row.messages) for number, row in enumerate(rows)]
        yield from spelling_rows("data.train", chats, config, _tokenizer(config))


def spelling_rows(key: str, chats: Iterable[tuple[str, Any]], config: Config, tokenizer: Any) -> list[Finding]:
    """Return a warning if messages of the dataset ``key`` spell control tokens.

    ``chats`` are pairs of a row's place and its messages.
    """
    safe = control_of(tokenizer).guarded_message
    places = [where for where, chat in chats if GUARD in json.dumps([*map(safe, chat)], ensure_ascii=False)]
    if not places:
        return []
    mode = config.data.special_tokens_in_content
    text = f"{len(places)} rows of {key} spell control tokens in a content, read as {mode} (first: {places[0]})"
    fix = f'data.special_tokens_in_content = "{"token" if mode == "text" else "text"}" if they are meant otherwise'
    return [Finding("special tokens", "WARN", text, fix=fix)]
