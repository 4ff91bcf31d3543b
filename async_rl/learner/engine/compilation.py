"""Compile the decoder layers by torch.compile (``learner.compile``). Called by ``trained_model.py``.

Each layer is compiled by itself and in place, so the names of parameters stay, and FSDP2 shards it as before. Layers of
one kind share their graphs. Attention in packed rows is not compiled: its calls depend on the lengths of the sequences.
The number of tokens is dynamic, because it differs from micro-batch to micro-batch.

torch compiles when a layer first runs: once for scores, once for training. Then it checks each call against what it
compiled for. If something else differs than the number of tokens, it compiles again. After ``LIMIT`` times it would
give up and run the layer uncompiled without a word; here it fails instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_rl.errors import ModelError
from async_rl.learner.model.attention import leave_uncompiled
from async_rl.learner.model.policy_model import DeviceBatch, PolicyModel
from async_rl.learner.optimizers.optimizer import total_norm

LIMIT = 64
"""How many times torch may compile one function. Kinds of layers, with and without gradient, one token or several."""
BACKEND = "inductor"
"""The compiler behind torch.compile. Tests of what is compiled, and not of the compiler, use a faster one."""
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest mean difference of logprobs that compilation may make, in nats, and of the gradient's norm as a share of it,
by the dtype of training. In bfloat16 a compiled layer rounds less often."""


def compile_layers(policy: PolicyModel) -> None:
    """Let torch compile the decoder layers of ``policy`` when they run first. Call it before FSDP."""
    import torch._dynamo.config as settings

    any_settings = cast(Any, settings)
    any_settings.recompile_limit = LIMIT
    any_settings.fail_on_recompile_limit_hit = True
    leave_uncompiled()
    for layer in policy.decoder_layers:
        cast(nn.Module, layer).compile(dynamic=True, backend=BACKEND)


def check_compiled(
    policy: PolicyModel, batches: Sequence[DeviceBatch], begin: Callable[[int], None], *, dtype: torch.dtype
) -> None:
    """Check that compiled layers compute what they compute uncompiled. All ranks call it.

    Args:
        policy: whose layers are compiled. Its gradients must be unset, and are unset afterwards.
        batches: the micro-batches of this rank. The loss is the sum of their logprobs.
        begin: called with the index of each micro-batch before its forward pass.
        dtype: that of training.

    Raises:
        ModelError: logprobs or gradients differ, or torch can't compile the layers.
    """
    name = type(policy.causal_lm).__name__
    try:
        logprobs, norm = _computed(policy, batches, begin)
    except Exception as error:  # torch, its compilers and their tools raise anything
        first = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"learner.compile: torch can't compile the layers of {name}: {type(error).__name__}: {first}; it needs a "
            f"C++ compiler and Python's headers; leave the key out to run uncompiled"
        ) from error
    with torch.compiler.set_stance("force_eager"):
        expected, expected_norm = _computed(policy, batches, begin)
    of_logprobs = float((logprobs - expected).abs().mean()) if len(expected) else 0.0
    of_norm = abs(norm - expected_norm) / max(expected_norm, 1e-6)
    if not max(of_logprobs, of_norm) <= TOLERANCES[dtype]:
        raise ModelError(
            f"learner.compile: compiled layers of {name} compute other values: logprobs differ by {of_logprobs:.1e} "
            f"nats in the mean, and the gradient's norm by {of_norm:.1e} of it (at most {TOLERANCES[dtype]:g}); leave "
            f"the key out, and report it with the installed version of torch"
        )


def _computed(
    policy: PolicyModel, batches: Sequence[DeviceBatch], begin: Callable[[int], None]
) -> tuple[Tensor, float]:
    """Return the logprobs of the trained tokens, [N] on the host, and the norm of the gradient over all ranks."""
    logprobs: list[Tensor] = []
    for index, batch in enumerate(batches):
        begin(index)
        scored = policy(batch)
        scored.logprobs.sum().backward()
        logprobs.append(scored.logprobs.detach().cpu())
    norm = total_norm(p.grad for p in policy.parameters() if p.grad is not None)
    policy.zero_grad()
    return torch.cat(logprobs), norm
