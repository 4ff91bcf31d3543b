"""The chat templates that trl ships, each with a tokenizer that has the template's marks as tokens.

Nothing of trl is copied: the templates are read from the installed package. The tokenizer has one token for each byte,
and one for each mark. Marks with a role in the protocol are special, as in the models' own tokenizers; ``<think>`` and
the like are tokens that decoding keeps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_KINDS = (
    *("cohere2", "deepseek_r1_distill", "gemma3", "glm4moe", "gptoss", "lfm2", "lfm2_2_5", "llama3_1", "llava_next"),
    *("nemotron_3_nano", "phi3", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_8", "smolvlm"),
)
"""One template of each kind, for the tests of daily work."""
_SPECIAL = re.compile(
    r"<\|[\w/]+\|>|<｜[^｜\s]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|<start_of_turn>|<end_of_turn>|<end_of_utterance>|"
    r"\[gMASK\]|<sop>|\[INST\]|\[/INST\]|</s>"
)
_KEPT = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")


@dataclass(frozen=True, slots=True)
class Marks:
    """The end tokens of the model that a template belongs to.

    Attributes:
        end: the token that ends a plain answer.
        eos: the tokenizer's ``eos_token``.
        listed: the end tokens in the model's ``generation_config.json``.
        bos: the tokenizer's ``bos_token``.
    """

    end: str
    eos: str
    listed: tuple[str, ...]
    bos: str | None = None


def _chatml(*more: str, bos: str | None = None) -> Marks:
    return Marks("<|im_end|>", "<|im_end|>", ("<|im_end|>", *more), bos)


_GEMMA4 = Marks("<turn|>", "<turn|>", ("<eos>", "<turn|>", "<|tool_response>"), "<bos>")
_DEEPSEEK = Marks(
    "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",), "<｜begin▁of▁sentence｜>"
)
_LLAMA = Marks("<|eot_id|>", "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|begin_of_text|>")
_MARKS: dict[str, Marks] = {
    "cohere": Marks("<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",), "<BOS_TOKEN>"),
    "deepseek": _DEEPSEEK,
    "diffusion_gemma": _GEMMA4,
    "gemma4": _GEMMA4,
    "gemma": Marks("<end_of_turn>", "<eos>", ("<eos>", "<end_of_turn>"), "<bos>"),
    "glm4moe": Marks("<|user|>", "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "gptoss": Marks("<|return|>", "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>"), "<|startoftext|>"),
    "idefics3": Marks("<end_of_utterance>", "<end_of_utterance>", ("<|end_of_text|>", "<end_of_utterance>")),
    "lfm2": _chatml(bos="<|startoftext|>"),
    "llama3": _LLAMA,
    "llava_next": Marks("</s>", "</s>", ("</s>",), "<s>"),
    "muse_glimmer": Marks("<|eot|>", "<|eot|>", ("<|eot|>",)),
    "nemotron": _chatml(),
    "phi3": Marks("<|end|>", "<|endoftext|>", ("<|endoftext|>", "<|assistant|>", "<|end|>")),
    "qwen": _chatml("<|endoftext|>"),
    "smolvlm": Marks("<end_of_utterance>", "<end_of_utterance>", ("<end_of_utterance>",)),
}
"""By the beginning of the template's name; the first that fits."""


def template_directory() -> Path:
    """Where the installed trl has its templates. trl itself is not imported: that takes seconds."""
    spec = find_spec("trl")
    assert spec is not None, "the tests read the chat templates of trl: install the extra dev"
    return Path(next(iter(spec.submodule_search_locations or []))) / "chat_templates"


def names(*, training: bool = False) -> list[str]:
    """The names of the templates, or of those with a twin for training."""
    stems = sorted(path.stem for path in template_directory().glob("*.jinja"))
    twins = {stem.removesuffix("_training") for stem in stems if stem.endswith("_training")}
    return sorted(twins) if training else [stem for stem in stems if not stem.endswith("_training")]


def cases(*, training: bool = False, without: Sequence[str] = ()) -> list[Any]:
    """The names as parameters of a test. Templates of the same kind as another one are slow."""
    chosen = [name for name in names(training=training) if name not in without]
    return [pytest.param(name, marks=[] if name in _KINDS else [pytest.mark.slow]) for name in chosen]


def template(name: str, *, training: bool = False) -> str:
    return (template_directory() / f"{name}{'_training' if training else ''}.jinja").read_text(encoding="utf-8")


def marks_of(name: str) -> Marks:
    return next(marks for begin, marks in _MARKS.items() if name.startswith(begin))


def tokenizer_of(name: str, *, eos: str | None = None, more: Sequence[str] = ()) -> Any:
    """A tokenizer with the template ``name``. ``eos`` replaces its end-of-sequence token; ``more`` are special too."""
    marks, text = marks_of(name), template(name)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = {*_SPECIAL.findall(text), marks.end, marks.eos, *marks.listed, *more} - {None}
    backend.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in sorted(special)])
    kept = sorted(set(_KEPT.findall(text)) - special)
    backend.add_tokens([AddedToken(one, special=False, normalized=False) for one in kept])
    roles = {"eos_token": eos or marks.eos} | ({"bos_token": marks.bos} if marks.bos else {})
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=text, **roles)


def listed_ids(tokenizer: Any, name: str) -> list[int]:
    """The ids of the end tokens that the model of the template lists."""
    return [tokenizer.convert_tokens_to_ids(token) for token in marks_of(name).listed]
