"""What each ``generator.backend`` can do. No torch: config checks, the doctor and launch read it before one is built.

``BACKENDS`` describes the built-in backends; ``generator.backend`` builds them. The name of a user's own backend
(``module:Class`` or ``file.py:Class``) is not in the table: its class declares ``capabilities``, which are checked on
the machine that imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from async_rl.process.user_code import is_code_name

if TYPE_CHECKING:
    from async_rl.config.config import Config

FALLBACK = "transformers"
"""Runs on every machine, with a learner or offline: what to use where the configured backend can't be."""


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    """What the rest of the program may rely on. The defaults promise the least.

    Attributes:
        deterministic: under ``sampling.deterministic`` the same lease and weights give the same tokens, bit for bit.
        scores_tokens: it implements ``generator.parity.ScoringBackend``, so learner and engine can be compared.
        offline: it can load the weights in a model's directory, for evaluations without a learner.
        reports_sampling_mask: it obeys ``sampling.top_p`` and ``top_k``, and says which tokens they left.
        recomputes_kv: it obeys ``generator.kv_after_update = "recompute"``.
        has_model: it samples from the run's model. Without a model its log-probabilities are artificial, so the parity
            check is skipped, and no device is needed.
        min_temperature: the lowest ``sampling.temperature`` that it applies exactly.
        package: the Python package that it needs, beyond those of async-rl; empty: none.
        package_version: the version of ``package`` that it is made for, a prefix such as ``0.32``.
        install: how to install ``package``.
        needs_cuda_for_auto: ``generator.backend = "auto"`` picks it on machines with CUDA only.
    """

    deterministic: bool = False
    scores_tokens: bool = False
    offline: bool = False
    reports_sampling_mask: bool = False
    recomputes_kv: bool = False
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
            reports_sampling_mask=True,
            recomputes_kv=True,
            min_temperature=0.01,  # below it vLLM samples hotter than it was asked to
            package="vllm",
            package_version="0.32",
            install='pip install "async-rl[vllm]" (with a GPU; without one see docs/vllm.md)',
            needs_cuda_for_auto=True,
        ),
        "transformers": BackendCapabilities(
            deterministic=True, scores_tokens=True, offline=True, reports_sampling_mask=True, recomputes_kv=True
        ),
        "fake": BackendCapabilities(
            deterministic=True, offline=True, reports_sampling_mask=True, recomputes_kv=True, has_model=False
        ),
    }
)

AUTO = "auto"
AUTO_CANDIDATES = ("vllm", "transformers")
"""``generator.backend = "auto"`` picks the first of these that runs on the generator's machine."""


def check_backend_name(name: str) -> None:
    """Refuse a name that no backend has.

    Raises:
        ValueError: it is neither ``auto``, nor in ``BACKENDS``, nor of the form ``module:Class``.
    """
    if name != AUTO and name not in BACKENDS and not is_code_name(name):
        known = ", ".join((AUTO, *BACKENDS))
        raise ValueError(f"expected one of {known}, or your own as module:Class or file.py:Class, got {name!r}")


def known_capabilities(name: str) -> BackendCapabilities | None:
    """What is known of a backend before it is loaded; None of a user's own. ``auto`` promises what all candidates do.

    Raises:
        ValueError: no backend has this name.
    """
    check_backend_name(name)
    if name != AUTO:
        return BACKENDS.get(name)
    candidates = [BACKENDS[candidate] for candidate in AUTO_CANDIDATES]
    return BackendCapabilities(
        deterministic=all(one.deterministic for one in candidates),
        scores_tokens=all(one.scores_tokens for one in candidates),
        offline=any(one.offline for one in candidates),  # it picks among those that are
        reports_sampling_mask=all(one.reports_sampling_mask for one in candidates),
        recomputes_kv=all(one.recomputes_kv for one in candidates),
        has_model=all(one.has_model for one in candidates),
    )


def has_model(name: str) -> bool:
    """Whether the backend samples from the run's model, as far as its name tells."""
    capabilities = known_capabilities(name)
    return capabilities is None or capabilities.has_model


def missing_package(name: str, reason: str) -> str:
    """The error for a machine that lacks the package of the built-in backend ``name``."""
    needs = BACKENDS[name]
    return (
        f'generator.backend = "{name}" needs {needs.package} {needs.package_version}, which can\'t be imported here '
        f'({reason}): {needs.install}, or set generator.backend = "{FALLBACK}"'
    )


def check_capabilities(config: Config, capabilities: BackendCapabilities) -> None:
    """Refuse settings that the backend can't honour.

    Args:
        capabilities: those of ``generator.backend``, from the table or declared by the user's own class.

    Raises:
        ValueError: the message names the key, the value and what was expected.
    """
    backend, generator = config.generator.backend, config.generator
    if config.sampling.deterministic and not capabilities.deterministic:
        able = " or ".join(name for name, one in BACKENDS.items() if one.deterministic)
        raise ValueError(
            f"sampling.deterministic: expected generator.backend {able}, got {backend!r}; other engines choose their "
            f"batches themselves"
        )
    must_fit = config.sampling.deterministic and capabilities.has_model
    if must_fit and generator.batch_size < config.sampling.group_size:
        raise ValueError(
            f"generator.batch_size: under sampling.deterministic expected room for a whole group, "
            f"sampling.group_size = {config.sampling.group_size}, got {generator.batch_size}"
        )
    masks = config.sampling.top_p < 1 or config.sampling.top_k > 0
    for key, value, is_asked, is_able, default in (
        ("generator.kv_after_update", '"recompute"', generator.kv_after_update == "recompute",
         capabilities.recomputes_kv, '"keep"'),
        ("sampling.top_p, sampling.top_k", f"{config.sampling.top_p}, {config.sampling.top_k}", masks,
         capabilities.reports_sampling_mask, "1, 0 (off)"),
    ):  # fmt: skip
        if is_asked and not is_able:
            raise ValueError(
                f"{key}: expected {default} with generator.backend {backend}, which can't do more, got {value}"
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
                f"{key}: with generator.backend {backend}, which samples no colder, expected at least "
                f"{capabilities.min_temperature}, got {temperature}"
            )
