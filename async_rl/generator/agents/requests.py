"""What the front reads of requests, and the token endpoint's bodies.

A request may shorten an answer, and may not change the distribution that it is sampled from: the run trains on it. Such
requests are refused by the name of the field.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from async_rl.generator.agents.messages import Call, Reply

NOT_OURS: Mapping[str, Any] = {
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0, "ignore_eos": False,
    "logit_bias": None, "bad_words": None, "allowed_token_ids": None, "structured_outputs": None, "n": 1,
    "prompt_logprobs": None, "logits_processors": None, "extra_args": None,
}  # fmt: skip
"""Settings that would change the distribution, or the shape of the answer, with the only value that is taken."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Settings that must be the run's, if they are given."""


class RefusedError(Exception):
    """A request is refused with an HTTP status."""

    def __init__(self, status: int, message: str, code: str, param: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


class GenerateRequest(msgspec.Struct):
    """The body of ``POST /inference/v1/generate``. Fields that are not listed are ignored."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    stream: bool = False
    features: Any = None
    model: str = ""


_requests = msgspec.json.Decoder(GenerateRequest)


class FinishRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /finish``."""

    reward: float
    score: float | None = None


_finishes = msgspec.json.Decoder(FinishRequest)


def read_finish(body: bytes) -> FinishRequest:
    """Read the body of ``POST /finish``.

    Raises:
        RefusedError: it is malformed.
    """
    try:
        return _finishes.decode(body)
    except msgspec.MsgspecError as error:
        raise RefusedError(400, f"the request: {error}", "invalid_request") from None


def read_generate(body: bytes) -> Call:
    """Read the body of ``POST /inference/v1/generate``. The call has no number and no key yet.

    Raises:
        RefusedError: it is malformed, or asks for what would not be the run's distribution.
    """
    try:
        wanted = _requests.decode(body)
        token_ids = array("i", wanted.token_ids)
    except msgspec.MsgspecError as error:
        raise RefusedError(400, f"the request: {error}", "invalid_request") from None
    except (OverflowError, TypeError):
        raise RefusedError(400, "token_ids: expected integers below 2^31", "invalid_request", "token_ids") from None
    if not token_ids:
        raise RefusedError(400, "token_ids: expected at least one token", "invalid_request", "token_ids")
    if wanted.stream or wanted.features is not None:
        name = "stream" if wanted.stream else "features"
        raise RefusedError(400, f"{name}: can't be had here; leave it out", "unsupported", name)
    params = wanted.sampling_params
    return Call(
        0, "", token_ids.tobytes(), max_tokens=count_of(params, "max_tokens"), stop=stop_of(params),
        stop_token_ids=_stop_token_ids(params), seed=seed_of(params), settings=settings_of(params),
    )  # fmt: skip


def settings_of(params: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling settings that a request names, which the generator compares with the run's.

    Raises:
        RefusedError: it names another setting that would change the distribution.
    """
    for name, only in NOT_OURS.items():
        if (got := params.get(name)) is not None and got != only and got not in ([], {}):
            text = f"{name}: expected {only!r} or none, got {got!r}: what is sampled otherwise can't be trained on"
            raise RefusedError(400, text, "unsupported", name)
    found = {name: params[name] for name in _SAMPLING if params.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RefusedError(400, f"{name}: expected a number, got {value!r}", "invalid_request", name)
    return {name: float(value) for name, value in found.items()}


def count_of(params: Mapping[str, Any], name: str) -> int | None:
    value = params.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise RefusedError(
            400, f"{name}: expected a number of tokens from 1 on, got {value!r}", "invalid_request", name
        )
    return value


def seed_of(params: Mapping[str, Any]) -> int:
    value = params.get("seed")
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise RefusedError(400, f"seed: expected an integer of 64 bits, got {value!r}", "invalid_request", "seed")
    return value


def stop_of(params: Mapping[str, Any]) -> tuple[str, ...]:
    value = params.get("stop")
    texts = [value] if isinstance(value, str) else (value or [])
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedError(
            400, "stop: expected a text, or a list of texts that are not empty", "invalid_request", "stop"
        )
    return tuple(texts)


def _stop_token_ids(params: Mapping[str, Any]) -> tuple[int, ...]:
    value = params.get("stop_token_ids") or []
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 2**31 for one in value):
        raise RefusedError(400, "stop_token_ids: expected a list of token ids", "invalid_request", "stop_token_ids")
    return tuple(value)


def generate_answer(reply: Reply) -> dict[str, Any]:
    """Return the body of an answer to ``POST /inference/v1/generate``: what ``renderers`` reads, and vLLM's fields."""
    token_ids, logprobs = array("i", reply.token_ids).tolist(), array("f", reply.logprobs).tolist()
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    num_prompt, num_sampled = reply.num_prompt, len(token_ids)
    return {
        "request_id": f"call-{reply.call}",
        "choices": [
            {
                "index": 0,
                "token_ids": token_ids,
                "logprobs": {"content": content},
                "finish_reason": reply.finish_reason,
                "weight_versions": array("i", reply.versions).tolist(),
            }
        ],
        "prompt_logprobs": None,
        "usage": {
            "prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled,
        },
    }  # fmt: skip
