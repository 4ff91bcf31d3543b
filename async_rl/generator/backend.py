"""What a generator asks of its inference engine, and what the engine gives back. No torch.

The worker owns the loop; a backend is *stepped*: ``step`` runs one decode step over every running sequence (or, where
the engine runs by itself, collects what it has done) and returns those that finished. New weights are applied by
``activate`` between two steps, running sequences go on, and every token carries the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from async_rl.config.backends import BackendCapabilities
from async_rl.records import FinishReason, Lease
from async_rl.sampling_mask import SamplingMask


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One finished sequence of a lease. ``N`` sampled tokens, end-of-sequence token included.

    Attributes:
        index: which of the lease's ``group_size`` samples, from 0.
        prompt_ids: int32 [P].
        token_ids: int32 [N].
        logprobs: float32 [N], nats, of the distribution that was sampled: after temperature, top-k and top-p.
        versions: int32 [N].
        finish_reason: ``stop`` (end of sequence or stop string) or ``length``.
        text: the sampled tokens decoded, without special tokens.
        sampling_mask: N sets, what top-p and top-k left of the vocabulary; None unless ``lease.wants_sampling_mask``.
    """

    lease_id: str
    index: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    text: str
    sampling_mask: SamplingMask | None = None


class Text(Protocol):
    """What is needed of a tokenizer."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text, with the opening of the assistant's turn."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 [N]; special tokens only where the text spells them out."""
        ...

    def ending(self, token_id: int) -> str:
        """How a special token is written; empty for any other token."""
        ...


class Backend(Protocol):
    """An inference engine. Not thread-safe: one loop owns it. ``conformance.check_backend`` tests an implementation."""

    @property
    def capabilities(self) -> BackendCapabilities:
        """What it promises; the same for all instances of a class."""
        ...

    @property
    def max_running(self) -> int:
        """Sequences that can run at once; may change with what the engine's memory holds."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences that run or wait to run."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the backend was made, by cancelled sequences too."""
        ...

    @property
    def version(self) -> int:
        """The active version; -1 before the first ``activate``."""
        ...

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """Token ids, int32 [P], of the rendered chat prompt, ready to be continued."""
        ...

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        """Start (or line up) the lease's ``group_size`` samples of this prompt, with its sampling and seed."""
        ...

    def cancel(self, lease_id: str) -> None:
        """Forget the lease's sequences; nothing of it is returned any more. Unknown leases are ignored."""
        ...

    def step(self) -> list[Sampled]:
        """One decode step over all running sequences; those that finished. Returns at once if none run."""
        ...

    def progress(self) -> dict[str, int]:
        """Tokens sampled so far, by lease, for the heartbeat."""
        ...

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        """Sample with these weights from the next step on; the seconds for which nothing could be sampled.

        ``weights`` maps Hugging Face state-dict names to host tensors, which stay valid until the next ``activate``
        returns. The fake ignores them.

        Raises:
            WeightsError: a tensor is missing, unknown, or of another shape.
        """
        ...

    def close(self) -> None:
        """Release the engine."""
        ...


@runtime_checkable
class PreparingBackend(Protocol):
    """Additional methods of a backend that can prepare a version while it samples with another."""

    def prepare(self, version: int, weights: Mapping[str, Any]) -> bool:
        """Prepare this version, and return whether it is ready, so that ``activate`` takes little time.

        It is called between decode steps, repeatedly, until it returns True. The first call starts the preparation.
        ``weights`` is the same object each time; it is not read after the first call that returned False. A call with
        another version or object replaces the preparation. Without any call, ``activate`` prepares the version itself.

        Raises:
            WeightsError: a tensor is missing, unknown, or of another shape, or the engine could not take it.
        """
        ...


@runtime_checkable
class TextBackend(Protocol):
    """What a backend has in addition to ``Backend`` if its tokens are not those of the model's tokenizer."""

    @property
    def text(self) -> Text: ...
