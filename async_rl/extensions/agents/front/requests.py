"""What the front reads of requests, and the token endpoint's bodies.

A request may shorten an answer, and may change neither what it consists of nor the distribution that it is sampled
from: the run trains on it. ``environment.other_settings`` says what becomes of requests that would sample otherwise;
the rest is refused by the name of the field. ``check_fields`` knows the fields of OpenAI's chats, and those that vLLM,
SGLang, llama.cpp and TGI add.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from async_rl.config.generator import OtherSettings
from async_rl.extensions.agents.front.messages import Call, Reply

SAMPLED: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "repeat_penalty": (1,),
    "no_repeat_ngram_size": (0,), "dry_multiplier": (0,), "typical_p": (1,), "top_a": (0,), "tfs_z": (1,),
    "top_n_sigma": (-1, 0), "xtc_probability": (0,), "dynatemp_range": (0,), "mirostat": (0,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "do_sample": (True,), "best_of": (1,), "use_beam_search": (False,), "num_beams": (1,),
    "length_penalty": (1,), "min_tokens": (0,), "min_new_tokens": (0,), "thinking_token_budget": (),
    "thinking_budget": (), "repetition_detection": (), "parallel_tool_calls": (True,),
    "tool_choice.disable_parallel_tool_use": (False,),
}  # fmt: skip
"""Fields that would change how tokens are sampled, with the values that change nothing, as do null and what is empty.
"""
VARIABLES = ("reasoning_effort", "enable_thinking", "thinking", "verbosity")
"""Fields of requests that are variables of chat templates. Where the model's reads no such one they have no effect."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # What may be sampled.
    "ignore_eos": (False,), "logit_bias": (), "bad_words": (), "allowed_token_ids": (), "logits_processors": (),
    "custom_logit_processor": (), "extra_args": (), "vllm_xargs": (), "structured_outputs": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "guided_decoding": (), "structural_tag": (),
    "json_schema": (), "grammar": (), "regex": (), "ebnf": (), "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"), "functions": (), "function_call": ("auto", "none"), "prediction": (),
    "web_search_options": (), "audio": (), "modalities": (["text"],),
    # Where an answer ends: other names of ``max_tokens`` and ``stop``.
    "max_new_tokens": (), "max_output_tokens": (), "n_predict": (), "stop_sequences": (), "stop_regex": (),
    # The prompt.
    "reasoning": (), "documents": (), "chat_template": (), "system": (), "instructions": (),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (False,),
    "truncate_prompt_tokens": (-1,), "prompt": (), "thread": (), "conversation": (), "previous_response_id": (),
    # What the answer consists of.
    "n": (1,), "logprobs": (0, 1), "top_logprobs": (0,), "prompt_logprobs": (), "echo": (False,),
    "background": (False,), "background_options": (), "compaction": (), "truncation": ("disabled",),
}  # fmt: skip
"""The same for what may be sampled, the prompt and the parts of the answer."""
LEFT_OUT = frozenset({
    # Who asks, who pays, what is kept, and what the API's own servers do with a request.
    "user", "metadata", "safety_identifier", "request_id", "user_profile_id", "workspace_id", "betas", "service_tier",
    "priority", "speed", "inference_geo", "billing_policy", "fallback_credit_token", "fallbacks", "access_programs",
    "store", "cache_salt", "cache_control", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    "diagnostics", "moderation", "image", "max_tool_calls", "mcp_servers", "container", "context_management",
    # Inside of messages and items.
    ".id", ".tool_call_id", ".name", ".caller", ".toolset_name", ".status", ".phase", ".is_error", ".clear_at",
    ".output_config", ".cache_control", ".prompt_cache_breakpoint", ".annotations", ".citations", ".logprobs", ".data",
    ".refusal", ".audio", ".function_call", ".reasoning_content", ".signature", ".summary", ".encrypted_content",
    # Inside of tools, and of what is said of thoughts and forms.
    ".strict", ".async", ".defer_loading", ".allowed_callers", ".output_schema", ".format", ".description", ".type",
    ".input_examples", ".eager_input_streaming", ".budget_tokens", ".display", ".block_binding", ".task_budget",
    ".context", ".generate_summary", ".mode", ".include_obfuscation",
})  # fmt: skip
"""Fields that have no effect where they are left out, those inside of others with a dot."""
_OF_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids", "seed"})
_OF_GENERATE = frozenset({"token_ids", "sampling_params", "stream", "features"})
_OF_ALL = frozenset({"model", "untrained", "is_answer", "stream_options", "return_token_ids"})
OF_CHATS = (
    _OF_SAMPLING | _OF_ALL | {"messages", "tools", "n", "stream", "max_completion_tokens", "chat_template_kwargs"}
).union(VARIABLES)
"""Fields that are read in a chat, in addition to those of ``NEUTRAL``."""
_Kind = TypeVar("_Kind")
Note = Callable[[str, Any], None]
"""Takes the name of a field that has no effect, and its value."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
POLICY = "policy"
"""The name by which every request may call the model that is trained."""


class RefusedError(Exception):
    """A request is refused with an HTTP status."""

    def __init__(self, status: int, message: str, code: str, param: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


class GenerateRequest(msgspec.Struct):
    """What is read in the body of ``POST /inference/v1/generate``."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    stream: bool = False
    features: Any = None


@dataclass(frozen=True)
class RequestRules:
    """How requests are taken.

    Attributes:
        model: a name of the model that is trained, in addition to ``POLICY``.
        untrained: the names of models that the policy plays without being trained (``environment.untrained_models``).
        other_settings: as ``environment.other_settings``.
    """

    model: str
    untrained: frozenset[str] = frozenset()
    other_settings: OtherSettings = "replace"

    def is_trained(self, params: Mapping[str, Any]) -> bool:
        """Return whether the run trains on the answer to a request.

        Raises:
            RefusedError: it names a model that nobody plays, or says it malformed.
        """
        name = params.get("model") or POLICY
        if name not in (POLICY, self.model) and name not in self.untrained:
            text = (
                f"model: expected {POLICY} or {self.model}, which is trained, or one of environment.untrained_models "
                f"({', '.join(sorted(self.untrained)) or 'none'}), got {name!r:.80}: name the policy, or list this "
                f"model there, so that the policy plays it untrained"
            )
            raise RefusedError(404, text, "model_not_found", "model")
        return name not in self.untrained and not flag_of(params, "untrained")


class FinishRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /finish``."""

    reward: float
    score: float | None = None


def read_json(body: bytes, kind: type[_Kind]) -> _Kind:
    """Read a body as a ``kind``.

    Raises:
        RefusedError: it is malformed.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RefusedError(400, f"the request: {error}", "invalid_request") from None


def has_no_effect(name: str) -> bool:
    """Return whether a field that is left out is known to be, or is a kind of one: ``tools: web_search``."""
    _, dot, inner = name.rpartition(".")
    return f"{dot}{inner}" in LEFT_OUT or name in SAMPLED or name in VARIABLES or ": " in name


def check_fields(fields: Mapping[str, Any], read: frozenset[str], note: Note, *, refuses: bool = False) -> None:
    """Check that nothing in a request is left aside that would change its prompt or its answer.

    ``read`` are the fields whose values the caller reads. ``note`` gets those that nobody knows, and, unless it
    ``refuses`` them, those that would sample otherwise.

    Raises:
        RefusedError: a field has another value than a neutral one, or belongs into another place.
    """
    for name, got in fields.items():
        if name in read or got in (None, "", [], {}):
            continue
        neutral = {**SAMPLED, **NEUTRAL}.get(name)
        if neutral is None and name not in OF_CHATS | _OF_GENERATE:
            note(name, got)
        elif name in SAMPLED and not refuses:
            if got not in SAMPLED[name]:
                note(name, got)
        elif got is not False if neutral is None else got not in neutral:
            wanted = " or ".join(msgspec.json.encode(one).decode() for one in neutral or ()) or "no value here"
            text = f"{name}: expected {wanted}, got {got!r:.80}: other values can't be trained on; leave it out"
            raise RefusedError(400, text, "unsupported", name)


def read_generate(body: bytes, rules: RequestRules, note: Note) -> Call:
    """Read the body of ``POST /inference/v1/generate``. The call has no number and no key yet.

    ``note`` gets the fields that have no effect.

    Raises:
        RefusedError: it is malformed, or asks for what would not be the run's distribution.
    """
    raw = read_json(body, dict[str, Any])
    try:
        wanted = msgspec.convert(raw, GenerateRequest)
        token_ids = array("i", wanted.token_ids)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RefusedError(400, f"the request: {error}", "invalid_request") from None
    except (OverflowError, TypeError):
        raise RefusedError(400, "token_ids: expected integers below 2^31", "invalid_request", "token_ids") from None
    if not token_ids:
        raise RefusedError(400, "token_ids: expected at least one token", "invalid_request", "token_ids")
    if wanted.stream or wanted.features is not None:
        name = "stream" if wanted.stream else "features"
        raise RefusedError(400, f"{name}: can't be had here; leave it out", "unsupported", name)
    params = wanted.sampling_params
    check_fields(raw, _OF_GENERATE | _OF_ALL, note)
    check_fields(params, _OF_SAMPLING, note, refuses=rules.other_settings == "refuse")
    kind = {"is_trained": rules.is_trained(raw), "is_answer": flag_of(raw, "is_answer")}
    return Call(0, "", token_ids.tobytes(), max_tokens=count_of(params, "max_tokens"), **kind, **wishes(params))


def wishes(params: Mapping[str, Any], choice: int = 0) -> dict[str, Any]:
    """Return fields of the call for the answer number ``choice`` to a request.

    Raises:
        RefusedError: a value is malformed.
    """
    ends = {"stop": stop_of(params), "stop_token_ids": _stop_token_ids(params)}
    return {**ends, "seed": _seed_of(params) + choice, "settings": _settings_of(params)}


def flag_of(params: Mapping[str, Any], name: str) -> bool:
    if not isinstance(value := params.get(name) or False, bool):
        raise RefusedError(400, f"{name}: expected true or false, got {value!r:.80}", "invalid_request", name)
    return value


def _settings_of(params: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling settings that a request names, which the generator compares with the run's.

    Raises:
        RefusedError: one of them is not a number.
    """
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


def _seed_of(params: Mapping[str, Any]) -> int:
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
