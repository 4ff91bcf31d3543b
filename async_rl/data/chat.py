"""Reads a model's directory without its weights: tokenizer, chat template and the files that a generator needs.

The learner calls ``check_model`` and ``model_files`` before training starts. The backends of generators call
``load_tokenizer`` and ``render_prompt``. transformers is imported inside the functions, so that commands that do not
need it start fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.data.spellings import GUARD, encoded
from async_rl.data.template import apply_template, check_arguments, check_rendered
from async_rl.errors import ModelError
from async_rl.records import TEXT_ROLE
from async_rl.routes import RoutingShape, routing_shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BREAK = "\n"
"""A text that tokenizers do not join with what follows."""
_MODEL_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_PROBE_MESSAGES: tuple[Mapping[str, str], ...] = ({"role": "user", "content": "1 + 1 = ?"},)


def quiet_progress_bars() -> None:
    """Switch off the progress bars that transformers shows while it reads and writes weights.

    On a terminal, downloads keep their progress bars, because a download may take an hour. Warnings and errors are
    still shown.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    hidden = are_progress_bars_disabled() or not sys.stderr.isatty()
    transformers_logging.disable_progress_bar()  # the hub's, too
    (disable_progress_bars if hidden else enable_progress_bars)()


def load_tokenizer(path: str | Path, *, needs_template: bool = True) -> PreTrainedTokenizerBase:
    """Load and return the tokenizer of the model at ``path``, a local directory or a hub id.

    Raises:
        ModelError: the tokenizer can't be loaded, or ``needs_template`` is set and the tokenizer has no chat template.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    directory = model_directory(path)
    if not has_tokenizer(directory):
        raise ModelError(
            f"expected a tokenizer in {directory} ({' or '.join(_VOCABULARY_FILES[:2])}), got none; write it there "
            f"with save_pretrained"
        )
    # AutoTokenizer goes by the model's type and would rebuild a generic tokenizer with that model's own splitting.
    is_generic = _tokenizer_config(directory).get("tokenizer_class") in _GENERIC_CLASSES
    try:
        tokenizer_class = PreTrainedTokenizerFast if is_generic else AutoTokenizer
        tokenizer = tokenizer_class.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and more for unreadable files
        raise ModelError(
            f"can't load a tokenizer from {path}: {type(error).__name__}: {error}; save it again with "
            f"save_pretrained, which writes tokenizer.json and tokenizer_config.json"
        ) from error
    if needs_template and not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer in {path} has no chat template, so prompts can't be rendered; use an instruction-tuned "
            f'model, put a chat_template.jinja next to tokenizer.json, or set data.prompt_format = "text"'
        )
    return tokenizer


def has_tokenizer(directory: Path) -> bool:
    """Return whether ``directory`` has the files of a tokenizer."""
    return any((directory / name).is_file() for name in _VOCABULARY_FILES)


def _tokenizer_config(directory: Path) -> Mapping[str, Any]:
    """Return the content of ``directory / "tokenizer_config.json"``. Empty if it can't be read."""
    try:
        config: Any = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def stored_template(path: str | Path) -> str:
    """Return the chat template of the model at ``path`` without loading its tokenizer. Empty if it has no single one,
    or if there is no model: who renders a prompt says so, and a queue server needs none.
    """
    try:
        directory = model_directory(path)
    except ModelError:
        return ""
    file = directory / "chat_template.jinja"
    found = file.read_text("utf-8") if file.is_file() else _tokenizer_config(directory).get("chat_template")
    return found if isinstance(found, str) else ""


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any] = _NOTHING
) -> np.ndarray:
    """Return the token ids of a prompt, int32 [P].

    The tokenizer's chat template turns ``messages`` into text and adds the start of the model's answer. ``arguments``
    are further variables of the template. A single message with the role ``TEXT_ROLE`` is tokenized as plain text,
    without the template.

    Raises:
        ModelError: the template refuses the messages (for example because of an unknown role), or returns no tokens.
    """
    if len(messages) == 1 and messages[0].get("role") == TEXT_ROLE:
        return text_ids(tokenizer, messages[0]["content"])
    return _chat_ids(tokenizer, messages, arguments, "the tokenizer's")


def _chat_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any], whose: str,
    *, open_turn: bool = True,
) -> np.ndarray:  # fmt: skip
    try:
        check_rendered(tokenizer, messages, arguments)
        ids = apply_template(tokenizer, messages, arguments, tokenize=True, open_turn=open_turn)
    except Exception as error:  # a template raises whatever its author wrote
        roles = [m.get("role") for m in messages]
        raise ModelError(
            f"{whose} chat template fails on a prompt whose messages have the roles {roles}: {error}; change the row, "
            f"data.system_prompt or the template"
        ) from error
    if not len(ids):
        raise ModelError(
            f"expected tokens from {whose} chat template for a prompt of {len(messages)} messages, got none; correct "
            f"the chat template of the model"
        )
    return np.asarray(ids, dtype=np.int32)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """Return the token ids of plain text that begins a sequence, int32 [T].

    The tokenizer's usual start tokens come first. Training, evaluation, environments and reward models begin text here,
    so that a model sees it in one form. A text that spells out the beginning-of-sequence token has it once.
    """
    ids = np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)
    begin = tokenizer.bos_token_id
    is_twice = isinstance(begin, int) and len(ids) > 1 and (ids[:2] == begin).all()
    return ids[1:] if is_twice and text.startswith(str(tokenizer.bos_token)) else ids


def ids_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Return the token ids of ``text``, which follows the text ``before`` in its sequence.

    Tokenizers such as those of Llama 2 and Mistral 7B write a space before each text, which is right only where a
    sequence begins, and with some of them after a special token.
    """
    lead = _lead(tokenizer, before, text)
    return plain_ids(tokenizer, lead + text)[len(plain_ids(tokenizer, lead)) :]


def places_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Return the character of ``text`` at which each of its tokens begins, of which ``ids_after`` returns the ids.

    Only tokenizers with a ``tokenizer.json`` know it.
    """
    lead = _lead(tokenizer, before, text)
    found: Any = tokenizer(lead + text, add_special_tokens=False, return_offsets_mapping=True)
    places = encoded(tokenizer, lead + text)[1] if GUARD in text else [begin for begin, _ in found["offset_mapping"]]
    return [place - len(lead) for place in places[len(plain_ids(tokenizer, lead)) :]]


def _lead(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> str:
    """Return a text that shows the tokenizer what comes before ``text``. Empty if that makes no difference, or if the
    tokenizer would join the two.
    """
    if not before or not _writes_space(tokenizer):
        return ""
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    lead = next((str(token.content) for token in added.values() if before.endswith(token.content)), _BREAK)
    lead_ids = plain_ids(tokenizer, lead)
    return lead if plain_ids(tokenizer, lead + text)[: len(lead_ids)] == lead_ids else ""


@lru_cache(maxsize=8)
def _writes_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer writes a space before a text that has none."""
    apart = [*plain_ids(tokenizer, _BREAK), *plain_ids(tokenizer, "A")]
    return plain_ids(tokenizer, _BREAK + "A") != apart


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of ``text`` alone. Special tokens occur only where the text spells them out without a guard
    (``spellings``).
    """
    if GUARD in text and tokenizer.is_fast:
        return encoded(tokenizer, text)[0]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []  # pyright: ignore[reportArgumentType]


def render_answer(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], answer: str,
    arguments: Mapping[str, Any] = _NOTHING,
) -> np.ndarray:  # fmt: skip
    """Return the token ids of a prompt with its answer, int32 [T], as a reward model reads them.

    The tokenizer's chat template renders the answer as the assistant's message, with what ends it. ``arguments`` are
    what it gets in addition to the messages. After a plain-text prompt the answer follows as text, and the
    end-of-sequence token, as in other trainers of reward models.

    Raises:
        ModelError: the tokenizer has no chat template or, for text, no end-of-sequence token; the template refuses the
            messages; or there are no tokens.
    """
    if len(messages) == 1 and messages[0].get("role") == TEXT_ROLE:
        end = tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ModelError(
                "expected a reward model's tokenizer with an end-of-sequence token, which ends the answer, got one "
                "without; set its eos_token"
            )
        ids = [*text_ids(tokenizer, messages[0]["content"] + answer).tolist(), end]
        return np.asarray(ids if ids[-2:-1] != [end] else ids[:-1], dtype=np.int32)
    if not tokenizer.chat_template:
        raise ModelError(
            "the reward model's tokenizer has no chat template, so the messages of a prompt can't be rendered; put a "
            "chat_template.jinja next to its tokenizer.json"
        )
    whole = [*messages, {"role": "assistant", "content": answer}]
    return _chat_ids(tokenizer, whole, arguments, "the reward model's", open_turn=False)


def count_unknown(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[Sequence[Mapping[str, str]]],
    arguments: Mapping[str, Any] = _NOTHING,
) -> tuple[int, int]:
    """Return how many tokens of the rendered ``prompts`` are the unknown token, and how many tokens there are.

    Both are 0 for a tokenizer without an unknown token. Some tokenizers of bytes name their end token as the unknown
    one; text never becomes that token, so they count as having none.

    Raises:
        ModelError: a prompt can't be rendered.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        return 0, 0
    rendered = [render_prompt(tokenizer, messages, arguments) for messages in prompts]
    return sum(int((ids == unknown).sum()) for ids in rendered), sum(map(len, rendered))


def model_directory(path: str | Path, *, weights: bool = False) -> Path:
    """Return the local directory of the model at ``path``. If ``path`` is a hub id, download the model first.

    The download contains the weights only if ``weights`` is set.

    Raises:
        ModelError: ``path`` is no directory, and the hub has no model of this name or refuses access to the model.
    """
    local = Path(path)
    if local.is_dir():
        return local
    if local.is_absolute() or str(path).startswith(".") or str(path).count("/") > 1:
        raise ModelError(f"model.path: expected a model directory, but there is no directory {path}; correct the path")
    return _fetched(str(path), weights)


@lru_cache
def _fetched(name: str, weights: bool) -> Path:
    """Fetch the model ``name``. The hub is asked once by a process, which then means the same revision throughout."""
    from huggingface_hub import snapshot_download

    patterns = [*_MODEL_FILES, *_TOKENIZER_FILES, *(["*.safetensors", "*.safetensors.index.json"] if weights else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise _not_fetched(name, error) from error


def _not_fetched(name: str, error: Exception) -> ModelError:
    """Return the error of a model that can't be fetched: offline, no such repository, or no permission."""
    return ModelError(
        f"model.path: {name!r} is neither a directory nor a model that can be fetched from the hub "
        f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); correct the name, or "
        f"download the model and set its directory"
    )


def file_names(path: str | Path) -> list[str]:
    """Return the names of a model's files, at ``path`` as in ``model_directory``, with those that were not fetched.

    Raises:
        ModelError: as ``model_directory``; or the weights were not fetched, and the hub does not answer.
    """
    here = [file.name for file in model_directory(path).iterdir()]
    if Path(path).is_dir() or any(name.endswith(".safetensors") for name in here):
        return here
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(str(path))
    except Exception as error:
        raise _not_fetched(str(path), error) from error


def model_files(path: str | Path) -> dict[str, bytes]:
    """Return the files from which a generator builds the model and its tokenizer, as file name -> content.

    The weights are left out, because the learner sends them separately.

    Raises:
        ModelError: there is no model at ``path`` (see ``model_directory``), or the model has no ``config.json``.
    """
    directory = model_directory(path)
    if not (directory / "config.json").is_file():
        raise ModelError(f"model.path: expected a config.json in {directory}, got none; set the directory of a model")
    names = (*_MODEL_FILES, *_TOKENIZER_FILES)
    return {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}


def model_settings(path: str | Path) -> dict[str, Any]:
    """Return the content of the ``config.json`` of the model at ``path``.

    Raises:
        ModelError: there is no model at ``path`` (see ``model_directory``), or ``config.json`` can't be read.
    """
    return _stored_config(model_directory(path))


def _stored_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"model.path: expected a config.json in {directory}, got none; set the directory of a model"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path: can't read {path}: {error}; expected a JSON file, as save_pretrained writes it"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            f"model.path: can't read {path}: it has no JSON object; expected a JSON file, as save_pretrained writes it"
        )
    return config


def _number_in(config: Mapping[str, Any], key: str) -> int | None:
    """Return the number ``key`` of ``config``, or else of its part about text. None if neither has one."""
    found = config.get(key, (config.get("text_config") or {}).get(key))
    return found if isinstance(found, int) else None


def vocabulary_size(path: str | Path) -> int | None:
    """Return the vocabulary size of the model at ``path``. None if the model's ``config.json`` does not contain it.

    The vocabulary size is the number of token ids for which the model computes logits.

    Raises:
        ModelError: there is no model at ``path`` (see ``model_directory``), or ``config.json`` can't be read.
    """
    return _number_in(model_settings(path), "vocab_size")


def stated_vocabulary_size(config_json: bytes) -> int | None:
    """Return the vocabulary size in ``config_json``, the content of a model's ``config.json``. None if it has none.

    Raises:
        ValueError: ``config_json`` is not JSON.
    """
    return _number_in(json.loads(config_json), "vocab_size")


def model_routing(path: str | Path) -> RoutingShape:
    """Return the shape of the routes of the model at ``path``.

    Raises:
        ModelError: there is no model at ``path`` (see ``model_directory``), ``config.json`` can't be read, or the model
            has no routes that can be replayed (``routes.routing_shape``).
    """
    return routing_shape(model_settings(path))


def context_length(path: str | Path) -> int | None:
    """Return the context length of the model at ``path``, in tokens. None if its ``config.json`` does not contain it.

    Raises:
        ModelError: there is no model at ``path`` (see ``model_directory``), or ``config.json`` can't be read.
    """
    return _number_in(model_settings(path), "max_position_embeddings")


def check_precision(directory: Path, dtype: str = "auto") -> None:
    """Check that ``directory / "config.json"`` describes a model that can be trained at the precision ``dtype``.

    ``dtype`` is the value of the config key ``model.dtype``.

    Raises:
        ModelError: the file can't be read, has no model type, says that the weights are quantised, or gives the output
            head another precision than the model.
    """
    path, config = directory / "config.json", _stored_config(directory)
    if "model_type" not in config:
        raise ModelError(
            f"model.path: expected a model_type in {path}, got none; set the directory of a Hugging Face causal "
            f"language model"
        )
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        if part.get("quantization_config") is not None:
            quantization = part["quantization_config"]
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ModelError(
                f"model.path: {path} has a quantization_config ({method}): quantised weights can't be trained or "
                f"updated; use the unquantised model that it was made from, and lora.base_bits = {_bits(quantization)} "
                f"with lora.rank, which quantises its frozen weights in the learner"
            )
        head = part.get("head_dtype")
        if head not in (None, "model") and (head, dtype) != ("float32", "float32"):
            raise ModelError(
                f"model.path: {path} has head_dtype = {head!r}: expected an output head with the model's "
                f'precision; remove head_dtype from the file (model.head_dtype = "float32" is for the learner\'s head '
                f'alone), or, if it is float32, set model.dtype = "float32"'
            )


def _bits(quantization: Any) -> int:
    """Return the number of bits, 4 or 8, that a ``quantization_config`` comes closest to."""
    is_8_bit = isinstance(quantization, dict) and (quantization.get("load_in_8bit") or quantization.get("bits") == 8)
    return 8 if is_8_bit else 4


def check_causal_lm(directory: Path) -> None:
    """Check that ``directory / "config.json"`` does not describe a sequence-classification model (a reward model).

    transformers would load it as a causal LM without its score, if the head of the family is the embedding.

    Raises:
        ModelError: it does, or it can't be read.
    """
    names = _stored_config(directory).get("architectures") or ()
    found = [str(name) for name in names if str(name).endswith("ForSequenceClassification")]
    if found:
        raise ModelError(
            f"model.path: expected a causal LM in {directory}, got {found[0]}; choose the causal LM that it was made "
            f"from, or another one"
        )


def check_model(
    path: str | Path,
    messages: Sequence[Mapping[str, str]] = (),
    *,
    dtype: str = "auto",
    arguments: Mapping[str, Any] = _NOTHING,
) -> None:
    """Check that the model at ``path`` can be used. This is quick, because no weights are loaded.

    Args:
        path: a local directory or a hub id.
        messages: the prompt that is rendered as a test, usually the first row's. If empty, a built-in prompt is used.
        dtype: the value of ``model.dtype``.
        arguments: the variables that the chat template gets, which it must read.

    Raises:
        ModelError: the model does not exist, has no readable ``config.json`` or no tokenizer, is a reward model, can't
            be trained at this precision, or has a chat template that fails or does not read one of ``arguments``.
    """
    directory = model_directory(path)
    check_precision(directory, dtype)
    check_causal_lm(directory)
    messages = messages or _PROBE_MESSAGES
    is_chat = all(message["role"] != TEXT_ROLE for message in messages)
    tokenizer = load_tokenizer(directory, needs_template=is_chat)
    check_arguments(tokenizer, arguments, messages)
    render_prompt(tokenizer, messages, arguments)
