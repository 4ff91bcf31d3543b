"""``Config``, all settings of a run, and the checks of keys against keys of other sections.

Every section is a frozen pydantic model. ``async_rl.config.loading`` builds a ``Config`` from TOML and ``--set``, and
no other module builds one from user input. Unknown keys are refused. A key without a value is left out of the TOML,
which has no null.
"""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from async_rl.config.critic import CriticConfig
from async_rl.config.data import DataConfig, EvalConfig, RowField
from async_rl.config.distill import DistillConfig, check_distillation
from async_rl.config.generator import (
    BACKENDS,
    EnvironmentConfig,
    GeneratorConfig,
    SamplingConfig,
    check_capabilities,
    has_model,
    known_capabilities,
)
from async_rl.config.judge import JudgeConfig
from async_rl.config.learner import LearnerConfig, LoraConfig, ModelConfig, OptimizerConfig
from async_rl.config.loss import LossConfig
from async_rl.config.loss_names import ADVANTAGES
from async_rl.config.offline import DpoConfig, RmConfig, SftConfig
from async_rl.config.parallel import ParallelConfig
from async_rl.config.queue import QueueConfig, WeightsConfig
from async_rl.config.reward import RewardConfig, reward_type
from async_rl.config.run import CheckpointConfig, ExperimentalConfig, LogConfig, RunConfig
from async_rl.config.scorer import ScorerConfig
from async_rl.config.section import Section
from async_rl.process.user_code import is_code_name

_SCORER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}")


class Config(Section):
    """All settings of one run: a field for each section of the TOML file."""

    run: RunConfig
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    scorer: dict[str, ScorerConfig] = Field(default={})
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

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        self._check_staleness_keys()
        self._check_sampling_keys()
        self._check_backend()
        self._check_device_keys()
        self._check_compile()
        self._check_packing()
        self._check_code_keys()
        self._check_scorers()
        self._check_judge()
        self._check_answer_keys()
        self._check_accuracy()
        self._check_no_reward()
        check_distillation(self, has_model=has_model(self.generator.backend))
        self._check_environment()
        self._check_eval_keys()
        self._check_quantized_base()
        self._check_generate()
        self._check_critic()
        return self

    def _check_staleness_keys(self) -> None:
        most = self.queue.max_staleness + 1
        if self.weights.sync_every > most:
            raise ValueError(
                f"weights.sync_every: expected at most queue.max_staleness + 1 = {most}, got "
                f"{self.weights.sync_every}; between two publications all groups would become too "
                f"stale, so lower weights.sync_every or raise queue.max_staleness"
            )
        most += 1 - self.weights.sync_every
        if self.learner.versions_per_batch > most:
            key = "learner.updates_per_batch" + (
                " * learner.epochs_per_batch" if self.learner.epochs_per_batch > 1 else ""
            )
            raise ValueError(
                f"{key}: expected at most queue.max_staleness + 2 - weights.sync_every = {most}, "
                f"got {self.learner.versions_per_batch}; the last update of a batch would train on data that is too "
                f"stale, so lower {key.replace(' *', ' or')} or raise queue.max_staleness"
            )
        if self.learner.groups_per_step % self.learner.updates_per_batch:
            raise ValueError(
                f"learner.updates_per_batch: expected a divisor of learner.groups_per_step = "
                f"{self.learner.groups_per_step}, got {self.learner.updates_per_batch}; change one of them, so that a "
                f"batch divides into equal parts"
            )
        self._check_fixed_lag()
        self._check_adaptive()
        low_high = self.queue.filter_range
        if low_high is not None and low_high[0] >= low_high[1]:
            raise ValueError(
                f"queue.filter_range: expected [low, high] with low < high, got {list(low_high)}; correct it, or set "
                f"[] to filter no group"
            )

    def _check_fixed_lag(self) -> None:
        lag = self.learner.fixed_lag
        if lag is None:
            return
        for key, value, needed in (
            ("queue.max_staleness", self.queue.max_staleness, lag),
            ("weights.sync_every", self.weights.sync_every, 1),
            ("learner.updates_per_batch", self.learner.updates_per_batch, 1),
            ("learner.epochs_per_batch", self.learner.epochs_per_batch, 1),
        ):
            if value != needed:
                raise ValueError(
                    f"{key}: expected {needed} with learner.fixed_lag = {lag}, got {value}; set "
                    f"{key} = {needed}, or leave learner.fixed_lag out"
                )

    def _check_adaptive(self) -> None:
        queue, loss = self.queue, self.loss
        if not queue.adaptive:
            return
        if self.learner.fixed_lag is not None:
            raise ValueError(
                "queue.adaptive: expected false with learner.fixed_lag, which keeps the lag constant, got true; set "
                "only one of the two"
            )
        if queue.max_staleness <= self.lowest_bound:
            raise ValueError(
                f"queue.adaptive: expected queue.max_staleness above weights.sync_every + learner.updates_per_batch "
                f"(times learner.epochs_per_batch) - 2 = {self.lowest_bound}, got {queue.max_staleness}; the staleness "
                f"bound could not be lowered, so raise queue.max_staleness or set queue.adaptive = false"
            )
        limits = self.experimental
        if limits.adaptive_min_ess <= (loss.min_ess or 0) or limits.adaptive_max_kl >= (loss.max_kl or float("inf")):
            raise ValueError(
                f"queue.adaptive: expected experimental.adaptive_min_ess above loss.min_ess = "
                f"{loss.min_ess or '0 (off)'}, got {limits.adaptive_min_ess}, and experimental.adaptive_max_kl below "
                f"loss.max_kl = {loss.max_kl or 'infinity (off)'}, got {limits.adaptive_max_kl}; correct the "
                f"wrong one, because steps would be skipped before the staleness bound is lowered"
            )

    def _check_sampling_keys(self) -> None:
        longest = self.sampling.max_new_tokens
        if self.reward.cache_length is not None and self.reward.cache_length >= longest:
            raise ValueError(
                f"reward.cache_length: expected less than sampling.max_new_tokens = {longest}, got "
                f"{self.reward.cache_length}; lower it, or leave it out"
            )
        row = ADVANTAGES[self.loss.advantage]
        is_own = self.loss.advantage_function is not None or not self.distill.rewards
        if self.sampling.group_size == 1 and not (is_own or row.over_step or row.has_critic):
            raise ValueError(
                f"sampling.group_size: expected at least 2 with loss.advantage = {self.loss.advantage!r}, got 1; "
                f"this advantage compares the rollouts of one group, so sample more of them or set loss.advantage = "
                f'"global_norm"'
            )
        best_k = self.loss.best_k
        if best_k is not None and best_k > self.sampling.group_size:
            raise ValueError(
                f"loss.best_k: expected at most sampling.group_size = {self.sampling.group_size}, got {best_k}; "
                f"lower it, or set 0 to train on all rollouts"
            )
        if self.sampling.temperature_steps is not None and self.sampling.temperature_end is None:
            raise ValueError(
                "sampling.temperature_steps: expected sampling.temperature_end to be set too, got none; set "
                "sampling.temperature_end, or leave sampling.temperature_steps out"
            )

    def _check_backend(self) -> None:
        capabilities = known_capabilities(self.generator.backend)
        if capabilities is not None:  # the capabilities of a user's backend are checked on the machine that imports it
            check_capabilities(self, capabilities)

    def _check_device_keys(self) -> None:
        for key, devices, needed in (
            ("learner.devices", self.learner.devices, self.learner.nproc),
            ("generator.devices", self.generator.devices, self.generator.count * self.generator.tensor_parallel_size),
        ):
            if devices is not None and len(devices) != needed:
                raise ValueError(
                    f"{key}: expected {needed} devices, one for each process, got {len(devices)}: {list(devices)}; "
                    f"list {needed}, or leave the key out"
                )

    def _check_compile(self) -> None:
        if not self.learner.compile:
            return
        if self.model.gradient_checkpointing == "selective":
            raise ValueError(
                'model.gradient_checkpointing: expected "none" or "full" with learner.compile, got "selective"; the '
                "compiler itself chooses which operations of a layer are computed again, so leave one of the two out"
            )
        if self.model.routing_replay:
            raise ValueError(
                "model.routing_replay: expected false with learner.compile, got true; layers are not compiled with "
                "recorded routes, so leave one of the two out"
            )
        if self.parallel.pipeline > 1:
            raise ValueError(
                f"parallel.pipeline: expected 1 with learner.compile, got {self.parallel.pipeline}; compiled layers "
                f"are checked on a whole model only, so leave one of the two out"
            )

    def _check_packing(self) -> None:
        if self.learner.packing == "padded" and self.parallel.sequence > 1:
            raise ValueError(
                f'parallel.sequence: expected 1 with learner.packing = "padded", got {self.parallel.sequence}; only '
                f"packed rows can be divided, so leave one of the two out"
            )

    def _check_code_keys(self) -> None:
        limit = self.reward.max_call_s
        for key, longest, is_asked in (
            ("reward.code.total_time_limit_s", self.reward.code.total_time_limit_s, self.reward.runs_programs),
            ("reward.time_limit_s", self.reward.time_limit_s, any(one.is_user_code for one in self.reward.types)),
        ):
            if is_asked and longest >= limit:
                raise ValueError(
                    f"{key}: expected less than reward.max_call_s = {limit}, got {longest}; the lease of an answer "
                    f"that takes so long would expire, so lower {key} or raise reward.max_call_s"
                )

    def _check_scorers(self) -> None:
        wanted = self.scorers_by_use
        for key, name in wanted.items():
            if name not in self.scorer:
                tables = ", ".join(f"scorer.{one}" for one in self.scorer) or "no table scorer.NAME"
                raise ValueError(
                    f"{key}: expected the name of a scorer, of {tables}, got {name!r}; correct it, or add it"
                )
        for name in self.scorer:
            if not _SCORER_NAME.fullmatch(name):
                raise ValueError(
                    f"scorer: expected names of letters, digits, '_' and '-', got {name!r}; choose another name"
                )
            if name not in wanted.values():
                raise ValueError(
                    f"scorer.{name}: expected a key that names this scorer, such as reward.model, got none; name it "
                    f"there, or remove the table"
                )
        for key, name in wanted.items():
            if key != "reward.model" and self.scorer[name].backend != "transformers":
                raise ValueError(
                    f'scorer.{name}.backend: expected "transformers" for a teacher, which {key} makes of this scorer, '
                    f'got "{self.scorer[name].backend}"; leave it out'
                )
        addresses = [scorer.address for scorer in self.scorer.values()]
        for name, scorer in self.scorer.items():
            if addresses.count(scorer.address) > 1:
                raise ValueError(
                    f"scorer.{name}.address: expected an address for each scorer, got {scorer.address} several times; "
                    f"change one"
                )
        if self.reward.asks_scorer != (self.reward.model is not None):
            raise ValueError(
                f'reward.model: expected the name of a scorer if, and only if, a reward is "model", got '
                f"{self.reward.model!r} with the rewards {', '.join(self.reward.names)}; correct one of them"
            )

    def _check_judge(self) -> None:
        plain = JudgeConfig()
        if not self.reward.asks_judge and self.reward.judge != plain:
            changed = next(
                key for key in JudgeConfig.model_fields if getattr(self.reward.judge, key) != getattr(plain, key)
            )
            raise ValueError(
                f'reward.judge.{changed}: expected the reward "judge" with the section [reward.judge], got the rewards '
                f"{', '.join(self.reward.names)}; set reward.type, or leave the section out"
            )

    def _check_answer_keys(self) -> None:
        """Check that a reward of the run reads the keys that say when an answer is right and in form."""
        reward, plain = self.reward, RewardConfig()
        if not self.environment.is_set and any(one.has_format for one in reward.types):
            return
        for key in ("equality", "require_format", "format"):
            if getattr(reward, key) != getattr(plain, key):
                got = "an environment" if self.environment.is_set else f"the rewards {', '.join(reward.names)}"
                raise ValueError(
                    f"reward.{key}: expected one of the rewards boxed, think_answer_tags and exact with it, because "
                    f"nothing else reads it, got {got}; leave the key out, or add such a reward to reward.extra"
                )

    def _check_accuracy(self) -> None:
        """Check that nothing chooses prompts by an accuracy that does not say how often a prompt is solved."""
        kind = self.reward.right_by
        main, key = reward_type(kind), "reward.accuracy" if self.reward.accuracy else "reward.type"
        if kind == "none":
            why = "is always 0"
        elif main.asks_scorer:
            why = "is the logistic function of a score and says nothing of right and wrong"
        elif main.asks_judge:
            why = "is the score's place in its range and says nothing of right and wrong"
        else:
            self._check_lone_answers()
            return
        if self.queue.filter_range is not None and not main.asks_judge:
            raise ValueError(
                f"queue.filter_range: expected [] with {key} = {kind!r}, whose accuracy {why}, got "
                f"{list(self.queue.filter_range)}; set it to [], or let reward.accuracy name what is right"
            )
        if self.data.curriculum.is_on:
            raise ValueError(
                f"data.curriculum: expected none with {key} = {kind!r}, whose accuracy {why}; leave the section "
                f"out, or let reward.accuracy name what is right"
            )

    def _check_lone_answers(self) -> None:
        """Check that not every group is filtered because it has a single answer, which is right or wrong."""
        bounds, judge = self.queue.filter_range, self.reward.right_by
        has_shares = reward_type(judge).is_user_code or (judge == "code" and self.reward.code.partial_credit)
        if self.sampling.group_size > 1 or bounds is None or self.environment.is_set or has_shares:
            return
        if bounds[0] > 0 and bounds[1] < 1:
            raise ValueError(
                f"queue.filter_range: expected [] with sampling.group_size = 1, because the accuracy of one answer is "
                f"0 or 1 and every group would be filtered, got {list(bounds)}; set it to []"
            )

    def _check_no_reward(self) -> None:
        if self.reward.type == "none" and not self.reward.extra and not self.distill.is_set:
            raise ValueError(
                "reward.type: expected a reward that scores answers, unless distill.teacher or reward.extra is set, "
                'got "none"; nothing would be learned, so choose another reward, or set one of them'
            )

    def _check_environment(self) -> None:
        environment = self.environment
        if not environment.is_set:
            plain = EnvironmentConfig()
            fields = EnvironmentConfig.model_fields
            if changed := [key for key in fields if getattr(environment, key) != getattr(plain, key)]:
                raise ValueError(
                    f"environment.{changed[0]}: expected an environment in environment.name with the section "
                    f"[environment], got none; name one, or leave the key out"
                )
            return
        if self.reward.names != (RewardConfig().type,):
            raise ValueError(
                f"reward.type, extra, accuracy: expected none with an environment, which scores its rollouts itself, "
                f"got {', '.join(self.reward.names)}; leave out either these keys or environment.name"
            )
        if environment.rows is not None and self.data.train:
            raise ValueError(
                f"environment.rows: expected no value with data.train, got {environment.rows}; set only one of the two"
            )
        if self.data.on_long_prompt == "truncate":
            raise ValueError(
                'data.on_long_prompt: expected "drop" with an environment, got "truncate"; only the environment may '
                "shorten its prompts, so leave the key out"
            )

    def _check_quantized_base(self) -> None:
        lora = self.lora
        if lora.base_bits is None:
            return
        if lora.publish == "adapters" and self.weights.parity == "stop":
            raise ValueError(
                f'weights.parity: expected "off" or "warn" with lora.base_bits = {lora.base_bits} and lora.publish = '
                f'"adapters", got "stop"; generators put the adapters on weights that are not quantised, so they '
                f'differ from the learner; set weights.parity, or lora.publish = "merged"'
            )
        if self.learner.offload == "all":
            raise ValueError(
                f'learner.offload: expected "none" or "reference" with lora.base_bits = {lora.base_bits}, whose '
                f'weights stay on the device, got "all"; leave one of the two keys out'
            )
        if self.parallel.tensor > 1:
            raise ValueError(
                f"parallel.tensor: expected 1 with lora.base_bits = {lora.base_bits}, whose weights can't be divided, "
                f"got {self.parallel.tensor}; leave one of the two keys out"
            )

    def _check_generate(self) -> None:
        learner = self.learner
        if not learner.generate:
            for key, default in (("generate_groups", None), ("generate_backend", "transformers")):
                if (got := getattr(learner, key)) != default:
                    raise ValueError(
                        f"learner.{key}: expected learner.generate = true, got false with {got}; set "
                        f"learner.generate, or leave learner.{key} out"
                    )
            return
        whole = "each rank samples with the whole model"
        for key, got, needed, why in (
            ("weights.sync_every", self.weights.sync_every, 1, "every version that it samples with must be published"),
            ("learner.fixed_lag", learner.fixed_lag, None, "it samples with its newest weights"),
            ("sampling.deterministic", self.sampling.deterministic, False, "its threads are not those of a generator"),
            ("parallel.tensor", self.parallel.tensor, 1, whole),
            ("parallel.pipeline", self.parallel.pipeline, 1, whole),
            ("parallel.experts", self.parallel.experts, 1, whole),
        ):
            if got != needed:
                expected = "no value" if needed is None else str(needed).lower()
                raise ValueError(
                    f"{key}: expected {expected} with learner.generate, got {str(got).lower()}; {why}, so leave one of "
                    f"the two keys out"
                )
        if is_code_name(self.generator.backend):
            raise ValueError(
                f"generator.backend: expected a built-in backend with learner.generate, got "
                f"{self.generator.backend!r}; the learner samples with a built-in one, so leave one of the two keys out"
            )
        if self.learner_uses_vllm:
            self._check_learners_vllm()

    def _check_learners_vllm(self) -> None:
        if not has_model(self.generator.backend):
            raise ValueError(
                f"learner.generate_backend: expected transformers with generator.backend {self.generator.backend}, "
                f"with which nothing samples from a model, got vllm; leave one of the two keys out"
            )
        generator = self.generator.model_copy(update={"backend": "vllm", "tensor_parallel_size": 1})
        try:
            check_capabilities(self.model_copy(update={"generator": generator}), BACKENDS["vllm"])
        except ValueError as error:
            raise ValueError(f'with learner.generate_backend = "vllm": {error}') from None

    def _check_critic(self) -> None:
        critic = self.critic
        if not self.loss.has_critic:
            plain = CriticConfig()
            if changed := [key for key in CriticConfig.model_fields if getattr(critic, key) != getattr(plain, key)]:
                raise ValueError(
                    f'critic.{changed[0]}: expected loss.advantage = "gae" with the section [critic], got '
                    f'"{self.loss.advantage}"; set it, or leave the section out'
                )
            return
        if critic.trunk == "policy":
            self._check_shared_trunk()
        if critic.freeze_steps >= self.learner.steps:
            raise ValueError(
                f"critic.freeze_steps: expected less than learner.steps = {self.learner.steps}, got "
                f"{critic.freeze_steps}; the policy would never be trained, so lower it"
            )
        if critic.freeze_steps and self.learner.fixed_lag is not None:
            raise ValueError(
                f"critic.freeze_steps: expected 0 with learner.fixed_lag, which counts versions, and a frozen policy "
                f"makes none, got {critic.freeze_steps}; leave one of the two out"
            )

    def _check_shared_trunk(self) -> None:
        if self.critic.path is not None:
            raise ValueError(
                f'critic.path: expected no value with critic.trunk = "policy", whose new head is on the policy, got '
                f"{self.critic.path!r}; leave one of the two keys out"
            )
        for key in ("pipeline", "tensor"):
            if (size := getattr(self.parallel, key)) > 1:
                raise ValueError(
                    f'parallel.{key}: expected 1 with critic.trunk = "policy", because every rank needs the last '
                    f"hidden states, got {size}; divide the model over shards or sequences instead, or set "
                    f'critic.trunk = "own"'
                )

    def _check_eval_keys(self) -> None:
        for name in self.eval.sets:
            if name not in self.data.eval:
                raise ValueError(
                    f"eval.sets: expected names from data.eval = {sorted(self.data.eval)}, got {name!r}; correct the "
                    f"name, or add the set to data.eval"
                )

    @property
    def samples_here(self) -> bool:
        """Whether processes that ``launch`` starts on this machine sample."""
        return bool(self.generator.count) or self.learner.generate

    @property
    def learner_uses_vllm(self) -> bool:
        """Whether the learner samples with vLLM."""
        return self.learner.generate and self.learner.generate_backend == "vllm"

    @property
    def has_critic_model(self) -> bool:
        """Whether a critic with a model of its own is trained."""
        return self.loss.has_critic and self.critic.trunk == "own"

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
        """Names of the user's own code (environment, rewards, backend) that generators of this run must import."""
        environment = (self.environment.name,) if self.environment.is_set else ()
        others = (*self.reward.names, self.generator.backend)
        return (*environment, *dict.fromkeys(name for name in others if is_code_name(name)))

    @property
    def recorded_code_names(self) -> tuple[str, ...]:
        """Names of all code of the user's own, whose digests the run directory has: ``code_names`` and the
        learner's.
        """
        return (*self.code_names, *self.loss.code_names)

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
        return bool(self.offline_commands) and not self.data.train and not self.makes_up_rows

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
