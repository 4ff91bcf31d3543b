"""Inference engines: the protocols that they implement, and their random numbers. No torch.

A backend is an inference engine behind the protocol ``Backend``. The generator's loop calls ``step``, which decodes one
token of every running sequence and returns the samples that finished. An engine that decodes by itself only collects
its outputs in ``step``. ``activate`` applies new weights between two steps. Running sequences then go on, with the new
weights or (vLLM with adapters) with those that they began with, and every token carries the version that sampled it.

``start.backends`` has the table of built-in engines, and builds the one that ``generator.backend`` names.

``rollout_keys`` and ``uniforms`` give random numbers that depend only on the lease's seed, the rollout's index and the
token's index. So they are the same on every generator, in every batch and in every order. They come from splitmix64
(Steele et al., 2014), with one stream for each rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from async_rl.config.config import Config
from async_rl.config.generator import BackendCapabilities
from async_rl.records import EngineColumns, FinishReason, Lease
from async_rl.weights.channel.engine_ranks import EngineRanks

UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW_64_BITS = (1 << 64) - 1


class Sampled(EngineColumns, frozen=True, eq=False):
    """One finished sample of a lease, with ``N`` sampled tokens. The end-of-sequence token is one of them.

    Of the columns of ``EngineColumns``, the sampling mask is there with ``lease.wants_sampling_mask`` only, and routes
    with ``lease.wants_routes``: those of every token of the prompt and of the answer, but for the last one. If a token
    was computed again, after new weights, its first routes count.

    Attributes:
        index: the sample's number in the lease's group, from 0.
        prompt_ids: the prompt's tokens, int32 [P].
        token_ids: the sampled tokens, int32 [N].
        logprobs: float32 [N], nats, of the distribution that was sampled: after temperature, top-k and top-p.
        versions: int32 [N], the version of the weights that sampled each token.
        finish_reason: ``stop`` (end of sequence or stop string) or ``length``.
        text: the sampled tokens decoded, without special tokens that end a turn or pad (``data.answer_text``).
        prompt_opened: what the prompt's end opens for the answer, such as ``<think>`` (``answer_text.prompt_opened``).
    """

    lease_id: str
    index: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    text: str
    prompt_opened: str = ""


class Text(Protocol):
    """Renders and encodes text for environments: the part of a tokenizer that they need."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the conversation as one text. The text ends where the assistant's next turn begins."""
        ...

    def encode(self, text: str, before: str = "") -> np.ndarray:
        """Return the token ids of ``text``, int32 [N], which follows the text ``before`` in its sequence.

        Special tokens occur only where the text spells them out.
        """
        ...

    def encode_start(self, text: str) -> np.ndarray:
        """Return the token ids of plain text that begins a sequence, int32 [N], with what such text begins with."""
        ...

    def ending(self, token_id: int) -> str:
        """Return the text of a special token, for example the one that ends a turn. Return "" for any other token."""
        ...


class Backend(Protocol):
    """An inference engine that samples answers with weights that change. One thread steps it; it is not thread-safe.

    ``conformance.check_backend`` tests an implementation.
    """

    @property
    def capabilities(self) -> BackendCapabilities:
        """What the backend can do. The value is the same for all instances of a class."""
        ...

    @property
    def max_running(self) -> int:
        """The number of sequences that can run at once. It may change with the engine's free memory."""
        ...

    @property
    def num_running(self) -> int:
        """The number of sequences that are running or waiting for a slot."""
        ...

    @property
    def num_tokens(self) -> int:
        """The number of tokens sampled since the backend was built, including those of cancelled sequences."""
        ...

    @property
    def version(self) -> int:
        """The version of the active weights. It is -1 before the first ``activate``."""
        ...

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """Return the token ids, int32 [P], of the prompt in the chat template.

        They end where the model's turn begins.
        """
        ...

    def submit(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        """Start the lease's ``group_size`` samples of this prompt, or queue them until slots are free.

        The lease has the sampling settings and the seed.
        """
        ...

    def cancel(self, lease_id: str) -> None:
        """Stop the lease's sequences. ``step`` returns none of them from now on. An unknown lease is ignored."""
        ...

    def step(self) -> list[Sampled]:
        """Run one decode step over all running sequences. Return the samples that it finished.

        Return at once if no sequence runs.
        """
        ...

    def progress(self) -> dict[str, int]:
        """Return, for each lease id with unfinished samples, the number of tokens sampled so far.

        Heartbeats report it.
        """
        ...

    def activate(self, version: int, weights: Mapping[str, Any]) -> float:
        """Sample with ``weights`` from the next step on. Return the pause: for how many seconds no step could run.

        ``weights`` maps Hugging Face state-dict names to host tensors, which stay valid until the next ``activate``
        returns. With ``lora.publish = "adapters"`` it has only the adapters, under peft's names. The fake backend
        ignores them.

        Raises:
            WeightsError: a tensor is missing, unknown, or of another shape.
        """
        ...

    def close(self) -> None:
        """Stop all sequences and release the engine."""
        ...


@runtime_checkable
class MultiRankBackend(Protocol):
    """Additional property of a backend whose engine has worker processes that receive weights themselves."""

    @property
    def ranks(self) -> EngineRanks | None:
        """The workers as ranks of a collective. None if they can't take part.

        A version that the workers hold reaches ``activate`` as a ``HeldByEngine``.
        """
        ...


@runtime_checkable
class SleepingBackend(Protocol):
    """Additional method of a backend whose engine computes between calls, too, and can lend its device to others."""

    def sleep(self) -> None:
        """Compute nothing from now on, and give up the device's memory as far as possible. Sequences are kept.

        The next ``activate``, ``step`` or scoring wakes the engine. The memory must be free again by then.
        """
        ...


@runtime_checkable
class TellingBackend(Protocol):
    """Additional method of a backend that tells the tokens of a sample before it is finished."""

    def tokens_after(self, counts: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Return by lease id the tokens of its sample, int32 [N], after the first ``counts[lease_id]``.

        The leases have one sample each. One that does not run is left out.
        """
        ...


@runtime_checkable
class TextBackend(Protocol):
    """Additional property of a backend that has its own tokens instead of those of the model's tokenizer."""

    @property
    def text(self) -> Text: ...


class BackendFactory(Protocol):
    """Builds a backend: a row of ``start.backends.FACTORIES``, or ``from_files`` of a user's own class."""

    def __call__(self, directory: Path, config: Config, *, device: str | None, load_pretrained: bool) -> Backend:
        """Build the backend.

        Args:
            directory: the model's and the tokenizer's files.
            device: the CUDA device to use; None for the CPU.
            load_pretrained: load the weights in ``directory`` as version 0, instead of waiting for ``activate``. It is
                True only for backends that declare ``offline``.

        Raises:
            ModelError: the backend can't run the model.
        """
        ...


def _mixed(value: UInt64Array) -> UInt64Array:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def rollout_keys(seed: int, indices: npt.NDArray[np.int64]) -> UInt64Array:
    """Return one key, uint64 [N], for each rollout index.

    ``uniforms`` makes a rollout's random numbers from its key.
    """
    start = _mixed(np.asarray([seed & _LOW_64_BITS], dtype=np.uint64))
    # Mixed twice, so that the stream of (seed, index + 1) is not this stream shifted by one token.
    return _mixed(_mixed(start + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN))


def uniforms(keys: UInt64Array, counters: npt.NDArray[np.int64]) -> Float64Array:
    """Return random numbers, float64 [N] in [0, 1 - 2**-52]: a fixed one for each pair (rollout key, token index)."""
    bits = _mixed(keys + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 52 bits, not 53: then u * total < total even after rounding, so an inverse CDF always finds an index.
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
