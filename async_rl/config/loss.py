"""The section ``loss``: its keys, its presets, and the names that its keys may take.

A preset sets the keys that the user did not set: ``preset = "grpo"`` with ``clip_high = 0.28`` is GRPO with DAPO's
upper clip. ``CONTRADICTIONS`` lists the combinations of keys that are refused.

The tables here say what config checks must know of each name. The functions of the same names are in the learner
(``losses/parts.py`` and ``advantages.py``), and a test compares both sides. To add a name, add an entry here and a
function there.

In formulas, pi is the policy that is trained, mu the behavior policy that sampled, prox the proximal policy of the
decoupled loss, and ref the frozen reference model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from async_rl.config.rules import Rule, check_rules
from async_rl.config.section import Section
from async_rl.process.user_code import is_code_name


class Surrogate(NamedTuple):
    """A policy objective for each token, which ``loss.surrogate`` names.

    Attributes:
        description: what it computes, for docs/config.md.
        has_ratio: whether it compares pi with the anchor, so that it corrects for staleness itself.
        has_clip: whether it uses ``clip_low`` or ``clip_high``.
        has_dual_clip: whether it uses ``dual_clip``.
    """

    description: str
    has_ratio: bool = True
    has_clip: bool = True
    has_dual_clip: bool = False


class Advantage(NamedTuple):
    """An estimator of advantages from rewards, which ``loss.advantage`` names.

    Attributes:
        description: what it computes, for docs/config.md.
        over_step: whether its baseline is over all rollouts of the step, not over those of one group.
        whitens_tokens: whether the advantages of all trained tokens are normalised at the end.
        weighs_rollouts: whether its baseline weighs rollouts by pi/mu before the batch's first update.
    """

    description: str
    over_step: bool = False
    whitens_tokens: bool = False
    weighs_rollouts: bool = False


class SkipStatistic(NamedTuple):
    """A statistic over the ratios of a sequence's tokens, which ``loss.skip_statistic`` names.

    Attributes:
        description: what it computes, for docs/config.md.
        of: the statistic of a token, in ``rules.STATISTICS``. The geometric mean of ratios is that of ``k1``.
        reduce: how the tokens' statistics become that of the sequence.
        is_ratio: True for an average or maximum of ratios, which is 1 if pi equals mu. False for a divergence, which
            is 0 if pi equals mu.
    """

    description: str
    of: str
    reduce: Literal["mean", "max"] = "mean"
    is_ratio: bool = True


class KlEstimator(NamedTuple):
    """An estimate of a KL divergence from samples, which ``loss.kl_estimator`` names.

    Attributes:
        description: what it computes, for docs/config.md.
        is_loss: whether it can be a term of the loss, because its gradient pulls pi to the reference.
    """

    description: str
    is_loss: bool = True


SURROGATES: Mapping[str, Surrogate] = {
    "clip": Surrogate("PPO's clipped ratio", has_dual_clip=True),
    "cispo": Surrogate("clipped ratio as a detached weight"),
    "plain": Surrogate("REINFORCE, without a ratio", has_ratio=False, has_clip=False),
    "sapo": Surrogate("a sigmoid of the ratio instead of a clip", has_clip=False),
    "gmpo": Surrogate("the sequence's geometric mean of ratios that are clipped by token", has_dual_clip=True),
}

ADVANTAGES: Mapping[str, Advantage] = {
    "group_norm": Advantage("reward less the group's mean, divided by its standard deviation"),
    "group_mean": Advantage("reward less the group's mean"),
    "leave_one_out": Advantage("reward less the mean of the group's other rewards"),
    "global_norm": Advantage("as group_norm, over all rollouts of the step", over_step=True),
    "reinforce_pp": Advantage("as group_mean, then normalised over all trained tokens", whitens_tokens=True),
    "off_policy_optimal": Advantage(
        "reward less the mean of the group weighted by length and squared policy / behavior policy of the answer",
        weighs_rollouts=True,
    ),
}

AGGREGATIONS: Mapping[str, str] = {
    "token": "mean over all tokens of the step",
    "sequence": "mean over sequences of their token means",
    "sequence_sum": "mean over sequences of their token sums, divided by sampling.max_new_tokens",
}

SKIP_STATISTICS: Mapping[str, SkipStatistic] = {
    "mean": SkipStatistic("mean of the ratios r", of="ratio"),
    "max": SkipStatistic("largest ratio", of="ratio", reduce="max"),
    "geometric": SkipStatistic("geometric mean of the ratios", of="k1"),
    "k3": SkipStatistic("mean of r - 1 - log r, in nats", of="k3", is_ratio=False),
}

KL_ESTIMATORS: Mapping[str, KlEstimator] = {
    "k1": KlEstimator("log ratio", is_loss=False),
    "k2": KlEstimator("half the squared log ratio"),
    "k3": KlEstimator("never negative, unbiased"),
}

_DPPO: Mapping[str, Any] = {"surrogate": "plain", "importance_cap": 10.0, "dual_clip": None}
_DPPO_RULE: Mapping[str, Any] = {"name": "dppo", "level": "token", "when": "outward", "action": "clip"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # arXiv:2503.14476: clip-higher, token-level loss, no KL. Answers without an end leave the loss.
    "dapo": {"clip_high": 0.28, "mask_truncated": True},
    # arXiv:2402.03300 eq. 3: mean over answers of token means, k3 to the reference in the loss, beta = 0.04.
    "grpo": {"aggregation": "sequence", "kl_coef": 0.04, "kl_placement": "loss", "kl_estimator": "k3"},
    # arXiv:2503.20783: neither the group's deviation nor the answer's length divides.
    "dr_grpo": {"advantage": "group_mean", "aggregation": "sequence_sum"},
    # Williams 1992 with the group's mean as baseline; truncated importance weights where the data is stale.
    "reinforce": {
        "surrogate": "plain",
        "advantage": "group_mean",
        "aggregation": "sequence",
        "importance_cap": 2.0,
        "dual_clip": None,
    },
    # arXiv:2402.14740: the log-probability of the whole answer, so a sum over its tokens.
    "rloo": {
        "surrogate": "plain",
        "advantage": "leave_one_out",
        "aggregation": "sequence_sum",
        "importance_cap": 2.0,
        "dual_clip": None,
    },
    # arXiv:2501.03262, the variant with a baseline: k2 in the loss once kl_coef is set.
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "aggregation": "sequence",
        "kl_placement": "loss",
        "kl_estimator": "k2",
    },
    # arXiv:2507.18071: a ratio per sequence, so clip ranges of its own (section 5.1). They are narrower than the noise
    # of bfloat16 between engine and learner, so the ratio is to recomputed logprobs; prox/mu corrects for staleness.
    "gspo": {
        "ratio_level": "sequence",
        "aggregation": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "anchor": "proximal",
        "importance_cap": 5.0,
    },
    # arXiv:2506.13585 eq. 4: no lower bound, no value for the upper; ours is ScaleRL's 5 (arXiv:2510.13786).
    "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "dual_clip": None},
    # arXiv:1707.06347 with dual clip (arXiv:1912.09729, c = 3).
    "ppo_clip": {"dual_clip": 3.0},
    # arXiv:2110.00641 and AReaL (arXiv:2505.24298): clipped around recomputed logprobs, times a capped prox/mu.
    "decoupled_ppo": {"anchor": "proximal", "importance_cap": 5.0},
    "agpo": {"aggregation": "sequence", "length_bonus": 0.1},
    # arXiv:2511.20347: temperatures 1 and 1.05, the mean over answers of token means.
    "sapo": {"surrogate": "sapo", "aggregation": "sequence", "dual_clip": None},
    # arXiv:2507.20673: clipped at e^-0.4 and e^0.4; the mean over answers.
    "gmpo": {
        "surrogate": "gmpo",
        "aggregation": "sequence",
        "clip_low": 1 - math.exp(-0.4),
        "clip_high": math.exp(0.4) - 1,
    },
    # arXiv:2602.04879: no clip on the ratio; a token stops where the probability itself has moved.
    "dppo_tv": {**_DPPO, "rules": [{**_DPPO_RULE, "statistic": "tv", "above": 0.15}]},
    "dppo_kl": {**_DPPO, "rules": [{**_DPPO_RULE, "statistic": "binary_kl", "above": 0.05}]},
    # DeepSeek-V3.2 (arXiv:2512.02556): DAPO, and wrong answers that pi makes unlikely teach nothing. Its limit is not
    # published; ours.
    "opsm": {
        "clip_high": 0.28,
        "mask_truncated": True,
        "rules": [
            {"name": "opsm", "level": "sequence", "statistic": "k1", "above": 0.1, "when": "negative", "action": "clip"}
        ],
    },
    # arXiv:2510.18855: prox/mu is a weight within its range, and 0 outside.
    "icepop": {
        "anchor": "proximal",
        "importance_cap": 5.0,
        "rules": [
            {
                "name": "icepop",
                "level": "token",
                "statistic": "ratio",
                "below": 0.5,
                "above": 5.0,
                "action": "clip",
                "policy": "anchor",
            }
        ],
    },
    # arXiv:2510.01161: no fixed clip. Of the tokens that move further away, those with the largest log ratios get no
    # gradient, until the mean square is at most 0.04. Single ratios are still bounded, at 10 for either sign of A.
    "m2po": {
        "clip_low": 1.0,
        "clip_high": 9.0,
        "rules": [
            {"name": "m2", "level": "step", "statistic": "k2", "above": 0.02, "when": "outward", "action": "clip"}
        ],
    },
}
"""The keys that each preset sets. Other keys keep the fields' defaults, those of plain PPO clipping by token."""

OFF_VALUES: Mapping[str, Any] = {
    "skip_threshold": 0,
    "token_range": [],
    "dual_clip": 0,
    "importance_cap": 0,
    "min_ess": 0,
    "max_kl": 0,
    "entropy_quantile": 0,
    "best_k": 0,
    "kl_placement": "",
    "kl_reference": "",
    "function": "",
    "advantage_function": "",
}
"""The value that switches a key off in TOML, which has no null."""

LOSS_KEYS = (
    "surrogate", "ratio_level", "anchor", "clip_low", "clip_high", "dual_clip", "importance_cap", "skip_threshold",
    "skip_statistic", "skip_unit", "token_range", "kl_coef", "kl_weighted", "entropy_coef", "aggregation",
    "sapo_positive", "sapo_negative",
)  # fmt: skip
"""Keys that the built-in loss reads. With ``loss.function`` they do what that function makes of them, so one that is
set to another value than the default, and that the function does not read, is refused. (A KL in the reward or the
advantages is not the loss's.)"""


if TYPE_CHECKING:
    PresetName = SurrogateName = AdvantageName = AggregationName = SkipStatisticName = KlEstimatorName = str
else:
    # Type checkers know no Literal of computed names; pydantic refuses others and lists these.
    PresetName = Literal[tuple(PRESETS)]
    SurrogateName = Literal[tuple(SURROGATES)]
    AdvantageName = Literal[tuple(ADVANTAGES)]
    AggregationName = Literal[tuple(AGGREGATIONS)]
    SkipStatisticName = Literal[tuple(SKIP_STATISTICS)]
    KlEstimatorName = Literal[tuple(KL_ESTIMATORS)]

KlPlacement = Literal["reward", "loss", "advantage"]


def _choices(table: Mapping[str, Any]) -> str:
    described = {name: row if isinstance(row, str) else row.description for name, row in table.items()}
    return "; ".join(f"{name}: {text}" for name, text in described.items())


class LossConfig(Section):
    """The policy-gradient loss. The defaults are those of ``preset = "dapo"``; see docs/algorithms.md."""

    preset: PresetName = Field(
        default="dapo",
        description="Published algorithm that sets the unset keys of this section; docs/algorithms.md describes each.",
    )

    function: str | None = Field(
        default=None,
        description="Your own loss as module:function or file.py:function, which replaces the built-in one; "
        'docs/algorithms.md, "A loss of your own", describes it.',
    )
    advantage_function: str | None = Field(
        default=None,
        description="Your own advantages as module:function or file.py:function, which replace loss.advantage.",
    )

    advantage: AdvantageName = Field(
        default="group_norm", description=f"How rewards become advantages. {_choices(ADVANTAGES)}."
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
        default="clip", description=f"What a token adds to the objective. {_choices(SURROGATES)}."
    )
    ratio_level: Literal["token", "sequence"] = Field(
        default="token",
        description="Whether each token has its own ratio, or all tokens of a sequence their geometric mean (GSPO).",
    )
    anchor: Literal["behavior", "proximal", "interpolated"] = Field(
        default="behavior",
        description="Policy to which the trained one is compared: the behavior policy, which sampled, or (decoupled "
        "PPO) a proximal policy, the weights before the first update on a batch. proximal computes it with a forward "
        "pass if a batch has several updates, else it is the trained policy; interpolated estimates it from "
        "the behavior policy, the trained one and the staleness.",
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
        description="Importance weights above this number are cut to it; 0 turns the weights off. The weight is "
        'policy / behavior policy with loss.surrogate = "plain", and proximal / behavior policy with loss.anchor = '
        '"proximal" or "interpolated".',
    )

    skip_threshold: float | None = Field(
        default=20.0,
        gt=0,
        description="Sequences whose loss.skip_statistic is above this number leave the loss; 0 keeps all of them.",
    )
    skip_statistic: SkipStatisticName = Field(
        default="mean",
        description=f"Statistic of a sequence's ratios r = policy / behavior policy. {_choices(SKIP_STATISTICS)}.",
    )
    skip_unit: Literal["sequence", "micro_batch"] = Field(
        default="sequence",
        description="What loss.skip_threshold leaves out: single sequences, or (Colossal-RL's rule) whole "
        "micro-batches, which makes results depend on how a batch is divided into them.",
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
        description="A step is skipped if the effective sample size of its ratios policy / behavior policy, divided by "
        "its number of tokens, is below this number; 0 skips none.",
    )
    max_kl: float | None = Field(
        default=None,
        gt=0,
        description="A step is skipped if its KL(behavior policy || policy), in nats, is above this number; 0 skips "
        "none.",
    )

    rules: tuple[Rule, ...] = Field(
        default=(),
        strict=False,
        description="More rules like the four keys above, each a table [[loss.rules]] with keys of its own: level, "
        "statistic, above, below, when, action, reduce, policy, name (docs/config.md, docs/algorithms.md).",
    )

    entropy_quantile: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Only tokens whose entropy is at or above this quantile of their optimizer step are in the "
        "policy's objective; the others still count in the denominator. 0 keeps all of them. It costs a forward pass.",
    )

    kl_coef: float = Field(
        default=0.0, ge=0, description="Factor of the KL penalty towards a reference model; 0 loads no reference."
    )
    kl_estimator: KlEstimatorName = Field(
        default="k1",
        description="Estimate of the KL to the reference model for each token; if unset, k3 with kl_placement = loss, "
        "else k1. "
        f"{_choices(KL_ESTIMATORS)}.",
    )
    kl_placement: KlPlacement | None = Field(
        default=None,
        description="Where the KL penalty goes: into the reward, the loss or the advantages; needed if loss.kl_coef "
        "is above 0.",
    )
    kl_weighted: bool = Field(
        default=False,
        description="Whether the KL in the loss is multiplied by the ratio policy / behavior policy, which makes it "
        "unbiased on stale samples (DeepSeek-V3.2).",
    )
    kl_policy: Literal["behavior", "trained"] = Field(
        default="behavior",
        description="Policy whose KL to the reference goes into reward or advantages: the behavior policy, whose "
        "logprobs are known, or the trained one before the first update on a batch, which costs a forward pass.",
    )
    kl_reference: str | None = Field(
        default=None, description="Directory of the reference model; if unset, the model that the run began with."
    )
    entropy_coef: float = Field(
        default=0.0, ge=0, description="Factor of the mean entropy, in nats, which is subtracted from the loss."
    )

    aggregation: AggregationName = Field(
        default="token", description=f"How the losses of tokens become the step's loss. {_choices(AGGREGATIONS)}."
    )
    mask_truncated: bool = Field(
        default=False,
        description="Whether answers that were cut at sampling.max_new_tokens are left out of the loss and of their "
        "group's baseline.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = {key: None if _is_off(key, value) else value for key, value in data.items()}
        preset = given.get("preset", "dapo")
        # The validation of the field refuses an unknown preset.
        filled = {**PRESETS.get(preset, {}), **given} if isinstance(preset, str) else given
        if given.get("advantage_function") is not None and "advantage" not in given:
            filled.pop("advantage", None)
        surrogate = SURROGATES.get(str(filled.get("surrogate", "clip")))
        if surrogate is not None and not surrogate.has_dual_clip:
            filled.setdefault("dual_clip", None)
        if filled.get("kl_placement") == "loss":
            filled.setdefault("kl_estimator", "k3")
        return filled

    @field_validator("function", "advantage_function")
    @classmethod
    def _is_code(cls, value: str | None) -> str | None:
        if value is not None and not is_code_name(value):
            raise ValueError(f"expected module:function or file.py:function, got {value!r}; correct it")
        return value

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        for contradiction in CONTRADICTIONS:
            if contradiction.holds(self):
                raise ValueError(
                    f"{contradiction.expected}, got {_shown(self, contradiction.keys)}; {contradiction.reason}"
                )
        check_rules(self.rules, has_anchor=self.anchor != "behavior")
        return self

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
        """Whether a frozen reference model must compute log-probabilities of the sequences."""
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
    def judges_step(self) -> bool:
        """Whether tokens leave the objective by a statistic of their whole optimizer step, which is known only after a
        forward pass.
        """
        return self.entropy_quantile is not None or any(rule.masks_step for rule in self.rules)

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


def _surrogates_with(flag: str) -> str:
    """Return the names of the surrogates for which ``flag`` is true, for an error message."""
    return " or ".join(name for name, surrogate in SURROGATES.items() if getattr(surrogate, flag))


class Contradiction(NamedTuple):
    """A combination of settings of ``[loss]`` that is refused.

    Attributes:
        keys: the keys whose values the error message shows.
        holds: returns whether a config has this combination.
        expected: the part of the error message that says what was expected.
        reason: the part of the error message that says why, and what to do.
        example: settings that have this combination, for tests.
    """

    keys: tuple[str, ...]
    holds: Callable[[LossConfig], bool]
    expected: str
    reason: str
    example: Mapping[str, Any]


CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        keys=("importance_cap", "anchor", "surrogate"),
        holds=lambda c: c.importance_cap is not None and c.anchor == "behavior" and SURROGATES[c.surrogate].has_ratio,
        expected="expected no loss.importance_cap with a surrogate that contains the ratio policy / behavior policy",
        reason="staleness would be corrected twice: set importance_cap = 0, anchor = \"proximal\" (decoupled loss), or "
        "surrogate = \"plain\" (truncated importance weights)",
        example={"preset": "dapo", "importance_cap": 2.0},
    ),
    Contradiction(
        keys=("anchor", "surrogate"),
        holds=lambda c: c.anchor != "behavior" and not SURROGATES[c.surrogate].has_ratio,
        expected=f"expected loss.surrogate {_surrogates_with('has_ratio')} with an anchor other than behavior",
        reason="surrogate = \"plain\" compares nothing with an anchor; set anchor = \"behavior\"",
        example={"preset": "reinforce", "anchor": "proximal"},
    ),
    Contradiction(
        keys=("dual_clip", "surrogate"),
        holds=lambda c: c.dual_clip is not None and not SURROGATES[c.surrogate].has_dual_clip,
        expected=f"expected loss.dual_clip only with loss.surrogate {_surrogates_with('has_dual_clip')}",
        reason="other surrogates do not use it; set dual_clip = 0",
        example={"preset": "cispo", "dual_clip": 3.0},
    ),
    Contradiction(
        keys=("skip_threshold", "skip_statistic", "clip_high"),
        holds=lambda c: (
            c.skip_threshold is not None
            and SKIP_STATISTICS[c.skip_statistic].is_ratio
            and SURROGATES[c.surrogate].has_clip
            and c.skip_threshold <= 1 + c.clip_high
        ),
        expected="expected loss.skip_threshold above 1 + loss.clip_high",
        reason="sequences would be left out before the clip acts on them; raise skip_threshold or lower clip_high",
        example={"clip_high": 0.28, "skip_threshold": 1.2},
    ),
    Contradiction(
        keys=("skip_threshold", "skip_statistic"),
        holds=lambda c: (
            c.skip_threshold is not None and SKIP_STATISTICS[c.skip_statistic].is_ratio and c.skip_threshold <= 1
        ),
        expected="expected loss.skip_threshold above 1 with this loss.skip_statistic",
        reason="on-policy data has ratios of 1 and would be skipped; raise skip_threshold, or set 0 to skip nothing",
        example={"preset": "reinforce", "skip_threshold": 0.5},
    ),
    Contradiction(
        keys=("skip_unit", "skip_threshold"),
        holds=lambda c: c.skip_unit == "micro_batch" and c.skip_threshold is None,
        expected="expected a loss.skip_threshold with skip_unit = \"micro_batch\"",
        reason="without a threshold nothing is skipped; set skip_threshold, or leave skip_unit out",
        example={"skip_unit": "micro_batch", "skip_threshold": 0},
    ),
    Contradiction(
        keys=("token_range",),
        holds=lambda c: c.token_range is not None and not 0 <= c.token_range[0] < 1 < c.token_range[1],
        expected="expected loss.token_range [low, high] with 0 <= low < 1 < high",
        reason="on-policy data has ratios of 1, which must be inside the range; widen it, or set [] to keep all tokens",
        example={"token_range": [1.5, 2.0]},
    ),
    Contradiction(
        keys=("token_range", "ratio_level"),
        holds=lambda c: c.token_range is not None and c.ratio_level == "sequence",
        expected="expected no loss.token_range with ratio_level = \"sequence\"",
        reason="all tokens of a sequence share one ratio, so single tokens can't be left out; set token_range = [], "
        "and skip_threshold with skip_statistic = \"geometric\" to leave out whole sequences",
        example={"preset": "gspo", "token_range": [0.5, 2.0]},
    ),
    Contradiction(
        keys=("entropy_quantile", "ratio_level"),
        holds=lambda c: c.entropy_quantile is not None and c.ratio_level == "sequence",
        expected="expected no loss.entropy_quantile with ratio_level = \"sequence\"",
        reason="the one ratio of a sequence has all its tokens in it; set entropy_quantile = 0, or ratio_level = "
        "\"token\"",
        example={"preset": "gspo", "entropy_quantile": 0.8},
    ),
    Contradiction(
        keys=("kl_coef", "kl_placement"),
        holds=lambda c: c.kl_coef != 0 and c.kl_placement is None,
        expected="expected a loss.kl_placement with kl_coef",
        reason="set kl_placement to reward, loss or advantage, or kl_coef = 0",
        example={"kl_coef": 0.1},
    ),
    Contradiction(
        keys=("kl_estimator", "kl_placement"),
        holds=lambda c: c.is_kl_in_loss and not KL_ESTIMATORS[c.kl_estimator].is_loss,
        expected="expected loss.kl_estimator k2 or k3 with kl_placement = \"loss\"",
        reason="the gradient of k1 is 0 on average, whatever the reference; set k2 or k3, or kl_placement = \"reward\"",
        example={"kl_coef": 0.1, "kl_placement": "loss", "kl_estimator": "k1"},
    ),
    Contradiction(
        keys=("kl_weighted", "kl_coef", "kl_placement"),
        holds=lambda c: c.kl_weighted and not c.is_kl_in_loss,
        expected="expected a KL in the loss with loss.kl_weighted",
        reason="set kl_coef and kl_placement = \"loss\", or kl_weighted = false",
        example={"kl_weighted": True},
    ),
    Contradiction(
        keys=("surrogate", "ratio_level"),
        holds=lambda c: c.surrogate == "gmpo" and c.ratio_level == "sequence",
        expected="expected loss.ratio_level = \"token\" with surrogate = \"gmpo\"",
        reason="it clips the tokens' ratios before it takes their mean",
        example={"preset": "gmpo", "ratio_level": "sequence"},
    ),
    Contradiction(
        keys=("kl_policy", "kl_coef", "kl_placement"),
        holds=lambda c: c.kl_policy == "trained" and not c.is_kl_in_advantages,
        expected="expected a loss.kl_coef with kl_placement = \"reward\" or \"advantage\" with kl_policy = \"trained\"",
        reason="a KL in the loss is always that of the trained policy; set both, or leave kl_policy out",
        example={"kl_policy": "trained"},
    ),
    Contradiction(
        keys=("function", "rules", "entropy_quantile"),
        holds=lambda c: (
            c.function is not None
            and (c.entropy_quantile is not None or any(rule.action != "skip" for rule in c.rules))
        ),
        expected="expected no loss.entropy_quantile, and no loss.rules that mask or clip, with loss.function",
        reason="your function decides which tokens count; only rules with action = \"skip\" apply to it",
        example={"function": "mine.py:loss", "entropy_quantile": 0.8},
    ),
    Contradiction(
        keys=("kl_reference", "kl_coef"),
        holds=lambda c: c.kl_reference is not None and c.kl_coef == 0,
        expected="expected a loss.kl_coef above 0 with kl_reference",
        reason="the reference would never be loaded; raise kl_coef, or leave kl_reference out",
        example={"kl_reference": "some/model"},
    ),
    Contradiction(
        keys=("advantage_function", "advantage"),
        holds=lambda c: c.advantage_function is not None and c.advantage != "group_norm",
        expected="expected no loss.advantage with loss.advantage_function, which replaces it",
        reason="leave out one of them",
        example={"advantage_function": "mine.py:advantages", "advantage": "group_mean"},
    ),
)  # fmt: skip
"""Every invalid combination, in the order in which they are checked."""


def _is_off(key: str, value: Any) -> bool:
    return key in OFF_VALUES and not isinstance(value, bool) and (value == OFF_VALUES[key] or value == ())


def _shown(config: LossConfig, keys: tuple[str, ...]) -> str:
    return ", ".join(f"{key} = {_in_toml(key, getattr(config, key))}" for key in keys)


def _in_toml(key: str, value: Any) -> str:
    value = OFF_VALUES[key] if value is None else value
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)
