"""Training on preferences: ``async-rl dpo CONFIG`` trains on chosen and rejected answers and exports the model.

A step scores the answers of a batch, computes the loss of their summed log-probabilities (``preference.py``), and
trains with its slopes (``slopes.py``). The reference model's log-probabilities are scored before the first step
(``reference.py``). Chosen and rejected answers share their prompt: it is computed once where they are in one
micro-batch. ``pairs.py`` has the forms of rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from async_rl.config.config import Config
from async_rl.config.offline import DpoConfig
from async_rl.extensions.offline.pairs import LabelledAnswer, Pair, load_labelled, load_pairs
from async_rl.extensions.offline.preference import PAIR_LOSSES, PairValues, kto_kl, kto_loss, log_odds_ratio
from async_rl.extensions.offline.reference import reference_logprobs
from async_rl.extensions.offline.run import Metrics, OfflineTask
from async_rl.extensions.offline.scores import numbered, summed_in_chunks, summed_logprobs
from async_rl.extensions.offline.slopes import sequence_slopes
from async_rl.learner.interface import Engine, UpdateStats
from async_rl.learner.sequences import TrainSequence

Preference = TypeVar("Preference", Pair, LabelledAnswer)


class _Preferences(OfflineTask[Preference]):
    """What the losses have in common: rows of two sequences, and the reference model."""

    name = "dpo"

    @property
    def section(self) -> DpoConfig:
        return self.config.dpo

    def sequences(self, row: Preference) -> Sequence[TrainSequence]:
        return row.sequences

    def prepare(
        self, engine: Engine, rows: Sequence[Preference], directory: Path, check_stop: Callable[[str], None]
    ) -> list[Preference]:
        if not self.section.has_reference:
            return list(rows)
        of_rows = [row.sequences for row in rows]
        scored = reference_logprobs(engine, self.config, of_rows, directory / "reference", check_stop)
        return [replace(row, reference=(first, second)) for row, (first, second) in zip(rows, scored, strict=True)]

    def evaluate(self, engine: Engine, rows: Sequence[Preference]) -> Metrics:
        sums = summed_in_chunks(engine, [row.sequences for row in rows])
        return self.metrics(rows, torch.tensor(sums, dtype=torch.float64))

    @abstractmethod
    def metrics(self, rows: Sequence[Preference], sums_R2: Tensor) -> Metrics:
        """Return the loss and the other metrics of rows, from the sums of their two sequences, [rows, 2]."""


class Pairs(_Preferences[Pair]):
    """``async-rl dpo`` with a loss that compares the two answers of each pair."""

    def load_rows(self, source: str, key: str) -> list[Pair]:
        return load_pairs(source, key, self.encoder(), self.config.data.ignore)

    def step(self, engine: Engine, batch: Sequence[Pair]) -> tuple[UpdateStats, Metrics]:
        sums_P2 = torch.tensor(summed_logprobs(engine, [pair.sequences for pair in batch]), dtype=torch.float64)
        sequences = numbered([*(pair.chosen for pair in batch), *(pair.rejected for pair in batch)])
        sloped = sequence_slopes(sequences, sums_P2.T.reshape(-1), lambda sums: self._loss(batch, *sums.chunk(2)))[1]
        return engine.update(sloped, version=0), self.metrics(batch, sums_P2)

    def _loss(self, batch: Sequence[Pair], chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """Return the mean loss of pairs from the sums of their answers."""
        return PAIR_LOSSES[self.section.loss](pair_values(batch, chosen_P, rejected_P), self.section).mean()

    def metrics(self, rows: Sequence[Pair], sums_R2: Tensor) -> Metrics:
        values = pair_values(rows, *sums_R2.unbind(1))
        chosen_P, rejected_P = values.log_ratios if self.section.has_reference else values.means
        margin_P = self.section.beta * (chosen_P - rejected_P)
        found = {
            "loss": self._loss(rows, *sums_R2.unbind(1)),
            "rewards/chosen": self.section.beta * chosen_P.mean(),
            "rewards/rejected": self.section.beta * rejected_P.mean(),
            "rewards/margin": margin_P.mean(),
            "rewards/accuracy": (margin_P > 0).double().mean(),
            "logprobs/chosen": values.chosen.mean(),
            "logprobs/rejected": values.rejected.mean(),
        }
        if self.section.loss == "orpo":
            found |= {"nll": -values.means[0].mean(), "log_odds_ratio": log_odds_ratio(values).mean()}
        return {key: value.item() for key, value in found.items()}


def pair_values(batch: Sequence[Pair], chosen_P: Tensor, rejected_P: Tensor) -> PairValues:
    """Return what the losses read of ``batch``, with the summed log-probabilities of its answers, float64 [P]."""

    def numbers(of: Callable[[Pair], Any]) -> Tensor:
        return torch.tensor([of(pair) for pair in batch], dtype=torch.float64)

    return PairValues(
        chosen_P,
        rejected_P,
        reference_chosen=numbers(lambda pair: pair.reference[0]),
        reference_rejected=numbers(lambda pair: pair.reference[1]),
        chosen_length=numbers(lambda pair: np.count_nonzero(pair.chosen.loss_mask)),
        rejected_length=numbers(lambda pair: np.count_nonzero(pair.rejected.loss_mask)),
    )


class LabelledAnswers(_Preferences[LabelledAnswer]):
    """``async-rl dpo`` with ``dpo.loss = "kto"``. The mismatched answers are scored, but not trained on."""

    def load_rows(self, source: str, key: str) -> list[LabelledAnswer]:
        return load_labelled(source, key, self.encoder(), self.config.data.ignore)

    def figure(self, row: LabelledAnswer) -> float:
        return float(row.is_good)

    def step(self, engine: Engine, batch: Sequence[LabelledAnswer]) -> tuple[UpdateStats, Metrics]:
        sums_A2 = torch.tensor(summed_logprobs(engine, [row.sequences for row in batch]), dtype=torch.float64)
        answers = numbered([row.answer for row in batch])
        sloped = sequence_slopes(answers, sums_A2[:, 0], lambda sums_A: self._loss(batch, sums_A, sums_A2[:, 1])[0])[1]
        return engine.update(sloped, version=0), self.metrics(batch, sums_A2)

    def _loss(self, rows: Sequence[LabelledAnswer], answers_A: Tensor, mismatched_A: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss and the reference point, from the sums of the answers and of the mismatched ones."""
        reference_A2 = torch.tensor([row.reference for row in rows], dtype=torch.float64)
        is_good_A = torch.tensor([row.is_good for row in rows])
        kl = kto_kl(mismatched_A - reference_A2[:, 1])
        return kto_loss(answers_A - reference_A2[:, 0], is_good_A, kl, self.section).mean(), kl

    def metrics(self, rows: Sequence[LabelledAnswer], sums_R2: Tensor) -> Metrics:
        loss, kl = self._loss(rows, *sums_R2.unbind(1))
        is_good_A = torch.tensor([row.is_good for row in rows])
        rewards_A = self.section.beta * (sums_R2[:, 0] - torch.tensor([row.reference[0] for row in rows]))
        chosen, rejected = rewards_A[is_good_A].mean().item(), rewards_A[~is_good_A].mean().item()
        return {
            "loss": loss.item(),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
            "kl": kl.item(),
        }


def preferences(config: Config) -> _Preferences[Any]:
    """Return the task of ``async-rl dpo`` with ``dpo.loss``."""
    return LabelledAnswers(config) if config.dpo.loss == "kto" else Pairs(config)
