"""The reward of a language model that judges answers, for ``reward.type = "judge"``.

The judge is a service with OpenAI's chat completions over HTTP. It gets the rubric with the answer in it, and must end
its reply with a line ``Score: N``. ``registry`` builds ``JudgeReward``; ``judge_client.py`` talks to the service.

A judge that does not answer says nothing about the answer that it was asked about. So grading waits until it answers
again, and a group whose verdict can't be read fails: no answer gets reward 0 for such a cause.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.judge import PLACEHOLDER, JudgeConfig
from async_rl.errors import ConfigError, RewardError
from async_rl.rewards.judge_client import JudgeClient
from async_rl.rewards.records import RewardInput, RewardOutput
from async_rl.rewards.served import ServedReward
from async_rl.rewards.transcripts import conversation_of

_VERDICT = re.compile(r"[*_#\s]*score[*_\s]*:[*_\s]*(-?[0-9]+(?:\.[0-9]+)?)[*_\s]*", re.IGNORECASE)
_HIDDEN = "</think>"


class JudgeReward(ServedReward):
    """Scores answers by a judge's verdicts. The part ``judge`` is ``scale`` times the score, mapped to [0, 1] from the
    rubric's range; that is the accuracy too.
    """

    def __init__(self, config: JudgeConfig, client: JudgeClient, *, scale: float) -> None:
        """Open the cache.

        Raises:
            ConfigError: the cache can't be read.
        """
        super().__init__(client)
        self._config, self._client, self._scale = config, client, scale
        self._cache = VerdictCache(config.cache)

    def score_group(self, items: Sequence[RewardInput]) -> list[RewardOutput]:
        if len(items) == 1:
            return [self._output(self._score(items[0]))]
        with ThreadPoolExecutor(max(1, len(items)), thread_name_prefix="judge") as calls:
            return [self._output(score) for score in calls.map(self._score, items)]

    def counters(self) -> dict[str, int]:
        return self._client.counters()

    def close(self) -> None:
        super().close()
        self._cache.close()

    def _output(self, score: float) -> RewardOutput:
        low, high = self._config.min_score, self._config.max_score
        share = (score - low) / (high - low)
        return RewardOutput({"judge": self._scale * share}, share, has_answer=True)

    def _score(self, item: RewardInput) -> float:
        """Return the judge's score of one answer, from the cache if it has been judged before.

        Raises:
            RewardError: the row lacks a field of the rubric, the judge refuses the request, or none of its verdicts can
                be read.
        """
        config = self._config
        request = {
            "model": config.model,
            "messages": [{"role": "user", "content": f"{_filled(self._config.rubric, item)}\n\n{_ending(config)}"}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        digest = hashlib.sha256(json.dumps([config.endpoint, request], sort_keys=True).encode()).hexdigest()
        if (found := self._cache.get(digest)) is not None:
            self._client.count(cached=1)
            return found
        text, num_cut = "", 0
        for _ in range(config.max_attempts):
            reply = self._client.ask(request)
            text, num_cut = reply.text, num_cut + reply.is_cut
            # The last line of a reply that was cut may be the judge's thoughts, or lack a digit.
            score = None if reply.is_cut else read_score(text, config)
            if score is not None:
                self._cache.put(digest, score)
                return score
            self._client.count(unreadable=1)
        cut = f", of which {num_cut} were cut at reward.judge.max_tokens = {config.max_tokens}" if num_cut else ""
        remedy = "raise that key" if num_cut else "correct the rubric, or use another model"
        raise RewardError(
            f"reward.judge: expected a reply of {config.model} whose last line is 'Score: N', N from "
            f"{config.min_score:g} to {config.max_score:g}, got {config.max_attempts} others{cut}, the last ending in "
            f"{text[-200:]!r}; {remedy}"
        )


def judge_reward(config: Config, scale: float) -> JudgeReward:
    """Build the reward of ``reward.judge``. Nothing is sent yet.

    Raises:
        ConfigError: the key's variable or the cache is missing.
    """
    judge = config.reward.judge
    return JudgeReward(judge, JudgeClient(judge), scale=scale)


def read_score(reply: str, config: JudgeConfig) -> float | None:
    """Return the score in the last line of a judge's reply. None if there is none, or if it is out of range.

    Only the last line that is not empty counts, after the thoughts of a reasoning model, if they are in the reply: an
    answer that the judge quotes may contain a score too. Markdown's emphasis is ignored.
    """
    lines = [line for line in reply.rpartition(_HIDDEN)[2].splitlines() if line.strip()]
    match = _VERDICT.fullmatch(lines[-1]) if lines else None
    if match is None:
        return None
    score = float(match[1])
    return score if config.min_score <= score <= config.max_score else None


class VerdictCache:
    """Scores by the digest of the request, in an SQLite file that several generators of a machine can share, or in
    memory. Any thread may call it.
    """

    def __init__(self, path: str | None) -> None:
        """Open or make the file ``path``; None: in memory.

        Raises:
            ConfigError: the file can't be opened.
        """
        self._lock = threading.Lock()
        try:
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path or ":memory:", timeout=30.0, check_same_thread=False, isolation_level=None)
            self._db.execute("CREATE TABLE IF NOT EXISTS verdicts (digest TEXT PRIMARY KEY, score REAL) WITHOUT ROWID")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"reward.judge.cache: expected a file that SQLite can open at {path}, got {error}; correct the path, "
                f"or remove the file"
            ) from error

    def get(self, digest: str) -> float | None:
        with self._lock:
            row = self._db.execute("SELECT score FROM verdicts WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else float(row[0])

    def put(self, digest: str, score: float) -> None:
        try:
            with self._lock:
                self._db.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", (digest, score))
        except sqlite3.Error as error:
            raise RewardError(f"reward.judge.cache: can't write a verdict: {error}; free space, or move it") from error

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _ending(config: JudgeConfig) -> str:
    return (
        f"End your reply with one line that contains only 'Score: N', where N is a number from {config.min_score:g} "
        f"(worst) to {config.max_score:g} (best)."
    )


def _filled(rubric: str, item: RewardInput) -> str:
    """Return the rubric with the rollout's texts in their places. What an answer contains is not replaced again."""

    def text(match: re.Match[str]) -> str:
        name = match[1]
        if name == "answer":
            return item.text
        if name == "prompt":
            return _conversation(item.messages)
        if name == "transcript":
            return _conversation(conversation_of(item))
        found: Any = item.reward_data
        for key in name.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None:
            raise RewardError(
                f"reward.judge.rubric: expected a value for {{{name}}} in the row, got none; add the field to the "
                f"rows, or remove it from the rubric"
            )
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

    return PLACEHOLDER.sub(text, rubric)


def _conversation(messages: Sequence[Mapping[str, str]]) -> str:
    """Return one user's message as it is, and others after their roles."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)
