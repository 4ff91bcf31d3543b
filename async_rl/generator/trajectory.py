"""The tokens of a rollout of several turns: token in, token out. Numpy only; called by ``environment_rollouts``.

What the model sampled is kept as it was and never tokenised again. What the environment adds is tokenised by itself and
stands off the mask. The *prefix rule* says where it goes: a state that begins with the old state and the action
continues the sequence, any other begins a new one (a template that strips old thoughts, say).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from async_rl.generator.backend import Sampled, Text
from async_rl.records import NO_VERSION, TokenSequence
from async_rl.sampling_mask import SamplingMask, join


class TokenizerText:
    """``Text`` of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def ending(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False) if token_id in self._special else ""


class Trajectory:
    """One rollout's sequences so far. Begin each turn with ``see``, end it with ``say``."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._closed: list[TokenSequence] = []
        self._open = _OpenSequence()
        self._state = ""
        self._action: str | None = None
        self._ending = ""
        self.turn_tokens: list[int] = []

    @property
    def num_sampled(self) -> int:
        return sum(self.turn_tokens)

    def see(self, state: str) -> np.ndarray:
        """The token ids, int32 [N], that the model continues in ``state``."""
        rest = self._continuation(state)
        if rest is None:
            self._close()
            rest = state
        self._open.told(self._text.encode(rest))
        self._state, self._action = state, None
        return self._open.token_ids()

    def say(self, sampled: Sampled) -> None:
        """The model's answer to what ``see`` returned."""
        self._open.sampled(sampled)
        self._action = sampled.text
        self._ending = self._text.ending(int(sampled.token_ids[-1]))
        self.turn_tokens.append(len(sampled.token_ids))

    def sequences(self) -> tuple[TokenSequence, ...]:
        """All of it; a sequence in which nothing was sampled is left out."""
        self._close()
        return tuple(self._closed)

    def _continuation(self, state: str) -> str | None:
        """What ``state`` adds to what is in the tokens already; None if it does not begin with that."""
        if self._action is None:
            return None
        said = self._state + self._action
        # The end-of-turn token was sampled, so it is there already. A rendered conversation spells it out; text that an
        # environment puts together from state and action does not.
        if self._ending and state.startswith(said + self._ending):
            return state[len(said) + len(self._ending) :]
        return state[len(said) :] if state.startswith(said) else None

    def _close(self) -> None:
        if self._open.has_samples:
            self._closed.append(self._open.sequence())
        self._open = _OpenSequence()


class _OpenSequence:
    """Parts of one sequence, in order."""

    def __init__(self) -> None:
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._sampling_masks: list[SamplingMask] = []
        self.has_samples = False

    def told(self, ids: np.ndarray) -> None:
        self._add(ids, False, np.zeros(len(ids), np.float32), np.full(len(ids), NO_VERSION, np.int32))

    def sampled(self, sampled: Sampled) -> None:
        self._add(sampled.token_ids, True, sampled.logprobs, sampled.versions)
        self.has_samples = True
        if sampled.sampling_mask is not None:
            self._sampling_masks.append(sampled.sampling_mask)

    def _add(self, ids: np.ndarray, mask: bool, logprobs: np.ndarray, versions: np.ndarray) -> None:
        self._ids.append(ids)
        self._masks.append(np.full(len(ids), mask, np.bool_))
        self._logprobs.append(logprobs)
        self._versions.append(versions)

    def token_ids(self) -> np.ndarray:
        return np.concatenate(self._ids).astype(np.int32)

    def sequence(self) -> TokenSequence:
        return TokenSequence(
            token_ids=self.token_ids(),
            loss_mask=np.concatenate(self._masks),
            behavior_logprobs=np.concatenate(self._logprobs).astype(np.float32),
            versions=np.concatenate(self._versions).astype(np.int32),
            sampling_mask=join(self._sampling_masks) if self._sampling_masks else None,
        )
