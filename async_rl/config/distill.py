"""The section ``distill``: teachers whose distribution the policy is pulled towards, on its own samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from async_rl.config.section import Section

if TYPE_CHECKING:
    from async_rl.config.config import Config


class DistillConfig(Section):
    """On-policy distillation from teachers, which are scorers (`scorer.NAME`). Off unless a teacher is named; see
    docs/distillation.md.
    """

    teacher: str | None = Field(
        default=None, description="The scorer, one of the tables scorer.NAME, that is the teacher of all prompts."
    )
    teachers: dict[str, str] = Field(
        default={},
        description="Teachers by data source: a table SOURCE = SCORER, with sources of data.train. They take the place "
        "of distill.teacher for prompts of these sources.",
    )
    form: Literal["advantage", "loss"] = Field(
        default="advantage",
        description="How the policy learns from its teacher. advantage: log teacher - log policy of each sampled token "
        "is added to its advantage. loss: KL(policy || teacher) at each sampled token is added to its loss.",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        le=1024,
        description='With distill.form = "loss", the number of the teacher\'s likeliest tokens over which the KL is '
        "computed, the rest as one; 0 estimates it from the sampled token alone.",
    )
    coef: float = Field(default=1.0, gt=0, description="Factor of the teacher's term in the advantage or the loss.")
    rewards: bool = Field(
        default=True,
        description="Whether the policy also learns from rewards. If false, the teacher alone counts, and rewards are "
        "only metrics.",
    )

    @property
    def is_set(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher is not None or bool(self.teachers)

    def teacher_of(self, source: str) -> str | None:
        """Return the scorer of prompts of the data source ``source``. None if they have no teacher."""
        return self.teachers.get(source, self.teacher)

    @property
    def by_use(self) -> dict[str, str]:
        """The key of each teacher -> the name of its scorer."""
        named = {} if self.teacher is None else {"distill.teacher": self.teacher}
        return named | {f"distill.teachers.{source}": name for source, name in self.teachers.items()}


def check_distillation(config: Config, *, has_model: bool) -> None:
    """Check that the section ``distill`` goes together with the others.

    Args:
        has_model: whether the backend samples with the run's model.

    Raises:
        ValueError: it does not. The message names the key, what was expected, and the remedy.
    """
    distill, sampling = config.distill, config.sampling
    if not distill.is_set:
        plain = DistillConfig()
        if changed := [key for key in DistillConfig.model_fields if getattr(distill, key) != getattr(plain, key)]:
            raise ValueError(
                f"distill.{changed[0]}: expected a teacher in distill.teacher with the section [distill], got none; "
                f"name one, or leave the key out"
            )
        return
    sources = set(config.data.train) if isinstance(config.data.train, dict) else {""}
    if unknown := sorted(set(distill.teachers) - sources):
        raise ValueError(
            f"distill.teachers: expected sources of data.train = {sorted(sources)}, got {unknown[0]!r}; correct "
            f"the name"
        )
    if distill.teacher is None and (without := sorted(sources - set(distill.teachers))):
        raise ValueError(
            f"distill.teachers: expected a teacher for each source of data.train, got none for {without[0]!r}; name "
            f"one there, or set distill.teacher for all others"
        )
    both = set(distill.by_use.values()) & {config.reward.model}
    for wrong, key, expected, got, remedy in (
        (bool(both), "distill.teacher", "another scorer than reward.model", config.reward.model,
         "a reward model has no log-probabilities"),
        (not has_model, "generator.backend", "a backend that samples with model.path", config.generator.backend,
         "the teacher shares the model's vocabulary"),
        (not (sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0), "sampling.top_p, top_k, min_p",
         "no limit with a teacher, whose distribution has none", (sampling.top_p, sampling.top_k, sampling.min_p),
         "leave them out"),
        (distill.form == "advantage" and distill.top_k > 0, "distill.top_k", '0 with distill.form = "advantage"',
         distill.top_k, 'an advantage is of the sampled token; set distill.form = "loss"'),
        (distill.form == "loss" and config.loss.function is not None, "distill.form",
         '"advantage" with loss.function', distill.form, "your own loss has no term for the teacher"),
        (distill.top_k > 0 and config.parallel.tensor > 1, "parallel.tensor", "1 with distill.top_k",
         config.parallel.tensor, "the likeliest tokens are looked up on one rank; leave one of the two out"),
        (any(rule.masks_step and rule.when != "always" for rule in config.loss.rules), "loss.rules.when",
         '"always" in rules of a step, with a teacher', "another",
         "they are decided before the teacher's advantages are known"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"{key}: expected {expected}, got {got}; {remedy}")
    if not distill.rewards:
        _check_teacher_alone(config)


def _check_teacher_alone(config: Config) -> None:
    """Refuse what chooses by rewards, and what only changes the advantages of rewards, which are not used."""
    loss = config.loss
    unused = "rewards and their advantages are not used, so leave it out, or set distill.rewards = true"
    for wrong, key, expected, got, remedy in (
        (config.queue.filter_range is not None, "queue.filter_range", "[]", list(config.queue.filter_range or ()),
         "prompts that are all right or all wrong teach as well"),
        (loss.best_k is not None, "loss.best_k", "0", loss.best_k, "it would choose answers by their rewards"),
        (loss.length_bonus > 0, "loss.length_bonus", "0", loss.length_bonus, unused),
        (loss.advantage_function is not None, "loss.advantage_function", "no value", loss.advantage_function, unused),
        (loss.has_critic, "loss.advantage", "no critic", loss.advantage, unused),
        (loss.is_kl_in_advantages, "loss.kl_placement", '"loss"', loss.kl_placement, unused),
        (config.data.curriculum.is_on, "data.curriculum", "none", "one", "it would choose prompts by their accuracy"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"{key}: expected {expected} with distill.rewards = false, got {got}; {remedy}")
