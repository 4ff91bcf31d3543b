"""A backend whose answers are written down (rollout ``index``, turn ``turn``; tokens are characters), and a grader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from async_rl.config.generator import BackendCapabilities
from async_rl.generator.backend import Sampled
from async_rl.generator.rollouts import ScoreOne, ThreadGrader
from async_rl.records import Lease

END = 0
"""Token of the end of a turn; every other token is its character's code."""


class CharacterText:
    """``backend.Text``: a token for every character, and ``$`` for the end of a turn."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        ends = {"assistant": "$"}
        return "".join(f"{m['role'][0]}:{m['content']}{ends.get(m['role'], '|')}" for m in messages) + "a:"

    def encode(self, text: str, before: str = "") -> np.ndarray:
        return np.array([END if c == "$" else ord(c) for c in text], dtype=np.int32)

    def encode_start(self, text: str) -> np.ndarray:
        return self.encode(text)

    def ending(self, token_id: int) -> str:
        return "$" if token_id == END else ""


class ScriptedBackend:
    """``backend.Backend``: a step finishes every request. An answer that is too long is cut; others end in END.

    ``encode`` returns the tokens of an answer, its end included.
    """

    capabilities = BackendCapabilities()

    def __init__(
        self, script: Callable[[int, int], str], *, max_running: int = 16,
        encode: Callable[[str], list[int]] = lambda text: [*map(ord, text), END],
    ) -> None:  # fmt: skip
        self.script, self.encode = script, encode
        self.max_running = max_running
        self.version = 3
        self.num_tokens = 0
        self.requests: list[tuple[Lease, list[int]]] = []
        self._running: list[tuple[Lease, np.ndarray]] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        return CharacterText().encode(CharacterText().render(messages))

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        self.requests.append((lease, prompt_ids.tolist()))
        self._running.append((lease, prompt_ids))

    def cancel(self, lease_id: str) -> None:
        self._running = [(lease, ids) for lease, ids in self._running if lease.lease_id != lease_id]

    def step(self) -> list[Sampled]:
        done, self._running = self._running, []
        return [self._sampled(lease, ids) for lease, ids in done]

    def _sampled(self, lease: Lease, prompt_ids: np.ndarray) -> Sampled:
        index, turn = map(int, lease.lease_id.split("/")[1:])
        text = self.script(index, turn)
        whole = self.encode(text)
        ids = whole[: lease.sampling.max_new_tokens]
        cut = len(ids) < len(whole)
        self.num_tokens += len(ids)
        return Sampled(
            lease_id=lease.lease_id,
            index=0,
            prompt_ids=prompt_ids,
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -1.0 - turn, np.float32),
            versions=np.full(len(ids), self.version, np.int32),
            finish_reason="length" if cut else "stop",
            text=text[: len(ids)] if cut else text,
        )

    def progress(self) -> dict[str, int]:
        return {lease.lease_id: 0 for lease, _ in self._running}

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        self.version = version
        return 0.0

    def close(self) -> None:
        self._running.clear()


class InlineGrader(ThreadGrader):
    """Scores at once, in the caller's thread, so that a test does not depend on timing."""

    def __init__(self, reward: ScoreOne) -> None:
        super().__init__(reward, num_threads=0)

    def call(self, job: Callable[[], None]) -> None:
        super().call(job)
        self._todo.put(None)
        self._run()
