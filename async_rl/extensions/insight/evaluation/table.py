"""Makes tables that compare evaluations: of the steps of a run, of several runs, of several models.

``compare`` is the body of ``async-rl eval --compare``. It reads the ``metrics.jsonl`` of runs and the ``figures.json``
of offline evaluations. No model is evaluated again, and torch is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.errors import RunError
from async_rl.run.directory import RunDir, is_figure, read_json
from async_rl.run.records.step_log import eval_figures, read_metrics

FIGURES_FILE = "figures.json"
"""Name of the file that ``async-rl eval --out DIR`` writes. It is a JSON list of objects, each with
the figures of one model on one dataset."""

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("best_of_n", "best@{n}", ".3f"),
    ("majority_at_n", "maj@{n}", ".3f"),
    ("score", "score", ".3g"),
    ("reward", "reward", ".3g"),
    ("turns", "turns", ".1f"),
    ("length_mean", "tokens", ".1f"),
    ("truncated", "cut", ".1%"),
)
"""The columns of a table after accuracy and pass@k. Each has the key of a figure, a heading and a number format."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One evaluation, which is one line of a table.

    ``labels`` has one label for each heading, such as the model's name. ``figures`` has the keys of
    ``metric_table.EVAL_FIGURES``.
    """

    labels: tuple[str, ...]
    figures: Mapping[str, float]


def eval_table(headings: Sequence[str], entries: Sequence[Entry]) -> list[str]:
    """Return the lines of a table: a line of headings, then one line for each of ``entries``.

    ``headings`` are the headings of the labels. Columns without any figure are left out. A column of labels is left out
    if all labels are the same, unless it is the last one.
    """
    of_all = [entry.figures for entry in entries]
    columns = [("accuracy", [cell(f.get("accuracy"), ".3f", f.get("accuracy_se"), error_form=".3f") for f in of_all])]
    columns += [
        (heading, [cell(f[key], form) if key in f else "" for f in of_all]) for key, heading, form in _chosen(entries)
    ]
    columns += [("unanswered", [_unanswered(entry.figures) for entry in entries])]
    columns += [("versions", [_versions(entry.figures) for entry in entries])]
    labels = [(heading, [entry.labels[i] for entry in entries]) for i, heading in enumerate(headings)]
    labels = [column for column in labels[:-1] if len(set(column[1])) > 1] + labels[-1:]
    shown = labels + [(heading, cells) for heading, cells in columns if any(cells)]
    return aligned(
        [[heading for heading, _ in shown], *([cells[i] for _, cells in shown] for i in range(len(entries)))],
        num_labels=len(labels),
    )


def aligned(rows: Sequence[Sequence[str]], *, num_labels: int = 1) -> list[str]:
    """Return the lines of a table: the first ``num_labels`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < num_labels else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def cell(value: float | None, form: str, error: float | None = None, *, error_form: str = ".2g") -> str:
    """Return a number in the format ``form``, with its standard error if that is known; ``-`` for None."""
    shown = "-" if value is None else format(value, form)
    return shown if value is None or error is None else f"{shown} ± {error:{error_form}}"


def compare(paths: Sequence[Path]) -> list[str]:
    """Return the lines of tables that compare all evaluations in the directories ``paths``, one table per dataset.

    A path is the directory of a run or the ``--out`` directory of ``async-rl eval``. A table has one line for each
    evaluated step of a run and for each model.

    Raises:
        RunError: a path is neither of the two, or contains no evaluation.
    """
    lines: list[str] = []
    for dataset, entries in _entries_by_dataset(paths).items():
        lines += [*([""] if lines else []), _title(dataset, entries), *eval_table(["of", "step"], entries)]
    return lines


def compare_json(paths: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Return the evaluations in the directories ``paths`` as plain data: for each dataset a list of evaluations.

    Each has the path or the model (``of``), the step (None for a model) and the figures.

    Raises:
        RunError: as ``compare``.
    """
    return {
        dataset: [
            {"of": of, "step": int(step) if step.isdecimal() else None, "figures": dict(entry.figures)}
            for entry in entries
            for of, step in [entry.labels]
        ]
        for dataset, entries in _entries_by_dataset(paths).items()
    }


def _entries_by_dataset(paths: Sequence[Path]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for path in paths:
        entries = _entries(path)
        if not entries:
            raise RunError(
                f"{path}: expected evaluations, got none; set data.eval in the run's config and resume the run, or "
                f"evaluate its checkpoints with `async-rl eval --out DIR`"
            )
        for dataset, entry in entries:
            found.setdefault(dataset, []).append(entry)
    return found


def _entries(path: Path) -> list[tuple[str, Entry]]:
    """Return the evaluations in the directory ``path``, as pairs (name of the dataset, entry of its table).

    The evaluations of a run are in the order of its steps.
    """
    metrics, figures = RunDir(path).metrics, path / FIGURES_FILE
    if figures.is_file():
        return _written(figures)
    if not metrics.is_file():
        raise RunError(
            f"{path}: expected a run directory (with a metrics.jsonl) or an --out directory of `async-rl eval` (with a "
            f"{FIGURES_FILE}), got neither; correct the path"
        )
    entries: list[tuple[str, Entry]] = []
    for row in sorted(read_metrics(metrics), key=lambda row: row["step"]):
        for dataset, of_set in eval_figures(row).items():
            entries.append((dataset, Entry((str(path), str(row["step"])), of_set)))
    return entries


def _written(path: Path) -> list[tuple[str, Entry]]:
    """Return what ``figures.json`` has, as ``_entries`` does."""
    try:
        written = read_json(path)
    except (OSError, ValueError) as error:
        raise RunError(f"can't read {path}: {error}; evaluate again with `async-rl eval --out DIR`") from error
    entries: list[tuple[str, Entry]] = []
    for number, one in enumerate(written if isinstance(written, list) else [written], start=1):
        match one:
            case {"dataset": str(dataset), "model": str(model), "figures": dict(figures)} if all(
                map(is_figure, figures.values())
            ):
                entries.append((dataset, Entry((model, "-"), figures)))
            case _:
                raise RunError(
                    f"{path}: expected a list of objects with dataset, model and figures, got another one at place "
                    f"{number}; the file is damaged, evaluate again with `async-rl eval --out DIR`"
                )
    return entries


def _title(dataset: str, entries: Sequence[Entry]) -> str:
    rows = _either([entry.figures.get("rows", 0) for entry in entries])
    answers = _either([entry.figures["samples"] for entry in entries if "samples" in entry.figures])
    said = "" if not answers else f", {answers} answer{'' if answers == '1' else 's'} a row"
    warning = "; DIFFERENT rows: not comparable" if " or " in rows else ""
    return f"{dataset}: {rows} rows{said}{warning}"


def _either(numbers: Sequence[float]) -> str:
    return " or ".join(str(int(number)) for number in sorted(set(numbers)))


def _chosen(entries: Sequence[Entry]) -> list[tuple[str, str, str]]:
    """Choose the table's columns to the right of the accuracy. Return each column's key, heading and number format.

    In headings such as ``best@{n}``, ``{n}`` becomes the number of answers per row, or the letter n if evaluations
    differ in this number.
    """
    samples = {int(entry.figures.get("samples", 1)) for entry in entries}
    number = str(samples.pop()) if len(samples) == 1 else "n"
    keys = {key for entry in entries for key in entry.figures}
    tries = sorted(int(key.removeprefix("pass_at_")) for key in keys if re.fullmatch(r"pass_at_\d+", key))
    # pass@1 equals the accuracy unless an answer is partly right.
    if all(entry.figures.get("pass_at_1") == entry.figures.get("accuracy") for entry in entries):
        tries = [k for k in tries if k > 1]
    passes = [(f"pass_at_{k}", f"pass@{k}", ".3f") for k in tries]
    if number.isdecimal() and int(number) > 1 and int(number) not in tries:
        passes.append(("pass_at_k", f"pass@{number}", ".3f"))
    # For the same reason the best answer's accuracy equals pass@n.
    same_best = all(entry.figures.get("best_of_n") == entry.figures.get("pass_at_k") for entry in entries)
    keys -= {"best_of_n"} if same_best else set()
    chosen = [column for column in (*passes, *_COLUMNS) if column[0] in keys]
    return [(key, heading.format(n=number), form) for key, heading, form in chosen]


def _unanswered(figures: Mapping[str, float]) -> str:
    return str(int(figures["unanswered"])) if figures.get("unanswered") else ""


def _versions(figures: Mapping[str, float]) -> str:
    oldest, newest = figures.get("version_min"), figures.get("version_max")
    if oldest is None or newest is None:
        return ""
    return str(int(oldest)) if oldest == newest else f"{int(oldest)}-{int(newest)}"
