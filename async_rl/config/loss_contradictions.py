"""The combinations of keys of the section ``loss`` that are refused, with what is expected instead.

``LossConfig`` checks them in their order. Rules of ``loss.rules`` that contradict themselves are in ``rules.py``.
"""

from __future__ import annotations

from async_rl.config.contradictions import Contradiction
from async_rl.config.loss_names import ADVANTAGES, KL_ESTIMATORS, PRESETS, SKIP_STATISTICS, SURROGATES


def _surrogates_with(flag: str) -> str:
    """Return the names of the surrogates for which ``flag`` is true, for an error message."""
    return " or ".join(name for name, surrogate in SURROGATES.items() if getattr(surrogate, flag))


CONTRADICTIONS: tuple[Contradiction, ...] = tuple(row._replace(section="loss") for row in (
    Contradiction(
        keys=("importance_cap", "anchor", "surrogate"),
        holds=lambda c: c.importance_cap is not None and c.anchor == "behavior" and SURROGATES[c.surrogate].has_ratio,
        expected="no loss.importance_cap with a surrogate that contains the ratio policy / behavior policy",
        reason="staleness would be corrected twice: set importance_cap = 0, anchor = \"proximal\" (decoupled loss), or "
        "surrogate = \"plain\" (truncated importance weights)",
        example={"importance_cap": 2.0},
    ),
    Contradiction(
        keys=("anchor", "surrogate"),
        holds=lambda c: c.anchor != "behavior" and not SURROGATES[c.surrogate].has_ratio,
        expected=f"loss.surrogate {_surrogates_with('has_ratio')} with an anchor other than behavior",
        reason="surrogate = \"plain\" compares nothing with an anchor; set anchor = \"behavior\"",
        example={"preset": "reinforce", "anchor": "proximal"},
    ),
    Contradiction(
        keys=("dual_clip", "surrogate"),
        holds=lambda c: c.dual_clip is not None and not SURROGATES[c.surrogate].has_dual_clip,
        expected=f"loss.dual_clip only with loss.surrogate {_surrogates_with('has_dual_clip')}",
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
        expected="loss.skip_threshold above 1 + loss.clip_high",
        reason="sequences would be left out before the clip acts on them; raise skip_threshold or lower clip_high",
        example={"skip_threshold": 1.2},
    ),
    Contradiction(
        keys=("skip_threshold", "skip_statistic"),
        holds=lambda c: (
            c.skip_threshold is not None and SKIP_STATISTICS[c.skip_statistic].is_ratio and c.skip_threshold <= 1
        ),
        expected="loss.skip_threshold above 1 with this loss.skip_statistic",
        reason="on-policy data has ratios of 1 and would be skipped; raise skip_threshold, or set 0 to skip nothing",
        example={"preset": "reinforce", "skip_threshold": 0.5},
    ),
    Contradiction(
        keys=("skip_unit", "skip_threshold"),
        holds=lambda c: c.skip_unit == "micro_batch" and c.skip_threshold is None,
        expected="a loss.skip_threshold with skip_unit = \"micro_batch\"",
        reason="without a threshold nothing is skipped; set skip_threshold, or leave skip_unit out",
        example={"skip_unit": "micro_batch", "skip_threshold": 0},
    ),
    Contradiction(
        keys=("token_range",),
        holds=lambda c: c.token_range is not None and not 0 <= c.token_range[0] < 1 < c.token_range[1],
        expected="loss.token_range [low, high] with 0 <= low < 1 < high",
        reason="on-policy data has ratios of 1, which must be inside the range; widen it, or set [] to keep all tokens",
        example={"token_range": [1.5, 2.0]},
    ),
    Contradiction(
        keys=("token_range", "ratio_level"),
        holds=lambda c: c.token_range is not None and c.ratio_level == "sequence",
        expected="no loss.token_range with ratio_level = \"sequence\"",
        reason="all tokens of a sequence share one ratio, so single tokens can't be left out; set token_range = [], "
        "and skip_threshold with skip_statistic = \"geometric\" to leave out whole sequences",
        example={"preset": "gspo", "token_range": [0.5, 2.0]},
    ),
    Contradiction(
        keys=("entropy_quantile", "ratio_level"),
        holds=lambda c: c.entropy_quantile is not None and c.ratio_level == "sequence",
        expected="no loss.entropy_quantile with ratio_level = \"sequence\"",
        reason="the one ratio of a sequence has all its tokens in it; set entropy_quantile = 0, or ratio_level = "
        "\"token\"",
        example={"preset": "gspo", "entropy_quantile": 0.8},
    ),
    Contradiction(
        keys=("kl_coef", "kl_placement"),
        # A coefficient of 0 that is written down, as in a sweep, switches the penalty off. Presets may place it, too.
        holds=lambda c: (
            "kl_coef" not in c.model_fields_set and c.kl_placement not in (None, PRESETS[c.preset].get("kl_placement"))
        ),
        expected="a loss.kl_coef with kl_placement",
        reason="without a coefficient there is no penalty: set kl_coef, or leave kl_placement out",
        example={"kl_placement": "reward"},
    ),
    Contradiction(
        keys=("kl_estimator", "kl_placement"),
        holds=lambda c: c.is_kl_in_loss and not KL_ESTIMATORS[c.kl_estimator].is_loss,
        expected="loss.kl_estimator k2 or k3 with kl_placement = \"loss\"",
        reason="the gradient of k1 is 0 on average, whatever the reference; set k2 or k3, or kl_placement = \"reward\"",
        example={"kl_coef": 0.1, "kl_estimator": "k1"},
    ),
    Contradiction(
        keys=("kl_weighted", "kl_coef", "kl_placement"),
        holds=lambda c: c.kl_weighted and not c.is_kl_in_loss,
        expected="a KL in the loss with loss.kl_weighted",
        reason="set kl_coef and kl_placement = \"loss\", or kl_weighted = false",
        example={"kl_weighted": True},
    ),
    Contradiction(
        keys=("surrogate", "ratio_level"),
        holds=lambda c: c.surrogate == "gmpo" and c.ratio_level == "sequence",
        expected="loss.ratio_level = \"token\" with surrogate = \"gmpo\"",
        reason="it clips the tokens' ratios before it takes their mean",
        example={"preset": "gmpo", "ratio_level": "sequence"},
    ),
    Contradiction(
        keys=("kl_policy", "kl_coef", "kl_placement"),
        holds=lambda c: c.kl_policy == "trained" and not c.is_kl_in_advantages,
        expected="a loss.kl_coef with kl_placement = \"reward\" or \"advantage\" with kl_policy = \"trained\"",
        reason="a KL in the loss is always that of the trained policy; set both, or leave kl_policy out",
        example={"kl_policy": "trained"},
    ),
    Contradiction(
        keys=("function", "rules", "entropy_quantile"),
        holds=lambda c: (
            c.function is not None
            and (c.entropy_quantile is not None or any(rule.action != "skip" for rule in c.rules))
        ),
        expected="no loss.entropy_quantile, and no loss.rules that mask or clip, with loss.function",
        reason="your function decides which tokens count; only rules with action = \"skip\" apply to it",
        example={"function": "mine.py:loss", "entropy_quantile": 0.8},
    ),
    Contradiction(
        keys=("kl_reference", "kl_coef"),
        holds=lambda c: c.kl_reference is not None and c.kl_coef == 0,
        expected="a loss.kl_coef above 0 with kl_reference",
        reason="the reference would never be loaded; raise kl_coef, or leave kl_reference out",
        example={"kl_reference": "some/model"},
    ),
    Contradiction(
        keys=("reference_every", "kl_coef", "kl_reference"),
        holds=lambda c: c.reference_every > 0 and (c.kl_coef == 0 or c.kl_reference is not None),
        expected="a loss.kl_coef above 0, and no kl_reference, with reference_every",
        reason="only the model that the run began with moves; set kl_coef, and leave kl_reference out",
        example={"reference_every": 8},
    ),
    Contradiction(
        keys=("reference_decay", "reference_every"),
        holds=lambda c: c.reference_decay > 0 and c.reference_every == 0,
        expected="a loss.reference_every with reference_decay",
        reason="the reference would never move; set reference_every, or leave reference_decay out",
        example={"reference_decay": 0.4},
    ),
    Contradiction(
        keys=("best_k", "advantage"),
        holds=lambda c: (
            c.best_k is not None and (ADVANTAGES[c.advantage].per_turn or ADVANTAGES[c.advantage].has_critic)
        ),
        expected="no loss.best_k with an advantage for each turn or token",
        reason="it compares one advantage for each rollout; set best_k = 0, or another advantage",
        example={"best_k": 2, "advantage": "per_turn_mean"},
    ),
    Contradiction(
        keys=("advantage", "length_bonus", "kl_placement"),
        holds=lambda c: (
            ADVANTAGES[c.advantage].per_part
            and (c.length_bonus > 0 or (c.kl_coef > 0 and c.kl_placement == "reward"))
        ),
        expected="no loss.length_bonus and no KL in the reward with an advantage of the reward's parts",
        reason="they change the sum of the parts, which this advantage does not read; set length_bonus = 0, and "
        "kl_placement = \"loss\" or \"advantage\"",
        example={"advantage": "per_part_norm", "length_bonus": 0.1},
    ),
    Contradiction(
        keys=("advantage_function", "advantage"),
        holds=lambda c: c.advantage_function is not None and c.advantage != "group_norm",
        expected="no loss.advantage with loss.advantage_function, which replaces it",
        reason="leave out one of them",
        example={"advantage_function": "mine.py:advantages", "advantage": "group_mean"},
    ),
))  # fmt: skip
"""Every invalid combination, in the order in which they are checked."""
