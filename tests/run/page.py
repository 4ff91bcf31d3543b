"""Prints the page docs/metrics.md: ``python -m tests.run.page > docs/metrics.md``."""

from __future__ import annotations

import sys

from async_rl.run.records.metric_table import METRIC_SECTIONS, meaning

_PAGE = """# Metrics

The learner writes one JSON object for each step to `metrics.jsonl` in the run directory, and one for each evaluation.
With `log.to` they go to other tools too ([watching.md](watching.md#loggers)). Values that are not finite are null. `N`
and names in `<>` stand for parts of a key that vary. [tuning.md](tuning.md#reading-the-metrics) says what to do about
them.

This page is generated from `async_rl/run/records/metric_table.py`:
`python -m tests.run.page > docs/metrics.md`.
"""


def markdown() -> str:
    """Return the text of ``docs/metrics.md``: a table of keys and meanings for each subject."""
    parts = [_PAGE]
    for title, keys in METRIC_SECTIONS.items():
        if title == "Evaluations":  # watching.md has a table of them, with the formulas
            parts.append(f"## {title}\n\n`eval/<dataset>/<name>`: the [figures](watching.md#figures) of a set.\n")
            continue
        rows = [f"| `{key}` | {meaning(key).replace('|', chr(92) + '|')} |" for key in keys]
        parts.append("\n".join([f"## {title}", "", "| key | meaning |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(markdown())
