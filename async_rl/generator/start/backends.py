"""The table of built-in inference engines, and the function that builds the one of a config. No torch.

``build_backend`` builds the engine that ``generator.backend`` names, for the generator command, offline evaluation and
the doctor. ``config.generator.BACKENDS`` says what each built-in backend can do. A new built-in backend needs a module,
a row in ``FACTORIES`` and a row in ``BACKENDS``. A user's own backend (``module:Class``) is imported under the rules of
``process.user_code``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from async_rl.config.config import Config
from async_rl.config.generator import (
    AUTO,
    AUTO_CANDIDATES,
    BACKENDS,
    BackendCapabilities,
    check_capabilities,
    has_model,
    unread_keys,
)
from async_rl.errors import ConfigError, ModelError
from async_rl.generator.backend import Backend, BackendFactory
from async_rl.process.user_code import digest_of, is_code_name, load_code
from async_rl.weights.adapters import link_base

logger = logging.getLogger(__name__)


def build_backend(
    config: Config,
    directory: Path,
    *,
    load_pretrained: bool = False,
    can_sleep: bool = False,
    code_digests: Mapping[str, str] | None = None,
) -> Backend:
    """Build the engine that ``config.generator`` names, for the model files in ``directory``.

    The engine has no weights until ``activate``. With ``load_pretrained`` it has those in ``directory``, as version 0.
    If versions hold only adapters, links to the frozen weights, those of ``model.path``, are added to ``directory``.

    Args:
        can_sleep: the engine lends its device to others at times. It is a ``SleepingBackend`` if it needs to know.
        code_digests: the learner's digests of the user's own code; None if this machine's user chose the code.

    Raises:
        ConfigError: the backend is unknown or can't do what the config requires; or it is the user's own code, and that
            is not allowed here, missing, different from the learner's, or not a backend.
        ModelError: the backend can't run the model, or the frozen weights are not those of the learner.
    """
    name = resolve_backend(config)
    if is_code_name(name):
        backend_class = _own_class(name, config, code_digests)
        capabilities, factory = backend_class.capabilities, backend_class.from_files
    elif name in FACTORIES:
        capabilities, factory = BACKENDS[name], (SLEEPING if can_sleep else FACTORIES)[name]
    else:
        raise ConfigError(f"generator.backend: expected one of {', '.join(FACTORIES)}, got {name!r}; correct it")
    if load_pretrained and not capabilities.offline:
        raise ConfigError(
            f"generator.backend: {name} can't load a model's own weights, as an evaluation without a learner needs; "
            f'set generator.backend = "auto"'
        )
    try:
        check_capabilities(config, capabilities)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if keys := unread_keys(config, name):
        logger.warning("generator.backend: %s does not read %s, so these have no effect here", name, ", ".join(keys))
    if config.lora.publishes_adapters and capabilities.has_model and not load_pretrained:
        link_base(directory, config.model.path)
    device = cuda_device(config) if capabilities.has_model else None
    return factory(directory, config, device=device, load_pretrained=load_pretrained)


def resolve_backend(config: Config) -> str:
    """Return the name of the backend to build.

    If ``generator.backend`` is ``auto``, choose one that suits this machine.
    """
    if config.generator.backend != AUTO:
        return config.generator.backend
    for name in AUTO_CANDIDATES:
        needs = BACKENDS[name]
        if needs.package and find_spec(needs.package) is None:
            continue
        if needs.needs_cuda_for_auto and cuda_device(config) is None:
            continue
        return name
    raise ModelError(
        f"generator.backend: none of {', '.join(AUTO_CANDIDATES)} can run on this machine; install one of "
        f"these packages"
    )


def cuda_device(config: Config) -> str | None:
    """Return the engine's CUDA device by its name in torch, for example ``cuda:0``. Return None for the CPU.

    The device is the first one of ``generator.devices``, or the machine's first one if that key is not set.
    """
    if not has_model(config.generator.backend):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return f"cuda:{config.generator.devices[0] if config.generator.devices else 0}"


def _own_class(name: str, config: Config, code_digests: Mapping[str, str] | None) -> Any:
    """Import the user's own backend class.

    Raises:
        ConfigError: as ``build_backend`` says.
    """
    found = load_code(name, allowed=config.generator.allow_code, digest=digest_of(name, code_digests))
    capabilities = getattr(found, "capabilities", None)
    if not isinstance(capabilities, BackendCapabilities) or not callable(getattr(found, "from_files", None)):
        raise ConfigError(
            f"generator.backend: expected {name} to be a class with an attribute capabilities (BackendCapabilities) "
            f"and a classmethod from_files(directory, config, *, device, load_pretrained), got {found!r}; "
            f"correct the class or the name"
        )
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
        # One group runs at a time. With more slots the loop would request leases that another generator could start.
        engine = engine.model_copy(update={"batch_size": config.sampling.group_size})
    return TransformersBackend.from_files(
        directory,
        engine,
        device=device or "cpu",
        dtype=config.model.dtype,
        deterministic=deterministic,
        load_pretrained=load_pretrained,
        needs_template=config.data.prompt_format == "chat",
        template_arguments=config.data.template_arguments,
        adapters=config.lora if config.lora.publishes_adapters and not load_pretrained else None,
    )


def _build_vllm(
    directory: Path, config: Config, *, device: str | None, load_pretrained: bool, can_sleep: bool = False
) -> Backend:
    from async_rl.generator.hf.causal_model import stored_weights
    from async_rl.generator.vllm.backend import VllmBackend

    backend = VllmBackend.from_files(directory, config, device=device or "cpu", can_sleep=can_sleep)
    if load_pretrained:
        backend.activate(0, stored_weights(directory, backend.dtype))
    return backend


FACTORIES: Mapping[str, BackendFactory] = MappingProxyType(
    {"vllm": _build_vllm, "transformers": _build_transformers, "fake": _build_fake}
)
"""The same names as in ``config.generator.BACKENDS``."""
SLEEPING: Mapping[str, BackendFactory] = MappingProxyType({**FACTORIES, "vllm": partial(_build_vllm, can_sleep=True)})
"""The same backends for devices that do other work at times. Those that compute only in ``step`` are no different."""
