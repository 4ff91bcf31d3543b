"""Keys of different sections that exclude each other: ``EXCLUSIONS``, which ``Config`` checks in this order.

What a backend can't do is refused by ``generator.check_capabilities``, because what a user's own backend can do is
known only on a machine that imports it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from async_rl.config.contradictions import Contradiction, changed_key, value_of
from async_rl.config.generator import has_model
from async_rl.config.loss_names import ADVANTAGES
from async_rl.config.reward import RewardConfig, reward_type
from async_rl.process.user_code import is_code_name

if TYPE_CHECKING:
    from async_rl.config.config import Config

_SCORER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}")

_SCORER = {"scorer.big.model": "big", "scorer.big.address": "tcp://127.0.0.1:5571"}
_TEACHER = {**_SCORER, "distill.teacher": "big"}
_ALONE = {**_TEACHER, "distill.rewards": False}
_UNFILTERED = {"queue.filter_range": []}
_SOLVED = {"data.curriculum.solved_at": 0.9}


def _row(key: str, holds: Any, expected: str, reason: str, example: dict[str, Any], got: str = "") -> Contradiction:
    return Contradiction((key,), holds, expected, reason, example, got)


_STALENESS = (
    _row("weights.sync_every", lambda c: _over(c.weights.sync_every, c.queue.max_staleness + 1),
         "at most queue.max_staleness + 1 = {x}",
         "between two publications all groups would become too stale, so lower weights.sync_every or raise "
         "queue.max_staleness", {"weights.sync_every": 6}),
    _row("learner.updates_per_batch",
         lambda c: _over(c.learner.versions_per_batch, c.queue.max_staleness + 2 - c.weights.sync_every),
         "at most queue.max_staleness + 2 - weights.sync_every = {x} updates of a batch in all its epochs",
         "the last update of a batch would train on data that is too stale, so lower learner.updates_per_batch or "
         "learner.epochs_per_batch, or raise queue.max_staleness",
         {"learner.updates_per_batch": 4, "weights.sync_every": 3}, got="{c.learner.versions_per_batch}"),
    _row("learner.updates_per_batch", lambda c: c.learner.groups_per_step % c.learner.updates_per_batch > 0,
         "a divisor of learner.groups_per_step = {c.learner.groups_per_step}",
         "change one of them, so that a batch divides into equal parts", {"learner.updates_per_batch": 3}),
    _row("queue.max_staleness",
         lambda c: c.learner.fixed_lag is not None and c.queue.max_staleness != c.learner.fixed_lag,
         "as much as learner.fixed_lag = {c.learner.fixed_lag}",
         "set both to one number, or leave learner.fixed_lag out", {"learner.fixed_lag": 2}),
    *(_row(key, lambda c, key=key: c.learner.fixed_lag is not None and value_of(c, key) != 1,
           "1 with learner.fixed_lag = {c.learner.fixed_lag}", f"set {key} = 1, or leave learner.fixed_lag out",
           {"learner.fixed_lag": 4, key: 2})
      for key in ("weights.sync_every", "learner.updates_per_batch", "learner.epochs_per_batch")),
    _row("queue.filter_range",
         lambda c: c.queue.filter_range is not None and c.queue.filter_range[0] >= c.queue.filter_range[1],
         "[low, high] with low < high", "correct it, or set [] to filter no group", {"queue.filter_range": [0.9, 0.1]}),
)  # fmt: skip


def _over(value: int, most: int) -> int | None:
    return most if value > most else None


def _has_no_baseline(c: Config) -> bool:
    row = ADVANTAGES[c.loss.advantage]
    is_own = c.loss.advantage_function is not None or not c.distill.rewards
    return c.sampling.group_size == 1 and not (is_own or row.over_step or row.has_critic)


def _sets_all_aside(c: Config) -> str | None:
    low, high = c.data.curriculum.unsolved_at, c.data.curriculum.solved_at
    return None if low is None or high is None or low < high else f"{low:g} and {high:g}"


_CURRICULUM = (
    _row("data.curriculum", _sets_all_aside, "unsolved_at below solved_at",
         "every prompt would be set aside, so correct one of them",
         {"data.curriculum.unsolved_at": 0.5, "data.curriculum.solved_at": 0.5}, got="{x}"),
    _row("data.curriculum.min_chance",
         lambda c: c.data.curriculum.chance == "uniform" and c.data.curriculum.min_chance != 0.1,
         'no value with chance = "uniform"',
         "every other prompt is always sampled, so set chance, or leave the key out",
         {"data.curriculum.min_chance": 0.2}),
    _row("data.curriculum.rest_epochs",
         lambda c: c.data.curriculum.rest_epochs != 2
         and (c.data.curriculum.solved_at, c.data.curriculum.unsolved_at) == (None, None),
         "no value without solved_at and unsolved_at",
         "no prompt is set aside otherwise, so set one of the two, or leave the key out",
         {"data.curriculum.rest_epochs": 3}),
    _row("data.epochs", lambda c: c.data.curriculum.is_on and c.data.epochs == 1,
         "no value, or at least 2, with data.curriculum",
         "a prompt's pass rate is known only after its first epoch, so raise the key, or leave the section out",
         {**_SOLVED, "data.epochs": 1}),
)  # fmt: skip


_SAMPLING = (
    _row("reward.cache_length",
         lambda c: c.reward.cache_length is not None and c.reward.cache_length >= c.sampling.max_new_tokens,
         "less than sampling.max_new_tokens = {c.sampling.max_new_tokens}", "lower it, or leave it out",
         {"reward.cache_length": 64, "sampling.max_new_tokens": 64}),
    _row("sampling.group_size", _has_no_baseline,
         "at least 2 with a loss.advantage that compares the rollouts of one group, here {c.loss.advantage!r}",
         'sample more of them, or set loss.advantage = "global_norm"', {"sampling.group_size": 1}),
    _row("loss.best_k", lambda c: c.loss.best_k is not None and c.loss.best_k > c.sampling.group_size,
         "at most sampling.group_size = {c.sampling.group_size}", "lower it, or set 0 to train on all rollouts",
         {"loss.best_k": 9}),
    _row("sampling.temperature_steps",
         lambda c: c.sampling.temperature_steps is not None and c.sampling.temperature_end is None,
         "sampling.temperature_end to be set too", "set it, or leave sampling.temperature_steps out",
         {"sampling.temperature_steps": 5}, got="none"),
    _row("eval.sets",
         lambda c: next(((name, sorted(c.data.eval)) for name in c.eval.sets if name not in c.data.eval), None),
         "names from data.eval, here of {x[1]}", "correct the name, or add the set to data.eval",
         {"eval.sets": {"maths": {"num_samples": 8}}}, got="{x[0]!r}"),
)  # fmt: skip


_MACHINES = (
    *(_row(key, lambda c, key=key, needed=needed: _unequal(value_of(c, key), needed(c)),
           "a device for each process, here {x}", "list as many, or leave the key out", example)
      for key, needed, example in (
          ("learner.devices", lambda c: c.learner.nproc, {"learner.nproc": 2, "learner.devices": [0]}),
          ("generator.devices", lambda c: c.generator.count * c.generator.tensor_parallel_size,
           {"generator.count": 2, "generator.devices": [0]}))),
    _row("weights.port", lambda c: c.weights.port is not None and c.weights.transport not in ("auto", "tcp"),
         'no value with weights.transport = "{c.weights.transport}", which chooses its own ports',
         'leave the key out, or set weights.transport = "tcp"', {"weights.port": 5556, "weights.transport": "gloo"}),
    _row("weights.peers", lambda c: c.weights.peers and c.weights.transport != "tcp",
         'false with weights.transport = "{c.weights.transport}"',
         'generators fetch from each other only by tcp, so set weights.transport = "tcp", or leave the key out',
         {"weights.peers": True}),
    *(_row(key, lambda c, key=key, default=default: c.lora.rank is None and value_of(c, key) != default,
           "no value without lora.rank", f"set lora.rank, or leave {key} out", {key: value})
      for key, default, value in (("lora.publish", "merged", "adapters"), ("lora.base_bits", None, 8))),
    _row("optimizer.adamw_lr", lambda c: c.optimizer.adamw_lr is not None and c.optimizer.name != "muon",
         'no value with optimizer.name = "{c.optimizer.name}"', "leave the key out, and set optimizer.lr",
         {"optimizer.adamw_lr": 0.1}),
    _row("generator.peer_port", lambda c: c.generator.peer_port > 0 and not c.weights.peers, "0 without weights.peers",
         "no generator sends weights to another one, so set weights.peers = true, or leave generator.peer_port out",
         {"generator.peer_port": 5600}),
    _row("model.attention",
         lambda c: c.model.attention != "auto" and (c.model.dtype == "float32" or c.learner.packing == "padded"),
         '"auto" with model.dtype = "float32" or learner.packing = "padded"',
         "flash attention is for packed rows in half precision, so leave one of the two out",
         {"model.attention": "fa3", "model.dtype": "float32"}),
    _row("model.gradient_checkpointing",
         lambda c: c.learner.compile and c.model.gradient_checkpointing in ("selective", "attention"),
         '"none" or "full" with learner.compile',
         "the compiler itself chooses which operations of a layer are computed again, so leave one of the two out",
         {"learner.compile": True, "model.gradient_checkpointing": "selective"}),
    _row("model.routing_replay", lambda c: c.learner.compile and c.model.routing_replay, "false with learner.compile",
         "layers are not compiled with recorded routes, so leave one of the two out",
         {"learner.compile": True, "model.routing_replay": True, "generator.backend": "transformers"}),
    *(_row("loss.load_balancing_coef", lambda c, holds=holds: c.loss.load_balancing_coef > 0 and holds(c),
           f"0 with {key}", f"{why}, so leave one of the two out", {"loss.load_balancing_coef": 0.001, key: value})
      for key, value, holds, why in (
          ("learner.compile", True, lambda c: c.learner.compile, "layers are compiled without hooks on their routers"),
          ("parallel.pipeline", 2, lambda c: c.parallel.pipeline > 1, "the loss is of the routers of all layers"),
          ("lora.rank", 4, lambda c: c.lora.is_set, "routers are frozen beside adapters"))),
    _row("parallel.pipeline", lambda c: c.learner.compile and c.parallel.pipeline > 1, "1 with learner.compile",
         "compiled layers are checked on a whole model only, so leave one of the two out",
         {"learner.compile": True, "parallel.pipeline": 2}),
    _row("parallel.sequence", lambda c: c.learner.packing == "padded" and c.parallel.sequence > 1,
         '1 with learner.packing = "padded"', "only packed rows can be divided, so leave one of the two out",
         {"learner.packing": "padded", "parallel.sequence": 2}),
    _row("weights.parity",
         lambda c: c.lora.base_bits is not None and c.lora.publish == "adapters" and c.weights.parity == "stop",
         '"off" or "warn" with lora.base_bits = {c.lora.base_bits} and lora.publish = "adapters"',
         "generators put the adapters on weights that are not quantised, so they differ from the learner; set "
         'weights.parity, or lora.publish = "merged"',
         {"lora.rank": 8, "lora.base_bits": 8, "lora.publish": "adapters"}),
    _row("learner.offload", lambda c: c.lora.base_bits is not None and c.learner.offload == "all",
         '"none" or "reference" with lora.base_bits = {c.lora.base_bits}, whose weights stay on the device',
         "leave one of the two keys out", {"lora.rank": 8, "lora.base_bits": 8, "learner.offload": "all"}),
    _row("parallel.tensor", lambda c: c.lora.base_bits is not None and c.parallel.tensor > 1,
         "1 with lora.base_bits = {c.lora.base_bits}, whose weights can't be divided", "leave one of the two keys out",
         {"lora.rank": 8, "lora.base_bits": 8, "parallel.tensor": 2}),
)  # fmt: skip


def _unequal(devices: tuple[int, ...] | None, needed: int) -> int | None:
    return needed if devices is not None and len(devices) != needed else None


def _is_read_by_no_answer(c: Config, key: str) -> str | None:
    if c.has_rewards and any(one.has_format for one in c.reward.types):
        return None
    if getattr(c.reward, key) == RewardConfig.model_fields[key].default:
        return None
    return f"the rewards {c.reward.shown}" if c.has_rewards else "an environment"


def _accuracy_flaw(c: Config) -> str | None:
    """Return why the accuracy does not say how often a prompt is solved, with the key. None if it does."""
    kind = reward_type(c.reward.right_by)
    if c.reward.right_by == "none":
        why = "is always 0"
    elif kind.asks_scorer:
        why = "is the logistic function of a score"
    elif kind.asks_judge:
        why = "is the score's place in its range"
    else:
        return None
    return f'{"reward.accuracy" if c.reward.accuracy else "reward.type"} = "{c.reward.right_by}", which {why}'


def _filtered_by_accuracy(c: Config) -> str | None:
    # A judge's filter may still choose by the score's place in its range.
    return None if c.queue.filter_range is None or reward_type(c.reward.right_by).asks_judge else _accuracy_flaw(c)


def _filters_lone_answers(c: Config) -> bool:
    bounds, judge = c.queue.filter_range, reward_type(c.reward.right_by)
    has_shares = judge.is_user_code or (judge.runs_programs and c.reward.code.partial_credit)
    if c.sampling.group_size > 1 or bounds is None or c.environment.is_set or has_shares or judge.asks_judge:
        return False
    return bounds[0] > 0 and bounds[1] < 1


_REWARDS = (
    *(_row(key, lambda c, key=key, is_asked=is_asked: is_asked(c) and value_of(c, key) >= c.reward.max_call_s,
           "less than reward.max_call_s = {c.reward.max_call_s}",
           f"the lease of an answer that takes so long would expire, so lower {key} or raise reward.max_call_s",
           {**example, "reward.max_call_s": 20.0})
      for key, is_asked, example in (
          ("reward.code.total_time_limit_s", lambda c: c.reward.runs_programs, {"reward.type": "code"}),
          ("reward.time_limit_s", lambda c: any(one.is_user_code for one in c.reward.types),
           {"reward.type": "mine:f", "reward.time_limit_s": 20.0}))),
    _row("reward.judge.{x}", lambda c: None if c.reward.asks_judge else changed_key(c.reward.judge),
         'the reward "judge" with the section [reward.judge]', "set reward.type, or leave the section out",
         {"reward.judge.model": "m"}, got="the rewards {c.reward.shown}"),
    *(_row(f"reward.{key}", lambda c, key=key: _is_read_by_no_answer(c, key),
           "one of the rewards boxed, think_answer_tags and exact with it, because nothing else reads it",
           "leave the key out, or add such a reward to reward.extra",
           {"reward.type": "mine.py:f", f"reward.{key}": value}, got="{x}")
      for key, value in (("equality", "exact"), ("require_format", False), ("format", 0.1))),
    _row("queue.filter_range", _filtered_by_accuracy,
         "[] with an accuracy that says nothing of right and wrong, here that of {x}",
         "set it to [], or let reward.accuracy name what is right", {"reward.type": "none"}),
    _row("data.curriculum", lambda c: _accuracy_flaw(c) if c.data.curriculum.is_on else None,
         "none with an accuracy that says nothing of right and wrong, here that of {x}",
         "leave the section out, or let reward.accuracy name what is right",
         {**_UNFILTERED, **_SOLVED, "reward.type": "none"}, got="one"),
    _row("queue.filter_range", _filters_lone_answers,
         "[] with sampling.group_size = 1, because the accuracy of one answer is 0 or 1 and every group would be "
         "filtered", "set it to []", {"sampling.group_size": 1, "loss.advantage": "gae"}),
    _row("reward.type", lambda c: c.reward.type == "none" and not c.reward.extra and not c.distill.is_set,
         "a reward that scores answers, unless distill.teacher or reward.extra is set",
         "nothing would be learned, so choose another reward, or set one of them",
         {**_UNFILTERED, "reward.type": "none"}),
)  # fmt: skip


def _unknown_scorer(c: Config, section: str) -> tuple[str, str, str] | None:
    tables = ", ".join(f"scorer.{one}" for one in c.scorer) or "no table scorer.NAME"
    uses = c.scorers_by_use.items()
    return next(((use.removeprefix(section), name, tables) for use, name in uses
                 if use.startswith(section) and name not in c.scorer), None)  # fmt: skip


def _scorer_without_use(c: Config) -> str | None:
    return next((name for name in c.scorer if name not in c.scorers_by_use.values()), None)


def _teacher_of_vllm(c: Config) -> tuple[str, str] | None:
    uses = c.distill.by_use.items()
    return next(((name, use) for use, name in uses if c.scorer[name].backend != "transformers"), None)


def _shared_address(c: Config) -> tuple[str, str] | None:
    by_name = {name: scorer.address for name, scorer in c.scorer.items()}
    return next((item for item in by_name.items() if list(by_name.values()).count(item[1]) > 1), None)


_SCORERS = (
    *(_row(key, lambda c, section=section: _unknown_scorer(c, section), "the name of a scorer, here of {x[2]}",
           "correct it, or add it", example, got="{x[1]!r}")
      for key, section, example in (
          ("reward.model", "reward.", {"reward.model": "big"}),
          ("distill.{x[0]}", "distill.", {"distill.teacher": "big"}))),
    _row("scorer", lambda c: next((name for name in c.scorer if not _SCORER_NAME.fullmatch(name)), None),
         "names of letters, digits, '_' and '-'", "choose another name",
         {"scorer": {"a/b": {"model": "m", "address": "tcp://127.0.0.1:1"}}}, got="{x!r}"),
    _row("scorer.{x}", _scorer_without_use, "a key that names this scorer, such as reward.model",
         "name it there, or remove the table", _SCORER, got="none"),
    _row("scorer.{x[0]}.backend", _teacher_of_vllm, '"transformers" for a teacher, here that of {x[1]}',
         "leave it out", {**_TEACHER, "scorer.big.backend": "vllm"}),
    _row("scorer.{x[0]}.address", _shared_address, "an address for each scorer", "change one",
         {**_TEACHER, "scorer.two.model": "two", "scorer.two.address": "tcp://127.0.0.1:5571",
          "distill.teachers": {"": "two"}}, got="{x[1]} several times"),
    _row("reward.model", lambda c: c.reward.asks_scorer != (c.reward.model is not None),
         'the name of a scorer if, and only if, a reward is "model"', "correct one of them",
         {**_SCORER, "reward.model": "big"}, got="{c.reward.model!r} with the rewards {c.reward.shown}"),
)  # fmt: skip


def _learns_from_teacher_alone(c: Config) -> bool:
    return c.distill.is_set and not c.distill.rewards


def _sources(c: Config) -> list[str]:
    return sorted(c.data.train) if isinstance(c.data.train, dict) else [""]


def _unknown_source(c: Config) -> tuple[str, list[str]] | None:
    return next(((one, _sources(c)) for one in sorted(c.distill.teachers) if one not in _sources(c)), None)


def _source_without_teacher(c: Config) -> str | None:
    return next((one for one in _sources(c) if c.distill.is_set and c.distill.teacher_of(one) is None), None)


_UNUSED = "rewards and their advantages are not used, so leave it out, or set distill.rewards = true"

_DISTILLATION = (
    _row("distill.{x}", lambda c: None if c.distill.is_set else changed_key(c.distill),
         "a teacher in distill.teacher with the section [distill]", "name one, or leave the key out",
         {"distill.form": "loss"}, got="none"),
    _row("distill.teachers", _unknown_source, "sources of data.train, here of {x[1]}", "correct the name",
         {**_SCORER, "distill.teachers": {"maths": "big"}}, got="{x[0]!r}"),
    _row("distill.teachers", _source_without_teacher, "a teacher for each source of data.train",
         "name one there, or set distill.teacher for all others",
         {**_SCORER, "distill.teachers": {"a": "big"}, "data.train": {"a": "f", "b": "g"}}, got="none for {x!r}"),
    _row("distill.teacher",
         lambda c: c.reward.model if c.reward.model in c.distill.by_use.values() else None,
         "another scorer than reward.model", "a reward model has no log-probabilities",
         {**_TEACHER, **_UNFILTERED, "reward.type": "model", "reward.model": "big"}, got="{x!r}"),
    _row("generator.backend", lambda c: c.distill.is_set and not has_model(c.generator.backend),
         "a backend that samples with model.path, with a teacher", "the teacher shares the model's vocabulary",
         {**_TEACHER, "generator.backend": "fake"}),
    _row("sampling.top_p, top_k, min_p",
         lambda c: c.distill.is_set and (c.sampling.top_p, c.sampling.top_k, c.sampling.min_p) != (1, 0, 0),
         "no limit with a teacher, whose distribution has none", "leave them out",
         {**_TEACHER, "sampling.top_p": 0.9}, got="{c.sampling.top_p}, {c.sampling.top_k}, {c.sampling.min_p}"),
    _row("distill.top_k", lambda c: c.distill.form == "advantage" and c.distill.top_k > 0,
         '0 with distill.form = "advantage"', 'an advantage is of the sampled token; set distill.form = "loss"',
         {**_TEACHER, "distill.top_k": 3}),
    _row("distill.form", lambda c: c.distill.form == "loss" and c.loss.function is not None,
         '"advantage" with loss.function', "your own loss has no term for the teacher",
         {**_TEACHER, "distill.form": "loss", "loss.function": "mine.py:f"}),
    _row("parallel.tensor", lambda c: c.distill.top_k > 0 and c.parallel.tensor > 1, "1 with distill.top_k",
         "the likeliest tokens are looked up on one rank; leave one of the two out",
         {**_TEACHER, "distill.form": "loss", "distill.top_k": 3, "parallel.tensor": 2}),
    _row("loss.rules.when",
         lambda c: c.distill.is_set and any(rule.masks_step and rule.when != "always" for rule in c.loss.rules),
         '"always" in rules of a step, with a teacher', "they are decided before the teacher's advantages are known",
         {**_TEACHER, "loss.preset": "m2po"}, got="another"),
    _row("queue.filter_range", lambda c: _learns_from_teacher_alone(c) and c.queue.filter_range is not None,
         "[] with distill.rewards = false", "prompts that are all right or all wrong teach as well",
         _ALONE),
    *(_row(key, lambda c, holds=holds: _learns_from_teacher_alone(c) and holds(c),
           f"{expected} with distill.rewards = false", reason, {**_ALONE, **_UNFILTERED, **example}, got)
      for key, holds, expected, reason, example, got in (
          ("loss.best_k", lambda c: c.loss.best_k is not None, "0", "it would choose answers by their rewards",
           {"loss.best_k": 2}, ""),
          ("loss.length_bonus", lambda c: c.loss.length_bonus > 0, "0", _UNUSED, {"loss.length_bonus": 0.5}, ""),
          ("loss.advantage_function", lambda c: c.loss.advantage_function is not None, "no value", _UNUSED,
           {"loss.advantage_function": "mine.py:f"}, ""),
          ("loss.advantage", lambda c: c.loss.has_critic, "no critic", _UNUSED, {"loss.advantage": "gae"}, ""),
          ("loss.kl_placement", lambda c: c.loss.is_kl_in_advantages, '"loss"', _UNUSED,
           {"loss.kl_coef": 0.1, "loss.kl_placement": "reward"}, ""),
          ("data.curriculum", lambda c: c.data.curriculum.is_on, "none", "it would choose prompts by their accuracy",
           _SOLVED, "one"))),
)  # fmt: skip


_ENVIRONMENT = (
    _row("environment.{x}", lambda c: None if c.environment.is_set else changed_key(c.environment),
         "an environment in environment.name with the section [environment]", "name one, or leave the key out",
         {"environment.max_turns": 3}, got="none"),
    _row("reward.type, extra, accuracy",
         lambda c: not c.has_rewards and c.reward.names != (RewardConfig.model_fields["type"].default,),
         "none with an environment, which scores its rollouts itself",
         "leave out either these keys or environment.name", {"environment.name": "mine.py", "reward.type": "exact"},
         got="{c.reward.shown}"),
    *(_row(f"environment.{key}",
           lambda c, key=key, value=value: not c.has_agents and getattr(c.environment, key) != value,
           "no value without generator.serve", f"set generator.serve, or leave environment.{key} out",
           {"environment.name": "mine.py", f"environment.{key}": 9})
      for key, value in (("max_rollout_tokens", None), ("session_timeout_s", 3600.0))),
    _row("environment.command", lambda c: bool(c.environment.command) and not c.has_agents,
         "no value without generator.serve", "set generator.serve, or leave the key out",
         {"environment.command": ["mine"]}),
    _row("environment.relay", lambda c: c.environment.relay is not None and not c.has_agents,
         "no value without generator.serve", "set generator.serve, or leave the key out",
         {"environment.relay": "tcp://127.0.0.1:5560"}),
    _row("environment.relay",
         lambda c: c.environment.relay is not None and bool(c.environment.name or c.environment.command),
         "no value with environment.name or environment.command", "set only one of the three",
         {"generator.serve": True, "environment.name": "mine.py", "environment.relay": "tcp://127.0.0.1:5560"}),
    _row("generator.serve", lambda c: c.has_agents and not c.environment.is_set,
         "false without an agent in environment.name", "name one, or leave the key out", {"generator.serve": True}),
    _row("environment.command", lambda c: bool(c.environment.command) and bool(c.environment.name),
         "no value with environment.name", "set only one of the two",
         {"generator.serve": True, "environment.name": "mine.py", "environment.command": ["mine"]}),
    _row("environment.sandbox",
         lambda c: c.environment.sandbox != "loopback" and not (c.environment.command or c.environment.relay),
         "no value without environment.command or environment.relay", "only their programs run in it: leave it out",
         {"environment.name": "mine.py", "environment.sandbox": "off"}),
    _row("environment.python", lambda c: bool(c.environment.python) != bool(c.environment.taskset),
         'the Python that has verifiers if, and only if, environment.name is "verifiers:TASKSET"',
         "correct one of the two keys", {"environment.name": "mine.py", "environment.python": "python3"},
         got="{c.environment.python!r} with {c.environment.name!r}"),
    _row("generator.serve", lambda c: bool(c.environment.taskset) and not c.has_agents,
         "true with a taskset of verifiers, whose harness calls an endpoint", "set the key to true",
         {"environment.name": "verifiers:mine", "environment.python": "python3"}),
    _row("environment.rows", lambda c: bool(c.environment.taskset) and c.environment.rows is not None,
         "no value with a taskset of verifiers, which has rows", "set data.train to the name of the taskset",
         {"environment.name": "verifiers:mine", "environment.python": "python3", "environment.rows": 3,
          "generator.serve": True}),
    _row("environment.max_turns", lambda c: c.has_agents and c.environment.max_turns != 8,
         "no value with generator.serve",
         "an agent calls as long as it has room, so set environment.max_rollout_tokens",
         {"generator.serve": True, "environment.name": "mine.py", "environment.max_turns": 4}),
    _row("sampling.deterministic", lambda c: c.has_agents and c.sampling.deterministic,
         "false with generator.serve", "agents call when they like, so leave one of the two keys out",
         {"generator.serve": True, "environment.name": "mine.py", "sampling.deterministic": True,
          "generator.backend": "fake"}),
    _row("environment.max_rollout_tokens",
         lambda c: c.has_agents and c.environment.max_rollout_tokens is not None
         and c.environment.max_rollout_tokens < c.sampling.max_prompt_tokens + c.sampling.max_new_tokens,
         "at least sampling.max_prompt_tokens + sampling.max_new_tokens, which one sequence may have",
         "raise it, or leave it out",
         {"generator.serve": True, "environment.name": "mine.py", "environment.max_rollout_tokens": 9}),
    _row("environment.rows", lambda c: c.environment.rows is not None and bool(c.data.train or c.data.source),
         "no value with data.train or data.source", "set only one of the two",
         {"environment.name": "mine.py", "environment.rows": 3, "data.train": "rows.jsonl"}),
    *(_row(key, lambda c, key=key, default=default: c.data.source is not None and value_of(c, key) != default,
           "no value with data.source", "your code says which rows come and in which order, so leave the key out",
           {"data.source": "mine.py:rows", key: value}, got="{x}")
      for key, default, value in (
          ("data.train", "", "rows.jsonl"), ("data.epochs", None, 2), ("data.shuffle", True, False),
          ("data.on_bad_row", "refuse", "skip"), ("data.curriculum.chance", "uniform", "failures"),
          ("data.curriculum.solved_at", None, 0.9), ("data.curriculum.unsolved_at", None, 0.1))),
    _row("data.on_long_prompt", lambda c: c.environment.is_set and c.data.on_long_prompt == "truncate",
         '"drop" with an environment', "only the environment may shorten its prompts, so leave the key out",
         {"environment.name": "mine.py", "data.on_long_prompt": "truncate"}),
)  # fmt: skip


_WHOLE = "each rank samples with the whole model"

_GENERATING = (
    *(_row(f"learner.{key}",
           lambda c, key=key, default=default: not c.learner.generate and getattr(c.learner, key) != default,
           "no value without learner.generate", f"set learner.generate, or leave learner.{key} out",
           {f"learner.{key}": value})
      for key, default, value in (("generate_groups", None, 2), ("generate_backend", "transformers", "vllm"))),
    *(_row(key, lambda c, key=key, needed=needed: c.learner.generate and value_of(c, key) != needed,
           f"{'no value' if needed is None else str(needed).lower()} with learner.generate",
           f"{why}, so leave one of the two keys out", {"learner.generate": True, key: value, **more})
      for key, needed, why, value, more in (
          ("weights.sync_every", 1, "every version that it samples with must be published", 2, {}),
          ("learner.fixed_lag", None, "it samples with its newest weights", 4, {}),
          ("sampling.deterministic", False, "its threads are not those of a generator", True,
           {"generator.backend": "fake"}),
          ("parallel.tensor", 1, _WHOLE, 2, {}),
          ("parallel.pipeline", 1, _WHOLE, 2, {}),
          ("parallel.experts", 1, _WHOLE, 2, {}))),
    _row("generator.backend", lambda c: c.learner.generate and is_code_name(c.generator.backend),
         "a built-in backend with learner.generate",
         "the learner samples with a built-in one, so leave one of the two keys out",
         {"learner.generate": True, "generator.backend": "mine.py:Engine"}),
    _row("learner.generate_backend", lambda c: c.learner_uses_vllm and not has_model(c.generator.backend),
         '"transformers" with generator.backend = {c.generator.backend!r}, with which nothing samples from a model',
         "leave one of the two keys out",
         {"learner.generate": True, "learner.generate_backend": "vllm", "generator.backend": "fake"}),
)  # fmt: skip


_CRITIC = (
    _row("critic.{x}", lambda c: None if c.loss.has_critic else changed_key(c.critic),
         'loss.advantage = "gae" with the section [critic]', "set it, or leave the section out",
         {"critic.lr": 0.001}, got="{c.loss.advantage!r}"),
    _row("critic.freeze_steps", lambda c: c.loss.has_critic and c.critic.freeze_steps >= c.learner.steps,
         "less than learner.steps = {c.learner.steps}", "the policy would never be trained, so lower it",
         {"loss.advantage": "gae", "critic.freeze_steps": 1000}),
    _row("critic.freeze_steps", lambda c: c.critic.freeze_steps > 0 and c.learner.fixed_lag is not None,
         "0 with learner.fixed_lag, which counts versions, and a frozen policy makes none",
         "leave one of the two out", {"loss.advantage": "gae", "critic.freeze_steps": 5, "learner.fixed_lag": 4}),
)  # fmt: skip

EXCLUSIONS: tuple[Contradiction, ...] = (
    *_STALENESS, *_CURRICULUM, *_SAMPLING, *_MACHINES, *_REWARDS, *_SCORERS, *_DISTILLATION, *_ENVIRONMENT,
    *_GENERATING, *_CRITIC,
)  # fmt: skip
"""Every combination of keys of different sections that is refused, in the order in which they are checked."""
