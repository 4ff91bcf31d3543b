"""Supervised fine-tuning: ``async-rl sft CONFIG`` trains on given answers and exports the model.

``sft.data`` is read as ``data.train`` is (``data.files``). A row is one of

- ``{"prompt": text, "response": text}``: plain text, without a template. No special tokens are added but the
  tokenizer's usual start tokens, and the end-of-sequence token after the response. The loss is on the response and that
  token. ``completion`` is another name of ``response``.
- the same with lists of messages: the loss is on the assistant turns of the response.
- ``{"text": text}``: plain text, all of which is trained on.
- ``{"messages": [{"role": ..., "content": ...}, ...]}``: the chat template is applied turn by turn. The loss is on
  every assistant turn up to its end token. ``tools`` are the row's tool schemas, in place of those of ``data.tools``.

Other keys are ignored. Rows longer than ``sft.max_length`` are cut on the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.config.config import Config
from async_rl.config.offline import OfflineConfig
from async_rl.data.chat import load_tokenizer
from async_rl.learner.engine import Engine, UpdateStats
from async_rl.learner.losses.objective import Objective, SupervisedObjective
from async_rl.learner.offline.forms import supervised_parts
from async_rl.learner.offline.rows import RowEncoder, load_rows
from async_rl.learner.offline.run import Metrics, OfflineTask, run_offline
from async_rl.learner.offline.scores import chunks_of, summed_logprobs
from async_rl.learner.packing import TrainSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run_sft(config: Config) -> None:
    """Train ``model.path`` on ``sft.data`` and export the trained model to ``sft.out``, as ``run_offline`` says."""
    run_offline(Supervised(config))


class Supervised(OfflineTask[TrainSequence]):
    """``async-rl sft``: the mean negative log-likelihood of the answers' tokens."""

    name = "sft"

    @property
    def section(self) -> OfflineConfig:
        return self.config.sft

    @property
    def objective(self) -> Objective:
        return SupervisedObjective()

    def load_rows(self, source: str, key: str) -> list[TrainSequence]:
        return load_sft_rows(
            source,
            load_tokenizer(self.config.model.path, needs_template=False),
            max_length=self.section.max_length,
            arguments=self.config.data.template_arguments,
            key=key,
        )

    def sequences(self, row: TrainSequence) -> Sequence[TrainSequence]:
        return [row]

    def step(self, engine: Engine, batch: Sequence[TrainSequence]) -> tuple[UpdateStats, Metrics]:
        stats = engine.update(batch, version=0)
        return stats, {"loss": stats.loss}

    def evaluate(self, engine: Engine, rows: Sequence[TrainSequence]) -> Metrics:
        scored = [sums for chunk in chunks_of(rows) for (sums,) in summed_logprobs(engine, [[row] for row in chunk])]
        return {"loss": -sum(scored) / sum(np.count_nonzero(row.loss_mask) for row in rows)}


def load_sft_rows(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    key: str = "sft.data",
) -> list[TrainSequence]:
    """Read and tokenise the rows of the dataset ``source``. The ``sequence_id`` of each is its row's index.

    ``arguments`` are the variables of the chat template in addition to the messages. ``key`` names the dataset in
    messages.

    Raises:
        DataError: the dataset can't be read, or has no row or a bad row. The message names the row's place.
        ModelError: the chat template does not read one of ``arguments``, or the tools of a row.
    """
    encoder = RowEncoder(tokenizer, arguments, max_length=max_length, section="sft")

    def encode(index: int, where: str, row: Mapping[str, Any]) -> TrainSequence:
        prompt, answer = supervised_parts(row, where)
        if prompt is None:
            return encoder.encode_whole(index, str(answer), where)
        return encoder.encode(index, prompt, answer, where, tools=row.get("tools"))

    rows = load_rows(str(source), key, encode)
    encoder.say_what_was_cut(key)
    return rows
