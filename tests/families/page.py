"""Measure every family of the catalogue, and print the page ``docs/families.md`` from the results.

``python -m tests.families.page > docs/families.md``. ``test_families`` compares the page with fresh results, without
the figures of rounding.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from async_rl.errors import ModelError
from async_rl.generator.hf.lockstep import LockstepRows
from async_rl.generator.hf.self_test import choose_rows
from tests.families.catalogue import FAMILIES, build
from tests.families.sampling import worst_difference, write_family
from tests.learner.model.reference import plain_step
from tests.learner.model.test_padded import gradient_of, make_engine
from tests.learner.rank_scenarios import sequences_with_a_group
from tests.learner.tiny import tiny_model

TOLERANCE = 1e-5
"""Largest difference that counts as rounding: in nats or relative, and relative to the largest gradient."""
VLLM = Path(__file__).with_name("vllm.json")
"""What somebody found with vLLM: family -> result. Families that are missing were not tried."""
TEXT = Path(__file__).with_name("page.txt")
_FIGURE = re.compile(r"\d(\.\d+)?e[-+]\d+|\b0\.\d+\b")


@dataclass(frozen=True, slots=True)
class Result:
    """What one side does with a family.

    Attributes:
        way: ``packed``, ``padded``; ``slots``, ``caches``, ``no cache``; or ``refused``.
        reason: why the family is refused.
        differences: largest differences from transformers' model; none if it is refused.
    """

    way: str
    reason: str
    differences: tuple[float, ...]

    @property
    def is_right(self) -> bool:
        return self.way == "refused" or all(difference < TOLERANCE for difference in self.differences)


@cache
def learner(name: str) -> Result:
    """Train one step. The differences are those of log-probabilities and of gradients, each sequence alone."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        tiny_model(root / "model")
        build(name).save_pretrained(root / "model")
        sequences = sequences_with_a_group()
        try:
            engine = make_engine(root)
            engine.self_test()
        except ModelError as error:
            return Result("refused", _clause(str(error)), ())
        scores, expected = plain_step(root / "model", sequences, FAMILIES[name].attention)
        found = engine.score(sequences, of="policy")
        logprobs = max(
            float((abs(found[i] - values.numpy()) / values.abs().clamp_min(1.0).numpy()).max())
            for i, values in scores.items()
        )
        gradients = gradient_of(engine, sequences, root / "ours")
        largest = max(float(tensor.abs().max()) for tensor in expected.values())
        worst = max(float((gradients[key] - tensor).abs().max()) for key, tensor in expected.items())
        return Result(engine.policy.model.packing, "", (logprobs, worst / largest))


@cache
def built_in_engine(name: str) -> Result:
    """Sample with the built-in engine. The difference is that of log-probabilities, from plain forward passes."""
    with tempfile.TemporaryDirectory() as directory:
        write_family(Path(directory), name)
        try:
            difference = worst_difference(Path(directory), name)
        except ModelError as error:
            return Result("refused", _clause(str(error)), ())
    rows: Any = choose_rows(build(name), 1)
    way = "slots" if not isinstance(rows, LockstepRows) else "caches" if rows.has_cache else "no cache"
    return Result(way, "", (difference,))


def _clause(message: str) -> str:
    """Return the cause at the end of an error that refuses a model, without the remedy."""
    cause = re.split(r"on padded rows: |without a cache, |model\.path: (?:\w+ForCausalLM )?", message)[-1]
    return re.split(r"; (?:set|choose|use)\b", cause)[0].replace("|", "/").replace("\n", " ")


def page() -> str:
    """Return the page, in Markdown."""
    sides = {name: (learner(name), built_in_engine(name)) for name in FAMILIES}
    families: dict[tuple[str, str], list[str]] = {}
    for name, (trained, sampled) in sides.items():
        families.setdefault((trained.way, sampled.way), []).append(_shown(name))
    ways = sorted(families, key=lambda pair: tuple(map(_WAYS.index, pair)))
    table = [f"| {way[0]} | {way[1]} | {len(families[way])} | {', '.join(families[way])} |" for way in ways]
    refused = [
        f"- {_shown(name)}, by the {side}: {result.reason}"
        for name, results in sides.items()
        for side, result in zip(("learner", "built-in engine"), results, strict=True)
        if result.way == "refused"
    ]
    logprobs, gradients = (
        max(trained.differences[i] for trained, _ in sides.values() if trained.differences) for i in (0, 1)
    )
    nats = max(sampled.differences[0] for _, sampled in sides.values() if sampled.differences)
    figures = f"at most {logprobs:.0e} and {gradients:.0e}; sampled tokens: at most {nats:.0e} nats."
    of_vllm: dict[str, list[str]] = {}
    for name, found in json.loads(VLLM.read_text(encoding="utf-8")).items():
        of_vllm.setdefault(found, []).append(_shown(name))
    vllm = [f"- {found}: {', '.join(names)}" for found, names in of_vllm.items()]
    lists = {name: "\n".join(rows) for name, rows in (("table", table), ("refused", refused), ("vllm", vllm))}
    return Template(TEXT.read_text(encoding="utf-8")).substitute(lists, figures=figures)


def _shown(name: str) -> str:
    family, comma, variant = name.partition(", ")
    return f"{family} ({variant})" if comma else name


def without_figures(text: str) -> str:
    """Return the text without the figures that depend on rounding."""
    return _FIGURE.sub("#", text)


_WAYS = ["packed", "padded", "slots", "caches", "no cache", "refused"]
"""Ways of both sides, the fast ones first."""


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(page(), end="")
