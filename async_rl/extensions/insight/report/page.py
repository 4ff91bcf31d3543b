"""Fill the templates with the data of runs: one HTML page that needs nothing else.

Data is in the page as gzip in base64, so no text of it can be markup. What the templates show themselves is escaped by
jinja2. The page's policy (CSP) names the digest of its one script, so a browser runs no other, and loads nothing.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from async_rl import __version__
from async_rl.extensions.insight.report.figures import Plain, panels
from async_rl.launch.status import ledger_rows
from async_rl.run.figures.progress import duration
from async_rl.run.records.metric_table import METRIC_KEYS, meaning
from async_rl.terminal import visible_values

_SECTIONS = {
    "learning": "Learning",
    "waits": "Waiting",
    "staleness": "Staleness",
    "ledger": "Ledger",
    "rollouts": "Rollouts",
    "notes": "Warnings",
    "settings": "Settings",
}
_SCRIPTS = ("base.js", "rollouts.js", "views.js")
_LEVEL = 6
_IN_TEMPLATE = (
    "name", "path", "state", "step", "steps", "origin", "starts", "headline", "notes", "changes", "settings",
    "config_text", "who_waits",
)  # fmt: skip
_IN_SCRIPT = ("name", "starts", "columns", "evals", "timeline", "lags", "ledger")
"""What the template shows of a run, and what the page's script gets."""


def blob(data: bytes) -> str:
    """Return ``data`` as the page holds it: gzip in base64, the same text for the same data."""
    return base64.b64encode(gzip.compress(data, _LEVEL, mtime=0)).decode("ascii")


def to_json(value: Any) -> bytes:
    """Return ``value`` as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")


def render(
    runs: Sequence[Plain], rollouts: Sequence[int] = (), blobs: Mapping[str, str] | None = None, *,
    left_out: str = "", is_served: bool = False,
) -> str:  # fmt: skip
    """Return the page.

    Args:
        runs: what ``figures.read_run`` returned, for each run.
        rollouts: the number of rollouts in the index of each run.
        blobs: further data for the page's script, by the id of its element.
        left_out: a sentence on what the page leaves out.
        is_served: whether the page gets indices and chunks, and newer figures, from the server that it is from.
    """
    style, script = _template("report.css"), "\n".join(map(_template, _SCRIPTS))
    keys = {key for run in runs for key in run["columns"]}
    shown = visible_values([{**{key: run[key] for key in _IN_TEMPLATE}, **_static(run)} for run in runs])
    of_script = {
        "runs": [{key: run[key] for key in _IN_SCRIPT} for run in runs], "panels": panels(),
        "descriptions": {key: meaning(key) for key in keys if key in METRIC_KEYS},  # documented under their own name
        "rollouts": list(rollouts), "served": is_served,
    }  # fmt: skip
    settings = _settings(shown)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_template("report.html")).render(
        title=" and ".join(run["name"] for run in shown),
        policy=_policy(style, script),
        style=style,
        script=script,
        sections=_SECTIONS.items(),
        runs=shown,
        any_starts=any(run["starts"] for run in runs),
        all=settings,
        changed=[row for row in settings if row["changed"]],
        differing=[row for row in settings if len(set(row["values_of"])) > 1],
        data=blob(to_json(visible_values(of_script))),
        blobs=(blobs or {}).items(),
        num_rollouts=sum(rollouts),
        left_out=left_out,
        version=__version__,
        made_at=time.strftime("%Y-%m-%d %H:%M %Z"),
    )


def _template(name: str) -> str:
    return (files("async_rl.extensions.insight.report") / "templates" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Return the page's content security policy: its own style and script, and nothing from anywhere else."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; connect-src 'self'; "
        f"base-uri 'none'; form-action 'none'"
    )


def _static(run: Plain) -> Plain:
    """Return what the template shows of a run without its script."""
    return {
        "elapsed": duration(run["elapsed_s"]),
        "ledger_rows": [[label, *(count or "–" for count in counts)] for label, *counts in ledger_rows(run["ledger"])],
        "outcome_rows": list(_outcome_rows(run["outcomes"])),
    }


def _outcome_rows(outcomes: Mapping[str, Mapping[str, float]]) -> Iterable[list[str]]:
    for name, sums in outcomes.items():
        if count := sums["rollouts"]:
            means = [f"{sums[key] / count:.3g}" for key in ("tokens", "reward", "accuracy")]
            yield [name, f"{sums['groups']:,}", *means]


def _settings(runs: Sequence[Plain]) -> list[Plain]:
    """Return the keys of all runs, each with its value in every run."""
    by_key = [{row["key"]: row for row in run["settings"]} for run in runs]
    names = dict.fromkeys(name for rows in by_key for name in rows)
    settings: list[Plain] = []
    for name in names:
        rows = [of_run.get(name) for of_run in by_key]
        first = next(row for row in rows if row is not None)
        values = ["–" if row is None else row["value"] for row in rows]
        settings.append({**first, "values_of": values, "changed": any(row is None or row["changed"] for row in rows)})
    return settings
