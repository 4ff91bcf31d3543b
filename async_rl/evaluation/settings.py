"""The settings of an offline evaluation: those of a config, of a run or the defaults, then the command line's options.

Options enter; a ``Config`` leaves whose ``data.eval`` and ``eval`` say which rows are answered and how. Called by the
command line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_rl.config.backends import AUTO, BACKENDS, FALLBACK
from async_rl.config.config import Config
from async_rl.config.loading import apply_override, load_config, parse_config
from async_rl.errors import ConfigError
from async_rl.process.user_code import is_code_name

MAX_PROMPT_TOKENS = 4096
"""``sampling.max_prompt_tokens`` of an evaluation without a config."""

_NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The options of the command line.

    Attributes:
        datasets: ``SOURCE`` or ``NAME=SOURCE``, as for ``data.eval``; empty: the config's ``data.eval``.
        config: a config file. None: that of the run that the first model belongs to, if any.
        overrides: ``section.key=value``, as ``--set`` takes them.
        values: config key -> the value of its own option (``--samples`` for ``eval.num_samples``). They win over
            ``overrides`` and over the keys of single sets.
    """

    datasets: tuple[str, ...] = ()
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """``notes`` are lines to show to the user."""

    config: Config
    notes: tuple[str, ...]


def eval_settings(models: Sequence[str], options: EvalOptions) -> EvalSettings:
    """The config that ``models`` are evaluated with.

    Raises:
        ConfigError: the config, an override or an option is wrong, or no data set is named.
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
    # There are no leases here that could expire.
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
    """``config.toml`` of the run that ``model`` is, or whose checkpoint or export it is; None if there is no run."""
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
    load_config(source)  # raises with the name of the file
    raw = tomllib.loads(source.read_text(encoding="utf-8"))
    generator = raw.setdefault("generator", {})
    for key in ("count", "devices", "tensor_parallel_size"):
        generator.pop(key, None)
    if options.config is None:
        # The user did not name this file. It may have come with the weights, so it must not allow code to run.
        generator.pop("allow_code", None)
    return raw, [f"settings: {source}" + ("" if options.config else " (--config FILE chooses others)")]


def _apply(raw: dict[str, Any], options: EvalOptions) -> None:
    """Apply the options of the command line, which also win over the keys of single sets."""
    if options.datasets:
        named = [_named(dataset) for dataset in options.datasets]
        raw.setdefault("data", {})["eval"] = dict(named)
        if len(raw["data"]["eval"]) < len(named):
            raise ConfigError(
                f"--dataset: expected names that differ, got {', '.join(name for name, _ in named)}; "
                f"use --dataset NAME=FILE"
            )
    evaluation = raw.setdefault("eval", {})
    names = raw.get("data", {}).get("eval", {})
    sets = {name: dict(own) for name, own in evaluation.get("sets", {}).items() if name in names}
    for key, value in options.values.items():
        section, _, name = key.partition(".")
        raw.setdefault(section, {})[name] = value
        if section == "eval":
            for own in sets.values():
                own.pop(name, None)
    evaluation["sets"] = sets
    reward = options.values.get("reward.type")
    if reward is not None and is_code_name(reward):
        # Naming code on the command line allows it.
        generator = raw.setdefault("generator", {})
        generator["allow_code"] = [*generator.get("allow_code", ()), reward.rpartition(":")[0]]


def _named(dataset: str) -> tuple[str, str]:
    """Name and source of ``--dataset``; without ``NAME=`` the name is the last part of the source."""
    name, separator, source = dataset.partition("=")
    if separator and "/" not in name:
        return name, source
    last = dataset.rstrip("/").rpartition("/")[2].partition(":")[0]
    return last.rpartition("@")[2].partition(".")[0] or "dataset", dataset


def describe_settings(config: Config, name: str) -> str:
    """Describe in words how the set ``name`` is answered."""
    chosen = config.eval.of(name)
    answers = "1 answer" if chosen.num_samples == 1 else f"{chosen.num_samples} answers"
    how: Mapping[str, Any] = {
        "temperature": f"{chosen.temperature:g}" if chosen.temperature else "0 (greedy)",
        **({"top-p": f"{chosen.top_p:g}"} if chosen.top_p < 1 else {}),
        **({"top-k": chosen.top_k} if chosen.top_k else {}),
        "at most": f"{chosen.max_new_tokens or config.sampling.max_new_tokens} tokens",
    }
    return f"{answers} a row, " + ", ".join(f"{key} {value}" for key, value in how.items())
