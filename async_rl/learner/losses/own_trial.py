"""Try the user's own loss on a made-up batch before a run, so that a mistake in it costs no sampling.

``launch`` and the doctor do it in a separate process on the CPU, and every rank of the learner on its own device, when
it loads the function. The batch has five sequences of different lengths with ratios around 1. It is given in one piece
and in two, and the loss and its gradient must be the same. Shape letters as in ``own.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.config.loss import LOSS_KEYS, LossConfig
from async_rl.config.loss_names import OFF_VALUES
from async_rl.errors import ConfigError, OwnCodeError
from async_rl.learner.losses.own import KEY, LossInputs, LossOutput, OwnLoss, called
from async_rl.process.user_code import load_named_code

_LENGTHS = (5, 1, 7, 3, 6)
_ADVANTAGES = (1.0, -0.8, 0.6, -1.2, 0.3)
_CUTS = (1, 3)
"""Numbers of sequences in the first of two pieces."""

_TOLERANCE = 1e-4
"""Of float32 sums in another order. A mean over the piece instead of the step is off by far more."""


def load_own_loss(config: Config, *, device: torch.device | None = None) -> OwnLoss | None:
    """Import the function of ``loss.function`` and try it on ``device`` (None: the CPU). None if the key is unset.

    Raises:
        ConfigError: it can't be imported, fails, or breaks the rules of ``own.py``. The message has the figures.
    """
    name = config.loss.function
    if name is None:
        return None
    function = load_named_code(name)
    if not callable(function):
        raise ConfigError(f"{KEY}: {name}: expected a function, got {type(function).__name__}; name a function")
    try:
        return try_loss(
            name, cast("Callable[[LossInputs], LossOutput]", function), config.loss,
            max_length=config.sampling.max_new_tokens, max_lag=config.queue.max_staleness, device=device,
        )  # fmt: skip
    except OwnCodeError as error:
        raise ConfigError(str(error)) from error


def try_loss(
    name: str, function: Callable[[LossInputs], LossOutput], settings: LossConfig, *, max_length: int, max_lag: int,
    device: torch.device | None = None,
) -> OwnLoss:  # fmt: skip
    """Call ``function`` with the made-up batch, in one piece and in two, and return it with the names that it uses.

    Raises:
        OwnCodeError: it raises an exception, or returns something other than it must.
        ConfigError: its loss or gradient is not finite, missing, or depends on the cut; it changes its inputs; or it
            does not read a key that is set.
    """
    watched = _Watched(settings)
    batch = made_up_inputs(settings, max_length=max_length, max_lag=max_lag, device=device)
    batch = replace(batch, settings=cast(LossConfig, watched))
    whole, out = _run(name, function, batch)
    masks, metrics = tuple(out.masks), tuple(out.metrics)
    _check_values(name, whole, out, batch)
    for first in _CUTS:
        pieces = [_run(name, function, piece, masks, metrics) for piece in _cut(batch, first)]
        _check_same(name, whole, _sum([piece for piece, _ in pieces]), first)
    _check_keys(name, function, batch, watched, whole)
    return OwnLoss(name, function, masks, metrics)


def made_up_inputs(
    settings: LossConfig, *, max_length: int, max_lag: int, device: torch.device | None = None
) -> LossInputs:
    """Return a batch of 22 tokens, always the same: log ratios of about 0.3 nats, some of 1.5, lags from 0 to 4."""
    num = sum(_LENGTHS)
    generator = torch.Generator().manual_seed(0)

    def noise(size: float) -> Tensor:
        return size * torch.randn(num, generator=generator)

    logprobs_N = -0.1 - 2.0 * torch.rand(num, generator=generator)
    far_N = torch.arange(num) % 7 == 3
    index_N = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    entropies_N = 0.2 + torch.rand(num, generator=generator)
    inputs = LossInputs(
        logprobs=logprobs_N.requires_grad_(),
        entropies=entropies_N.requires_grad_(settings.entropy_coef != 0),
        behavior_logprobs=logprobs_N.detach() - torch.where(far_N, noise(1.0).sign() * 1.5, noise(0.3)),
        advantages=torch.tensor(_ADVANTAGES)[index_N],
        lag=(torch.arange(num) % 5).clamp(max=max_lag),
        sequence_index=index_N,
        num_sequences=len(_LENGTHS),
        reference_logprobs=logprobs_N.detach() + noise(0.3) if settings.is_kl_in_loss else None,
        proximal_logprobs=logprobs_N.detach() + noise(0.1) if settings.needs_proximal else None,
        settings=settings,
        max_length=max_length,
    )
    return _with_tensors(
        inputs, lambda tensor: tensor.detach().to(device or "cpu").requires_grad_(tensor.requires_grad)
    )


class _Figures(NamedTuple):
    """Of one piece, or of several: what the step's loss and its metrics are computed from."""

    loss_sum: float
    denominator: float
    gradient: Tensor  # float64 [N] or, if entropies carry a gradient, [2, N]
    left_out: Tensor  # bool [masks + 2, N]: the masks, capped_low, capped_high
    metrics: Tensor  # float64 [metrics]

    @property
    def loss(self) -> float:
        return self.loss_sum / self.denominator

    def described(self) -> str:
        return f"{self.loss:.6g} = {self.loss_sum:.6g} / {self.denominator:.6g}"


def _run(
    name: str, function: Callable[[LossInputs], LossOutput], piece: LossInputs,
    masks: Sequence[str] | None = None, metrics: Sequence[str] | None = None,
) -> tuple[_Figures, LossOutput]:  # fmt: skip
    """Call the function with copies of the tensors, check that it left them as they were, and backpropagate."""
    leaves = _with_tensors(piece, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))
    # As in a run, tensors with a gradient are no leaves: torch refuses to change leaves, but not these.
    given = _with_tensors(leaves, lambda tensor: tensor * 1 if tensor.requires_grad else tensor)
    out = called(name, function, given, masks=masks, metrics=metrics)
    for key in (field.name for field in fields(LossInputs)):
        before, after = getattr(piece, key), getattr(given, key)
        if isinstance(before, Tensor) and not torch.equal(before, after):
            raise ConfigError(
                f"{KEY}: {name} changes its input {key}, which other parts of the step read; compute with a copy"
            )
    out.loss_sum.backward()
    carriers = [leaves.logprobs, *([leaves.entropies] if leaves.entropies.requires_grad else [])]
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in carriers]
    nothing = torch.zeros_like(piece.lag, dtype=torch.bool)
    flags = [*out.masks.values(), *(nothing if f is None else f for f in (out.capped_low, out.capped_high))]
    figures = _Figures(
        float(out.loss_sum.detach()),
        float(out.denominator),
        torch.stack(gradients).double().cpu(),
        torch.stack(flags).cpu(),
        torch.tensor([float(value.detach()) for value in out.metrics.values()], dtype=torch.float64),
    )
    return figures, out


def _check_values(name: str, whole: _Figures, out: LossOutput, batch: LossInputs) -> None:
    for what, value in {"loss_sum": whole.loss_sum, "denominator": whole.denominator}.items():
        if not torch.tensor(value).isfinite():
            raise ConfigError(f"{KEY}: {name}: expected a finite {what} of a batch of finite numbers, got {value}")
    for metric, value in zip(out.metrics, whole.metrics.tolist(), strict=True):
        if not torch.tensor(value).isfinite():
            raise ConfigError(f"{KEY}: {name}: expected a finite metric {metric}, got {value}")
    if whole.denominator <= 0:
        raise ConfigError(
            f"{KEY}: {name}: expected a denominator above 0 for a batch of {len(batch.lag)} tokens, got "
            f"{whole.denominator:g}; return the number of tokens or sequences that count"
        )
    if not whole.gradient.isfinite().all():
        num_bad = int((~whole.gradient.isfinite()).sum())
        raise ConfigError(
            f"{KEY}: {name}: expected a finite gradient, got NaN or infinity for {num_bad} of "
            f"{whole.gradient.numel()} tokens; mask before exp, log and division, not after"
        )
    if not whole.gradient[0].any():
        raise ConfigError(
            f"{KEY}: {name}: expected a gradient to logprobs, got 0 for each of {len(batch.lag)} tokens; detach only "
            f"what is a weight"
        )
    for mask, flags_N in zip(out.masks, whole.left_out, strict=False):
        if whole.gradient[:, flags_N].any():
            largest = float(whole.gradient[:, flags_N].abs().max())
            raise ConfigError(
                f"{KEY}: {name}: expected no gradient for tokens under the mask {mask}, got up to {largest:.3g}; leave "
                f"these tokens out of loss_sum, for example with masked_fill(mask, 0.0)"
            )


def _check_same(name: str, whole: _Figures, parts: _Figures, first: int) -> None:
    """Raise ConfigError if the figures of two pieces, added up, are not those of one piece."""
    cut = f"cut after sequence {first} of {len(_LENGTHS)}"
    remedy = (
        "return sums over tokens or sequences, with their number as the denominator; values may depend on a token's "
        "sequence, not on the rest of the micro-batch"
    )
    one, two = whole.gradient / whole.denominator, parts.gradient / parts.denominator
    scale = float(one.abs().sum())
    if not abs(whole.loss - parts.loss) <= _TOLERANCE * max(abs(whole.loss), scale):
        raise ConfigError(
            f"{KEY}: {name}: expected the same loss however a step is cut into micro-batches, got "
            f"{whole.described()} in one piece and {parts.described()} in two, {cut}; {remedy}"
        )
    worst = (one - two).abs().max()
    if not worst <= _TOLERANCE * one.abs().max():
        token = int((one - two).abs().amax(0).argmax())
        raise ConfigError(
            f"{KEY}: {name}: expected the same gradient however a step is cut into micro-batches, got "
            f"{float(one[0, token]):.6g} for token {token} in one piece and {float(two[0, token]):.6g} in two, {cut}; "
            f"{remedy}"
        )
    if not torch.equal(whole.left_out, parts.left_out):
        raise ConfigError(
            f"{KEY}: {name}: expected the same masks and capped tokens however a step is cut, got "
            f"{whole.left_out.sum(1).tolist()} tokens in one piece and {parts.left_out.sum(1).tolist()} in two, {cut}; "
            f"decide by a token's sequence, not by the rest of the micro-batch"
        )
    if not torch.allclose(whole.metrics, parts.metrics, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ConfigError(
            f"{KEY}: {name}: expected metrics that are sums over tokens, got {whole.metrics.tolist()} in one piece and "
            f"{parts.metrics.tolist()} in two, {cut}; return sums, not means"
        )


def _check_keys(
    name: str, function: Callable[[LossInputs], LossOutput], batch: LossInputs, watched: _Watched, whole: _Figures
) -> None:
    """Raise ConfigError if a key of ``LOSS_KEYS`` is set that the function does not read."""
    read = set(watched.names_read)
    for key, tensor in (("anchor", "proximal_logprobs"), ("kl_coef", "reference_logprobs")):
        values = getattr(batch, tensor)
        if values is not None:
            shifted, _ = _run(name, function, replace(batch, **{tensor: values - 0.05}))
            is_same = shifted.loss_sum == whole.loss_sum and torch.equal(shifted.gradient, whole.gradient)
            read |= set() if is_same else {key}
    defaults, settings = LossConfig(), watched.settings
    for key in LOSS_KEYS:
        value = getattr(settings, key)
        is_other = key == "kl_coef" and not settings.is_kl_in_loss
        is_default = value in (getattr(defaults, key), LossConfig.model_fields[key].default)
        if key not in read and not is_other and not is_default:
            shown = OFF_VALUES[key] if value is None else value
            raise ConfigError(
                f"{KEY}: {name} does not read loss.{key}, but it is set to {shown!r}; leave the key out (or the preset "
                f'that sets it, loss.preset = "{settings.preset}"), or read inputs.settings.{key} in the function'
            )


class _Watched:
    """Stands for the settings and notes which keys are read, also by the properties of ``LossConfig``."""

    def __init__(self, settings: LossConfig) -> None:
        self.settings = settings
        self.names_read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(LossConfig, name, None)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)
        self.names_read.add(name)
        return getattr(self.settings, name)


def _cut(batch: LossInputs, first: int) -> tuple[LossInputs, LossInputs]:
    """Return the first ``first`` sequences, and the others."""
    at = sum(_LENGTHS[:first])
    head = _with_tensors(batch, lambda tensor: tensor[:at])
    tail = _with_tensors(batch, lambda tensor: tensor[at:])
    return (
        replace(head, num_sequences=first),
        replace(tail, sequence_index=tail.sequence_index - first, num_sequences=len(_LENGTHS) - first),
    )


def _sum(pieces: Sequence[_Figures]) -> _Figures:
    return _Figures(
        sum(piece.loss_sum for piece in pieces),
        sum(piece.denominator for piece in pieces),
        torch.cat([piece.gradient for piece in pieces], 1),
        torch.cat([piece.left_out for piece in pieces], 1),
        torch.stack([piece.metrics for piece in pieces]).sum(0),
    )


def _with_tensors(inputs: LossInputs, change: Callable[[Tensor], Tensor]) -> LossInputs:
    tensors = {f.name: value for f in fields(LossInputs) if isinstance(value := getattr(inputs, f.name), Tensor)}
    return replace(inputs, **{name: change(tensor) for name, tensor in tensors.items()})
