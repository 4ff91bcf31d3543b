"""Checks of the data of ``async-rl sft``, ``rm`` and ``dpo``. They read and tokenise all rows, as the commands do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.data.chat import load_tokenizer
from async_rl.errors import DataError, ModelError
from async_rl.extensions.offline.rows import read_rows
from async_rl.extensions.offline.tasks import TASKS
from async_rl.launch.checks.data import spelling_rows
from async_rl.launch.checks.finding import Finding
from async_rl.launch.checks.start import Start


def check_offline_rows(start: Start) -> list[Finding]:
    """Check that each dataset of the commands for which the config names data can be read and trained on. Return one
    finding for each.
    """
    config, findings = start.config, list[Finding]()
    tokenizer = load_tokenizer(config.model.path, needs_template=False)
    for task in (TASKS[command](config) for command in config.offline_commands):
        for key, source in task.sources.items():
            try:
                rows = task.load_rows(source, key)
                task.check_tokens(rows, key)
            except (DataError, ModelError) as error:
                findings.append(Finding(key, "FAIL", str(error), fix="correct the file, or name another one"))
                continue
            chats = ((where, _messages_of(row)) for where, row in read_rows(source, key, config.data.ignore))
            findings += spelling_rows(key, chats, config, tokenizer)
            longest = task.longest(rows)
            text = f"{len(rows)} rows, the longest sequence has {longest} tokens"
            if longest <= config.longest_sequence:
                findings.append(Finding(key, "OK", text))
                continue
            fix = f"raise {config.longest_sequence_keys} to it, or lower {task.name}.max_length"
            findings.append(Finding(key, "FAIL", f"{text}, a micro-batch at most {config.longest_sequence}", fix=fix))
    return findings


def _messages_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for value in row.values() if isinstance(value, list) for one in value if isinstance(one, dict)]
