"""Choose how the built-in engine computes a model's running rows, by a test before the first sample.

``choose_rows`` runs a few short sequences as a rollout does: prompts of several lengths, shared prefixes, one token at
a time, rows that end and rows that take their place. It compares the distribution of every next token with that of a
plain forward pass over the whole text, by transformers' own code. A model that only caches keys and values is tried in
slots (``rows``), then every model in transformers' own caches (``lockstep``), then without a cache. A model that
differs in all of them is refused: its tokens depend on later ones.

The weights are those of the run, in its dtype, on its device. Windows are narrowed for the test, so that its short
sequences are longer than they are. Shape letters: P = tokens of a text, R = rows, V = vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from async_rl.attention_limits import caps_attention, narrow_windows
from async_rl.errors import ModelError, WeightsError
from async_rl.generator.hf.lockstep import LockstepRows
from async_rl.generator.hf.rows import Rows, SlotRows, caches_only_keys_and_values
from async_rl.queue.parity import parity_limit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_REFERENCE_ATTENTION = "eager"
_EXACT_LIMIT = 1e-4
"""Largest mean difference in float32, nats. Rounding stays far below it. In half precision the limit is that of the
run's parity check."""
_TEXT_TOKENS = (14, 9, 11, 15)
_PROMPT_TOKENS = (1, 3, 7, 7)
"""Tokens of each text, and how many of them are its prompt. The texts 2 and 3 have one prompt."""


def choose_rows(model: PreTrainedModel, max_running: int) -> Rows:
    """Return empty rows for ``model``, whose attention is set to fit them. The model has its weights.

    Raises:
        ModelError: the model computes other values with a cache than without, in every way that this engine knows.
        WeightsError: the weights give values that are not finite.
    """
    ways = _ways(model)
    reasons: list[str] = []
    with narrow_windows(model):
        texts, expected = _expected(model)
        for name, make in ways.items():
            if not (reason := _why_wrong(model, make, texts, expected)):
                break
            reasons.append(f"{name}, {reason}")
        else:
            raise ModelError(
                f'the built-in engine (generator.backend = "transformers") can\'t sample {type(model).__name__}: '
                f'{"; ".join(reasons)}; set generator.backend = "vllm" or a backend of your own (docs/engines.md), or '
                f"use another model"
            )
    rows = make(max_running)
    if isinstance(rows, LockstepRows):
        how = "with a forward pass for each group" if rows.has_cache else "with the whole text computed for every token"
        logger.warning(
            "%s is sampled slowly, %s %s%s",
            type(model).__name__,
            name,
            how,
            "".join(f"; {reason}" for reason in reasons),
        )
    return rows


def _ways(model: PreTrainedModel) -> dict[str, Callable[[int], Rows]]:
    """Return what makes rows in the ways that may suit the model, from the most rows that may run.

    The keys are names for messages, the fastest first.
    """
    native = model.config._attn_implementation or _REFERENCE_ATTENTION
    if caps_attention(model.config):
        native = _REFERENCE_ATTENTION  # transformers' sdpa leaves the cap out
    without = {"without a cache": lambda _: LockstepRows(model, _REFERENCE_ATTENTION, has_cache=False)}
    if _clamps_steps(model):
        return dict(without)
    ways: dict[str, Callable[[int], Rows]] = {}
    if caches_only_keys_and_values(model.config):
        ways["in slots"] = lambda max_running: SlotRows(model, max_running)
    ways["in transformers' own caches"] = lambda _: LockstepRows(model, native, has_cache=True)
    if native != _REFERENCE_ATTENTION:
        ways["in these with eager attention"] = lambda _: LockstepRows(model, _REFERENCE_ATTENTION, has_cache=True)
    return ways | without


def _clamps_steps(model: Any) -> bool:
    """Return whether state space layers limit their step sizes, which transformers leaves out with a cache.

    The difference is about 1e-3 nats, which the test may not see in half precision.
    """
    limits = (getattr(module, "time_step_limit", None) for module in model.modules())
    return any(limit is not None and tuple(limit) != (0.0, math.inf) for limit in limits)


def _why_wrong(model: Any, make: Callable[[int], Rows], texts: list[np.ndarray], expected: list[Tensor]) -> str:
    """Return why rows made by ``make`` can't sample this model; empty if they can."""
    try:
        found = _decoded(make(len(texts)), texts)
    except Exception as error:  # a model may raise anything for arguments that it does not support
        return f"it fails: {type(error).__name__}: {error}"
    differences = [_difference(a, b) for a, b in zip(found, expected, strict=True)]
    mean = float(torch.cat(differences).mean())
    limit = _EXACT_LIMIT if model.dtype == torch.float32 else parity_limit(None, (str(model.dtype),))
    if mean <= limit:
        return ""
    return (
        f"its log-probabilities differ by {mean:.1e} nats on average from those of a forward pass over the whole text "
        f"(at most {limit:g})"
    )


def _difference(found_PV: Tensor, expected_PV: Tensor) -> Tensor:
    """Return the expected |difference| of a token that is sampled from ``expected``, float32 [P]."""
    difference_PV = (found_PV - expected_PV).abs()
    return (expected_PV.exp() * difference_PV).sum(-1)


@torch.inference_mode()
def _expected(model: Any) -> tuple[list[np.ndarray], list[Tensor]]:
    """Return texts, int32 [P], and the log-probabilities after each token from the prompt's last one on, [.., V].

    Raises:
        ModelError: the model fails on a text.
        WeightsError: its values are not finite.
    """
    generator = np.random.default_rng(0)
    vocab_size = min(model.get_output_embeddings().weight.shape[0], model.get_input_embeddings().weight.shape[0])
    texts = [generator.integers(vocab_size, size=length, dtype=np.int32) for length in _TEXT_TOKENS]
    texts[3][: _PROMPT_TOKENS[3]] = texts[2][: _PROMPT_TOKENS[3]]
    model.set_attn_implementation(_REFERENCE_ATTENTION)
    expected: list[Tensor] = []
    for text, prompt in zip(texts, _PROMPT_TOKENS, strict=True):
        ids = torch.from_numpy(text.astype(np.int64)).to(model.device)
        try:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        except Exception as error:  # a model may raise anything for arguments that it does not support
            raise ModelError(
                f"model.path: {type(model).__name__} fails on a text of {len(text)} tokens: {type(error).__name__}: "
                f"{error}; use another model"
            ) from error
        expected.append(logits[prompt - 1 :].float().log_softmax(-1))
    if not all(bool(values.isfinite().all()) for values in expected):
        raise WeightsError(
            f"the first version of the weights gives NaN or infinite log-probabilities in {type(model).__name__}; look "
            f"for a non-finite loss in the learner's log, or for damage in the files of model.path"
        )
    return texts, expected


@torch.inference_mode()
def _decoded(rows: Rows, texts: list[np.ndarray]) -> list[Tensor]:
    """Return the same log-probabilities as ``_expected``, from ``rows`` that are fed one token at a time.

    Texts 0 and 1 run first. Texts 2 and 3 join as one group after two steps. Text 1 ends in the midst, and the last
    row takes its number.
    """
    longest = max(map(len, texts))
    found: list[list[Tensor]] = [[] for _ in texts]
    running: list[int] = []
    position = [prompt - 1 for prompt in _PROMPT_TOKENS]

    def add(members: list[int]) -> None:
        length = _PROMPT_TOKENS[members[0]] - 1
        (prefix,) = rows.prefixes([texts[members[0]][:length]]) if length else (None,)
        rows.add(len(running), len(members), prefix, length=longest, max_length=longest)
        running.extend(members)

    add([0])
    add([1])
    num_steps = 0
    while running:
        if num_steps == 2:
            add([2, 3])
        at = np.array([position[text] for text in running], np.int64)
        ids = np.array([texts[text][place] for text, place in zip(running, at, strict=True)], np.int64)
        logits = rows.decode(ids, at, max_length=longest)
        for text, row in zip(running, logits.float().log_softmax(-1), strict=True):
            found[text].append(row)
            position[text] += 1
        num_steps += 1
        while ended := [row for row, text in enumerate(running) if position[text] == len(texts[text])]:
            last = len(running) - 1
            rows.remove([ended[0]], *(([last], [ended[0]]) if ended[0] != last else ([], [])))
            running[ended[0]] = running[last]
            running.pop()
    return [torch.stack(values) for values in found]
