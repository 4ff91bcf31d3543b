"""Checks of the models' files: of the policy, a critic, reward models and teachers. No weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.data.chat import (
    check_causal_lm,
    check_model,
    check_precision,
    file_names,
    load_tokenizer,
    model_directory,
    vocabulary_size,
)
from async_rl.data.dataset import Row
from async_rl.data.turn_end import turn_ends
from async_rl.data.vocabulary import vocabulary_digest
from async_rl.errors import ModelError, naming
from async_rl.launch.checks.addresses import check_own_address
from async_rl.launch.checks.finding import Finding


def check_policy(config: Config) -> Iterator[Finding]:
    """Check that there is a causal language model that can be trained at ``model.path``. Of a model of the hub the
    weights are not fetched.

    Raises:
        ModelError: there is none, it can't be trained at this precision, or its weights are in no safetensors files.
    """
    directory = model_directory(config.model.path)
    check_precision(directory, config.model.dtype)
    check_causal_lm(directory)
    if not any(name.endswith(".safetensors") for name in file_names(config.model.path)):
        raise ModelError(
            f"model.path: expected *.safetensors in {config.model.path}, got none; save the model there with "
            f"save_pretrained, in the safetensors format"
        )
    yield Finding("model", "OK", f"{directory}, vocabulary of {vocabulary_size(directory)}")


def check_template(config: Config, rows: Sequence[Row]) -> None:
    """Check that the model has a tokenizer, and its chat template renders the first prompt of ``rows``.

    Raises:
        ModelError: as ``data.chat.check_model``.
    """
    messages = rows[0].messages if rows else ()
    check_model(config.model.path, messages, dtype=config.model.dtype, arguments=config.data.template_arguments)


def check_critic(config: Config) -> Iterator[Finding]:
    """Check that there is a model that can be trained at ``critic.path``, if a critic begins as that model.

    Raises:
        ModelError: there is none, or it can't be trained at this precision.
    """
    if not config.loss.has_critic or config.critic.path is None:
        return
    with naming("critic.path", ModelError):
        check_precision(model_directory(config.critic.path), config.model.dtype)
    yield Finding("critic", "OK", config.critic.path)


def find_turn_ends(config: Config) -> Iterator[Finding]:
    """List the tokens that end a turn of the model.

    Raises:
        ModelError: the chat template can't be rendered.
    """
    directory, is_chat = model_directory(config.model.path), config.data.prompt_format == "chat"
    tokenizer = load_tokenizer(directory, needs_template=is_chat)
    ends = turn_ends(tokenizer, directory, config.data.template_arguments)
    if not ends.ids:
        text = "no token ends an answer, so each runs to sampling.max_new_tokens"
        fix = "set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json"
        yield Finding("end of turn", "FAIL", text, fix=fix)
    elif is_chat and ends.of_template is None:
        text = f"the chat template writes no end token after an answer; {ends.describe(tokenizer)}"
        fix = (
            "if the model was trained with another one (such as the mark of the next role), add it to eos_token_id in "
            "generation_config.json; sft, dpo and rm put eos_token after the answer"
        )
        yield Finding("end of turn", "WARN", text, fix=fix)
    else:
        yield Finding("end of turn", "OK", ends.describe(tokenizer))


def check_scorers(config: Config, *, insecure: bool) -> Iterator[Finding]:
    """Check the scorers that ``launch`` starts: they can bind their addresses, and their models fit their use.

    Raises:
        AddressError: an address is in use, belongs to another machine, or is open to a network without keys.
        ModelError: a model is missing, or is not of the kind that its use needs.
    """
    for key, name in config.scorers_by_use.items():
        scorer = config.scorer[name]
        if not scorer.launch:
            continue
        check_own_address(scorer.address, f"scorer.{name}.address", config, insecure=insecure)
        with naming(f"scorer.{name}.model", ModelError):
            directory = model_directory(scorer.model)
            if key == "reward.model":
                check_reward_model(directory)
            else:
                check_teacher(directory, config.model.path)
        yield Finding(f"scorer.{name}", "OK", f"{directory}, at {scorer.address}")


def check_reward_model(directory: Path) -> None:
    """Check that ``directory / "config.json"`` describes a sequence-classification model with one label.

    Raises:
        ModelError: it does not.
    """
    path = directory / "config.json"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        names, labels = config.get("architectures") or [], config.get("id2label") or {0: "", 1: ""}
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"can't read {path}: {error}; expected what `async-rl rm` or save_pretrained writes") from None
    if not any(str(name).endswith("ForSequenceClassification") for name in names) or len(labels) != 1:
        raise ModelError(
            f"expected a sequence-classification model with one label, got {', '.join(map(str, names)) or 'no'} "
            f"architecture with {len(labels)} labels in {path}; choose a reward model"
        )


def check_teacher(directory: Path, student: str) -> None:
    """Check that ``directory`` has a causal LM, with the vocabulary of the model ``student``.

    Raises:
        ModelError: it has a reward model, or one with another vocabulary, or a tokenizer is missing.
    """
    check_causal_lm(directory)
    digests = [vocabulary_digest(load_tokenizer(path, needs_template=False)) for path in (directory, student)]
    if digests[0] != digests[1]:
        raise ModelError(
            f"expected a teacher with the vocabulary of model.path = {student}, because it scores the same tokens, got "
            f"another tokenizer in {directory}; choose a model of the same family"
        )
