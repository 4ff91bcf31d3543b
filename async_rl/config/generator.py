"""The sections ``generator``, ``sampling`` and ``environment``, and the table of what each backend can do.

``generator`` says which inference engine samples, where, and how much at a time. ``sampling`` has the settings with
which training rollouts are sampled. ``environment`` says which environment plays rollouts of several turns. Evaluations
have sampling keys of their own, in ``eval``.

``BACKENDS`` describes the built-in backends, which the folder ``async_rl/generator`` implements. Config checks, doctor
and launch read this table before a backend is built. A user's own backend (``module:Class`` or ``file.py:Class``) is
not in the table: its class declares ``capabilities``, which are checked on the machine that imports it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from async_rl.config.contradictions import value_of
from async_rl.config.engine_arguments import check_engine_arguments
from async_rl.config.section import Free, OnResume, Section, check_served_address
from async_rl.process.user_code import ENVIRONMENTS, is_code_name
from async_rl.registry import offers

if TYPE_CHECKING:
    from async_rl.config.config import Config


FALLBACK = "transformers"
"""The backend to use where the configured one can't run. It runs on every machine, also offline."""


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    """What a backend can do. The default of each attribute is the least that a backend may promise.

    Attributes:
        deterministic: under ``sampling.deterministic`` the same lease and weights give the same tokens, bit for bit.
        scores_tokens: the backend implements ``generator.parity.ScoringBackend``, so that its log-probabilities can be
            compared with the learner's.
        offline: the backend can load the weights in a model's directory, for evaluations without a learner.
        reports_sampling_mask: the backend obeys ``sampling.top_p`` and ``top_k``, and reports which tokens they left.
        min_p: the same for ``sampling.min_p``; and the backend obeys ``eval.min_p``.
        stop_token_ids: the backend obeys ``sampling.stop_token_ids``.
        reports_routes: the backend reports the experts that computed each token, for leases that want routes.
        recomputes_kv: the backend obeys ``generator.kv_after_update = "recompute"``.
        splits_model: the backend obeys ``generator.tensor_parallel_size``.
        applies_adapters: versions may hold only LoRA adapters (``lora.publish = "adapters"``), under peft's names.
        has_model: the backend samples from the run's model. Without a model its log-probabilities are artificial, so
            the parity check is skipped, and no device is needed.
        min_temperature: the lowest ``sampling.temperature`` that the backend applies exactly.
        package: the Python package that the backend needs in addition to those of async-rl. Empty if none.
        package_version: the version of ``package`` that is supported, as a prefix such as ``0.32``.
        install: how to install ``package``.
        needs_cuda_for_auto: ``generator.backend = "auto"`` chooses this backend on machines with CUDA only.
    """

    deterministic: bool = False
    scores_tokens: bool = False
    offline: bool = False
    reports_sampling_mask: bool = False
    min_p: bool = False
    stop_token_ids: bool = False
    reports_routes: bool = False
    recomputes_kv: bool = False
    splits_model: bool = False
    applies_adapters: bool = False
    has_model: bool = True
    min_temperature: float = 0.0
    package: str = ""
    package_version: str = ""
    install: str = ""
    needs_cuda_for_auto: bool = False


BACKENDS: Mapping[str, BackendCapabilities] = MappingProxyType(
    {
        "vllm": BackendCapabilities(
            scores_tokens=True,
            offline=True,
            reports_sampling_mask=True,
            min_p=True,
            stop_token_ids=True,
            recomputes_kv=True,
            splits_model=True,
            applies_adapters=True,
            min_temperature=0.01,  # at lower settings vLLM samples at a higher temperature than requested
            package="vllm",
            package_version="0.32",
            install="pip install vllm==0.32.0 (with a GPU; without one see docs/engines.md)",
            needs_cuda_for_auto=True,
        ),
        "transformers": BackendCapabilities(
            deterministic=True,
            scores_tokens=True,
            offline=True,
            reports_sampling_mask=True,
            min_p=True,
            stop_token_ids=True,
            reports_routes=True,
            recomputes_kv=True,
            applies_adapters=True,
        ),
        "fake": BackendCapabilities(
            deterministic=True,
            offline=True,
            reports_sampling_mask=True,
            recomputes_kv=True,
            applies_adapters=True,  # it ignores all weights
            has_model=False,
        ),
    }
)

ENGINE_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "generator.memory_fraction": ("vllm",),
        "generator.double_buffer": ("vllm",),
        "generator.engine": ("vllm",),
        "experimental.vllm.kv_cache_bytes": ("vllm",),
        "experimental.vllm.enforce_eager": ("vllm",),
        "experimental.vllm.model_runner": ("vllm",),
    }
)
"""Keys that only some backends read, with the names of those. ``check_capabilities`` refuses further keys by what a
backend can do. All other keys of ``generator`` and ``sampling`` are read by every backend, by the loop around it or by
the queue."""

AUTO = "auto"
AUTO_CANDIDATES = ("vllm", "transformers")
"""``generator.backend = "auto"`` picks the first of these that runs on the generator's machine."""


def check_backend_name(name: str) -> None:
    """Refuse a value of ``generator.backend`` that names no backend.

    Raises:
        ValueError: ``name`` is not ``auto``, not in ``BACKENDS``, and not of the form ``module:Class``.
    """
    if name != AUTO and name not in BACKENDS and not is_code_name(name):
        known = ", ".join((AUTO, *BACKENDS))
        raise ValueError(
            f"expected one of {known}, or a backend of your own as module:Class or file.py:Class, got {name!r}; "
            f"correct the name"
        )


def known_capabilities(name: str) -> BackendCapabilities | None:
    """Return what the backend ``name`` can do. None for a user's backend, which is not imported here.

    ``auto`` chooses a backend later, so the result for ``auto`` promises only what every backend that it may choose can
    do, except ``splits_model``: whether it has it is known on the generator's machine.

    Raises:
        ValueError: no backend has this name.
    """
    check_backend_name(name)
    if name != AUTO:
        return BACKENDS.get(name)
    candidates = [BACKENDS[candidate] for candidate in AUTO_CANDIDATES]
    promised: dict[str, Any] = {}
    for flag in fields(BackendCapabilities):
        if isinstance(flag.default, bool):
            of_candidates = any if flag.name == "splits_model" else all
            promised[flag.name] = of_candidates(getattr(one, flag.name) for one in candidates)
    return BackendCapabilities(**promised)


def has_model(name: str) -> bool:
    """Return whether the backend ``name`` samples from the run's model. True is assumed for a user's backend."""
    capabilities = known_capabilities(name)
    return capabilities is None or capabilities.has_model


def missing_package(name: str, reason: str, *, key: str = "generator.backend") -> str:
    """Return the error message for a machine on which the package of the built-in backend ``name`` can't be imported.

    ``reason`` is the error of the import, and ``key`` the config key that names the backend.
    """
    needs = BACKENDS[name]
    return (
        f'{key} = "{name}" needs {needs.package} {needs.package_version}, which can\'t be imported here '
        f'({reason}): {needs.install}, or set {key} = "{FALLBACK}"'
    )


def check_capabilities(config: Config, capabilities: BackendCapabilities) -> None:
    """Refuse settings of ``config`` that its backend can't carry out.

    Args:
        config: the run's config.
        capabilities: what the backend can do, from ``BACKENDS`` or as declared by the user's own class.

    Raises:
        ValueError: the message names the key, the value and what was expected.
    """
    backend, generator = config.generator.backend, config.generator
    if config.sampling.deterministic and not capabilities.deterministic:
        able = " or ".join(name for name, one in BACKENDS.items() if one.deterministic)
        raise ValueError(
            f"sampling.deterministic: expected generator.backend {able}, got {backend!r}; this backend can't "
            f"repeat its samples bit for bit, so set another backend or sampling.deterministic = false"
        )
    must_fit = config.sampling.deterministic and capabilities.has_model
    if must_fit and generator.batch_size < config.sampling.group_size:
        raise ValueError(
            f"generator.batch_size: expected at least sampling.group_size = {config.sampling.group_size} with "
            f"sampling.deterministic, got {generator.batch_size}; raise it, so that a whole group fits into one batch"
        )
    masks = config.sampling.top_p < 1 or config.sampling.top_k > 0
    for key, value, is_asked, is_able, default in (
        ("generator.kv_after_update", '"recompute"', generator.kv_after_update == "recompute",
         capabilities.recomputes_kv, '"keep"'),
        ("sampling.top_p, sampling.top_k", f"{config.sampling.top_p}, {config.sampling.top_k}", masks,
         capabilities.reports_sampling_mask, "1, 0 (off)"),
        ("sampling.min_p", config.sampling.min_p, config.sampling.min_p > 0, capabilities.min_p, "0 (off)"),
        ("eval.min_p", config.eval.min_p, config.eval.min_p > 0, capabilities.min_p, "0 (off)"),
        *((f"eval.sets.{name}.min_p", own.min_p, own.min_p > 0, capabilities.min_p, "0 (off)")
          for name, own in config.eval.sets.items()),
        ("sampling.stop_token_ids", list(config.sampling.stop_token_ids), bool(config.sampling.stop_token_ids),
         capabilities.stop_token_ids, "[]"),
        ("model.routing_replay", "true", config.model.routing_replay, capabilities.reports_routes, "false"),
        ("generator.tensor_parallel_size", generator.tensor_parallel_size, generator.tensor_parallel_size > 1,
         capabilities.splits_model, "1"),
        ("lora.publish", '"adapters"', config.lora.publishes_adapters, capabilities.applies_adapters, '"merged"'),
    ):  # fmt: skip
        if is_asked and not is_able:
            raise ValueError(
                f"{key}: expected {default} with generator.backend {backend}, which supports nothing else, got "
                f"{value}; leave the key out, or set another backend"
            )
    sets = ((f"eval.sets.{name}.temperature", own.temperature) for name, own in config.eval.sets.items())
    for key, temperature in (
        ("sampling.temperature", config.sampling.temperature),
        ("sampling.temperature_end", config.sampling.temperature_end),
        ("eval.temperature", config.eval.temperature),
        *sets,
    ):
        if temperature and temperature < capabilities.min_temperature:
            raise ValueError(
                f"{key}: expected at least {capabilities.min_temperature} with generator.backend {backend}, got "
                f"{temperature}; raise it (evaluations may also set 0, for greedy decoding)"
            )


def unread_keys(config: Config, name: str) -> list[str]:
    """Return those of ``ENGINE_KEYS`` that do not have their default, and that the backend ``name`` does not read.

    Empty for a user's own backend, which gets the whole config.
    """
    found: list[str] = []
    for key, readers in ENGINE_KEYS.items():
        table, _, last = key.rpartition(".")
        section = value_of(config, table)
        if (
            name in BACKENDS
            and name not in readers
            and getattr(section, last) != type(section).model_fields[last].default
        ):
            found.append(key)
    return found


class GeneratorConfig(Section):
    """The inference engine of a generator. ``async-rl generator --set`` takes these keys, for one machine alone."""

    on_resume: ClassVar[OnResume] = OnResume.RECORDED

    backend: str = Field(
        default=AUTO,
        description=f"Inference engine: {', '.join(BACKENDS)}, or your own as module:Class or file.py:Class; auto is "
        "vllm on CUDA if vLLM is installed, else transformers.",
    )
    count: Free[int] = Field(default=1, ge=0, description="Number of generators that launch starts.")
    devices: Free[tuple[int, ...] | None] = Field(
        default=None,
        strict=False,
        description="CUDA devices, assigned in order to the generators that launch starts; if unset, the first ones "
        "that the learner leaves free.",
    )
    tensor_parallel_size: Free[int] = Field(
        default=1, ge=1, description="Number of devices over which vLLM splits the model of one generator."
    )
    batch_size: Free[int] = Field(
        default=64, ge=1, description="Maximum number of sequences that one generator samples at the same time."
    )
    max_concurrent_groups: Free[int | None] = Field(
        default=None,
        ge=1,
        description="Maximum number of groups that one generator samples at the same time; if unset, as many as fill "
        "generator.batch_size.",
    )
    prometheus_port: int | None = Field(
        default=None,
        ge=1024,
        le=60000,
        description="Port at which this generator serves metrics for Prometheus; only by --set of a generator that you "
        "start by hand, because those that launch starts follow log.prometheus_port.",
    )
    peer_port: int = Field(
        default=0,
        ge=0,
        le=65520,
        description="Port at which this generator sends weights to others (weights.peers). Generators of one machine "
        "take the first free one of this and the next 15; 0 is any free port.",
    )
    serve: bool = Field(
        default=False,
        description="Whether environment.name is an agent: a function that asks an HTTP endpoint of the generator for "
        "the model's answers. Each rollout is a session of its own there.",
    )
    memory_fraction: Free[float] = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Share of the device's memory that vLLM may use; the rest is for whatever else runs there, the "
        "generator's own process included (about 0.5 GB).",
    )
    double_buffer: Free[bool] = Field(
        default=True,
        description="Whether vLLM on one GPU receives broadcasts in the GPU's memory while it decodes, which takes the "
        "memory of one more version from its cache. If false, or with tensor_parallel_size above 1, it copies versions "
        "from host memory, in the pause.",
    )
    engine: dict[str, Any] = Field(
        default={},
        description="Arguments of vLLM's engine under their own names, as kv_cache_dtype or max_num_batched_tokens. "
        "Refused is what has a key here, what returns other log-probabilities than those sampled from, and what no GPU "
        "has run. The config that a queue server sends can't set what runs code or reads files.",
    )
    kv_after_update: Literal["keep", "recompute"] = Field(
        default="keep",
        description="What happens to the cached keys and values of running sequences after a weight update: keep goes "
        "on using them, recompute computes them with the new weights.",
    )
    num_threads: Free[int | None] = Field(
        default=None,
        ge=1,
        description="CPU threads of each generator; if unset, the cores divided by the processes of the run.",
    )
    allow_code: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Your own modules and files that generators on this machine may import, and the command that they "
        "may run. The config that a queue server sends can't add to them.",
    )

    @field_validator("backend")
    @classmethod
    def _is_known(cls, value: str) -> str:
        check_backend_name(value)
        return value

    @field_validator("engine")
    @classmethod
    def _may_reach_the_engine(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_engine_arguments(value)
        return value


class SamplingConfig(Section):
    """How training rollouts are sampled. Evaluations have their own keys in ``eval``."""

    group_size: int = Field(
        default=8, ge=1, le=1024, description="Number of rollouts that are sampled for each prompt."
    )
    temperature: float = Field(
        default=1.0, gt=0, description="Temperature by which logits are divided before sampling."
    )
    temperature_end: float | None = Field(
        default=None,
        gt=0,
        description="Temperature from the version sampling.temperature_steps on. Before that version it changes "
        "linearly, starting from sampling.temperature; if unset, the temperature stays constant.",
    )
    temperature_steps: int | None = Field(
        default=None,
        ge=1,
        description="Version of the weights at which sampling.temperature_end is reached; if unset, the last version "
        "of the run.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Sample only from the most likely tokens whose probabilities add up to this; 1 means all tokens.",
    )
    top_k: int = Field(
        default=0, ge=0, description="Sample only from this many most likely tokens; 0 means all tokens."
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Sample only from tokens whose probability is at least this share of the most likely token's, "
        "before top_p and top_k; 0 means all tokens.",
    )
    max_new_tokens: int = Field(
        default=3584,
        ge=1,
        description="Maximum number of tokens that the model may generate in one rollout, over all its turns.",
    )
    max_prompt_tokens: int = Field(
        default=512,
        ge=1,
        description="Maximum number of tokens of a prompt; data.on_long_prompt decides about longer ones.",
    )
    stop: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Strings that end a rollout when the model writes them; they stay in its text.",
    )
    stop_token_ids: tuple[int, ...] = Field(
        default=(),
        strict=False,
        description="Ids of tokens that end a rollout, or a turn of it, in addition to the model's own end tokens. "
        "They stay in the rollout and its text, and are trained on.",
    )
    deterministic: bool = Field(
        default=False,
        description="Whether a group's rollouts are the same bit for bit, whichever generator samples them. Each "
        "generator then samples one group at a time, which is slow.",
    )

    @field_validator("stop")
    @classmethod
    def _are_texts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError(
                f"expected texts that are not empty, got {list(value)}; every answer would end at once, so leave the "
                f"empty one out"
            )
        return value

    @field_validator("stop_token_ids")
    @classmethod
    def _are_ids(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(one < 0 for one in value):
            raise ValueError(f"expected token ids of at least 0, got {list(value)}; correct them")
        return value


VERIFIERS = "verifiers:"
"""How ``environment.name`` begins if it names a taskset of verifiers."""
MAX_SESSION_CALLS = 1024
"""Maximum number of calls of an agent in one rollout."""


OtherSettings = Literal["replace", "untrained", "refuse"]
"""What becomes of an agent's call that would sample otherwise than the run."""


class EnvironmentConfig(Section):
    """Rollouts of several turns: your own code, the environment, answers the model and scores the rollout."""

    name: str = Field(
        default="",
        description="The environment: file.py, file.py:name, module, module:name, or a name for which an installed "
        "package offers one; or verifiers:TASKSET, a taskset of the package verifiers (generator.serve). Every "
        "generator must list it in generator.allow_code. If empty, a rollout is one answer, scored by reward.type.",
    )
    command: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="An agent that is a program, with its arguments, instead of environment.name (generator.serve). It "
        "finds the endpoint in OPENAI_BASE_URL, its task in the JSON file ASYNC_RL_TASK, and reward.type judges its "
        "last answer. Every generator must list it in generator.allow_code, as one text.",
    )
    python: str = Field(
        default="",
        description="The Python of an environment in which verifiers 0.4 is installed, for environment.name = "
        '"verifiers:TASKSET". Every generator must list both in generator.allow_code, as one text: PYTHON '
        "verifiers:TASKSET.",
    )
    sandbox: Free[Literal["loopback", "network", "off"]] = Field(
        default="loopback",
        description="How programs of agents (environment.command, `async-rl agent`) run: loopback isolates them, and "
        "they reach their endpoint alone; network leaves them the machine's network; off isolates nothing. Where that "
        "can't be had, launch warns.",
    )
    relay: Free[str | None] = Field(
        default=None,
        description="Address of a relay, as in tcp://10.0.0.1:5560, instead of environment.name: agents are programs "
        "that take sessions by `async-rl agent`, on any machine (generator.serve). launch starts the relay there; "
        "generators and agents connect to it. Beyond loopback it needs queue.keys.",
    )
    max_turns: int = Field(
        default=8, ge=1, le=1024, description="Maximum number of answers of the model in one rollout."
    )
    max_turn_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of tokens of one answer of the model; if unset, what is left of "
        "sampling.max_new_tokens.",
    )
    other_settings: OtherSettings = Field(
        default="replace",
        description="What becomes of an agent's call that names another temperature, top_p, top_k or min_p than the "
        "run's (generator.serve): replace samples it with the run's, untrained samples it as asked and trains nothing "
        "of it, refuse answers with an error. Penalties and their like are left out, or refused.",
    )
    untrained_models: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Model names of agents' calls, as of a judge or a user simulator, that the policy answers and is "
        "not trained on (generator.serve). The policy's own are policy and the name of model.path's folder; others are "
        "refused.",
    )
    timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Time limit in seconds for one call of reset or step. A rollout whose call exceeds it fails. With "
        "generator.serve it is the limit for the time in which an agent makes no call.",
    )
    session_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="Time limit in seconds for one rollout of an agent (generator.serve).",
    )
    max_rollout_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of tokens of all sequences of one rollout of an agent together (generator.serve). "
        "A call that goes on from an earlier one adds only what is new; a rewritten history counts anew. If unset, "
        "sampling.max_prompt_tokens + sampling.max_new_tokens.",
    )
    first_reset_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="Time limit in seconds for the first reset of an environment's process, which may import modules "
        "while other processes do the same; for an agent, until its first call.",
    )
    rows: int | None = Field(
        default=None,
        ge=1,
        description="Number of empty rows to train on instead of data.train, for environments that make their own "
        "tasks.",
    )
    extra: dict[str, Any] = Field(
        default={},
        description="The environment's own settings, which it receives in extra_info; for a taskset of verifiers the "
        "config of its environment.",
    )

    @field_validator("name")
    @classmethod
    def _is_code(cls, value: str) -> str:
        if value == VERIFIERS:
            raise ValueError("expected the taskset's id behind verifiers:, got nothing; add it")
        if value and not value.startswith(VERIFIERS) and not is_code_name(value, needs_attribute=False):
            known = ", ".join((*offers(ENVIRONMENTS), "file.py", "file.py:name", "module"))
            raise ValueError(f"expected {known} or module:name, got {value!r}; correct the name")
        return value

    @field_validator("relay")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        return None if value is None else check_served_address(value)

    @property
    def is_set(self) -> bool:
        """Whether rollouts are played with an environment."""
        return bool(self.name or self.command or self.relay)

    @property
    def taskset(self) -> str:
        """The id of a taskset of verifiers; empty if ``name`` is none."""
        return self.name.removeprefix(VERIFIERS) if self.name.startswith(VERIFIERS) else ""

    @property
    def user_code(self) -> str:
        """The name of the user's code, which processes of the environment import; empty if they run a program."""
        return "" if self.taskset else self.name

    @property
    def program(self) -> tuple[str, ...]:
        """The program that plays, with its arguments, as ``generator.allow_code`` must have it; empty if none does."""
        return (self.python, self.name) if self.taskset else self.command

    @property
    def program_key(self) -> str:
        """The key that names the program."""
        return "environment.python" if self.taskset else "environment.command"

    @property
    def key(self) -> str:
        """The key that names what plays."""
        return "environment.name" if self.name else "environment.relay" if self.relay else "environment.command"

    @property
    def shown(self) -> str:
        """The environment's name, command or relay, as text."""
        return self.name or self.relay or shlex.join(self.command)
