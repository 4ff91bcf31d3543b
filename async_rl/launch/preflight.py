"""Checks before a run starts, except those of capacity and of scorers: address, devices, data, model, lengths, reward,
environment. Nothing is written or started.

``checks.CHECKS`` says which of them are made when. Each error message names the config key that the user must correct.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain

from async_rl.config.config import Config
from async_rl.config.generator import ENGINE_KEYS, has_model, known_capabilities, missing_package, unread_keys
from async_rl.config.learner import check_offload
from async_rl.config.parallel import Layout, check_sizes
from async_rl.config.queue import QueueConfig
from async_rl.data.chat import (
    check_model,
    check_precision,
    context_length,
    count_unknown,
    load_tokenizer,
    model_directory,
    model_routing,
    model_settings,
    render_prompt,
    vocabulary_size,
)
from async_rl.data.dataset import LoadedRows, Row, load_rows_of, load_train_rows
from async_rl.data.vocabulary import check_embedded, num_beyond
from async_rl.errors import AddressError, ConfigError, DataError, ModelError
from async_rl.launch.agent_trial import try_agent
from async_rl.launch.capacity import has_gpu
from async_rl.launch.environment_trial import try_environment
from async_rl.launch.user_code_trial import try_reward
from async_rl.net.address import advertised_address, check_address, host_towards, refuse_open_bind
from async_rl.net.keys import ServerKeys, client_keys_of
from async_rl.net.streams import listening_socket
from async_rl.process.child import DEVICES_ARE_DEALT
from async_rl.process.user_code import check_allowed, check_allowed_command, code_digests
from async_rl.queue.server.settings import settings_of
from async_rl.rewards.judge import judge_reward
from async_rl.rewards.registry import build_reward
from async_rl.run.directory import check_writable
from async_rl.run.reuse import check_run_dir
from async_rl.weights.collective.libraries import COLLECTIVES

NUM_TOKENIZED = 100
"""Number of prompts in which ``check_tokenizer`` looks for text that the tokenizer does not know."""


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
    own = (config.critic.path,) if config.has_critic_model and config.critic.path is not None else ()
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


def check_judge(config: Config) -> None:
    """Check the files and the key of ``reward.judge``, if a reward asks a judge and this machine samples. The judge
    itself may be away.

    Raises:
        ConfigError: one of them is missing or can't be read.
    """
    if config.reward.asks_judge and config.samples_here:
        judge_reward(config, 1.0).close()


def check_policy(config: Config, rows: Sequence[Row]) -> None:
    """Check that there is a model that can be trained at ``model.path``, and renders the first prompt of ``rows``.

    Raises:
        ModelError: as ``data.chat.check_model``.
    """
    messages = rows[0].messages if rows else ()
    check_model(config.model.path, messages, dtype=config.model.dtype, arguments=config.data.template_arguments)


def check_critic(config: Config) -> None:
    """Check that there is a model that can be trained at ``critic.path``, if a critic begins as that model.

    Raises:
        ModelError: there is none, or it can't be trained at this precision.
    """
    if not config.has_critic_model or config.critic.path is None:
        return
    try:
        check_precision(model_directory(config.critic.path), config.model.dtype)
    except ModelError as error:
        raise ModelError(f"critic.path: {str(error).removeprefix('model.path: ')}") from None


def check_queue(config: Config) -> None:
    """Check that a queue server has training data and a run directory that can be written.

    The server itself checks the content of the data and its address before it writes a file.

    Raises:
        UserError: a check failed. The later checks are not made.
    """
    check_train_is_set(config)
    check_writable(check_run_dir(config, fresh=False).path, "run.dir")


def check_keys(config: Config, *, is_server: bool) -> None:
    """Check that this process can read the key files in the directory ``queue.keys``. Do nothing if the key is unset.

    The learner's key file is always checked. The queue server's key file is checked if ``is_server``.

    Raises:
        KeyFileError: a key file is missing or malformed, or other users can read it.
    """
    client_keys_of(config.queue.keys)
    if is_server and config.queue.keys is not None:
        ServerKeys.load(config.queue.keys)


def check_train_is_set(config: Config) -> None:
    """Check that ``data.train`` is set, except if the environment generates its tasks without dataset rows.

    Raises:
        ConfigError: the key is unset.
    """
    if not config.data.train and not config.makes_up_rows:
        raise ConfigError("data.train: expected a file or data set, but the key is unset; set data.train")


def check_code(config: Config) -> None:
    """Check that the user's code that the config names exists, and that generators on this machine may import theirs.

    Raises:
        ConfigError: the code does not exist, or ``generator.allow_code`` does not list it.
    """
    code_digests(config.recorded_code_names)
    if config.samples_here:
        check_allowed(config.code_names, config.generator.allow_code)
        environment = config.environment
        check_allowed_command(environment.program, config.generator.allow_code, key=environment.program_key)


def check_data(config: Config) -> LoadedRows:
    """Check that the training set and all evaluation sets can be loaded. Return the training rows.

    Raises:
        ConfigError: ``data.train`` is not set.
        DataError: a file is missing, or a row is malformed. The message names the config key, the file and the line.
    """
    check_train_is_set(config)
    key = "data.train"
    try:
        train = load_train_rows(config)
        for name, source in config.data.eval.items():
            key = f"data.eval.{name}"
            load_rows_of(config, source)
    except DataError as error:
        raise DataError(f"{key}: {error}") from None
    return train


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


def check_lengths(config: Config, rows: Sequence[Row]) -> None:
    """Check that the longest rollout fits the learner and the model, that a step of the largest groups fits the queue,
    and that not all prompts of ``rows`` are too long.

    Raises:
        ConfigError: ``learner.max_tokens``, ``queue.max_bytes``, the model's context length or
            ``sampling.max_prompt_tokens`` is too small.
    """
    sampling, limit = config.sampling, config.longest_sequence
    longest = sampling.max_prompt_tokens + sampling.max_new_tokens
    what = f"sampling.max_prompt_tokens + max_new_tokens = {sampling.max_prompt_tokens} + {sampling.max_new_tokens}"
    if longest > limit:
        raise ConfigError(
            f"{config.longest_sequence_keys}: expected at least {longest} ({what}), got {limit}; raise "
            f"learner.max_tokens to {-(-longest // config.parallel.sequence)}, or lower the other two"
        )
    settings_of(config)  # raises if one step does not fit
    if not has_model(config.generator.backend):
        return
    context = context_length(config.model.path)
    if context is not None and longest > context:
        room = context - sampling.max_new_tokens
        lower = f"lower sampling.max_prompt_tokens to at most {room}, or lower" if room > 0 else "lower"
        raise ConfigError(
            f"{what} = {longest} tokens: expected at most {context}, the model's context length "
            f"(max_position_embeddings in its config.json); {lower} sampling.max_new_tokens"
        )
    if config.data.on_long_prompt == "drop" and rows and all(row.messages for row in rows):
        _check_prompts(config, rows)


def _check_prompts(config: Config, rows: Sequence[Row]) -> None:
    is_chat = config.data.prompt_format == "chat"
    tokenizer = load_tokenizer(config.model.path, needs_template=is_chat)
    limit, shortest = config.sampling.max_prompt_tokens, None
    for row in rows:
        size = len(render_prompt(tokenizer, row.messages, config.data.template_arguments))
        if size <= limit:
            return
        shortest = size if shortest is None else min(shortest, size)
    raise ConfigError(
        f"sampling.max_prompt_tokens: none of the {len(rows)} prompts of data.train has at most {limit} tokens (the "
        f'shortest has {shortest}); raise it, shorten data.system_prompt, or set data.on_long_prompt = "truncate"'
    )


def check_tokenizer(config: Config, rows: Sequence[Row]) -> str:
    """Check that the model's embedding has a row for each token of the prompts of ``rows`` and of the evaluations.

    Return a warning if the tokenizer does not know all text of the first prompts of ``rows``; empty if it does.

    Raises:
        ModelError: it has not.
    """
    prompts = [row.messages for row in rows[:NUM_TOKENIZED] if row.messages]
    if not prompts or not has_model(config.generator.backend):
        return ""
    path, arguments = config.model.path, config.data.template_arguments
    tokenizer = load_tokenizer(path, needs_template=config.data.prompt_format == "chat")
    if num_beyond(tokenizer, num_rows := vocabulary_size(path)):
        held_out = [load_rows_of(config, source).rows for source in config.data.eval.values()]
        for row in (one for one in chain(rows, *held_out) if one.messages):
            check_embedded(render_prompt(tokenizer, row.messages, arguments), num_rows, tokenizer, "data")
    unknown, total = count_unknown(tokenizer, prompts, arguments)
    if not unknown:
        return ""
    which = "prompt" if len(prompts) == 1 else f"{len(prompts)} prompts"
    return (
        f"{unknown:,} of {total:,} tokens of the first {which} are unknown to the tokenizer ({tokenizer.unk_token!r}), "
        f"so the model can't read that text; use a model whose tokenizer knows the characters of your data, or change "
        f"the data"
    )


def check_own_reward(config: Config, rows: Sequence[Row]) -> None:
    """Let the user's reward functions score answers to the first rows, if generators on this machine call them.

    Raises:
        ConfigError: a reward function fails, or returns something other than it must.
    """
    is_own = any(kind.is_user_code for kind in config.reward.types)
    if is_own and config.samples_here and not config.environment.is_set:
        try_reward(config, [(row.messages, row.reward_data) for row in rows])


def check_own_environment(config: Config, rows: Sequence[Row]) -> str:
    """Let the user's environment play the first rows, if generators on this machine play it.

    Return a warning if it fails on some of them only, else an empty text.

    Raises:
        ConfigError: on each row the environment fails, or returns something other than it must.
    """
    if not config.environment.is_set or config.environment.relay is not None or not config.samples_here:
        return ""
    return try_agent(config, rows) if config.has_agents else try_environment(config, rows)


def check_code_reward(config: Config) -> None:
    """If the reward runs programs, check that this machine can isolate them, or that the configured verifier answers.

    Raises:
        SandboxError: the check failed, and ``reward.code.allow_unsafe`` is false.
    """
    if config.reward.runs_programs:
        build_reward(config).close()


def check_bindable(queue: QueueConfig, *, insecure: bool) -> None:
    """Check that a queue server on this machine could bind ``queue.address`` now. Do nothing if the key is unset.

    Raises:
        AddressError: the address is in use, belongs to another machine, can't be reached by others, or can be reached
            from the network although there are no keys and ``insecure`` is false.
    """
    address = queue.address
    if address is None:
        return
    check_reachable(queue, insecure=insecure)
    host, port = check_address(address)
    if host in {name for _, name in socket.if_nameindex()}:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, port))
        except OSError as error:
            raise AddressError(
                f"queue.address: can't bind {address}: {error.strerror or error}; choose another port or an address "
                f"of this machine, or leave queue.address out for any free port on loopback"
            ) from None


def check_reachable(queue: QueueConfig, *, insecure: bool) -> None:
    """Check that others can reach ``queue.address``, and only those with keys unless ``insecure``. Do nothing if it is
    unset.

    Raises:
        AddressError: they can't, or others can, too.
    """
    if queue.address is not None:
        refuse_open_bind(queue.address, insecure=insecure, has_keys=queue.keys is not None)
        advertised_address(queue.address, queue.advertise)


def check_weights_ports(config: Config) -> None:
    """Check that two ports of ``weights.port`` are free on this machine. Do nothing if the key is unset.

    Raises:
        AddressError: fewer than two are free, or this machine has no route to the queue server.
    """
    ports = config.weights.ports
    if ports is not None:
        host = host_towards(others_address(config.queue))
        with listening_socket(host, ports), listening_socket(host, ports):
            pass


def others_address(queue: QueueConfig) -> str:
    """Return the address by which learner and generators connect to the queue server of this config.

    Raises:
        AddressError: other machines could not connect to that address.
    """
    return advertised_address(queue.address or "tcp://127.0.0.1:0", queue.advertise)


def serves_here(config: Config) -> bool:
    """Return whether the queue server is, or will be, on this machine: its host is, so that it could be bound here.

    Raises:
        AddressError: the host's name can't be resolved.
    """
    if config.queue.address is None:
        return True
    host, _ = check_address(config.queue.address)
    if host == "*" or host in {name for _, name in socket.if_nameindex()}:
        return True
    try:
        family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise AddressError(
            f"queue.address: expected a host that this machine can resolve, got {host!r}: {error}; correct the "
            f"host's name"
        ) from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(place)
        except OSError:
            return False
    return True


def check_devices(config: Config, *roles: str) -> None:
    """Check that the CUDA devices in the config exist, and that there is one if ``weights.transport`` needs CUDA.

    ``roles`` are the config's sections whose key ``devices`` is checked: ``learner``, ``generator``.

    Raises:
        ConfigError: a device does not exist. Without this check the run would go on without the device.
    """
    named = {f"{role}.devices": getattr(config, role).devices for role in roles}
    named = {key: devices for key, devices in named.items() if devices is not None}
    collective = COLLECTIVES.get(config.weights.transport)  # None for "auto" and "tcp"
    needs_cuda = collective is not None and collective.needs_cuda
    if not named and not needs_cuda:
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if needs_cuda and not count:
        raise ConfigError(
            f'weights.transport: "{config.weights.transport}" needs CUDA devices, but torch finds none; set it to '
            f'"auto", "gloo" or "tcp"'
        )
    for key, devices in named.items():
        if not count:
            raise ConfigError(
                f"{key}: expected CUDA devices {list(devices)}, but torch finds none here; leave {key} out to run on "
                f"the CPU, or install a CUDA build of torch"
            )
        if DEVICES_ARE_DEALT not in os.environ and max(devices) >= count:
            raise ConfigError(
                f"{key}: expected indices below {count}, the number of CUDA devices here, got {list(devices)}; correct "
                f"{key}"
            )


def check_engines(config: Config, *roles: str) -> None:
    """Check that the inference engines (such as vLLM) of these roles are installed, if they sample on this machine.

    Raises:
        ModelError: an engine's package is missing.
    """
    chosen = {"learner": ("learner.generate_backend", config.learner.generate_backend, config.learner.generate),
              "generator": ("generator.backend", config.generator.backend, config.generator.count > 0)}  # fmt: skip
    for key, name, is_used in (chosen[role] for role in roles):
        needs = known_capabilities(name)
        if is_used and needs is not None and needs.package and find_spec(needs.package) is None:
            raise ModelError(missing_package(name, "there is no such package", key=key))


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


def check_compiler(config: Config) -> None:
    """Check that this machine has the compiler that ``learner.compile`` needs, if it is set.

    On CUDA torch's compiler generates programs for Triton, which needs a C compiler; on the CPU it generates C++.

    Raises:
        ConfigError: there is none.
    """
    if not config.learner.compile:
        return
    variable, language, names = ("CC", "C", ("gcc", "clang")) if has_gpu() else ("CXX", "C++", ("g++",))
    named = os.environ.get(variable)
    wanted = (named,) if named else names
    if not any(shutil.which(name) for name in wanted):
        raise ConfigError(
            f"learner.compile: expected a {language} compiler ({' or '.join(wanted)}), found none; install one, name "
            f"it in the environment variable {variable}, or leave the key out"
        )


def check_routing(config: Config) -> None:
    """Check that the model has routes that can be replayed, if ``model.routing_replay`` is set.

    Raises:
        ModelError: it has none, or its routers are not understood.
    """
    if config.model.routing_replay:
        model_routing(config.model.path)


def check_fake_vocabulary(config: Config) -> None:
    """Check that a backend without a model (``fake``) samples only token ids that the learner's model knows.

    Raises:
        ConfigError: ``experimental.fake.vocab_size`` is larger than the model's vocabulary.
    """
    if config.own_vocab_size is None:
        return
    known = vocabulary_size(config.model.path)
    if known is not None and config.own_vocab_size > known:
        raise ConfigError(
            f"experimental.fake.vocab_size: expected at most {known}, the model's vocab_size, got "
            f"{config.experimental.fake.vocab_size}; lower it"
        )
