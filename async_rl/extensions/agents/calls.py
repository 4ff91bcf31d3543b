"""A call of an agent: whether the run can train on it, what the backend is asked for, and the answer to the client."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from async_rl.extensions.agents.front.messages import Call, Reply
from async_rl.extensions.agents.session import OpenSession
from async_rl.generator.backend import Sampled, rollout_keys
from async_rl.records import Lease, Sampling

_BOUNDS = {"temperature": (0.0, 100.0), "top_p": (1e-9, 1.0), "top_k": (-1, 2**31 - 1), "min_p": (0.0, 1.0 - 1e-9)}


def is_of(sampling: Sampling, name: str, value: float) -> bool:
    """Return whether ``value`` is that of the setting ``name`` of ``sampling``."""
    wanted = 0.0 if name == "top_k" and value == -1 else value  # -1 switches top-k off, too
    return math.isclose(wanted, getattr(sampling, name), rel_tol=1e-6)


def others_in(call: Call, taken: Mapping[str, Sampling]) -> dict[str, str]:
    """Return the settings of a call that are not the run's, each with a text that says so.

    ``taken`` are the run's, by the section of the config that has them.
    """
    found: dict[str, str] = {}
    for name, value in call.settings.items():
        if not any(is_of(sampling, name, value) for sampling in taken.values()):
            run = " or ".join(f"{section}.{name} = {getattr(one, name):g}" for section, one in taken.items())
            found[name] = f"{name}: expected the run's {run} or none, got {value:g}"
    return found


def wrong_in(call: Call, vocab_size: int | None) -> tuple[str, str, str] | None:
    """Return what is wrong with a call, as the message, code and parameter of a refusal; None if nothing is.

    Token ids must be below ``vocab_size``, None for no limit.
    """
    for name, value in call.settings.items():
        least, most = _BOUNDS[name]
        if not least <= value <= most or (name == "top_k" and value % 1):
            return f"{name}: expected a number from {least:g} to {most:g}, got {value:g}", "invalid_request", name
    limit = vocab_size or 2**31
    # An engine may fail as a whole on ids that it does not know: vLLM does.
    prompt, ends = np.frombuffer(call.token_ids, np.int32), np.array(call.stop_token_ids, np.int64)
    for name, ids in (("token_ids", prompt), ("stop_token_ids", ends)):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limit):
            return f"{name}: expected ids from 0 to {limit} (exclusive), got others", "invalid_request", name
    return None


def request_of(session: OpenSession, call: Call, max_tokens: int) -> Lease:
    """Return a call as the backend's request for one answer of at most ``max_tokens`` tokens.

    It is sampled with the settings that the call still has.
    """
    sampling = replace(session.lease.sampling, **call.settings)
    return replace(
        session.lease,
        lease_id=f"{session.rollout_key}/{session.num_begun}",
        group_size=1,
        seed=_seed(session, call.seed),
        sampling=replace(
            sampling,
            max_new_tokens=max_tokens,
            stop=(*sampling.stop, *call.stop),
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *call.stop_token_ids))),
        ),
    )


def _seed(session: OpenSession, asked: int) -> int:
    """Return a call's seed, which depends on the lease's seed, the rollout, the call's number and its own seed."""
    key = int(rollout_keys(session.lease.seed, np.array([session.index]))[0])
    seed = int(rollout_keys(key, np.array([session.num_begun]))[0])
    return (int(rollout_keys(seed, np.array([asked]))[0]) if asked else seed) >> 1


def reply_to(call: int, sample: Sampled) -> Reply:
    """Return what the front sends to the client of the call numbered ``call``."""
    return Reply(
        call,
        token_ids=sample.token_ids.astype("<i4").tobytes(),
        logprobs=sample.logprobs.astype("<f4").tobytes(),
        versions=sample.versions.astype("<i4").tobytes(),
        finish_reason=sample.finish_reason,
        num_prompt=len(sample.prompt_ids),
        text=sample.text,
    )
