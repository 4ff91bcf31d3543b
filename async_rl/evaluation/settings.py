"""The settings of an offline evaluation: a config's, a run's or the defaults, and what the command line says on top.

Called by ``evaluation``; leaves a ``Config`` whose ``data.eval`` and ``eval`` say what is asked and how.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.backends import AUTO, BACKENDS, FALLBACK
from async_rl.config.config import Config
from async_rl.config.loading import apply_override, load_config, parse_config
from async_rl.errors import ConfigError
from async_rl.process.user_code import is_code_name

MAX_PROMPT_TOKENS = 4096
"""Of an evaluation that has no config's ``sampling.max_prompt_tokens``."""

_NEVER_S = 1e9
_SAMPLED_BY_SET = ("num_samples", "temperature", "top_p", "top_k", "max_new_tokens", "max_rows")


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What the command line says; None: as the config has it, else the default.

    Attributes:
        datasets: ``SOURCE`` or ``NAME=SOURCE``, as for ``data.eval``; none: the config's ``data.eval``.
        config: a run's config. None: that of the first model's run, where it is one's checkpoint.
        overrides: ``section.key=value``.
        limit: the first rows of each set.
    """

    datasets: tuple[str, ...] = ()
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    num_samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    max_prompt_tokens: int | None = None
    reward: str | None = None
    system_prompt: str | None = None
    batch_size: int | None = None
    seed: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """``notes`` are lines that the user should know of."""

    config: Config
    notes: tuple[str, ...]


def eval_settings(models: Sequence[str], options: EvalOptions) -> EvalSettings:
    """What is asked of ``models`` and how.

    Raises:
        ConfigError: the config, an override or an option is wrong, or nothing says what to ask.
    """
    raw, notes = _base(models, options)
    if not _is_usable_offline(raw):
        notes.append(
            f"the run samples with {raw['generator']['backend']}; an offline evaluation samples with {FALLBACK}"
        )
        raw["generator"]["backend"] = FALLBACK
    for override in options.overrides:
        apply_override(raw, override)
    if not _is_usable_offline(raw):
        usable = " or ".join(name for name, one in BACKENDS.items() if one.offline)
        raise ConfigError(
            f"generator.backend: expected {usable} for an offline evaluation, got {raw['generator']['backend']!r}, "
            f"which serves only the evaluations of a run (data.eval, eval.every); leave it out"
        )
    _apply(raw, options)
    raw.setdefault("run", {}).setdefault("dir", "unused")
    raw.setdefault("model", {})["path"] = models[0]
    # There are no leases here that an answer could take too long for.
    raw.setdefault("queue", {})["lease_timeout_s"] = _NEVER_S
    config = parse_config(raw, "the config with this command line")
    if not config.data.eval:
        raise ConfigError("expected --dataset FILE, or a config with data.eval that says what to answer, got neither")
    return EvalSettings(config, tuple(notes))


def _is_usable_offline(raw: Mapping[str, Any]) -> bool:
    """False of a known backend that needs a learner; a user's own is asked where it is imported."""
    capabilities = BACKENDS.get(raw.get("generator", {}).get("backend", AUTO))
    return capabilities is None or capabilities.offline


def run_config_of(model: str) -> Path | None:
    """The ``config.toml`` of the run that ``model`` is a checkpoint or an export of (or is); None if it is of none."""
    path = Path(model)
    if not path.exists():
        return None  # a hub id
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "config.toml").is_file() and (folder / "run_id").is_file():
            return folder / "config.toml"
    return None


def _base(models: Sequence[str], options: EvalOptions) -> tuple[dict[str, Any], list[str]]:
    """The config to start from as plain data, and notes."""
    source = options.config or run_config_of(models[0])
    if source is None:
        return {"sampling": {"max_prompt_tokens": MAX_PROMPT_TOKENS}}, []
    load_config(source)  # tells what is wrong with it by itself
    raw = tomllib.loads(source.read_text(encoding="utf-8"))
    generator = raw.setdefault("generator", {})
    for key in ("count", "devices", "tensor_parallel_size"):
        generator.pop(key, None)
    if options.config is None:
        # Nobody named this file: it may have come with the weights, so it must not say which code may be run.
        generator.pop("allow_code", None)
    return raw, [f"settings: {source}" + ("" if options.config else " (--config FILE: others)")]


def _apply(raw: dict[str, Any], options: EvalOptions) -> None:
    """The options of the command line, which win over a set's own keys too."""
    if options.datasets:
        named = [_named(dataset) for dataset in options.datasets]
        raw.setdefault("data", {})["eval"] = dict(named)
        if len(raw["data"]["eval"]) < len(named):
            raise ConfigError(
                f"--dataset: expected names that differ, got {', '.join(name for name, _ in named)}; "
                f"--dataset NAME=FILE gives one"
            )
    evaluation = raw.setdefault("eval", {})
    names = raw.get("data", {}).get("eval", {})
    sets = {name: dict(own) for name, own in evaluation.get("sets", {}).items() if name in names}
    chosen = {**{key: getattr(options, key, None) for key in _SAMPLED_BY_SET}, "max_rows": options.limit}
    for key, value in chosen.items():
        if value is not None:
            evaluation[key] = value
            for own in sets.values():
                own.pop(key, None)
    evaluation["sets"] = sets
    for section, key, value in (
        ("sampling", "max_prompt_tokens", options.max_prompt_tokens),
        ("reward", "type", options.reward),
        ("data", "system_prompt", options.system_prompt),
        ("generator", "batch_size", options.batch_size),
        ("run", "seed", options.seed),
    ):
        if value is not None:
            raw.setdefault(section, {})[key] = value
    if options.reward is not None and is_code_name(options.reward):
        # Who names code on the command line allows it.
        generator = raw.setdefault("generator", {})
        generator["allow_code"] = [*generator.get("allow_code", ()), options.reward.rpartition(":")[0]]


def _named(dataset: str) -> tuple[str, str]:
    """Name and source of ``--dataset``: what stands before the first ``=``, else the source's last part."""
    name, separator, source = dataset.partition("=")
    if separator and "/" not in name:
        return name, source
    last = dataset.rstrip("/").rpartition("/")[2].partition(":")[0]
    return last.rpartition("@")[2].partition(".")[0] or "dataset", dataset


def describe_settings(config: Config, name: str) -> str:
    """How the set called ``name`` is answered, in words."""
    chosen = config.eval.of(name)
    answers = "1 answer" if chosen.num_samples == 1 else f"{chosen.num_samples} answers"
    how: Mapping[str, Any] = {
        "temperature": f"{chosen.temperature:g}" if chosen.temperature else "0 (greedy)",
        **({"top-p": f"{chosen.top_p:g}"} if chosen.top_p < 1 else {}),
        **({"top-k": chosen.top_k} if chosen.top_k else {}),
        "at most": f"{chosen.max_new_tokens or config.sampling.max_new_tokens} tokens",
    }
    return f"{answers} a row, " + ", ".join(f"{key} {value}" for key, value in how.items())
