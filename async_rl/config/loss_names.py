"""The names that keys of the section ``loss`` may take, and its presets.

A preset sets the keys that the user did not set: ``preset = "grpo"`` with ``clip_high = 0.28`` is GRPO with DAPO's
upper clip.

The tables here say what config checks must know of each name. The functions of the same names are in the learner
(``losses/parts.py`` and ``advantages.py``), and a test compares both sides. To add a name, add an entry here and a
function there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple


class Surrogate(NamedTuple):
    """A policy objective for each token, which ``loss.surrogate`` names.

    Attributes:
        description: what it computes, for docs/config.md.
        has_ratio: whether it compares pi with the anchor, so that it corrects for staleness itself.
        has_clip: whether it uses ``clip_low`` or ``clip_high``.
        has_dual_clip: whether it uses ``dual_clip``.
        over_sequence: whether a token's objective depends on other tokens of its sequence, at any ``ratio_level``.
    """

    description: str
    has_ratio: bool = True
    has_clip: bool = True
    has_dual_clip: bool = False
    over_sequence: bool = False


class Advantage(NamedTuple):
    """An estimator of advantages from rewards, which ``loss.advantage`` names.

    Attributes:
        description: what it computes, for docs/config.md.
        over_step: whether its baseline is over all rollouts of the step, not over those of one group.
        whitens_tokens: whether the advantages of all trained tokens are normalised at the end.
        weighs_rollouts: whether its baseline weighs rollouts by pi/mu before the batch's first update.
        per_part: whether each part of the reward is normalised in its group, before their weighted sum is the reward.
        per_turn: whether it compares the rewards that follow the same turn, so that every turn has its own advantage.
        has_critic: whether it is computed from the values of a critic (the section ``critic``), token by token.
    """

    description: str
    over_step: bool = False
    whitens_tokens: bool = False
    weighs_rollouts: bool = False
    per_part: bool = False
    per_turn: bool = False
    has_critic: bool = False


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
    "gmpo": Surrogate(
        "the sequence's geometric mean of ratios that are clipped by token", has_dual_clip=True, over_sequence=True
    ),
}

ADVANTAGES: Mapping[str, Advantage] = {
    "group_norm": Advantage("reward less the group's mean, divided by its standard deviation"),
    "group_mean": Advantage("reward less the group's mean"),
    "leave_one_out": Advantage("reward less the mean of the group's other rewards"),
    "global_norm": Advantage("as group_norm, over all rollouts of the step", over_step=True),
    "per_part_norm": Advantage(
        "each part of the reward as group_norm, then their weighted sum as global_norm", over_step=True, per_part=True
    ),
    "reinforce_pp": Advantage("as group_mean, then normalised over all trained tokens", whitens_tokens=True),
    "off_policy_optimal": Advantage(
        "reward less the mean of the group weighted by length and squared policy / behavior policy of the answer",
        weighs_rollouts=True,
    ),
    "per_turn_mean": Advantage(
        "for each turn, the reward from there on less the group's mean at the same turn", per_turn=True
    ),
    "per_turn_norm": Advantage("as per_turn_mean, divided by the standard deviation", per_turn=True),
    "gae": Advantage("generalised advantage estimate of each token from the values of a [critic]", has_critic=True),
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

_PLAIN: Mapping[str, Any] = {"surrogate": "plain", "importance_cap": 2.0, "dual_clip": None}
_DPPO: Mapping[str, Any] = {**_PLAIN, "importance_cap": 10.0}


def _clip(name: str, level: str, statistic: str, above: float, **others: Any) -> dict[str, Any]:
    """Return the keys of a preset with one entry of ``rules``, which clips."""
    return {
        "rules": [{"name": name, "level": level, "statistic": statistic, "above": above, "action": "clip", **others}]
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # arXiv:2503.14476: clip-higher, token-level loss, no KL. Answers without an end leave the loss.
    "dapo": {"clip_high": 0.28, "mask_truncated": True},
    # arXiv:2402.03300 eq. 3: mean over answers of token means, k3 to the reference in the loss, beta = 0.04.
    "grpo": {"aggregation": "sequence", "kl_coef": 0.04, "kl_placement": "loss", "kl_estimator": "k3"},
    # arXiv:2503.20783: neither the group's deviation nor the answer's length divides.
    "dr_grpo": {"advantage": "group_mean", "aggregation": "sequence_sum"},
    # Williams 1992 with the group's mean as baseline; truncated importance weights where the data is stale.
    "reinforce": {**_PLAIN, "advantage": "group_mean", "aggregation": "sequence"},
    # arXiv:2402.14740: the log-probability of the whole answer, so a sum over its tokens.
    "rloo": {**_PLAIN, "advantage": "leave_one_out", "aggregation": "sequence_sum"},
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
    # arXiv:1707.06347 with a critic (arXiv:1506.02438).
    "ppo": {"advantage": "gae"},
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
    "dppo_tv": {**_DPPO, **_clip("dppo", "token", "tv", 0.15, when="outward")},
    "dppo_kl": {**_DPPO, **_clip("dppo", "token", "binary_kl", 0.05, when="outward")},
    # DeepSeek-V3.2 (arXiv:2512.02556): DAPO, and wrong answers that pi makes unlikely teach nothing. Its limit is not
    # published; ours.
    "opsm": {"clip_high": 0.28, "mask_truncated": True, **_clip("opsm", "sequence", "k1", 0.1, when="negative")},
    # arXiv:2510.18855: prox/mu is a weight within its range, and 0 outside.
    "icepop": {
        "anchor": "proximal",
        "importance_cap": 5.0,
        **_clip("icepop", "token", "ratio", 5.0, below=0.5, policy="anchor"),
    },
    # arXiv:2510.01161: no fixed clip. Of the tokens that move further away, those with the largest log ratios get no
    # gradient, until the mean square is at most 0.04. Single ratios are still bounded, at 10 for either sign of A.
    "m2po": {"clip_low": 1.0, "clip_high": 9.0, **_clip("m2", "step", "k2", 0.02, when="outward")},
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


def choices(table: Mapping[str, Any]) -> str:
    """Return the names of ``table`` with their descriptions, for docs/config.md."""
    described = {name: row if isinstance(row, str) else row.description for name, row in table.items()}
    return "; ".join(f"{name}: {text}" for name, text in described.items())
