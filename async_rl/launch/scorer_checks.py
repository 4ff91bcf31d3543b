"""Checks of the tables ``scorer.NAME`` before a run: addresses and models, without loading weights; and of the
address of a relay."""

from __future__ import annotations

import json
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from async_rl.config.config import Config
from async_rl.config.generator import missing_package
from async_rl.data.chat import check_causal_lm, load_tokenizer, model_directory
from async_rl.data.vocabulary import vocabulary_digest
from async_rl.errors import AddressError, ModelError
from async_rl.net.address import check_address, refuse_open_bind
from async_rl.net.link import why_unreachable


def check_scorers(config: Config, *, insecure: bool) -> None:
    """Check the scorers that ``launch`` starts: they can bind their addresses, and their models fit their use.

    Raises:
        AddressError: an address is in use, belongs to another machine, or is open to a network without keys.
        ModelError: a model is missing, or is not of the kind that its use needs; or its backend is not installed.
    """
    for key, name in config.scorers_by_use.items():
        scorer = config.scorer[name]
        if not scorer.launch:
            continue
        try:
            refuse_open_bind(scorer.address, insecure=insecure, has_keys=config.queue.keys is not None)
            _try_bind(scorer.address)
        except AddressError as error:
            raise AddressError(f"scorer.{name}.address: {error}") from None
        if scorer.backend == "vllm" and find_spec("vllm") is None:
            raise ModelError(missing_package("vllm", "there is no such package", key=f"scorer.{name}.backend"))
        try:
            directory = model_directory(scorer.model)
            if key == "reward.model":
                check_reward_model(directory)
            else:
                check_teacher(directory, config.model.path)
        except ModelError as error:
            raise ModelError(f"scorer.{name}.model: {str(error).removeprefix('model.path: ')}") from None


def check_relay(config: Config, *, insecure: bool) -> None:
    """Check that the relay, if there is one, can bind its address.

    Raises:
        AddressError: the address is in use, belongs to another machine, or is open to a network without keys.
    """
    if (address := config.environment.relay) is not None:
        try:
            refuse_open_bind(address, insecure=insecure, has_keys=config.queue.keys is not None)
            _try_bind(address)
        except AddressError as error:
            raise AddressError(f"environment.relay: {error}") from None


def why_scorers_are_away(config: Config) -> dict[str, str]:
    """Return for each scorer that somebody else must have started why it can't be reached; empty if it can."""
    found: dict[str, str] = {}
    for name, scorer in config.scorer.items():
        if not scorer.launch:
            host, port = check_address(scorer.address)
            found[name] = why_unreachable(f"the scorer {name}", host, port)
    return found


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


def _try_bind(address: str) -> None:
    host, port = check_address(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise AddressError(
                f"can't bind {address}: {error.strerror or error}; choose another port or an address of this machine"
            ) from None
