"""The rows of a file, as the commands that train on given rows read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from async_rl.extensions.offline.pairs import LabelledAnswer, Pair, load_labelled, load_pairs
from async_rl.extensions.offline.rm import load_scored_pairs
from async_rl.extensions.offline.rows import RowEncoder
from async_rl.extensions.offline.sft import load_sft_rows
from async_rl.learner.sequences import TrainSequence

Arguments = Mapping[str, Any]
NONE: Arguments = MappingProxyType({})


def sft_rows(
    path: Path, tokenizer: Tokenizer, *, max_length: int, arguments: Arguments = NONE, only_last: bool = False
) -> list[TrainSequence]:
    """The sequences of all rows."""
    encoder = RowEncoder(tokenizer, arguments, max_length=max_length, section="sft")
    return [one for row in load_sft_rows(str(path), "sft.data", encoder, only_last=only_last) for one in row]


def pairs_of(path: Path, tokenizer: Tokenizer, *, max_length: int = 100) -> list[Pair]:
    return load_pairs(str(path), "dpo.data", RowEncoder(tokenizer, {}, max_length=max_length, section="dpo"))


def labelled_of(path: Path, tokenizer: Tokenizer, *, max_length: int = 100) -> list[LabelledAnswer]:
    return load_labelled(str(path), "dpo.data", RowEncoder(tokenizer, {}, max_length=max_length, section="dpo"))


def scored_pairs(path: Path, tokenizer: Tokenizer, *, max_length: int = 100, arguments: Arguments = NONE) -> list[Pair]:
    encoder = RowEncoder(tokenizer, arguments, max_length=max_length, section="rm")
    return load_scored_pairs(str(path), "rm.data", encoder)
