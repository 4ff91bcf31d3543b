"""What the staleness study asks: its runs, and the questions that they answer (``staleness_real.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

_LISTS = ("tasks", "arms", "rates")


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run of the grid."""

    task: str
    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}/{self.arm}/x{self.rate:g}/{self.seed}"


@dataclass(frozen=True, slots=True)
class Question:
    """How ``arms`` differ from the first of them."""

    name: str
    title: str
    tasks: tuple[str, ...]
    arms: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: int

    def cells(self) -> Iterator[Cell]:
        """Yield the runs seed by seed, so that whoever stops has whole comparisons."""
        for seed, task, rate, arm in product(range(self.seeds), self.tasks, self.rates, self.arms):
            yield Cell(task, arm, rate, seed)


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid's file: arms are settings by their keys."""

    arms: Mapping[str, Mapping[str, Any]]
    questions: Sequence[Question]

    @classmethod
    def load(cls, path: Path) -> Grid:
        parsed = tomllib.loads(path.read_text(encoding="utf-8"))
        questions = [Question(**{**q, **{key: tuple(q[key]) for key in _LISTS}}) for q in parsed["question"]]
        return cls(parsed["arms"], questions)

    def settings(self, arm: str) -> dict[str, Any]:
        """Return the settings of ``arm``: of ``a+b`` those of a, then those of b."""
        return {key: value for name in arm.split("+") for key, value in self.arms[name].items()}
