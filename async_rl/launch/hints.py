"""Notes of ``launch`` about what needs an explanation: answers cut short, steps that train nothing, a collapse.

The views give every new row of ``metrics.jsonl`` to ``Hints`` and show the notes that it returns: answers cut short,
steps that trained nothing, training that goes wrong (``run.figures.health``). ``LedgerNotes`` reads those of the queue,
which ``ledger.json`` has. The summary shows ``best_lines``, and the notes again where no view has shown them.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from async_rl.errors import RunError
from async_rl.run.directory import RunDir, checkpoint_name
from async_rl.run.figures.health import Health
from async_rl.run.figures.progress import is_step_row
from async_rl.run.records.step_log import Row, eval_figures

_STEPS = 5
_MIN_STEPS = 3
_MOST = 0.5
_MANY_ZERO = 0.25


class LedgerNotes:
    """Finds the notes of the queue in ``ledger.json``. Each cause is reported once in a launch.

    What the file had before this launch is left out: a learner that starts makes a new lineage.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._lineage_before = self._read().get("lineage")
        self._given: set[str] = set()

    def poll(self) -> list[str]:
        """Return the notes that are new since the last call."""
        ledger = self._read()
        if ledger.get("lineage") in (None, self._lineage_before):
            return []
        new = {cause: text for cause, text in ledger.get("group_notes", {}).items() if cause not in self._given}
        self._given |= new.keys()
        return [f"note: {text}" for text in new.values()]

    def _read(self) -> dict[str, Any]:
        try:
            return self._run_dir.read_ledger()
        except RunError:  # a damaged file has no notes; the server writes it again
            return {}


class Hints:
    """Finds what a user should know about the steps of a run. Each note is given once in a launch.

    Attributes:
        health: judges the training. Its notes are given once in a run.
    """

    def __init__(self, history: Iterable[Row] = ()) -> None:
        """Take the rows of earlier launches as ``history``."""
        self.health = Health(history)
        self._rows: deque[Row] = deque(maxlen=_STEPS)
        self._given: set[str] = set()

    def add(self, row: Row) -> list[str]:
        """Take the next row of ``metrics.jsonl``, and return the notes that are due now."""
        of_health = [f"note: {note.text}" for note in self.health.add(row)]
        if not is_step_row(row):
            return of_health
        self._rows.append(row)
        found = {
            "truncated": _truncated(list(self._rows)), "masked": _masked(row), "skipped": _skipped(row),
            "zero_groups": _zero_groups(list(self._rows)),
        }  # fmt: skip
        new = {kind: note for kind, note in found.items() if note and kind not in self._given}
        self._given |= new.keys()
        return [*new.values(), *of_health]


def best_lines(run_dir: RunDir, rows: Sequence[Row]) -> list[str]:
    """Return a line for each evaluation set whose best evaluation was before the last one, and how to export its model.

    ``rows`` are those of the run's ``metrics.jsonl``.
    """
    points: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        for dataset, figures in eval_figures(row, "accuracy").items():
            points.setdefault(dataset, []).append((row["step"], figures["accuracy"], figures.get("accuracy_se", 0.0)))
    return [_best_line(run_dir, name, found) for name, found in points.items() if _best(found)[1] > found[-1][1]]


def _best(points: Sequence[tuple[int, float, float]]) -> tuple[int, float, float]:
    return max(points, key=lambda point: point[1])


def _best_line(run_dir: RunDir, dataset: str, points: Sequence[tuple[int, float, float]]) -> str:
    (step, best, error), (last_step, last, last_error) = _best(points), points[-1]
    errors = (error**2 + last_error**2) ** 0.5
    doubt = ", which may be chance" if best - last <= 2 * errors else ""
    checkpoint = run_dir.checkpoints / checkpoint_name(step)
    if checkpoint.is_dir():
        remedy = f"export it: async-rl export {shlex.quote(str(checkpoint))} OUT"
    elif step:
        remedy = "its checkpoint is gone (checkpoint.keep_every keeps more)"
    else:
        remedy = "that is the model at model.path"
    return f"best on {dataset}: {best:.3f} at step {step}, the last is {last:.3f} at step {last_step}{doubt}; {remedy}"


def _truncated(rows: list[Row]) -> str:
    """Return a note if most answers of ``rows`` were cut at the token limit, and that costs; else an empty text."""
    share = sum(row.get("length/truncated") or 0.0 for row in rows) / len(rows)
    if len(rows) < _MIN_STEPS or share <= _MOST:
        return ""
    penalty = -sum(row.get("reward/overlong") or 0.0 for row in rows) / len(rows)
    costs = [f"lower the mean reward by {penalty:.2f} (reward.soft_overlong)"] if penalty >= 0.005 else []
    if any(row.get("masked/truncated") for row in rows):
        costs.append("are left out of the loss (loss.mask_truncated)")
    if not costs:  # without reward.soft_overlong they count as they are, which teaches to be short
        return ""
    return (
        f"note: {share:.0%} of the answers of the last {len(rows)} steps were cut at {_cut_at(rows)}. They "
        f"{' and '.join(costs)}. Raise {_raised(rows)}, or let the prompt ask for shorter answers. If they are "
        f"complete and go on, the model does not end its turns: async-rl doctor lists the tokens that end one"
    )


def _zero_groups(rows: list[Row]) -> str:
    """Return a note if many of the groups of ``rows`` train nothing; else an empty text.

    Of steps in which no group trains ``run.figures.health`` has a note. A teacher trains them all.
    """
    shares = [row["advantage/zero_groups"] for row in rows if row.get("advantage/zero_groups") is not None]
    mean = sum(shares) / max(1, len(shares))
    if len(shares) < _MIN_STEPS or not _MANY_ZERO <= mean < 1 or any("distill/kl" in row for row in rows):
        return ""
    return (
        f"note: {mean:.0%} of the groups of the last {len(shares)} steps train nothing: their answers all have the "
        f"advantage 0, as with equal rewards. queue.filter_range replaces groups that are all right or all wrong, and "
        f"looks at nothing but the accuracy; for others let the reward tell better answers from worse ones, or raise "
        f"sampling.group_size or sampling.temperature"
    )


_CUT_KEYS = {"length/cut_turn": "environment.max_turn_tokens", "length/cut_context": "the end of the context"}


def _cut_at(rows: list[Row]) -> str:
    """Return the limit that cut most of the cut answers of ``rows``."""
    shares = {limit: sum(row.get(key) or 0.0 for row in rows) for key, limit in _CUT_KEYS.items()}
    others = sum(row.get("length/truncated") or 0.0 for row in rows) - sum(shares.values())
    return max([("sampling.max_new_tokens", others), *shares.items()], key=lambda item: item[1])[0]


def _raised(rows: list[Row]) -> str:
    """Return the keys to raise, so that fewer answers are cut."""
    limit = _cut_at(rows)
    if limit != "the end of the context":
        return limit
    # An agent's rollout also ends where all its sequences together are too long.
    of_agents = "environment.max_rollout_tokens, " if any("agent/sessions" in row for row in rows) else ""
    return f"{of_agents}sampling.max_prompt_tokens or sampling.max_new_tokens"


def _masked(row: Row) -> str:
    """Return a note if the step had nothing to train on; else an empty text."""
    if not row.get("skip/steps") or "loss/policy" in row:
        return ""
    causes = {key.removeprefix("masked/"): count for key, count in row.items() if key.startswith("masked/") and count}
    listed = ", ".join(f"{count} {cause}" for cause, count in causes.items())
    remedy = f"; raise {_raised([row])}, or set loss.mask_truncated = false" if "truncated" in causes else ""
    return (
        f"note: step {row['step']} trained nothing, because all its answers are left out of the loss"
        f"{f' ({listed})' if listed else ''}{remedy}. The ledger counts such groups as step_skipped"
    )


def _skipped(row: Row) -> str:
    """Return a note if an optimizer step was skipped that had tokens to train on; else an empty text."""
    if not row.get("skip/steps") or "loss/policy" not in row:
        return ""
    return (
        f"note: an optimizer step of step {row['step']} was skipped (gradient, loss.min_ess or loss.max_kl); "
        f"logs/learner-0.log has the reason and a remedy. The ledger counts its answers as step_skipped"
    )
