"""Check before training that a model computes the same values for packed sequences as for each sequence alone.

``check_packing`` runs one micro-batch of short sequences, two of which share their prompt, in float32. It compares
every module's output and the gradient at the embeddings with those of each sequence alone. A sequence alone runs with
transformers' attention code and masks. The values differ for models that can't be packed: those with short
convolutions, linear attention or other state along the row, or with a window that exists only in the mask. Most of
these compute the same in padded rows. The logits must be the head's output times a factor, perhaps with a soft cap, and
no token may depend on later ones. ``fsdp_engine`` calls it on rank 0, with unsharded weights.

``check_replay`` checks that routers which replay their own choice of experts compute the same, bit for bit.

``check_neighbours`` checks with the finished engine, in the dtype and with the kernels of training, that a sequence's
values do not depend on its neighbours' tokens.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.attention_limits import NARROW_WINDOW, narrow_windows
from async_rl.errors import ModelError
from async_rl.learner.data.packing import Packing, pack
from async_rl.learner.model.policy_model import DeviceBatch, PolicyModel, to_device
from async_rl.learner.sequences import TrainSequence, train_sequence

VALUE_TOLERANCE = 1e-4
"""Largest allowed difference of a module's outputs, relative to their largest absolute value. Float32 rounding in a sum
of thousands stays far below it; a leak between sequences is far above it."""
GRADIENT_TOLERANCE = 1e-3
_NATIVE_ATTENTION = "eager"
_MIXED_LENGTH_ROPES = ("longrope", "dynamic")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_PROMPT_TOKENS, _ANSWER_TOKENS = 5, (9, 4)
_LONE_TOKENS = 11
NEIGHBOURS_TOKENS = 64
"""Size of a micro-batch, in tokens, that is enough for sequence 0 to have neighbours, packed or padded."""
_FEW_PARAMETERS = 50_000_000
"""A model with more parameters is tested with its first layers only, up to the first layer of the last kind."""

Outputs = dict[str, Tensor]
"""Module name -> output, float32 [T, ...], in the order in which the modules finish."""
_OUTPUT = "the decoder's output"


def check_packing(policy: PolicyModel, *, max_length: int) -> None:
    """Check that a micro-batch gives the same values as each sequence alone, in float32.

    Args:
        policy: on the host, unsharded. Its ``packing`` is checked. Its parameters and settings are restored afterwards.
        max_length: tokens of the longest sequence that will be trained on.

    Raises:
        ModelError: values differ, or the model fails. The message names the first module that differs or fails.
    """
    model = policy.causal_lm
    _refuse_mixed_lengths(policy, max_length)
    batch = test_batch(policy)
    with ExitStack() as changed:
        changed.enter_context(_frozen(model))
        changed.enter_context(_few_layers(policy))
        changed.enter_context(narrow_windows(model, below=max_length))
        together, gradient = _run_together(policy, batch)
        _check_head(policy, _laid_out(batch)[0])
        alone = [_run_alone(policy, ids, index) for index, ids in enumerate(_laid_out(batch))]
    places = _places(batch)
    _compare_values(policy, together, [outputs for outputs, _ in alone], places)
    expected = torch.zeros_like(gradient)
    for place, (_, part) in zip(places, alone, strict=True):
        expected.index_add_(0, place, part)
    if (difference := _difference(gradient, expected)) > GRADIENT_TOLERANCE:
        raise _refused(
            policy,
            f"the gradient at its embeddings differs by {difference:.1e} of its largest value from that of each "
            f"sequence alone (at most {GRADIENT_TOLERANCE:g})",
        )


@torch.no_grad()
def check_replay(policy: PolicyModel) -> None:
    """Check that replaying the routes which the model chooses changes nothing, bit for bit.

    Args:
        policy: on the host, unsharded, with its ``routers``.

    Raises:
        ModelError: the decoder's output changes.
    """
    replay = policy.routers
    assert replay is not None, "a check of routing replay without routing replay"
    batch = test_batch(policy)
    with _few_layers(policy):
        with replay.recording() as chosen:
            expected = policy.hidden_states(batch)
        # Of padding too, or an expert would compute another number of tokens, and round otherwise.
        routes_NLK = torch.zeros(len(next(iter(chosen.values()))), replay.num_layers, replay.top_k, dtype=torch.int64)
        for layer, own_NK in chosen.items():
            routes_NLK[:, layer] = own_NK
        with replay.forward(routes_NLK):
            value = policy.decoded(batch)
    if not torch.equal(value, expected):
        raise ModelError(
            f"model.routing_replay: with its own choice of experts replayed, the decoder's output of "
            f"{type(policy.causal_lm).__name__} changes by {_difference(value, expected):.1e} of its largest value; "
            f"leave the key out, and report it with the installed version of transformers"
        )


def check_neighbours(
    score: Callable[[Sequence[TrainSequence]], Mapping[int, np.ndarray]], model_config: Any, *, num_ranks: int,
    packing: Packing = "packed",
) -> None:  # fmt: skip
    """Check that a sequence's logprobs stay the same, bit for bit, if its neighbours in a micro-batch change.

    Models with experts are not checked here. The tokens that an expert computes together, and so its rounding, depend
    on the neighbours. ``check_packing`` checks such models in float32.

    Args:
        score: returns the engine's logprobs of sequences, or values, by sequence id.
        model_config: the model's transformers config.
        num_ranks: number of ranks. With more ranks the test needs more neighbours, so that some share a row with the
            sequence.
        packing: how the engine computes a micro-batch, for the message.

    Raises:
        ModelError: the logprobs change.
    """
    text = model_config.get_text_config()
    if any((getattr(text, key, None) or 0) > 1 for key in _EXPERT_KEYS):
        return
    before, after = (_sequences(text.vocab_size, neighbours_seed=seed, copies=num_ranks) for seed in (1, 2))
    value, changed = (score(sequences)[0] for sequences in (before, after))
    if not np.array_equal(value, changed):
        raise _refusal(
            ", ".join(model_config.architectures or ["the model"]),
            packing,
            f"in the dtype and on the device of training, a sequence's logprobs change by up to "
            f"{np.abs(value - changed).max():.1e} nats with the tokens of its neighbours",
        )


def short_sequences(policy: PolicyModel, *, copies: int) -> list[TrainSequence]:
    """Return the test's sequences, with ``copies`` of all but the first."""
    return _sequences(min(policy.vocab_size, policy.causal_lm.config.get_text_config().vocab_size), copies=copies)


def test_batch(policy: PolicyModel) -> DeviceBatch:
    """Return the test's sequences as one micro-batch of ``policy``, on the host."""
    ((micro_batch,),) = pack(short_sequences(policy, copies=1), max_tokens=1 << 20, num_ranks=1, packing=policy.packing)
    return to_device(micro_batch, torch.device("cpu"), policy.packing)


def _sequences(vocab_size: int, *, neighbours_seed: int = 1, copies: int = 1) -> list[TrainSequence]:
    """Return the test's sequences. Sequence 0 is always the same. The others are random, from ``neighbours_seed``.

    All but one of them are longer. The shorter one shares a padded micro-batch with sequence 0 if no longer one does.
    """
    own, others = np.random.default_rng(0), np.random.default_rng(neighbours_seed)

    def tokens(generator: np.random.Generator, count: int) -> np.ndarray:
        return generator.integers(vocab_size, size=count, dtype=np.int32)

    texts = [(tokens(own, NARROW_WINDOW * 2), 1)]
    for _ in range(copies):
        prompt = tokens(others, _PROMPT_TOKENS)
        texts.append((tokens(others, _LONE_TOKENS), 1))
        texts += [(np.concatenate([prompt, tokens(others, count)]), _PROMPT_TOKENS) for count in _ANSWER_TOKENS]
    texts.append((tokens(others, NARROW_WINDOW * 2 - 1), 1))
    return [train_sequence(index, ids, np.arange(len(ids)) >= start) for index, (ids, start) in enumerate(texts)]


# Run the model on the micro-batch and on each sequence alone.


def _places(batch: DeviceBatch) -> list[Tensor]:
    """Return, for each sequence, the indices of its tokens in the row, int64."""
    bounds = batch.layout.cu_seqlens.tolist()
    expand = batch.layout.expand
    index = torch.arange(bounds[-1]) if expand is None else expand
    return [index[start:end] for start, end in pairwise(bounds)]


def _laid_out(batch: DeviceBatch) -> list[Tensor]:
    return [batch.token_ids[place] for place in _places(batch)]


def _run_together(policy: PolicyModel, batch: DeviceBatch) -> tuple[Outputs, Tensor]:
    """Run the micro-batch. Return outputs and gradient for the tokens of its row, which takes the first copy of a
    shared token.
    """

    def run() -> Tensor:
        return policy.hidden_states(batch)

    def loss(hidden_Td: Tensor) -> Tensor:
        parts = [hidden_Td[place] * _loss_weights(i, *hidden_Td[place].shape) for i, place in enumerate(_places(batch))]
        return torch.cat(parts).sum()

    if policy.packing == "packed":
        outputs, gradient = _recorded(policy, run, loss, "packed in a row", (1, len(batch.token_ids)))
        return outputs, gradient
    (rows,), restore = batch.layout.padding
    outputs, gradient = _recorded(policy, run, loss, "in padded rows", (rows.num_sequences, rows.max_length))
    of_row = {name: value[restore] for name, value in outputs.items() if name != _OUTPUT}
    # Copies of a shared token add up. Padding repeats a token, so a gradient that reaches it shows as well.
    summed = gradient.new_zeros(len(batch.token_ids), gradient.shape[-1]).index_add(0, rows.gather, gradient)
    return of_row | {_OUTPUT: outputs[_OUTPUT]}, summed


def _run_alone(policy: PolicyModel, token_ids: Tensor, index: int) -> tuple[Outputs, Tensor]:
    model = policy.causal_lm

    def run() -> Tensor:
        return model.base_model(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]

    model.set_attn_implementation(_NATIVE_ATTENTION)
    try:
        return _recorded(
            policy, run, lambda h: (h * _loss_weights(index, *h.shape)).sum(), "alone", (1, len(token_ids))
        )
    finally:
        policy.use(policy.packing)


@torch.no_grad()
def _check_head(policy: PolicyModel, token_ids: Tensor) -> None:
    """Raise ModelError if the model is not causal, or its logits are not ``policy.logits`` of its head's output."""
    model = cast(Any, policy.causal_lm)
    model.set_attn_implementation(_NATIVE_ATTENTION)
    head = policy.head
    try:
        hidden = model.base_model(input_ids=token_ids[None], use_cache=False).last_hidden_state
        shorter = model.base_model(input_ids=token_ids[None, :-1], use_cache=False).last_hidden_state
        with _scaled_to_cap(policy, head(hidden)):
            logits = model(input_ids=token_ids[None], use_cache=False).logits.float()
            expected = policy.logits(head(hidden))
    except Exception as error:  # a model may raise anything for arguments that it does not support
        raise _failed(policy, "a sequence alone", error) from error
    finally:
        policy.use(policy.packing)
    if (difference := _difference(hidden[:, :-1], shorter)) > VALUE_TOLERANCE:
        raise _refused(
            policy,
            f"its tokens depend on later ones: without the last token of a sequence, {_OUTPUT} differs by "
            f"{difference:.1e} of its largest value (at most {VALUE_TOLERANCE:g})",
        )
    if policy.head_kind == "value":
        return  # transformers gives that of one token only, without a factor or a cap
    difference = _difference(expected, logits)
    if difference > VALUE_TOLERANCE:
        capped = "" if policy.logit_cap is None else f", capped at {policy.logit_cap:g}"
        raise _refused(
            policy,
            f"its logits differ by {difference:.1e} of the largest from the output of its head times "
            f"{policy.logit_factor:g}{capped} (at most {VALUE_TOLERANCE:g})",
        )


@contextmanager
def _scaled_to_cap(policy: PolicyModel, head_output: Tensor) -> Iterator[None]:
    """Scale the head's output while the ``with`` block runs, so that the largest logit reaches the cap, if any.

    A cap far above all logits would show in none of them.
    """
    if policy.logit_cap is None:
        yield
        return
    scale = policy.logit_cap / policy.logit_factor / float(head_output.abs().max().clamp_min(1e-6))
    hook = cast(Any, policy.head).register_forward_hook(lambda module, inputs, output: output * scale)
    try:
        yield
    finally:
        hook.remove()


def _loss_weights(index: int, num_tokens: int, width: int) -> Tensor:
    """Return weights of the hidden states in the test's loss, [num_tokens, width]. They differ from sequence to
    sequence.
    """
    return torch.cos(torch.arange(num_tokens)[:, None] * 0.7 + torch.arange(width) * 1.3 + index)


def _recorded(
    policy: PolicyModel,
    run: Callable[[], Tensor],
    loss: Callable[[Tensor], Tensor],
    how: str,
    shape: tuple[int, int],
) -> tuple[Outputs, Tensor]:
    """Run the model on ids of ``shape`` [B, L]. Return every module's output, and the gradient of
    ``loss(hidden states)`` at the embeddings, [B * L, ...].
    """
    outputs: Outputs = {}
    embedded: list[Tensor] = []
    base = cast(Any, policy.causal_lm.base_model)

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == shape:
                outputs[name] = value.detach().flatten(0, 1).clone()

        return hook

    def embed(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    hooks = [module.register_forward_hook(keep(name)) for name, module in base.named_modules() if name]
    embeddings = cast(Any, policy.causal_lm).get_input_embeddings()
    hooks.append(embeddings.register_forward_hook(embed))
    try:
        hidden_Td = run()
        outputs[_OUTPUT] = hidden_Td.detach()
        loss(hidden_Td).backward()
    except Exception as error:  # a model may raise anything for arguments that it does not support
        raise _failed(policy, f"sequences {how}", error) from error
    finally:
        for hook in hooks:
            hook.remove()
    (gradient,) = [e.grad for e in embedded[:1]] or [None]
    if gradient is None:
        raise _refused(policy, "its output does not depend on its input embeddings")
    return outputs, gradient.flatten(0, 1)


# Compare the two runs.


def _compare_values(policy: PolicyModel, together: Outputs, alone: list[Outputs], places: list[Tensor]) -> None:
    """Raise ModelError if a module's outputs differ. The message names the first one in the order in which
    modules finish.
    """
    for module, value in together.items():
        for outputs, place in zip(alone, places, strict=True):
            other = outputs.get(module)
            if other is None or other.shape[1:] != value.shape[1:]:
                continue
            if (difference := _difference(value[place], other)) > VALUE_TOLERANCE:
                raise _refused(
                    policy,
                    f"the output of {module} differs by {difference:.1e} of its largest value from that for each "
                    f"sequence alone (at most {VALUE_TOLERANCE:g})",
                )


def _difference(value: Tensor, expected: Tensor) -> float:
    """Return max |value - expected| / max |expected|. Infinite if ``value`` or ``expected`` is not finite."""
    difference = float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    return difference if difference == difference else float("inf")


def _failed(policy: PolicyModel, what: str, error: Exception) -> ModelError:
    """Return the refusal of a model that raised ``error`` on ``what``, and let the frames of its call go.

    In torch 2.12 the hooks of a checkpointed layer that raised stay on this thread for as long as the frame of its
    call lives. The caller keeps the error, and would record the next forward pass, in padded rows, with these hooks.
    """
    traceback.clear_frames(error.__traceback__)
    return _refused(policy, f"it fails on {what}: {type(error).__name__}: {error}")


def _refused(policy: PolicyModel, finding: str) -> ModelError:
    return _refusal(type(policy.causal_lm).__name__, policy.packing, finding)


def _refusal(name: str, packing: Packing, finding: str) -> ModelError:
    return ModelError(
        f"model.path: {name} can't be trained on {packing} rows: {finding}; choose a model such as Qwen2, Qwen3 or "
        f"Llama"
    )


# Change the model temporarily for the test.


def _refuse_mixed_lengths(policy: PolicyModel, max_length: int) -> None:
    """Raise ModelError if the model's positions depend on the longest sequence of a micro-batch at lengths that the
    run may reach.
    """
    text = cast(Any, policy.causal_lm).config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind not in _MIXED_LENGTH_ROPES:
        return
    original = rope.get("original_max_position_embeddings")
    original = original or getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings
    if max_length > original:
        raise _refused(
            policy,
            f"its {kind} positions depend on the longest sequence of a micro-batch above {original} tokens, and "
            f"sequences may have {max_length} (sampling.max_prompt_tokens + sampling.max_new_tokens, or "
            f"sft.max_length)",
        )


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Switch off the gradients of parameters while the ``with`` block runs.

    The gradient at the embeddings also tests every layer, with far less memory.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _few_layers(policy: PolicyModel) -> Iterator[None]:
    """Shorten a large model to its first layers while the ``with`` block runs. Every kind of layer is still among
    them.
    """
    layers = policy.decoder_layers
    keep_tested_layers(policy)
    try:
        yield
    finally:
        _set_layers(policy, layers)


def keep_tested_layers(policy: PolicyModel) -> None:
    """Shorten a large model to its first layers, up to the first layer of the last kind."""
    _set_layers(policy, nn.ModuleList(tested_layers(policy)))


def tested_layers(policy: PolicyModel) -> list[nn.Module]:
    """Return the layers that a test needs: of a large model the first ones, up to the first layer of the last kind."""
    layers = list(policy.decoder_layers)
    if sum(p.numel() for p in policy.parameters()) <= _FEW_PARAMETERS:
        return layers
    first_of_kind = {_kind(layer): index for index, layer in reversed(list(enumerate(layers)))}
    return layers[: 1 + max(first_of_kind.values())]


def _set_layers(policy: PolicyModel, layers: nn.ModuleList) -> None:
    parent, _, name = policy.layers_name.rpartition(".")
    setattr(cast(nn.Module, policy.causal_lm.base_model).get_submodule(parent), name, layers)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    names = ("attention_type", "layer_type", "is_sliding", "sliding_window")
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    settings = tuple(repr(getattr(module, name, None)) for module in layer.modules() for name in names)
    return modules, settings, tuple(parameter.shape for parameter in layer.parameters())
