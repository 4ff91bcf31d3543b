"""What every engine must do with a model that is also here for plain full forward passes. Its own tests call these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from async_rl.errors import WeightsError
from async_rl.generator.backend import Backend, Sampled
from async_rl.sampling_mask import contains
from tests.generator.leases import run_all, submit
from tests.generator.tiny_model import CHARACTERS, full_logprobs, scores

PROMPTS = ["1+1", "what is 23+4", "7", "a longer prompt than the others are"]
VOCABULARY = len(CHARACTERS) + 3


def assert_scored_by(
    models: Mapping[int, PreTrainedModel],
    finished: Iterable[Sampled],
    temperature: float = 1.0,
    *,
    tolerance: float = 1e-5,
) -> int:
    """Each token scores as in a full forward pass of the version in ``models`` that it carries. Return how many
    sequences have tokens of several versions.
    """
    num_mixed = 0
    for sampled in finished:
        versions = np.unique(sampled.versions).tolist()
        for version in versions:
            of_version = sampled.versions == version
            expected = scores(models[version], sampled, temperature)[of_version]
            np.testing.assert_allclose(sampled.logprobs[of_version], expected, atol=tolerance)
        num_mixed += len(versions) > 1
    return num_mixed


def check_greedy(backend: Backend, model: PreTrainedModel, tolerance: float = 1e-5) -> None:
    """It takes the likeliest token, beside others, and scores it by the distribution at temperature 1."""
    submit(backend, "eval", PROMPTS[1], kind="eval", group_size=1, temperature=0.0, top_p=0.5, max_new_tokens=30)
    submit(backend, "train", PROMPTS[1], group_size=4, max_new_tokens=30)
    sampled = run_all(backend)["eval", 0]
    logprobs = full_logprobs(model, sampled)
    assert sampled.token_ids.tolist() == logprobs.argmax(-1).tolist()
    np.testing.assert_allclose(sampled.logprobs, logprobs.max(-1), atol=tolerance)
    assert sampled.sampling_mask is None


def check_ends(backend: Backend, *ends: int) -> None:
    """An answer ends at one of the tokens ``ends``, which is kept, or at the length limit."""
    submit(backend, "a", group_size=40, temperature=2.0, max_new_tokens=60)
    finished = run_all(backend)
    assert {s.finish_reason for s in finished.values()} == {"stop", "length"}
    for sampled in finished.values():
        ids = sampled.token_ids.tolist()
        if sampled.finish_reason == "stop":
            assert ids[-1] in ends
            assert not set(ends) & set(ids[:-1])
        else:
            assert len(ids) == 60
        assert sampled.text == "".join(CHARACTERS[i - 3] for i in ids if i > 2)


def check_stops(backend: Backend) -> None:
    """A stop string or a stop token ends the answer and stays in it."""
    settings: dict[str, Any] = {"group_size": 8, "max_new_tokens": 40, "temperature": 2.0, "seed": 5}
    submit(backend, "a", **settings)
    wholes = run_all(backend)
    text = max((s.text for s in wholes.values()), key=len)
    stop, token = text[5:7], int(wholes["a", 0].token_ids[2])
    submit(backend, "a", **settings, stop=(stop, "never said"))
    stopped = run_all(backend)
    submit(backend, "a", **settings, stop_token_ids=(token,))
    ended = run_all(backend)
    assert any(stop in whole.text for whole in wholes.values())
    for key, whole in wholes.items():
        sampled, ids = stopped[key], whole.token_ids.tolist()
        if stop in whole.text:
            assert (sampled.text, sampled.finish_reason) == (whole.text[: whole.text.index(stop) + 2], "stop")
        else:
            assert (sampled.text, sampled.finish_reason) == (whole.text, whole.finish_reason)
        # The tokens are those that made the text, and each has its logprob.
        np.testing.assert_array_equal(sampled.token_ids, whole.token_ids[: len(sampled.token_ids)])
        assert len(sampled.logprobs) == len(sampled.versions) == len(sampled.token_ids)
        assert ended[key].token_ids.tolist() == (ids[: ids.index(token) + 1] if token in ids else ids)
        assert ended[key].finish_reason == ("stop" if token in ids else whole.finish_reason)


CUTS: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_p": 0.8, "top_k": 5},
                              {"top_p": 0.7, "top_k": 4, "min_p": 0.1}]  # fmt: skip


def check_cut(backend: Backend, model: PreTrainedModel, cut: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Sampling masks are exactly what min-p, then top-k, then top-p left, and logprobs are over these alone."""
    submit(backend, "a", group_size=4, **cut, temperature=0.9, max_new_tokens=12, seed=1)
    for sampled in run_all(backend).values():
        probabilities = np.exp(full_logprobs(model, sampled, 0.9).astype(np.float64))
        mask = sampled.sampling_mask
        assert mask is not None
        got_VN = np.stack([contains(mask, np.full(len(mask), token, np.int32)) for token in range(VOCABULARY)])
        for i, (row, token, logprob) in enumerate(zip(probabilities, sampled.token_ids, sampled.logprobs, strict=True)):
            order = np.argsort(-row)[: int((row >= cut.get("min_p", 0.0) * row.max()).sum())]
            order = order[: cut.get("top_k") or VOCABULARY]
            share = np.cumsum(row[order]) / row[order].sum()
            expected = order[: int(np.searchsorted(share, cut.get("top_p", 1.0))) + 1]
            assert set(np.flatnonzero(got_VN[:, i])) == set(expected)
            assert token in expected
            assert logprob == pytest.approx(float(np.log(row[token] / row[expected].sum())), abs=tolerance)


def check_nan(backend: Backend, weights: dict[str, torch.Tensor]) -> None:
    """Weights that give NaN are refused when they have sampled."""
    weights["model.norm.weight"][0] = torch.nan
    backend.activate(4, weights)
    submit(backend, "a", max_new_tokens=4)
    with pytest.raises(WeightsError, match="version 4 gives NaN"):
        run_all(backend)
