"""A backend of your own, as small as one can be: every printable character is equally likely, and `.` ends an answer.

Use it as a skeleton and replace the random characters by your engine. To run it, from the checkout:

    async-rl launch CONFIG --set generator.backend=examples/uniform_backend.py:UniformBackend \\
        --set 'generator.allow_code=["examples/uniform_backend.py"]' --set 'queue.filter_range=[]'

The vocabulary of CONFIG's model must have at least 95 tokens, because this backend samples the ids 0 to 94. Random
answers are never right, so without the last key every group would be filtered.

`async_rl/generator/backend.py` says what each method must do, and `async_rl.generator.conformance` tests it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.generator import BackendCapabilities
from async_rl.generator.backend import Sampled
from async_rl.records import NO_VERSION, Lease

CHARACTERS = [chr(code) for code in range(32, 127)]
END = CHARACTERS.index(".")


@dataclass(eq=False)
class Running:
    lease: Lease
    index: int
    prompt_ids: np.ndarray
    random: np.random.Generator
    token_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class UniformBackend:
    capabilities = BackendCapabilities(deterministic=True, has_model=False)

    def __init__(self, batch_size: int) -> None:
        self.max_running, self.version, self.num_tokens = batch_size, NO_VERSION, 0
        self._sequences: list[Running] = []

    @classmethod
    def from_files(cls, directory: Path, config: Config, *, device: str | None, load_pretrained: bool):
        return cls(config.generator.batch_size)

    @property
    def num_running(self) -> int:
        return len(self._sequences)

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        text = "".join(message["content"] for message in messages)
        return np.array([CHARACTERS.index(c) for c in text if c in CHARACTERS] or [0], np.int32)

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        if self.version == NO_VERSION:
            raise RuntimeError("submit() was called before the first activate(); activate a version first")
        for index in range(lease.group_size):
            random = np.random.default_rng([lease.seed, index])
            self._sequences.append(Running(lease, index, prompt_ids, random))

    def cancel(self, lease_id: str) -> None:
        self._sequences = [one for one in self._sequences if one.lease.lease_id != lease_id]

    def step(self) -> list[Sampled]:
        done: list[Running] = []
        for one in self._sequences[: self.max_running]:
            one.token_ids.append(int(one.random.integers(len(CHARACTERS))))
            one.versions.append(self.version)
            self.num_tokens += 1
            if one.token_ids[-1] == END or len(one.token_ids) == one.lease.sampling.max_new_tokens:
                done.append(one)
        self._sequences = [one for one in self._sequences if one not in done]
        return [self._sampled(one) for one in done]

    def progress(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for one in self._sequences:
            counts[one.lease.lease_id] = counts.get(one.lease.lease_id, 0) + len(one.token_ids)
        return counts

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        self.version = version
        return 0.0

    def close(self) -> None:
        self._sequences.clear()

    def _sampled(self, one: Running) -> Sampled:
        return Sampled(
            lease_id=one.lease.lease_id,
            index=one.index,
            prompt_ids=one.prompt_ids,
            token_ids=np.array(one.token_ids, np.int32),
            logprobs=np.full(len(one.token_ids), -math.log(len(CHARACTERS)), np.float32),
            versions=np.array(one.versions, np.int32),
            finish_reason="stop" if one.token_ids[-1] == END else "length",
            text="".join(CHARACTERS[token_id] for token_id in one.token_ids if token_id != END),
        )
