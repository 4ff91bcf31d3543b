"""The settings of a plan, which of them to take, and the table and the JSON object of ``async-rl plan``."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from async_rl.config.config import Config
from async_rl.extensions.insight.comparison.advice import MUCH_LOST, PAYS
from async_rl.extensions.insight.evaluation.table import aligned
from async_rl.extensions.insight.plan.rates import Rates
from async_rl.extensions.insight.plan.simulation import Prediction, Setting
from async_rl.output import size_text
from async_rl.run.figures.progress import MUCH_IDLE

_BOUNDS = (1, 2, 4, 8)
"""The staleness bounds of a plan for which the user names none, besides the lowest and the config's."""
_COLUMNS: dict[str, Callable[[Prediction], str]] = {
    "bound": lambda one: f"{one.setting.max_staleness}",
    "generators": lambda one: f"{one.setting.num_generators}",
    "ranks": lambda one: f"{one.setting.num_ranks}",
    "tokens": lambda one: f"{one.setting.lengths.mean_tokens:.0f}",
    "steps/s": lambda one: f"{one.steps_per_s:.3g}",
    "learner idle": lambda one: f"{one.idle_learner:.0%}",
    "generators idle": lambda one: f"{one.idle_generators:.0%}",
    "staleness": lambda one: f"{one.staleness_mean:.2f}",
    "oldest": lambda one: f"{max(one.staleness, default=0)}",
    "dropped": lambda one: f"{one.dropped:.1%}",
    "masked": lambda one: f"{one.masked:.1%}",
    "weights/s": lambda one: size_text(one.weights_bytes_per_s) if one.weights_bytes_per_s else "-",
}


def settings_of(
    config: Config, rates: Rates, bounds: Sequence[int], generators: Sequence[int], ranks: Sequence[int],
    mean_tokens: Iterable[int],
) -> list[Setting]:  # fmt: skip
    """Return all combinations. Empty values stand for the config's. The lowest bound is always there, to compare."""
    wanted = sorted({config.lowest_bound, *(bounds or (*_BOUNDS, config.queue.max_staleness))})
    lengths = [rates.lengths.with_mean(mean) for mean in mean_tokens] or [rates.lengths]
    counts = generators or [max(1, config.generator.count)]
    combinations = itertools.product(lengths, ranks or [rates.num_ranks], counts, wanted)
    return [Setting(bound, count, num, one) for one, num, count, bound in combinations if bound >= config.lowest_bound]


def choose(found: Sequence[Prediction]) -> Prediction:
    """Return the setting with the fewest generators and ranks, then the lowest bound, that is not clearly slower than
    the fastest. Masked tokens count as not trained.
    """
    fastest = max(map(_speed, found))
    near = [one for one in found if _speed(one) * PAYS >= fastest]
    devices = [one.setting.num_generators + one.setting.num_ranks for one in near]
    return min(zip(devices, near, strict=True), key=lambda pair: (pair[0], pair[1].setting.max_staleness))[1]


def _speed(one: Prediction) -> float:
    return one.steps_per_s * (1 - one.masked)


def advice(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield sentences: for each mean length, the setting to take and why, and whether asynchrony helps at all."""
    lengths = sorted({one.setting.lengths.mean_tokens for one in found})
    for mean_tokens in lengths:
        chosen = choose([one for one in found if one.setting.lengths.mean_tokens == mean_tokens])
        setting = chosen.setting
        alike = [one for one in found if replace(one.setting, max_staleness=0) == replace(setting, max_staleness=0)]
        lowest = min(alike, key=lambda one: one.setting.max_staleness)
        start = f"With answers of {mean_tokens:.0f} tokens: set" if len(lengths) > 1 else "Set"
        yield (
            f"{start} queue.max_staleness = {setting.max_staleness} with "
            f"{_counted(setting.num_generators, 'generator')} and {_counted(setting.num_ranks, 'learner rank')}: "
            f"{chosen.steps_per_s:.3g} steps/s."
        )
        yield from _reasons(chosen, lowest, max(map(_speed, alike)) / _speed(lowest))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _reasons(chosen: Prediction, lowest: Prediction, gain: float) -> Iterator[str]:
    bound, lost = lowest.setting.max_staleness, chosen.dropped + chosen.masked
    if gain < PAYS:
        slower = "generators are" if lowest.idle_learner > lowest.idle_generators else "learner is"
        yield (
            f"Asynchrony does not help here: no bound is more than {PAYS - 1:.0%} faster than {bound}. The {slower} "
            f"the slower side in nearly all of a step, so make that side faster."
        )
    else:
        yield f"That is {chosen.steps_per_s / lowest.steps_per_s:.2f} times the steps/s of a bound of {bound}."
    if lost > MUCH_LOST:
        yield f"{lost:.1%} of the data is too old to train on. A higher bound loses less."
    if chosen.idle_generators > max(MUCH_IDLE, chosen.idle_learner):
        yield f"Generators are idle {chosen.idle_generators:.0%} of the time: add learner ranks or drop generators."
    elif chosen.idle_learner > MUCH_IDLE:
        yield f"The learner is idle {chosen.idle_learner:.0%} of the time: more generators make the run faster."


def plan_lines(found: Sequence[Prediction], rates: Rates, source: str) -> list[str]:
    """Return the lines that ``async-rl plan`` prints."""
    head = (
        f"Rates {source}: {rates.decode_step_s:.3g} s for a decode step and {rates.decode_sequence_s:.3g} s more "
        f"for each sequence in it; {rates.train_s:.3g} s and "
        f"{1e6 * rates.train_token_s:.3g} s per million tokens for a step's training, {rates.after_s:.3g} s after it; "
        f"{rates.transfer_s:.3g} s until a version arrives; answers of {rates.lengths.mean_tokens:.0f} tokens."
    )
    cells = [[value(one) for value in _COLUMNS.values()] for one in found]
    # Of the columns that name the setting, those with one value are left out.
    shown = [n for n in range(len(_COLUMNS)) if not 1 <= n <= 3 or len({row[n] for row in cells}) > 1]
    table = aligned([[row[n] for n in shown] for row in [list(_COLUMNS), *cells]], num_labels=0)
    text = [line for part in advice(found) for line in textwrap.wrap(part, 100)]
    return [*textwrap.wrap(head, 100), "", *table, "", *text]


def plan_json(found: Sequence[Prediction], rates: Rates, source: str) -> dict[str, Any]:
    """Return the predictions, the rates and the advice as plain data."""

    def plain(one: Prediction) -> dict[str, Any]:
        figures = asdict(one)
        figures["setting"]["lengths"].pop("observed")
        return {**figures.pop("setting"), **figures}

    of_rates = asdict(rates)
    of_rates["lengths"].pop("observed")
    settings = [plain(one) for one in found]
    chosen = settings[found.index(choose(found))]
    return {
        "source": source, "rates": of_rates, "settings": settings, "recommended": chosen, "advice": list(advice(found)),
    }  # fmt: skip
