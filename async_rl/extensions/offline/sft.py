"""Supervised fine-tuning: ``async-rl sft CONFIG`` trains on given answers and exports the model.

``sft.data`` is read as ``data.train`` is (``data.files``). A row is one of

- ``{"prompt": text, "response": text}``: plain text, without a template. No special tokens are added but the
  tokenizer's usual start tokens, and the end-of-sequence token after the response. The loss is on the response and that
  token. ``completion`` is another name of ``response``.
- the same with lists of messages: the loss is on the assistant turns of the response.
- ``{"text": text}``: plain text, all of which is trained on.
- ``{"messages": [{"role": ..., "content": ...}, ...]}``: the chat template is applied turn by turn. The loss is on
  every assistant turn up to its end token, or on the last (``sft.turns``). A template that rewrites earlier turns gives
  one sequence for each assistant turn; the row stays the unit of a batch. ``tools`` are the row's tool schemas, in
  place of those of ``data.tools``.

Flags in messages (``data.message_keys``) leave them out. ``data.context_columns`` has the columns that are read or
refused beside these; others are ignored. Rows longer than ``sft.max_length`` are cut on the right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.config.offline import SftConfig
from async_rl.extensions.offline.forms import supervised_parts
from async_rl.extensions.offline.rows import RowEncoder, load_rows, template_fields
from async_rl.extensions.offline.run import Metrics, OfflineTask
from async_rl.extensions.offline.scores import numbered, summed_in_chunks
from async_rl.extensions.offline.slopes import LinearObjective
from async_rl.learner.interface import Engine, UpdateStats
from async_rl.learner.losses.batch import LossBatch
from async_rl.learner.losses.objective import Objective
from async_rl.learner.sequences import TrainSequence

Turns = tuple[TrainSequence, ...]
"""The sequences of one row."""


class SupervisedObjective(LinearObjective):
    """The mean negative log-likelihood of all trained tokens."""

    def slopes(self, batch: LossBatch) -> Tensor:
        return torch.full_like(batch.advantages, -1.0)


class Supervised(OfflineTask[Turns]):
    """``async-rl sft``: the mean negative log-likelihood of the answers' tokens."""

    name = "sft"

    @property
    def section(self) -> SftConfig:
        return self.config.sft

    @property
    def objective(self) -> Objective:
        return SupervisedObjective()

    def load_rows(self, source: str, key: str) -> list[Turns]:
        only_last = self.section.turns == "last"
        return load_sft_rows(source, key, self.encoder(), self.config.data.ignore, only_last=only_last)

    def sequences(self, row: Turns) -> Sequence[TrainSequence]:
        return row

    def step(self, engine: Engine, batch: Sequence[Turns]) -> tuple[UpdateStats, Metrics]:
        sequences = [sequence for row in batch for sequence in row]
        stats = engine.update(sequences if len(sequences) == len(batch) else numbered(sequences), version=0)
        return stats, {"loss": stats.loss}

    def evaluate(self, engine: Engine, rows: Sequence[Turns]) -> Metrics:
        sequences = [sequence for row in rows for sequence in row]
        scored = summed_in_chunks(engine, [[one] for one in sequences])
        return {"loss": -sum(sums for (sums,) in scored) / sum(np.count_nonzero(one.loss_mask) for one in sequences)}


def load_sft_rows(
    source: str, key: str, encoder: RowEncoder, ignore: Collection[str] = (), *, only_last: bool = False
) -> list[Turns]:
    """Read the rows of the dataset ``source``, which the config key ``key`` names, without the columns ``ignore``.

    The ``sequence_id`` of each sequence is its row's index. ``only_last`` trains only the last assistant message.

    Raises:
        DataError: the dataset can't be read, or has no row or a bad row. The message names the row's place.
        ModelError: the chat template does not read the tools of a row.
    """

    def encode(index: int, where: str, row: Mapping[str, Any]) -> Turns:
        prompt, answer = supervised_parts(row, where)
        if prompt is None:
            return (encoder.encode_whole(index, str(answer), where),)
        return tuple(encoder.encode_turns(index, prompt, answer, where, **template_fields(row), only_last=only_last))

    rows = load_rows(source, key, encode, ignore)
    encoder.say_what_was_cut(key)
    return rows
