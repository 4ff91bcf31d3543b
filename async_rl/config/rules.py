"""The entries of ``loss.rules``: what is too far from the behavior policy, and what follows.

Each rule names a statistic of the ratio r = pi/mu, the unit over which it is averaged, its limits, and an action. The
short keys of ``[loss]`` (``SHORT_RULES``) are rules too (``LossConfig.all_rules``), so one piece of code applies them
all: ``learner/losses/rules.py``. ``STATISTICS`` says what config checks must know of each statistic; a test compares it
with the functions of the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from async_rl.config.section import Section


class Statistic(NamedTuple):
    """A measure of the difference between pi and mu, which ``loss.rules[].statistic`` names.

    Attributes:
        description: what it computes for a token, for docs/config.md.
        on_policy: its value if pi equals mu.
        lowest: the lowest value that it can have.
        of_step: whether it is defined only over a whole step.
    """

    description: str
    on_policy: float = 0.0
    lowest: float = 0.0
    of_step: bool = False


STATISTICS: Mapping[str, Statistic] = {
    "ratio": Statistic("r = policy / behavior policy", on_policy=1.0),
    "abs_log_ratio": Statistic("|log r|"),
    "k1": Statistic("-log r", lowest=-math.inf),
    "k2": Statistic("half the square of log r"),
    "k3": Statistic("r - 1 - log r"),
    "tv": Statistic("|policy - behavior policy|, the total variation of sampling this token or not"),
    "binary_kl": Statistic("KL(behavior policy || policy) of sampling this token or not"),
    "ess": Statistic("normalised effective sample size of the step", on_policy=1.0, of_step=True),
}
_CHOICES = "; ".join(f"{name}: {statistic.description}" for name, statistic in STATISTICS.items())


if TYPE_CHECKING:
    StatisticName = str
else:
    # Type checkers know no Literal of computed names; pydantic refuses others and lists these.
    StatisticName = Literal[tuple(STATISTICS)]


class Rule(Section):
    """One entry of ``loss.rules``, written as ``[[loss.rules]]``. Tokens, sequences or steps whose statistic is beyond
    a limit leave the loss, get no gradient, or are skipped.
    """

    name: str = Field(
        default="",
        pattern="^[a-z0-9_]*$",
        description="Name of its metric rule/NAME; if unset, LEVEL_STATISTIC.",
    )
    level: Literal["token", "sequence", "micro_batch", "step"] = Field(
        description="Unit that is judged, by the mean of its tokens' statistics. micro_batch makes results depend on "
        "the cut. step with mask or clip leaves out the tokens with the highest statistic until the mean is within "
        "the limit, which costs a forward pass."
    )
    statistic: StatisticName = Field(description=f"Statistic of a token. {_CHOICES}.")
    reduce: Literal["mean", "max", "sum"] = Field(
        default="mean",
        description="How the tokens' statistics become that of a sequence or micro-batch. The sum of k1 is minus the "
        "logarithm of the product of the ratios.",
    )
    above: float | None = Field(default=None, description="A statistic above this number is beyond the limit.")
    below: float | None = Field(default=None, description="A statistic below this number is beyond the limit.")
    when: Literal["always", "positive", "negative", "outward"] = Field(
        default="always",
        description="Tokens to which it applies, by their advantage A: all; A > 0; A < 0; or outward (A > 0 and r > "
        "1, or A < 0 and r < 1; in a sequence r is the geometric mean).",
    )
    action: Literal["mask", "clip", "skip"] = Field(
        default="mask",
        description="mask: the tokens leave the loss and its denominator. clip: they add nothing to the policy's "
        "objective, but count in the denominator. skip: the optimizer step is skipped.",
    )
    policy: Literal["trained", "anchor"] = Field(
        default="trained",
        description="Policy that is compared with the behavior policy: the trained one, or that of loss.anchor.",
    )

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        for holds, expected in _PROBLEMS:
            if holds(self):
                raise ValueError(f"expected {expected}; got {_shown(self)}")
        return self

    @property
    def label(self) -> str:
        """The name of the rule in metrics and messages."""
        return self.name or f"{self.level}_{self.statistic}"

    @property
    def masks_step(self) -> bool:
        """Whether it masks or clips tokens by the statistic of the whole step, which is known only after a forward
        pass.
        """
        return self.level == "step" and self.action != "skip"


_PROBLEMS: tuple[tuple[Callable[[Rule], bool], str], ...] = (
    (lambda r: r.above is None and r.below is None, "a limit: set above or below"),
    (
        lambda r: r.above is not None and r.above <= STATISTICS[r.statistic].on_policy,
        "above to exceed the statistic's value on policy (1 for ratio and ess, else 0), for fresh tokens stay",
    ),
    (
        lambda r: r.below is not None and r.below >= STATISTICS[r.statistic].on_policy,
        "below to be less than the statistic's value on policy (1 for ratio and ess, else 0), for fresh tokens stay",
    ),
    (
        lambda r: r.below is not None and r.below <= STATISTICS[r.statistic].lowest,
        "below to exceed the statistic's lowest value: set above instead",
    ),
    (
        lambda r: r.action == "skip" and r.level != "step",
        'level = "step" with action = "skip", which skips an optimizer step: set action = "mask" for less',
    ),
    (
        lambda r: r.action == "clip" and r.level == "micro_batch",
        'level "token", "sequence" or "step" with action = "clip"',
    ),
    (
        lambda r: r.when != "always" and (r.level == "micro_batch" or r.action == "skip"),
        'when = "always" with level = "micro_batch" and with action = "skip"',
    ),
    (
        lambda r: STATISTICS[r.statistic].of_step and r.action != "skip",
        'level = "step" and action = "skip" with this statistic',
    ),
    (lambda r: r.level in ("token", "step") and r.reduce != "mean", 'reduce = "mean" with level "token" or "step"'),
    (
        lambda r: r.masks_step and (r.above is None or r.below is not None or r.policy != "trained"),
        'above, no below, and policy = "trained" with level = "step" and action = "mask" or "clip"',
    ),
)
"""What contradicts itself in a rule, and what is expected instead, in the order in which it is checked."""


def check_rules(rules: Sequence[Rule], *, has_anchor: bool) -> None:
    """Check ``loss.rules`` as a whole. ``has_anchor``: whether ``loss.anchor`` is not the behavior policy.

    Raises:
        ValueError: two rules have one name, a name is that of a key of ``[loss]``, or a rule needs an anchor.
    """
    seen: set[str] = {*SHORT_RULES, ENTROPY_QUANTILE}
    for rule in rules:
        if rule.label in seen:
            raise ValueError(
                f"expected a name of its own for every rule, other than {', '.join(SHORT_RULES)} and "
                f"{ENTROPY_QUANTILE}, got {rule.label!r} again; set name"
            )
        if rule.policy == "anchor" and not has_anchor:
            raise ValueError(
                f'expected policy = "trained" in the rule {rule.label!r}, because loss.anchor is the behavior policy; '
                f'set it, or loss.anchor = "proximal"'
            )
        seen.add(rule.label)


SHORT_RULES = ("skip_threshold", "token_range", "min_ess", "max_kl")
"""The keys of ``[loss]`` that are rules of their own, in the order in which they apply."""

ENTROPY_QUANTILE = "entropy_quantile"
"""The key of ``[loss]`` that is counted as a rule of this name, but is none: it does not compare pi with mu."""


def _shown(rule: Rule) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in rule.model_dump(exclude_defaults=True).items())
