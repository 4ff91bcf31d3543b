"""The section ``loss``: its keys. ``loss_names`` has their names and presets, ``loss_contradictions`` what is refused.

In formulas, pi is the policy that is trained, mu the behavior policy that sampled, prox the proximal policy of the
decoupled loss, and ref the reference model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from async_rl.config.contradictions import check_contradictions
from async_rl.config.loss_contradictions import CONTRADICTIONS
from async_rl.config.loss_names import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    OFF_VALUES,
    PRESETS,
    SKIP_STATISTICS,
    SURROGATES,
    AdvantageName,
    AggregationName,
    KlEstimatorName,
    KlPlacement,
    PresetName,
    SkipStatisticName,
    SurrogateName,
    choices,
)
from async_rl.config.rules import Rule, check_rules
from async_rl.config.section import CodeName, Section

LOSS_KEYS = (
    "surrogate", "ratio_level", "anchor", "clip_low", "clip_high", "dual_clip", "importance_cap", "skip_threshold",
    "skip_statistic", "skip_unit", "token_range", "kl_coef", "kl_weighted", "entropy_coef", "aggregation",
    "sapo_positive", "sapo_negative",
)  # fmt: skip
"""Keys that the built-in loss reads. With ``loss.function`` they do what that function makes of them, so one that is
set to another value than the default, and that the function does not read, is refused. (A KL in the reward or the
advantages is not the loss's.)"""


IMPLIED_BY = {"dual_clip": "loss.surrogate", "kl_placement": "loss.kl_coef", "kl_estimator": "loss.kl_placement"}
"""Key -> the key that decides if neither the user nor the preset does. The advantage is left to advantage_function."""


class LossConfig(Section):
    """The policy-gradient loss. The defaults are those of ``preset = "dapo"``; see docs/algorithms.md."""

    preset: PresetName = Field(
        default="dapo",
        description="Published algorithm that sets the unset keys of this section; docs/algorithms.md describes each.",
    )

    function: CodeName | None = Field(
        default=None,
        description="Your own loss as module:function or file.py:function, in place of the built-in one "
        '(docs/algorithms.md, "A loss of your own").',
    )
    advantage_function: CodeName | None = Field(
        default=None,
        description="Your own advantages as module:function or file.py:function, which replace loss.advantage.",
    )

    advantage: AdvantageName = Field(
        default="group_norm", description=f"How rewards become advantages. {choices(ADVANTAGES)}."
    )
    best_k: int | None = Field(
        default=None,
        ge=1,
        description="Train only on this many rollouts of each group, those with the highest advantage; 0 means all.",
    )
    length_bonus: float = Field(
        default=0.0,
        ge=0,
        description="Largest extra reward for short right answers in groups that have right and wrong ones.",
    )

    surrogate: SurrogateName = Field(
        default="clip", description=f"What a token adds to the objective. {choices(SURROGATES)}."
    )
    ratio_level: Literal["token", "sequence"] = Field(
        default="token",
        description="Whether each token has its own ratio, or all tokens of a sequence their geometric mean (GSPO).",
    )
    anchor: Literal["behavior", "proximal", "interpolated"] = Field(
        default="behavior",
        description="Policy to which the trained one is compared: the behavior policy, which sampled, or (decoupled "
        "PPO) the weights before the first update on a batch. proximal computes these with a forward pass if a batch "
        "has several updates; interpolated estimates them from the other two policies and the staleness.",
    )
    clip_low: float = Field(
        default=0.2, ge=0, le=1, description="Ratios below 1 - loss.clip_low are clipped; 1 clips none of them."
    )
    clip_high: float = Field(default=0.2, ge=0, description="Ratios above 1 + loss.clip_high are clipped.")
    dual_clip: float | None = Field(
        default=10.0,
        gt=1,
        description="Upper limit on the ratio of tokens with a negative advantage, with surrogate = clip; 0 sets no "
        "limit.",
    )
    sapo_positive: float = Field(
        default=1.0, gt=0, description="Temperature of surrogate = sapo at positive advantages: higher decays sooner."
    )
    sapo_negative: float = Field(default=1.05, gt=0, description="The same at negative advantages.")
    importance_cap: float | None = Field(
        default=None,
        ge=1,
        description="Importance weights are cut to this number; 0 turns them off. The weight is policy / behavior "
        'policy with loss.surrogate = "plain", and proximal / behavior policy with loss.anchor = "proximal" or '
        '"interpolated".',
    )

    skip_threshold: float | None = Field(
        default=20.0,
        gt=0,
        description="Sequences whose loss.skip_statistic is above this number leave the loss; 0 keeps all of them.",
    )
    skip_statistic: SkipStatisticName = Field(
        default="mean",
        description=f"Statistic of a sequence's ratios r = policy / behavior policy. {choices(SKIP_STATISTICS)}.",
    )
    skip_unit: Literal["sequence", "micro_batch"] = Field(
        default="sequence",
        description="What loss.skip_threshold leaves out: sequences, or (Colossal-RL) whole micro-batches, so that "
        "results depend on their cut.",
    )
    token_range: tuple[float, float] | None = Field(
        default=None,
        strict=False,
        description="Tokens whose ratio policy / behavior policy is outside this range leave the loss (IcePop); [] "
        "keeps all of them.",
    )
    min_ess: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Steps whose effective sample size of the ratios policy / behavior policy, divided by the number "
        "of tokens, is below this number are skipped; 0 skips none.",
    )
    max_kl: float | None = Field(
        default=None,
        gt=0,
        description="Steps whose KL(behavior policy || policy), in nats, is above this number are skipped; 0 skips "
        "none.",
    )

    rules: tuple[Rule, ...] = Field(
        default=(),
        strict=False,
        description="More rules than those of the four keys before, each a table [[loss.rules]] with the keys level, "
        "statistic, above, below, when, action, reduce, policy, name.",
    )

    entropy_quantile: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Only tokens whose entropy is at or above this quantile of their optimizer step are in the "
        "policy's objective; 0 keeps all. It costs a forward pass.",
    )

    kl_coef: float = Field(
        default=0.0, ge=0, description="Factor of the KL penalty towards a reference model; 0 loads no reference."
    )
    kl_estimator: KlEstimatorName = Field(
        default="k1",
        description="Estimate of the KL to the reference model for each token; if unset, k3 with kl_placement = loss, "
        "else k1. "
        f"{choices(KL_ESTIMATORS)}.",
    )
    kl_placement: KlPlacement | None = Field(
        default=None,
        description="Where the KL penalty goes: into the reward, the loss or the advantages; if unset, into the loss "
        "once loss.kl_coef is above 0.",
    )
    kl_weighted: bool = Field(
        default=False,
        description="Whether the KL in the loss is multiplied by the ratio policy / behavior policy, which makes it "
        "unbiased on stale samples (DeepSeek-V3.2).",
    )
    kl_policy: Literal["behavior", "trained"] = Field(
        default="behavior",
        description="Policy whose KL to the reference goes into reward or advantages: the behavior policy, or the "
        "trained one before the first update on a batch, which costs a forward pass.",
    )
    kl_reference: str | None = Field(
        default=None, description="Directory of the reference model; if unset, the model that the run began with."
    )
    reference_every: int = Field(
        default=0,
        ge=0,
        description="After every this many optimizer steps the reference becomes the policy; 0 keeps it fixed.",
    )
    reference_decay: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of itself that the reference keeps then: reference = decay x reference + (1 - decay) x "
        "policy; of adapters, each matrix.",
    )
    entropy_coef: float = Field(
        default=0.0, ge=0, description="Factor of the mean entropy, in nats, which is subtracted from the loss."
    )
    load_balancing_coef: float = Field(
        default=0.0,
        ge=0,
        description="Factor of the load-balancing loss of a model with experts, which is added to the loss; 0 adds "
        "none.",
    )

    aggregation: AggregationName = Field(
        default="token", description=f"How the losses of tokens become the step's loss. {choices(AGGREGATIONS)}."
    )
    mask_truncated: bool = Field(
        default=False,
        description="Whether answers that were cut (by sampling.max_new_tokens, environment.max_turn_tokens or the "
        "context) leave the loss and their group's baseline.",
    )

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        check_contradictions(self, CONTRADICTIONS)
        check_rules(self.rules, has_anchor=self.anchor != "behavior")
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _fill_from_preset(cls, data: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return validated(data)
        given = {key: None if _is_off(key, value) else value for key, value in data.items()}
        preset = given.get("preset", "dapo")
        # The validation of the field refuses an unknown preset.
        filled = {**PRESETS.get(preset, {}), **given} if isinstance(preset, str) else given
        if given.get("advantage_function") is not None and "advantage" not in given:
            filled.pop("advantage", None)
        surrogate = SURROGATES.get(str(filled.get("surrogate", "clip")))
        if surrogate is not None and not surrogate.has_dual_clip:
            filled.setdefault("dual_clip", None)
        if filled.get("kl_coef") and filled.get("kl_placement") is None:
            filled["kl_placement"] = "loss"
        if filled.get("kl_placement") == "loss":
            filled.setdefault("kl_estimator", "k3")
        loss = validated(filled)
        loss.model_fields_set.intersection_update(given)  # so that ``origin_of`` knows what the user has set
        return loss

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """The rules that the short keys ``SHORT_RULES`` stand for, and then ``loss.rules``."""
        return (*_short_rules(self), *self.rules)

    @property
    def code_names(self) -> tuple[str, ...]:
        """Names of the user's own code that the learner imports: loss and advantages."""
        return tuple(name for name in (self.function, self.advantage_function) if name is not None)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model must compute log-probabilities of the sequences."""
        return self.kl_coef != 0

    @property
    def is_kl_in_loss(self) -> bool:
        """Whether the KL divergence to the reference model is a term of the loss."""
        return self.kl_coef != 0 and self.kl_placement == "loss"

    @property
    def is_kl_in_advantages(self) -> bool:
        """Whether the KL divergence to the reference model changes rewards or advantages, before the loss is
        computed.
        """
        return self.kl_coef != 0 and self.kl_placement in ("reward", "advantage")

    @property
    def scores_policy(self) -> bool:
        """Whether advantages need log-probabilities of the policy before the first update on a batch."""
        return self.kl_policy == "trained" or ADVANTAGES[self.advantage].weighs_rollouts

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return ADVANTAGES[self.advantage].has_critic

    @property
    def judges_step(self) -> bool:
        """Whether tokens leave the objective by a statistic of their whole optimizer step, which is known only after a
        forward pass.
        """
        return self.entropy_quantile is not None or any(rule.masks_step for rule in self.rules)

    @property
    def separates_by_token(self) -> bool:
        """Whether a token's derivative depends on its own log-probability only, if no rule masks or clips it."""
        return self.ratio_level == "token" and not SURROGATES[self.surrogate].over_sequence

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss compares with the policy before the first update on a batch."""
        return self.anchor == "proximal"


def _short_rules(loss: LossConfig) -> Iterator[Rule]:
    if (threshold := loss.skip_threshold) is not None:
        statistic = SKIP_STATISTICS[loss.skip_statistic]
        above, below = (threshold, None) if statistic.of != "k1" else (None, -math.log(threshold))
        yield Rule(
            name="skip_threshold", level=loss.skip_unit, statistic=statistic.of, reduce=statistic.reduce,
            above=above, below=below,
        )  # fmt: skip
    if loss.token_range is not None:
        low, high = loss.token_range
        policy = "trained" if loss.anchor == "behavior" else "anchor"
        # A ratio is never below 0, so a lower limit of 0 is none.
        yield Rule(name="token_range", level="token", statistic="ratio", below=low or None, above=high, policy=policy)
    if loss.min_ess is not None:
        yield Rule(name="min_ess", level="step", statistic="ess", below=loss.min_ess, action="skip")
    if loss.max_kl is not None:
        yield Rule(name="max_kl", level="step", statistic="k3", above=loss.max_kl, action="skip")


def _is_off(key: str, value: Any) -> bool:
    return key in OFF_VALUES and not isinstance(value, bool) and (value == OFF_VALUES[key] or value == ())
