"""Checks of settings against each other, the number of ranks, and the config files of models."""

from __future__ import annotations

from async_rl.config.config import Config
from async_rl.config.generator import ENGINE_KEYS, unread_keys
from async_rl.config.learner import check_offload
from async_rl.config.parallel import Layout, check_sizes
from async_rl.data.chat import model_routing, model_settings, vocabulary_size
from async_rl.errors import ConfigError
from async_rl.launch.checks.finding import Finding
from async_rl.routes import check_balanced


def find_age(config: Config) -> Finding:
    """Return how old the trained data may be, in versions, and how old it will be where sampling is the faster side."""
    bound, run_ahead = config.queue.max_staleness, config.queue.run_ahead
    busy = config.lowest_bound + config.learner.versions_per_batch
    if 0 < bound < busy and not config.learner.generate:
        return Finding(
            "age of data", "WARN", f"queue.max_staleness = {bound}: generators wait while the learner trains a batch, "
            f"whose versions fill the bound (learner.updates_per_batch, learner.epochs_per_batch, weights.sync_every)",
            fix=f"set it to {busy}, or leave it if every batch shall be on-policy",
        )  # fmt: skip
    if config.learner.fixed_lag is not None or bound == 0:
        return Finding("age of data", "OK", f"every token {bound} versions old (queue.max_staleness)")
    if run_ahead == "auto" and config.queue.on_stale != "wait":
        age = "in the mean at most 2 + 1.4 L / S: L seconds for a group, S for a step (time/group_s, time/own_step_s)"
    elif isinstance(run_ahead, float | int):
        age = f"about {run_ahead + 1:g} (queue.run_ahead)"
    else:
        age = "nearly that old"
    found = f"at most {bound} versions (queue.max_staleness); where sampling is the faster side, {age}"
    return Finding("age of data", "OK", found)


def check_ranks(config: Config, num_ranks: int) -> None:
    """Check that ``num_ranks`` ranks of the learner can be divided as ``[parallel]`` says, and that they begin the
    groups of a step if nobody else can sample.

    Raises:
        ConfigError: they can't be divided so, or don't.
    """
    Layout.of(config.parallel, num_ranks)
    if config.queue.address is None and begins_too_few(config, num_ranks):
        needed = -(-config.learner.groups_per_step // num_ranks)
        raise ConfigError(
            f"learner.generate_groups: expected at least {needed} if no other generator samples, because {num_ranks} "
            f"{'rank' if num_ranks == 1 else 'ranks'} must begin learner.groups_per_step = "
            f"{config.learner.groups_per_step} groups, got {config.learner.generate_groups}; the first step would wait "
            f"for ever, so raise it or generator.count, or set queue.address, to which other generators connect"
        )


def begins_too_few(config: Config, num_ranks: int) -> bool:
    """Return whether the learner is the only one here that samples, and begins fewer groups than a step needs."""
    groups = config.learner.generate_groups
    is_alone = config.learner.generate and config.generator.count == 0
    return is_alone and groups is not None and groups * num_ranks < config.learner.groups_per_step


def check_division(config: Config) -> None:
    """Check that the models that are trained have heads, experts and layers that can be divided as ``[parallel]`` says.

    Raises:
        UserError: they have not.
    """
    own = (config.critic.path,) if config.loss.has_critic and config.critic.path is not None else ()
    for path in (config.model.path, *own):
        settings = model_settings(path)
        check_sizes(config.parallel, settings.get("text_config") or settings)


def check_offloading(config: Config, *, is_offline: bool = False) -> None:
    """Check that ``learner.offload`` means something here. Whether one of the commands sft, rm and dpo, which
    ``is_offline`` means, has a reference model is not checked.

    Raises:
        ConfigError: it does not.
    """
    if config.learner.offload != "none":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        check_offload(config.learner.offload, device, has_reference=is_offline or config.has_reference_model)


def check_engine_keys(config: Config) -> None:
    """Refuse keys of another inference engine than ``generator.backend``, which would have no effect.

    Nothing is refused with ``auto``, which may choose vLLM on one machine and transformers on another, and where the
    learner samples with vLLM. A generator logs what its engine does not read.

    Raises:
        ConfigError: such a key is set.
    """
    backend = config.generator.backend
    if not config.learner_uses_vllm and (keys := unread_keys(config, backend)):
        readers = " or ".join(dict.fromkeys(name for key in keys for name in ENGINE_KEYS[key]))
        raise ConfigError(
            f"{', '.join(keys)}: expected no value with generator.backend {backend}, which does not read it (only "
            f"{readers} does); leave it out, or set another backend"
        )


def check_stop_tokens(config: Config) -> None:
    """Check that the model can sample every token of ``sampling.stop_token_ids``.

    Raises:
        ConfigError: an id is outside the model's vocabulary.
    """
    size = vocabulary_size(config.model.path) if config.sampling.stop_token_ids else None
    if size is not None and (beyond := [one for one in config.sampling.stop_token_ids if one >= size]):
        raise ConfigError(
            f"sampling.stop_token_ids: expected ids below {size}, the vocabulary size of {config.model.path}, got "
            f"{beyond}; correct the ids"
        )


def check_routing(config: Config) -> None:
    """Check that the model has routes that can be replayed, if ``model.routing_replay`` is set, and experts that can
    be balanced, if ``loss.load_balancing_coef`` is.

    Raises:
        ModelError: it has none, or its routers are not understood.
    """
    if config.model.routing_replay:
        model_routing(config.model.path)
    if config.loss.load_balancing_coef:
        check_balanced(str(model_settings(config.model.path).get("model_type")))
