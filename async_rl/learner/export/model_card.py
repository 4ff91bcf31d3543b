"""Writes ``README.md`` of an export: a model card, which says what the files of the run say about the model.

``export/model.py`` calls it. The checkpoint has the settings, the steps and the ledger; the run directory, if the
checkpoint lies in one, has staleness and evaluations. A card may be published, so of a local path it has the last part
only, and it calls a model or a data set one of the hub only if this machine's cache of the hub has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from async_rl.config.loading import config_from_toml, plain_values
from async_rl.errors import ConfigError
from async_rl.learner.checkpoints.files import read_extra
from async_rl.learner.model.lora import ADAPTER_CONFIG
from async_rl.process.package_versions import package_versions
from async_rl.process.user_code import stored_digests
from async_rl.run.config_changes import read_changes
from async_rl.run.directory import STEP, RunDir
from async_rl.run.records.step_log import Row, eval_figures, iter_metrics
from async_rl.terminal import visible

CARD = "README.md"
_OFFLINE = ("sft", "rm", "dpo")
_LABELS = {
    "reward.type": "Reward",
    "reward.extra": "Further rewards, with their weights",
    "environment.name": "Environment",
    "loss.preset": "Loss",
    "loss.advantage": "Advantages",
    "data.system_prompt": "System message",
    "sampling.max_prompt_tokens": "Longest prompt, in tokens",
    "sampling.max_new_tokens": "Longest answer, in tokens",
    "sampling.group_size": "Answers to a prompt",
    "learner.groups_per_step": "Prompts in a step",
    "optimizer.lr": "Learning rate",
    "lora.rank": "LoRA rank",
}
"""Config key -> label of the line with its value."""
_OFFLINE_LABELS = {"dpo.loss": "Loss", **{f"{name}.lr": "Learning rate" for name in _OFFLINE}, "lora.rank": "LoRA rank"}
_VERSIONS = ("async-rl", "torch", "transformers")


def write_model_card(checkpoint_dir: Path, target: Path) -> None:
    """Write the card of the model of ``checkpoint_dir`` to its export in ``target``. A card that is there is kept.

    Raises:
        RunError: the checkpoint is damaged.
    """
    if (target / CARD).exists():
        return
    from huggingface_hub import ModelCardData  # here, because its import takes long

    extra, place = read_extra(checkpoint_dir), checkpoint_dir.resolve()
    settings = _settings(extra)
    command = "" if "trainer" in extra else next((name for name in _OFFLINE if f"{name}.data" in settings), "")
    folder = place.parent.parent  # run.dir, or a folder in it
    sources = _under(settings, f"{command}.data" if command else "data.train")
    is_adapter = (target / ADAPTER_CONFIG).is_file()
    base, versions = str(settings.get("model.path", "")), package_versions()
    licence, is_chat = _licence(base), settings.get("data.prompt_format") != "text"
    header = ModelCardData(
        license=licence,
        base_model=base if _is_of_hub(base, "model") else None,
        datasets=[name for source in sources.values() if _is_of_hub(name := _hub_name(source), "dataset")] or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if command == "rm" else "text-generation",
        tags=["async-rl", command or "reinforcement-learning", *(["lora"] if is_adapter else [])],
    )
    lines = [
        *((["Base model", _code(base, "model")],) if base else ()),
        ["Licence", _code(licence) if licence else "that of the base model"],
        *((["Data", ", ".join(_code(source, "dataset") for source in sources.values())],) if sources else ()),
        *_setting_lines(settings, _OFFLINE_LABELS if command else _LABELS),
        *(["Source of", f"{_code(name)}, SHA-256 {digest}"] for name, digest in stored_digests(folder).items()),
        *_course_lines(extra, settings, folder if STEP.fullmatch(place.name) else None),
        ["Exported with", ", ".join(f"{name} {versions[name]}" for name in _VERSIONS)],
    ]
    title = f"{folder.parent.name}-{command}" if command else folder.name
    how = f"`async-rl {command}`" if command else "reinforcement learning with async-rl"
    body = "\n".join(f"- {label}: {text}" for label, text in lines)
    text = f"---\n{header.to_yaml()}\n---\n\n# {_plain(title)}\n\nTrained by {how}.\n\n{body}\n"
    if command != "rm" and not is_adapter:
        question = '[{"role": "user", "content": "..."}]' if is_chat else '"..."'
        use = f'pipeline("text-generation", "PATH")({question}, max_new_tokens=...)'
        text += f"\n## Use\n\n```python\nfrom transformers import pipeline\n\n{use}\n```\n"
    (target / CARD).write_text(text, encoding="utf-8")


def _licence(base: str) -> str | None:
    """Return the licence that the card of the model in the directory ``base`` names."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    path = Path(base) / CARD
    try:
        return ModelCard.load(path).data.to_dict().get("license") if path.is_file() else None
    except (OSError, ValueError, YAMLError):  # no card that can be read names it
        return None


def _settings(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``section.key`` -> value; empty if another version wrote the config, or the checkpoint has none."""
    if isinstance(config := extra.get("config"), str):
        try:
            return plain_values(config_from_toml(config, "the checkpoint's config"))
        except ConfigError:
            return {}
    settings = extra.get("settings")
    return settings if isinstance(settings, dict) else {}


def _under(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the values of ``key``, or those of its table by their names."""
    found = {name: settings[name] for name in settings if name == key or name.startswith(f"{key}.")}
    return {name.removeprefix(f"{key}."): value for name, value in found.items() if value not in (None, "", {})}


def _setting_lines(settings: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[list[str]]:
    for key, label in labels.items():
        values = _under(settings, key)
        if value := values.get(key):
            yield [label, _code(value) if isinstance(value, str) else str(value)]
        elif values and key not in values:
            yield [label, ", ".join(f"{_code(name)} {value:g}" for name, value in values.items())]


def _course_lines(extra: Mapping[str, Any], settings: Mapping[str, Any], run: Path | None) -> Iterator[list[str]]:
    """Yield what became of the run until the checkpoint: steps, staleness, evaluations."""
    trainer = extra.get("trainer")
    state: Mapping[str, Any] = trainer if isinstance(trainer, dict) else extra
    if not isinstance(step := state.get("step"), int):
        return
    known = {"version": "; version {} of the weights", "num_steps": " of {}"}
    yield ["Steps", f"{step}{''.join(text.format(state[key]) for key, text in known.items() if key in state)}"]
    tokens, age, oldest, evaluations = 0, 0.0, 0, list[Row]()
    for row in iter_metrics(RunDir(run).metrics) if run else ():
        if row["step"] <= step and (trained := row.get("tokens/trained") or 0):
            tokens, age = tokens + trained, age + trained * (row.get("staleness/mean") or 0)
            oldest = max(oldest, row.get("staleness/max") or 0)
        if row["step"] <= step and eval_figures(row):
            evaluations.append(row)
    changes = [change for change in read_changes(RunDir(run)) if change.step < step] if run else []
    yield from (["Changed", _plain(line)] for change in changes for line in change.lines)
    if tokens:
        bound = settings.get("queue.max_staleness", "unknown")
        yield ["Staleness of the trained tokens", f"mean {age / tokens:.3g} versions, at most {oldest} (bound {bound})"]
    yield from _evaluation_lines(evaluations)


def _evaluation_lines(evaluations: list[Row]) -> Iterator[list[str]]:
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for row in evaluations:
        for name, figures in eval_figures(row).items():
            found.setdefault(name, []).append((row["step"], figures))
    for dataset, points in found.items():
        (first_step, first), (last_step, last) = points[0], points[-1]
        for key in [key for key in ("accuracy", "loss") if key in first and key in last]:
            begin = f"{first[key]:.3g} at step {first_step}, " if last_step > first_step else ""
            known = {"rows": "{} rows", f"{key}_se": "standard error {:.3g}"}
            notes = [text.format(last[name]) for name, text in known.items() if name in last]
            details = f" ({', '.join(notes)})" if notes else ""
            yield [f"Evaluation on {_code(dataset)}", f"{key} {begin}{last[key]:.3g} at step {last_step}{details}"]


def _hub_name(source: Any) -> str:
    """Return ``owner/name`` of ``[split@]owner/name[:config]``."""
    return str(source).rpartition("@")[2].partition(":")[0]


def _is_of_hub(name: str, kind: str) -> bool:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if name.count("/") != 1 or Path(name).exists():
        return False
    return (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)).is_dir()


def _code(value: Any, kind: str = "") -> str:
    """Return ``value`` as code: a name of the hub, whose sort is ``kind``, as it is, and of a path its last part."""
    name = str(value)
    is_of_hub = bool(kind) and _is_of_hub(_hub_name(name) if kind == "dataset" else name, kind)
    return f"`{_plain(name if is_of_hub else Path(name).name or name)}`"


def _plain(text: str) -> str:
    """Return ``text`` in one line, without characters that would be markup inside backquotes."""
    return visible(" ".join(text.replace("`", "'").split()))
