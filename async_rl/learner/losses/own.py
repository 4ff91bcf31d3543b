"""A loss of the user's own: what it gets (``LossInputs``), what it returns (``LossOutput``), and how it is called.

``loss.function = "file.py:function"`` replaces ``policy.policy_loss`` by a function of one ``LossInputs``. It is called
for each micro-batch on each rank, and returns a *sum* over tokens or sequences and that sum's *denominator*::

    def reinforce(inputs: LossInputs) -> LossOutput:
        loss = -(inputs.advantages * inputs.logprobs)
        return LossOutput(loss_sum=loss.sum(), denominator=torch.tensor(len(loss)))

The step's loss is the sum of all ``loss_sum`` divided by the sum of all ``denominator``, over micro-batches and ranks.
The engine backpropagates the sums and divides the gradients once, when it knows the denominator. So the result does not
depend on how the step was cut, if the function keeps to one rule: what it adds for a token may depend on the token's
sequence, which is never cut, but not on other sequences of the micro-batch. A mean over the micro-batch breaks it.
``own_trial.py`` checks that before a run.

The parts of the built-in loss are in ``parts.py``, for use in such a function. ``objective.py`` calls ``OwnLoss``,
whose result has the form of the built-in loss, so all metrics are computed as for that. Shape letters: N = trained
tokens, S = sequences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from async_rl.config.loss import LossConfig
from async_rl.errors import OwnCodeError
from async_rl.learner.losses.parts import kl_estimate, log_ratio, sum_by
from async_rl.learner.losses.policy import PolicyInputs, PolicyLoss
from async_rl.learner.losses.rules import step_sums
from async_rl.process.user_code import describe_error

KEY = "loss.function"


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """The trained tokens of one micro-batch, at least one, as tensors on the learner's device. Do not change them.

    A sequence is in one micro-batch with all of its tokens. Sequences with a behavior logprob that is not finite are
    left out before, and counted as skipped.

    Attributes:
        logprobs: float32 [N], nats, of the sampled tokens under the policy that is trained; carries grad.
        entropies: float32 [N], nats, of the same distributions; carries grad if ``loss.entropy_coef`` is not 0.
        behavior_logprobs: float32 [N], nats, under the policy that sampled, at sampling time; finite.
        advantages: float32 [N], finite.
        lag: int64 [N], versions between sampling and now, from 0 to ``queue.max_staleness``.
        sequence_index: int64 [N], in [0, num_sequences): the sequence of each token. Tokens of a sequence are in order.
        num_sequences: S. Some sequences may have no token here.
        reference_logprobs: float32 [N], nats, of the reference model; None unless ``loss.kl_coef`` is above 0 and
            ``loss.kl_placement`` is "loss".
        proximal_logprobs: float32 [N], nats, of the policy before the first update on the batch, detached; None unless
            ``loss.anchor`` is "proximal".
        settings: the section ``[loss]``, read-only.
        max_length: ``sampling.max_new_tokens``.
    """

    logprobs: Tensor
    entropies: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    lag: Tensor
    sequence_index: Tensor
    num_sequences: int
    reference_logprobs: Tensor | None
    proximal_logprobs: Tensor | None
    settings: LossConfig
    max_length: int


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """The loss of one micro-batch, and which of its tokens count.

    Attributes:
        loss_sum: floating point [], carries grad: the micro-batch's part of the numerator of the step's loss.
        denominator: a number [], not below 0, without grad: its part of the denominator, such as the number of tokens
            or of sequences that are not masked.
        masks: name -> bool [N], True for tokens that were left out of ``loss_sum`` for the cause ``name``. A masked
            token must have no gradient. It counts under the first mask that has it, and in the metric
            ``loss_mask/<name>``. Tokens without a mask are *kept*: ratios, entropy and the effective sample size are
            means over these.
        capped_low, capped_high: bool [N], True for tokens whose ratio was cut at a lower or upper bound, for
            ``ratio/clip_low`` and ``ratio/clip_high``. None: no token was.
        metrics: name -> number [], a sum over kept tokens. The metric ``loss_metric/<name>`` is their mean.

    The names of masks and metrics, of lower-case letters, digits and ``_``, must be the same for every micro-batch.
    """

    loss_sum: Tensor
    denominator: Tensor
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    capped_low: Tensor | None = None
    capped_high: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """The user's loss function, with the names that it uses. ``own_trial.load_own_loss`` builds it.

    Attributes:
        name: the value of ``loss.function``.
        function: the function.
        masks: the names of its masks.
        metrics: the names of its metrics.
    """

    name: str
    function: Callable[[LossInputs], LossOutput]
    masks: tuple[str, ...]
    metrics: tuple[str, ...]

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """The metrics of the numbers that ``__call__`` returns beside the loss."""
        return (*(f"loss_mask/{name}" for name in self.masks), *(f"loss_metric/{name}" for name in self.metrics))

    def __call__(self, inputs: PolicyInputs, loss: LossConfig, *, max_length: int) -> tuple[PolicyLoss, Tensor]:
        """Return the loss of one micro-batch in the form of ``policy_loss``, and float64 [masks + metrics]: the number
        of tokens under each mask, and the sum of each metric.

        Raises:
            OwnCodeError: the function raises an exception, or returns something other than it must.
        """
        finite_N = inputs.behavior_logprobs.isfinite()
        skipped_S = sum_by(inputs.sequence_index, (~finite_N).long(), inputs.num_sequences) > 0
        # A look at the tensor would make the host wait for the device.
        usable_N = None if inputs.is_finite else ~skipped_S[inputs.sequence_index]
        given = loss_inputs(inputs, usable_N, loss, max_length)
        if len(given.logprobs):
            out = called(self.name, self.function, given, masks=self.masks, metrics=self.metrics)
        else:  # an empty sum, so that this rank still takes part in the backward pass
            out = _of_no_token(self, inputs)
        kept, counts = _counted(out, given)
        kept_N, capped_low_N, capped_high_N = (
            _spread(value, usable_N) for value in (kept, _and(out.capped_low, kept), _and(out.capped_high, kept))
        )
        before_S = sum_by(inputs.sequence_index, torch.ones_like(inputs.sequence_index), inputs.num_sequences)
        after_S = sum_by(inputs.sequence_index, kept_N.long(), inputs.num_sequences)
        kl_sum = counts.new_zeros(())
        if loss.is_kl_in_loss:
            distance_N = log_ratio(inputs.logprobs.detach(), inputs.reference_logprobs, kept_N)
            kl_sum = kl_estimate(distance_N, loss.kl_estimator).sum(dtype=torch.float64)
        log_ratio_N = log_ratio(inputs.logprobs.detach(), inputs.behavior_logprobs, finite_N).double()
        behavior_N = inputs.behavior_logprobs.masked_fill(~finite_N, 0.0)
        result = PolicyLoss(
            loss_sum=out.loss_sum.double(),
            denominator=out.denominator.detach(),
            skipped=skipped_S | ((before_S > 0) & (after_S == 0)),
            kept=kept_N,
            finite=finite_N,
            log_ratio=log_ratio_N,
            capped_low=capped_low_N,
            capped_high=capped_high_N,
            kl_sum=kl_sum,
            rule_counts=counts.new_zeros(len(loss.all_rules)),
            rule_sums=step_sums(loss.all_rules, log_ratio_N, behavior_N.double(), kept_N),
        )
        return result, counts


def loss_inputs(inputs: PolicyInputs, usable_N: Tensor | None, loss: LossConfig, max_length: int) -> LossInputs:
    """Return the user's view of a micro-batch: the tokens where ``usable_N`` (bool) is True. None: all."""

    def chosen(values_N: Tensor) -> Tensor:
        return values_N if usable_N is None else values_N[usable_N]

    proximal_N = None
    if loss.needs_proximal:
        proximal_N = chosen(inputs.proximal_logprobs if inputs.has_proximal else inputs.logprobs.detach())
    return LossInputs(
        logprobs=chosen(inputs.logprobs),
        entropies=chosen(inputs.entropies),
        behavior_logprobs=chosen(inputs.behavior_logprobs),
        advantages=chosen(inputs.advantages),
        lag=chosen(inputs.lag),
        sequence_index=chosen(inputs.sequence_index),
        num_sequences=inputs.num_sequences,
        reference_logprobs=chosen(inputs.reference_logprobs) if loss.is_kl_in_loss else None,
        proximal_logprobs=proximal_N,
        settings=loss,
        max_length=max_length,
    )


def called(
    name: str, function: Callable[[LossInputs], LossOutput], inputs: LossInputs, *,
    masks: Sequence[str] | None = None, metrics: Sequence[str] | None = None,
) -> LossOutput:  # fmt: skip
    """Call the user's ``function``, which ``loss.function = name`` is, and check the form of what it returns.

    Args:
        masks, metrics: the names that it must use; None accepts any.

    Raises:
        OwnCodeError: it raises an exception, or returns something other than it must.
    """
    try:
        out: Any = function(inputs)
    except Exception as error:  # the user's code raises what it likes
        raise OwnCodeError(f"{KEY}: {name} failed: {describe_error(error)[0]}; correct that file") from error
    problem = wrong_form(out, len(inputs.logprobs))
    for kind, found, wanted in (("masks", getattr(out, "masks", ()), masks), ("metrics", _metrics(out), metrics)):
        if not problem and wanted is not None and tuple(found) != tuple(wanted):
            problem = (
                f"expected {kind} {list(wanted)}, as in the trial at the start, got {list(found)}: the names and their "
                f"order must be the same for every micro-batch"
            )
    if problem:
        raise OwnCodeError(f"{KEY}: {name}: {problem}; correct what the function returns")
    return out


def wrong_form(out: Any, num_tokens: int) -> str:
    """Return what is wrong with the types and shapes of ``out``, the function's result for N tokens; empty if nothing
    is.
    """
    if not isinstance(out, LossOutput):
        return f"expected a LossOutput, got {type(out).__name__}"
    loss_sum, numbers = out.loss_sum, {"denominator": out.denominator} | {f"metric {k}": v for k, v in _items(out)}
    if not isinstance(loss_sum, Tensor) or loss_sum.shape != () or not loss_sum.is_floating_point():
        return f"expected loss_sum to be a floating-point tensor of shape [], got {_shown(loss_sum)}"
    if not loss_sum.requires_grad:
        return "expected loss_sum with a gradient to logprobs, got one without"
    for what, value in numbers.items():
        if not isinstance(value, Tensor) or value.shape != () or value.dtype == torch.bool or value.is_complex():
            return f"expected {what} to be a real tensor of shape [], got {_shown(value)}"
    if out.denominator.requires_grad:
        return "expected a denominator without a gradient, got one with a gradient"
    flags = {f"mask {name}": mask for name, mask in dict(out.masks).items()}
    flags |= {k: v for k in ("capped_low", "capped_high") if (v := getattr(out, k)) is not None}
    for what, flag in flags.items():
        if not isinstance(flag, Tensor) or flag.shape != (num_tokens,) or flag.dtype != torch.bool:
            return f"expected {what} to be a bool tensor of shape [{num_tokens}], got {_shown(flag)}"
    bad = [name for name in (*out.masks, *out.metrics) if not re.fullmatch("[a-z0-9_]+", str(name))]
    return f"expected names of lower-case letters, digits and _, got {bad[0]!r}" if bad else ""


def _items(out: LossOutput) -> list[tuple[str, Any]]:
    return list(dict(out.metrics).items())


def _metrics(out: Any) -> Any:
    return getattr(out, "metrics", ())


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _of_no_token(own: OwnLoss, inputs: PolicyInputs) -> LossOutput:
    nothing = inputs.logprobs[:0].sum(dtype=torch.float64)
    empty, zero = inputs.lag.new_zeros(0, dtype=torch.bool), nothing.detach()
    return LossOutput(nothing, zero, dict.fromkeys(own.masks, empty), metrics=dict.fromkeys(own.metrics, zero))


def _counted(out: LossOutput, given: LossInputs) -> tuple[Tensor, Tensor]:
    """Return which tokens are kept (bool [N]), and float64 [masks + metrics]."""
    left = torch.ones_like(given.lag, dtype=torch.bool)
    counts: list[Tensor] = []
    for mask in out.masks.values():
        counts.append((mask & left).sum().double())
        left = left & ~mask
    counts += [value.detach().double() for value in out.metrics.values()]
    return left, torch.stack(counts) if counts else left.new_zeros(0, dtype=torch.float64)


def _and(flags: Tensor | None, kept: Tensor) -> Tensor:
    return torch.zeros_like(kept) if flags is None else flags & kept


def _spread(values: Tensor, usable_N: Tensor | None) -> Tensor:
    """Return bool [N] that has ``values`` where ``usable_N`` is True (None: everywhere), and False elsewhere."""
    if usable_N is None:
        return values
    spread = torch.zeros_like(usable_N)
    spread[usable_N] = values
    return spread
