"""``Config``, all settings of a run, and the checks of keys against keys of other sections.

Every section is a frozen pydantic model. ``async_rl.config.loading`` builds a ``Config`` from TOML and ``--set``, and
no other module builds one from user input. Unknown keys are refused. A key without a value is left out of the TOML,
which has no null.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from async_rl.config.contradictions import check_contradictions
from async_rl.config.critic import CriticConfig
from async_rl.config.data import DataConfig, EvalConfig, RowField
from async_rl.config.distill import DistillConfig
from async_rl.config.exclusions import EXCLUSIONS
from async_rl.config.generator import (
    BACKENDS,
    EnvironmentConfig,
    GeneratorConfig,
    SamplingConfig,
    check_capabilities,
    has_model,
    known_capabilities,
)
from async_rl.config.learner import LearnerConfig, LoraConfig, ModelConfig, OptimizerConfig
from async_rl.config.loss import LossConfig
from async_rl.config.offline import DpoConfig, RmConfig, SftConfig
from async_rl.config.parallel import ParallelConfig
from async_rl.config.queue import QueueConfig, WeightsConfig
from async_rl.config.reward import RewardConfig
from async_rl.config.run import CheckpointConfig, ExperimentalConfig, LogConfig, RunConfig
from async_rl.config.scorer import ScorerConfig
from async_rl.config.section import Free, Recorded, Section
from async_rl.process.user_code import is_code_name


class Config(Section):
    """All settings of one run: a field for each section of the TOML file."""

    run: RunConfig
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    # A scorer's model may move, but its digest must stay (``scorer.start``).
    scorer: Free[dict[str, ScorerConfig]] = Field(default={})
    distill: DistillConfig = DistillConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    queue: QueueConfig = QueueConfig()
    loss: LossConfig = LossConfig()
    critic: CriticConfig = CriticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learner: LearnerConfig = LearnerConfig()
    parallel: ParallelConfig = ParallelConfig()
    generator: GeneratorConfig = GeneratorConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    sft: SftConfig = SftConfig()
    rm: RmConfig = RmConfig()
    dpo: DpoConfig = DpoConfig()
    experimental: ExperimentalConfig = ExperimentalConfig()
    # Tables of installed packages, each checked by the model that its package offers (``config.extension``).
    extension: Recorded[dict[str, dict[str, Any]]] = Field(default={})

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        capabilities = known_capabilities(self.generator.backend)
        if capabilities is not None:  # the capabilities of a user's backend are checked on the machine that imports it
            check_capabilities(self, capabilities)
        check_contradictions(self, EXCLUSIONS)
        if self.learner_uses_vllm:
            self._check_learners_vllm()
        return self

    def _check_learners_vllm(self) -> None:
        generator = self.generator.model_copy(update={"backend": "vllm", "tensor_parallel_size": 1})
        try:
            check_capabilities(self.model_copy(update={"generator": generator}), BACKENDS["vllm"])
        except ValueError as error:
            raise ValueError(f'with learner.generate_backend = "vllm": {error}') from None

    @property
    def samples_here(self) -> bool:
        """Whether processes that ``launch`` starts on this machine sample."""
        return bool(self.generator.count) or self.learner.generate

    @property
    def learner_uses_vllm(self) -> bool:
        """Whether the learner samples with vLLM."""
        return self.learner.generate and self.learner.generate_backend == "vllm"

    @property
    def has_reference_model(self) -> bool:
        """Whether the learner loads a reference model of its own, which adapters need not."""
        return self.loss.needs_reference and (not self.lora.is_set or bool(self.loss.kl_reference))

    @property
    def of_critic(self) -> Config:
        """The settings with which the critic is loaded and trained: those of ``[critic]`` in the places of the
        policy's.
        """
        critic = self.critic
        optimizer = {
            "lr": critic.lr, "schedule": critic.schedule, "min_lr_ratio": critic.min_lr_ratio, "ess_reference": 0.0,
            "warmup_steps": critic.warmup_steps, "max_grad_norm": critic.max_grad_norm, "adamw_lr": None,
        }  # fmt: skip
        return self.model_copy(
            update={
                "model": self.model.model_copy(
                    update={"path": critic.path or self.model.path, "routing_replay": False}
                ),
                "optimizer": self.optimizer.model_copy(update=optimizer),
                "critic": critic.model_copy(update={"freeze_steps": 0}),  # they are the critic's own steps, too
                "lora": self.lora.model_copy(update={"publish": "merged"}),
            }
        )

    @property
    def longest_sequence(self) -> int:
        """Number of tokens of the longest sequence that a micro-batch can hold: answers with a longer one can't be
        trained.
        """
        return self.learner.max_tokens * self.parallel.sequence

    @property
    def longest_sequence_keys(self) -> str:
        """What ``longest_sequence`` is, for messages: keys, and their values if there are several."""
        if self.parallel.sequence == 1:
            return "learner.max_tokens"
        return f"learner.max_tokens x parallel.sequence = {self.learner.max_tokens} x {self.parallel.sequence}"

    @property
    def system_prompt(self) -> str:
        """The system message that rows without one get. Empty if there is none."""
        if self.data.system_prompt is not None:
            return self.data.system_prompt
        if self.environment.is_set:
            return ""
        return self.reward.types[0].system_prompt

    @property
    def row_needs(self) -> tuple[RowField, ...]:
        """The fields that every row of the data must have, because the run's rewards read them.

        Empty for environments and for the user's own reward functions, whose needs are not known.
        """
        types = () if self.environment.is_set else self.reward.types
        return tuple(dict.fromkeys(key for one in types for key in one.row_fields))

    @property
    def scorers_by_use(self) -> dict[str, str]:
        """The key of each use of a scorer -> the name of the scorer."""
        reward = {} if self.reward.model is None else {"reward.model": self.reward.model}
        return reward | self.distill.by_use

    @property
    def code_names(self) -> tuple[str, ...]:
        """Names of the user's own code (environment, rewards, backend, filter) that the run's generators import."""
        environment = (self.environment.user_code,) if self.environment.user_code else ()
        others = (*self.reward.names, self.generator.backend, self.queue.filter_function or "")
        return (*environment, *dict.fromkeys(name for name in others if is_code_name(name)))

    @property
    def recorded_code_names(self) -> tuple[str, ...]:
        """Names of all code of the user's own, whose digests the run directory has: ``code_names``, and that
        of the queue server and of the learner.
        """
        source = () if self.data.source is None else (self.data.source,)
        return (*self.code_names, *source, *self.loss.code_names)

    @property
    def has_agents(self) -> bool:
        """Whether rollouts are sessions of an agent, which asks a generator's endpoint for answers."""
        return self.generator.serve

    @property
    def rollouts(self) -> str:
        """The name of what plays rollouts: ``answers``, ``turns`` of an environment, or ``agents``."""
        return "agents" if self.has_agents else "turns" if self.environment.is_set else "answers"

    @property
    def has_rewards(self) -> bool:
        """Whether ``reward.type`` judges rollouts: single answers, and those of agents that return no reward."""
        return self.has_agents or not self.environment.is_set

    @property
    def max_rollout_tokens(self) -> int | None:
        """The limit on the tokens of all sequences of an agent's rollout together. None without agents."""
        longest = self.sampling.max_prompt_tokens + self.sampling.max_new_tokens
        return (self.environment.max_rollout_tokens or longest) if self.has_agents else None

    @property
    def makes_spans(self) -> bool:
        """Whether a reward of the run may judge parts of an answer by themselves: only the user's own can."""
        return not self.environment.is_set and any(one.is_user_code for one in self.reward.types)

    @property
    def own_vocab_size(self) -> int | None:
        """The vocabulary size of a backend that has no model. None if the backend uses the model's vocabulary."""
        return None if has_model(self.generator.backend) else self.experimental.fake.vocab_size

    @property
    def offline_commands(self) -> tuple[str, ...]:
        """Those of the commands sft, rm and dpo for which the config names data."""
        return tuple(name for name in ("sft", "rm", "dpo") if getattr(self, name).data)

    @property
    def is_offline_only(self) -> bool:
        """Whether the config is for these commands only, because it has no data for reinforcement learning."""
        return bool(self.offline_commands) and not self.has_train

    @property
    def has_train(self) -> bool:
        """Whether the config says where training prompts come from."""
        return bool(self.data.train or self.data.source) or self.makes_up_rows

    @property
    def makes_up_rows(self) -> bool:
        """Whether the environment generates its tasks, so that no training file is needed."""
        return self.environment.is_set and self.environment.rows is not None

    @property
    def cache_length(self) -> int:
        """Number of tokens before ``max_new_tokens`` over which the penalty on long answers grows. It is DAPO's
        L_cache.
        """
        return self.reward.cache_length or max(1, min(1024, self.sampling.max_new_tokens // 4))

    @property
    def lowest_bound(self) -> int:
        """The lowest staleness bound under which every batch can be fresh enough.

        Just before a version is published, generators are ``sync_every - 1`` versions behind. The last update of a
        batch adds ``versions_per_batch - 1``.
        """
        return self.weights.sync_every + self.learner.versions_per_batch - 2

    @property
    def last_version(self) -> int:
        """The version after the run's last step, if no optimizer step is skipped. Steps that train only the critic make
        none.
        """
        return (self.learner.steps - self.critic.freeze_steps) * self.learner.versions_per_batch

    @property
    def temperature_steps(self) -> int:
        """The version from which on the temperature is ``sampling.temperature_end``. By default, the run's last
        version.
        """
        return self.sampling.temperature_steps or self.last_version

    @property
    def max_filtered(self) -> int:
        """The run stops when this many groups were filtered since its last step."""
        return self.queue.max_filtered or 100 * self.learner.groups_per_step
