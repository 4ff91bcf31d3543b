"""What a model computes from its last hidden states: the head, a linear layer without bias or with one.

A model with the head ``"tokens"`` is a causal LM. One with the head ``"value"`` is transformers' sequence
classification model with one label: the same decoder, and ``score``, a matrix [1, d]. transformers reads its output at
a sequence's last token only, but it is defined at every token (``value_model.py``).

A value model is made from a causal LM of the same family. Its head is new then, and 0: it says 0 of every token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from async_rl.data.chat import check_causal_lm
from async_rl.data.model_config import read_model_config
from async_rl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Head = Literal["tokens", "value"]
SCORE = "score"
SCORE_WEIGHT = f"{SCORE}.weight"
"""Name of the only parameter of a value model's head."""
_CLASSIFIER = "ForSequenceClassification"


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that computes log-probabilities or values from hidden states. None if ``model`` has none."""
    score = getattr(model, SCORE, None)
    return cast("nn.Module | None", model.get_output_embeddings()) if score is None else score


def is_value_config(config: PretrainedConfig) -> bool:
    """Whether ``config`` is that of a sequence classification model."""
    return any(str(name).endswith(_CLASSIFIER) for name in config.architectures or ())


def auto_class(head: Head) -> Any:
    """Return the class of transformers that builds and loads models with this ``head``."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForCausalLM if head == "tokens" else AutoModelForSequenceClassification


def read_config(directory: Path, head: Head, *, trust_remote_code: bool) -> PretrainedConfig:
    """Read the config in ``directory`` for a model with this ``head``.

    Raises:
        ModelError: ``directory`` has a sequence classification model and ``head`` is not its. Or, for values, the
            family has no such model, or the one in ``directory`` has several labels.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as FAMILIES

    config = read_model_config(directory, trust_remote_code=trust_remote_code)
    if head == "tokens":
        check_causal_lm(directory)
        return config
    if type(config) not in cast(Any, FAMILIES):
        raise ModelError(
            f"model.path: expected a model for which transformers has a {_CLASSIFIER[3:]} class, because values need "
            f"one, but {config.model_type} in {directory} has none; choose a model such as Qwen2, Qwen3 or Llama"
        )
    if is_value_config(config) and config.num_labels != 1:
        raise ModelError(
            f"model.path: expected a sequence classification model with one label, which is the value, got "
            f"{config.num_labels} labels in {directory}; choose a causal LM or a model with one label"
        )
    config.num_labels = 1
    return config


@torch.no_grad()
def make_new_head(model: PreTrainedModel) -> None:
    """Give a value model, which may be on the meta device, a head of zeros on the host."""
    head = cast(nn.Linear, head_of(model))
    head.weight = nn.Parameter(torch.zeros(head.weight.shape))


def with_value_config(files: Mapping[str, bytes], model: PreTrainedModel) -> dict[str, bytes]:
    """Return a model directory's ``files`` for the value ``model`` that was made from it: ``config.json`` changes."""
    config: dict[str, Any] = json.loads(files["config.json"])
    if config.get("pad_token_id") is None and (pad := _pad_token_id(files)) is not None:
        config["pad_token_id"] = pad  # without it transformers refuses batches
    config |= {"architectures": [type(model).__name__], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**files, "config.json": json.dumps(config, indent=2).encode()}


def _pad_token_id(files: Mapping[str, bytes]) -> int | None:
    """Return the id of the tokenizer's padding token. None if it can't be read from the files."""
    token = json.loads(files.get("tokenizer_config.json", b"{}")).get("pad_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = json.loads(files.get("tokenizer.json", b"{}")).get("added_tokens") or ()
    return next((int(one["id"]) for one in added if one.get("content") == text), None)
