"""The table of backends: ``generator.backend`` -> the engine, built. What each can do is in ``config.backends``.

Called by the generator command, offline evaluation and the doctor. A new built-in backend is a module of its own, a
row here and a row there; a user's own (``module:Class``) is imported under the rules of ``process.user_code``. No torch
until a backend is built that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from async_rl.config.backends import (
    AUTO,
    AUTO_CANDIDATES,
    BACKENDS,
    BackendCapabilities,
    check_capabilities,
    has_model,
)
from async_rl.config.config import Config
from async_rl.errors import ConfigError, ModelError
from async_rl.generator.backend import Backend
from async_rl.process.user_code import digest_of, is_code_name, load_code


class BackendFactory(Protocol):
    """Builds a backend: a row of ``FACTORIES``, or the classmethod ``from_files`` of a user's own class."""

    def __call__(self, directory: Path, config: Config, *, device: str | None, load_pretrained: bool) -> Backend:
        """Build the backend.

        Args:
            directory: the model's and the tokenizer's files.
            device: the CUDA device to use; None: the CPU.
            load_pretrained: load the weights in ``directory`` as version 0, instead of waiting for ``activate``; asked
                only of backends that declare ``offline``.

        Raises:
            ModelError: the model is not one that the backend can run.
        """
        ...


def build_backend(
    config: Config,
    directory: Path,
    *,
    load_pretrained: bool = False,
    code_digests: Mapping[str, str] | None = None,
) -> Backend:
    """The engine that ``config.generator`` asks for, over the model files in ``directory``.

    Its weights come by ``activate``; with ``load_pretrained`` they are those in ``directory``, as version 0.

    Args:
        code_digests: the learner's digests of the user's own code; None: the code is this machine's user's.

    Raises:
        ConfigError: the backend is unknown here, can't do what the config asks for, or is code that is not allowed
            here, not there, not the learner's, or not a backend.
        ModelError: the model is not one that the backend can run.
    """
    name = resolve_backend(config, offline=load_pretrained)
    if is_code_name(name):
        backend_class = _own_class(name, config, code_digests)
        capabilities, factory = backend_class.capabilities, backend_class.from_files
    elif name in FACTORIES:
        capabilities, factory = BACKENDS[name], FACTORIES[name]
    else:
        raise ConfigError(f"generator.backend: expected one of {', '.join(FACTORIES)}, got {name!r}")
    if load_pretrained and not capabilities.offline:
        raise ConfigError(
            f"generator.backend: {name} can't load a model's own weights, as an evaluation without a learner needs; "
            f'set generator.backend = "auto"'
        )
    device = cuda_device(config) if capabilities.has_model else None
    return factory(directory, config, device=device, load_pretrained=load_pretrained)


def resolve_backend(config: Config, *, offline: bool = False) -> str:
    """The name of the backend to build: ``generator.backend``, with ``auto`` resolved for this machine."""
    if config.generator.backend != AUTO:
        return config.generator.backend
    for name in AUTO_CANDIDATES:
        needs = BACKENDS[name]
        if offline and not needs.offline:
            continue
        if needs.package and find_spec(needs.package) is None:
            continue
        if needs.needs_cuda_for_auto and cuda_device(config) is None:
            continue
        return name
    raise ModelError(f"generator.backend: none of {', '.join(AUTO_CANDIDATES)} can run on this machine")


def cuda_device(config: Config) -> str | None:
    """The CUDA device that the engine runs on: the first of ``generator.devices``, or else of the machine."""
    if not has_model(config.generator.backend):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return f"cuda:{config.generator.devices[0] if config.generator.devices else 0}"


def _own_class(name: str, config: Config, code_digests: Mapping[str, str] | None) -> Any:
    """Import the user's backend class and check it against the config.

    Raises:
        ConfigError: as ``build_backend`` says.
    """
    found = load_code(name, allowed=config.generator.allow_code, digest=digest_of(name, code_digests))
    capabilities = getattr(found, "capabilities", None)
    if not isinstance(capabilities, BackendCapabilities) or not callable(getattr(found, "from_files", None)):
        raise ConfigError(
            f"generator.backend: expected {name} to be a class with an attribute capabilities (BackendCapabilities) "
            f"and a classmethod from_files(directory, config, *, device, load_pretrained), got {found!r}"
        )
    try:
        check_capabilities(config, capabilities)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return found


def _build_fake(directory: Path, config: Config, *, device: str | None, load_pretrained: bool) -> Backend:
    from async_rl.generator.fake import FakeBackend

    backend = FakeBackend(config.generator, config.experimental.fake, answer_form=config.reward.type)
    if load_pretrained:
        backend.activate(0, {})
    return backend


def _build_transformers(directory: Path, config: Config, *, device: str | None, load_pretrained: bool) -> Backend:
    import torch

    from async_rl.generator.hf.backend import TransformersBackend

    engine, deterministic = config.generator, config.sampling.deterministic
    if engine.num_threads is not None:
        torch.set_num_threads(engine.num_threads)
    if deterministic:
        # One group runs at a time: more room would fetch leases that another generator could start on.
        engine = engine.model_copy(update={"batch_size": config.sampling.group_size})
    return TransformersBackend.from_files(
        directory,
        engine,
        device=device or "cpu",
        dtype=config.model.dtype,
        deterministic=deterministic,
        load_pretrained=load_pretrained,
        needs_template=config.data.prompt_format == "chat",
    )


def _build_vllm(directory: Path, config: Config, *, device: str | None, load_pretrained: bool) -> Backend:
    from async_rl.generator.vllm.backend import VllmBackend

    return VllmBackend.from_files(directory, config, device=device or "cpu")


FACTORIES: Mapping[str, BackendFactory] = MappingProxyType(
    {"vllm": _build_vllm, "transformers": _build_transformers, "fake": _build_fake}
)
"""The same names as in ``config.backends.BACKENDS``."""
