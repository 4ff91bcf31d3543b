"""Reads a ``Config`` from a TOML file and ``--set section.key=value`` options, and writes one as TOML."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from async_rl.config.config import Config
from async_rl.config.engine_arguments import is_operators
from async_rl.config.generator import GeneratorConfig
from async_rl.config.loss import LossConfig
from async_rl.config.loss_names import OFF_VALUES
from async_rl.config.other_trainers import hints
from async_rl.config.reward import RewardConfig, reward_named
from async_rl.config.run import ExperimentalConfig
from async_rl.errors import ConfigError
from async_rl.process.user_code import ENVIRONMENTS, offered_code

MACHINE_KEYS = (
    "reward.code.allow_unsafe", "reward.code.endpoint", "reward.code.packages",
    "reward.judge.endpoint", "reward.judge.api_key_env", "reward.judge.cache",
)  # fmt: skip
"""Keys that only the operator of a generator's machine may set for it, in addition to ``generator.allow_code`` and what
``is_operators`` names of ``generator.engine``."""
_GENERATORS_OWN = ("generator.", "experimental.fake.", "experimental.vllm.", *MACHINE_KEYS)
"""Keys, or prefixes of keys, that a generator may set for its machine alone."""


_ROUTER_KEYS = (
    "aux_loss_coef", "output_router_logits", "router_aux_loss_coef", "router_bias_update_rate", "router_z_loss",
    "router_z_loss_coef", "update_router_bias",
)  # fmt: skip
"""Names under which a user may ask for another loss of the routers or updates of their bias, in any section."""
_REPLACED: Mapping[str, str] = {
    **dict.fromkeys(
        ("queue.adaptive", "experimental.adaptive_min_ess", "experimental.adaptive_max_kl"),
        'remove it: queue.run_ahead = "auto" keeps data younger than a bound that lowers itself did',
    ),
    "critic.trunk": "remove it: a critic has a model of its own, and critic.path may name a smaller one",
    "learner.audit_rewards": "remove it, and give keys only to generators that you trust (docs/many_nodes.md)",
    "reward.judge.rubric_file": "write its text as reward.judge.rubric",
    **dict.fromkeys(
        ("reward.judge.prompt_price", "reward.judge.completion_price"),
        "remove it: the tokens are counted, in grading/judge_prompt_tokens and grading/judge_completion_tokens",
    ),
}
"""Key that is gone -> what replaces it."""
_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
    "literal_error": "{expected}",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} items",
}
"""pydantic's error type -> the expected input, a template that is filled from the error's context."""


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read the config file at ``path``, apply the ``--set`` options in ``overrides``, and return the checked config.

    Raises:
        ConfigError: there is no such file, the file is not TOML, a key is unknown, a value has a wrong type or range,
            or keys contradict each other.
    """
    raw = read_toml(Path(path))
    overrides = list(overrides)
    if any(override.partition("=")[0].strip() == "loss.preset" for override in overrides):
        raw |= {"loss": _beside_preset(raw.get("loss"))}
    for override in overrides:
        apply_override(raw, override)
    _refuse_nul(raw)
    resolve(raw)
    return parse_config(raw, f"{path} with its --set" if overrides else str(path))


def _beside_preset(loss: Any) -> Any:
    """Return the keys of a section ``loss`` that differ from its preset's, if a run has written it, with all keys.

    Else another preset would change none of them. A section that a person wrote is returned as it is.
    """
    if not isinstance(loss, dict) or not LossConfig.model_fields.keys() <= loss.keys():
        return loss if loss is not None else {}
    of_preset = _loss_data(LossConfig.model_validate({"preset": loss["preset"]}))
    return {key: value for key, value in loss.items() if value != of_preset[key]}


def _refuse_nul(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError if a text in ``raw`` has the character NUL, which no path, name or command can have."""
    for key, value in flat(raw).items():
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{key}: expected text without the character NUL, got {value!r:.80}; correct it")


def default_config(overrides: Iterable[str] = ()) -> Config:
    """Return a config of defaults and the ``--set`` options in ``overrides``, to explain keys without a file.

    Raises:
        ConfigError: as ``load_config``.
    """
    raw: dict[str, Any] = {"run": {"dir": "runs/my"}, "model": {"path": "MODEL"}}
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw, "the default config")


def load_run_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read the config that async-rl has written to the run directory's file ``path``, and apply the ``--set`` options
    in ``overrides``.

    Raises:
        ConfigError: as ``load_config``.
    """
    raw = read_toml(path)
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the unchecked content of the config file at ``path``, a dict for each section.

    Raises:
        ConfigError: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config file at {path}; check the path") from None
    except IsADirectoryError:
        raise ConfigError(
            f"expected a config file, got the directory {path}; pass a file, such as {path / 'config.toml'} if {path} "
            f"is a run directory"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"can't read the config file {path}: {error}; expected a readable file of UTF-8 text"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; correct the file there") from error


def resolve(raw: Mapping[str, Any]) -> None:
    """Replace what is found on this machine alone, so that other machines and later starts get the same.

    The path in ``data.tools`` becomes the text of its file. The name of a reward or an environment that an installed
    package offers becomes the name of its code.

    Raises:
        ConfigError: the file can't be read, or two names are of one reward.
        ExtensionError: what a package offers has no name of code.
    """
    _read_tools(raw)
    environment, reward = raw.get("environment"), raw.get("reward")
    if isinstance(environment, dict) and isinstance(name := environment.get("name"), str) and name:
        environment["name"] = offered_code(ENVIRONMENTS, name)
    if not isinstance(reward, dict):
        return
    for key in ("type", "accuracy"):
        if isinstance(name := reward.get(key), str):
            reward[key] = reward_named(name)
    if isinstance(extra := reward.get("extra"), dict):
        reward["extra"] = {reward_named(name): weight for name, weight in extra.items()}
        if len(reward["extra"]) < len(extra):
            raise ConfigError(f"reward.extra: expected each reward once, got {', '.join(extra)}; leave one out")


def _read_tools(raw: Mapping[str, Any]) -> None:
    data = raw.get("data")
    if not isinstance(data, dict):
        return
    path = data.get("tools")
    if not isinstance(path, str) or not path or path.lstrip().startswith("["):
        return
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.tools: expected a JSON file of tool schemas, can't read {path}: {error}; correct the path"
        ) from None
    data["tools"] = text.strip() or "[]"


def config_from_toml(text: str, source: str) -> Config:
    """Return the config in ``text``, which ``config_to_toml`` has written. Error messages name ``source``.

    Raises:
        ConfigError: ``text`` is not TOML, or not a valid config.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}; correct it there") from error
    return parse_config(raw, source)


def parse_config(raw: Mapping[str, Any], source: str) -> Config:
    """Return the config in ``raw``, which has a dict for each section. Error messages name ``source``.

    Raises:
        ConfigError: a key is unknown, a value has a wrong type or range, or keys contradict each other.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = _of_alternatives(explain_error(detail) for detail in error.errors(include_url=False))
        raise ConfigError("\n".join([f"{source} is not a valid config:", *(f"  {line}" for line in lines)])) from None


def explain_error(detail: Mapping[str, Any]) -> str:
    """Return pydantic's ``detail`` of a refused value as a message that begins with its key."""
    # pydantic marks a table's key, and the alternatives of a value that may be of several kinds.
    parts = (str(part) for part in detail["loc"] if part != "[key]")
    key = ".".join(part for part in parts if not part.startswith(("literal[", "constrained-")))
    if detail["type"] == "extra_forbidden" and detail["loc"][-1] in _ROUTER_KEYS:
        return (
            f"{key}: unknown key; loss.load_balancing_coef is the only loss of routers, and their bias stays as it is; "
            f"set that, or remove the key"
        )
    if detail["type"] == "extra_forbidden" and key in _REPLACED:
        return f"{key}: unknown key; {_REPLACED[key]}"
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key{_suggestion(detail['loc'])}"
    if detail["type"] == "missing":
        return f"{_first_missing(key)}: expected a value, got none; set it in the file or with --set"
    if key and detail["type"] in _EXPECTED:
        expected = _EXPECTED[detail["type"]].format(**detail.get("ctx", {}))
        return f"{key}: expected {expected}, got {detail['input']!r}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if not key:
        return message
    if re.match(r"[a-z_.]+: ", message):  # of one key of the table ``key``
        return message if message.startswith(f"{key}.") else f"{key}.{message}"
    if "got " in message:
        return f"{key}: {message}"
    return f"{key}: {message[0].lower()}{message[1:]}, got {detail['input']!r}"


def _of_alternatives(messages: Iterable[str]) -> list[str]:
    """Make one message of those that differ only in what was expected."""
    expected: dict[tuple[str, str], list[str]] = {}
    for message in messages:
        match = re.fullmatch(r"(\S+: expected )([^;]*)(, got .*)", message)
        head, what, got = match.groups() if match else (message, "", "")
        expected.setdefault((head, got), []).append(what)
    return [head + " or ".join(what) + got for (head, got), what in expected.items()]


def _first_missing(key: str) -> str:
    """Return the key that the error about the missing ``key`` must name.

    It is ``key`` itself, or the first required key of the section if ``key`` is a whole section.
    """
    field = Config.model_fields.get(key)
    section = None if field is None else field.annotation
    if not (isinstance(section, type) and issubclass(section, BaseModel)):
        return key
    return next((f"{key}.{name}" for name, inner in section.model_fields.items() if inner.is_required()), key)


def _suggestion(location: Sequence[Any]) -> str:
    """Return what the user may have meant by the unknown key at ``location``, as the end of a message.

    It is the same key in other sections, a name of TRL or verl, or a similar key of the section or of them. Return
    an empty string if there is none.
    """
    name = str(location[-1])
    model: Any = Config
    for part in location[:-1]:
        model = _model_of(model, part)
        if model is None:
            return ""
    elsewhere = [f"{section}.{name}" for section in Config.model_fields if name in _keys_of(_model_of(Config, section))]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    # Other names are too short to be recognised when they are misspelt.
    names = [*_keys_of(model), *(one for one in hints() if "_" in one)]
    near = name if name in hints() else "".join(difflib.get_close_matches(name, names, n=1))
    if near in hints() and near not in _keys_of(model):
        return f"; {hints()[near]}"
    return f"; did you mean {'.'.join([*map(str, location[:-1]), near])}?" if near else ""


def _model_of(model: Any, field: Any) -> Any:
    """Return the section or table that the ``field`` of ``model`` is; None if it is none."""
    found = getattr(model.model_fields.get(field), "annotation", None)
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _keys_of(model: Any) -> Collection[str]:
    return () if model is None else model.model_fields


def machine_overrides(config: Config) -> list[str]:
    """Return the ``--set`` options that a generator must be started with, so that it accepts ``config``.

    They set the keys that a generator never takes from the queue's config. The queue server must not decide which code
    another machine runs, without which protection, or where that machine sends programs, answers, and what is in its
    environment and its files.
    """
    names = json.dumps(config.generator.allow_code, ensure_ascii=False)
    overrides = [f"generator.allow_code={names}"] if config.generator.allow_code else []
    engine = config.generator.engine.items()
    overrides += [f"generator.engine.{name}={json.dumps(value)}" for name, value in engine if is_operators(name)]
    reward = config.reward
    sections = {
        "code": reward.code if reward.runs_programs else None,
        "judge": reward.judge if reward.asks_judge else None,
    }
    for key in MACHINE_KEYS:
        _, section, name = key.split(".")
        if (own := sections[section]) is None:
            continue
        value, default = getattr(own, name), type(own).model_fields[name].default
        is_less = isinstance(value, tuple) and set(value) <= set(default)
        if value != default and not is_less:
            overrides.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
    return overrides


def refuse_foreign_decisions(config: Config, overrides: Sequence[str]) -> None:
    """Refuse a queue's ``config`` that sets what only this machine's operator may, and not by the generator's
    ``overrides``.

    Raises:
        ConfigError: such a key is set. The message says which ``--set`` option allows it.
    """
    allowed = ["generator.allow_code", *(override.partition("=")[0].strip() for override in overrides)]
    for asked in machine_overrides(config):
        if not is_among(asked.partition("=")[0], allowed):
            raise ConfigError(
                f"the queue's config sets {asked}, which only the operator of this machine may decide; if you agree, "
                f"start the generator with --set '{asked}'"
            )


def check_generator_overrides(overrides: Iterable[str]) -> None:
    """Check the ``--set`` options of a generator, as far as that is possible without the run's config.

    Raises:
        ConfigError: an option is malformed, is not for generators, or has an unknown key or a wrong value.
    """
    raw: dict[str, Any] = {}
    for override in overrides:
        apply_override(raw, override)
        if not override.strip().startswith(_GENERATORS_OWN):
            raise ConfigError(
                f"--set {override}: a generator takes only generator.* keys and {', '.join(MACHINE_KEYS)}; set other "
                f"keys in the learner's config"
            )
    details: list[dict[str, Any]] = []
    own = {"generator": GeneratorConfig, "experimental": ExperimentalConfig, "reward": RewardConfig}
    for section, model in own.items():
        try:
            model.model_validate(raw.get(section, {}))
        except ValidationError as error:
            details += [{**detail, "loc": (section, *detail["loc"])} for detail in error.errors(include_url=False)]
    if details:
        raise ConfigError("\n".join(["--set is not valid:", *(f"  {explain_error(d)}" for d in details)]))


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one key in ``raw``, a dict for each section, from the ``--set`` option ``override`` (``section.key=value``).

    The value is read as TOML, or as a JSON object, which other trainers take for tables. If it is neither, it is a
    string.

    Raises:
        ConfigError: ``override`` is not of that form.
    """
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or len(parts) < 2 or not all(parts):
        raise ConfigError(f"expected --set section.key=value, got {override!r}; correct the option")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = _json_object(text.strip())
    table = raw
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"--set {override}: expected {part!r} to be a section of the config, but it is a key with a value; "
                f"write --set section.key=value"
            )
    table[parts[-1]] = value


def _json_object(text: str) -> Any:
    """Return the JSON object in ``text``, or ``text`` itself if it is no JSON object."""
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def config_to_toml(config: Config, *, is_short: bool = False) -> str:
    """Return the config as TOML text with all defaults. Reading the text back gives an equal config.

    If ``is_short``, a comment names the sections that have only defaults.
    """
    data, default = config_data(config), config_data(default_config()) if is_short else {}
    unused = [name for name in data if name in default and data[name] == default[name]]
    text = tomli_w.dumps({name: section for name, section in data.items() if name not in unused})
    return f"{text}\n# --all adds the sections with only defaults: {', '.join(unused)}\n" if unused else text


def config_data(config: Config) -> dict[str, Any]:
    """Return the config as plain data that TOML and JSON have. ``parse_config`` makes an equal config of it."""
    data = config.model_dump(mode="json", exclude_none=True)
    if config.queue.filter_range is None:
        data["queue"]["filter_range"] = []
    data["loss"] = _loss_data(config.loss)
    return data


def _loss_data(loss: LossConfig) -> dict[str, Any]:
    return {**OFF_VALUES, **loss.model_dump(mode="json", exclude_none=True)}


def plain_values(config: Config) -> dict[str, Any]:
    """Return ``section.key`` -> value for every key, as plain data that JSON has, too."""
    return flat(config.model_dump(mode="json"))


def changed_keys(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return ``section.key`` -> (old value, new value) for every key whose value differs, sorted by key."""
    before, after = plain_values(old), plain_values(new)
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def show_change(key: str, old: object, new: object) -> str:
    """Return the text ``section.key: old -> new``."""
    return f"{key}: {old!r} -> {new!r}"


def is_among(key: str, keys: Sequence[str]) -> bool:
    """Return whether ``key`` is one of ``keys``, or belongs to one of them that is a section or a table."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of ``data`` and of the tables in it, by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
