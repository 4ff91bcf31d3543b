"""``compare``: the tables and the advice of ``async-rl compare``, and a page about several runs, from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from async_rl.api.run import Run, write_page_about
from async_rl.registry import load, our_offers
from async_rl.terminal import visible

CompareRuns = Callable[[Sequence[Path]], tuple[list[str], dict[str, Any]]]
"""What is offered as ``compare`` of ``async_rl.python``: it returns the lines that ``async-rl compare`` prints about
runs, given their directories, and the object that it prints with ``--json``.
"""


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs side by side. As text, and in a notebook, it is what ``async-rl compare`` prints.

    Attributes:
        paths: the directories of the runs.
        lines: the text.
        figures: what ``async-rl compare --json`` prints. ``pandas.DataFrame(figures["runs"])`` is a table of it.
    """

    paths: Sequence[Path]
    lines: Sequence[str]
    figures: Mapping[str, Any]

    def report(self, out: str | PathLike[str]) -> Path:
        """Write the page that ``async-rl report`` writes about all these runs to ``out``, and return its path."""
        return write_page_about(self.paths, Path(out))

    def __repr__(self) -> str:
        return "\n".join(map(visible, self.lines))


def compare(*runs: Run | str | PathLike[str]) -> Comparison:
    """Compare runs, finished or running, given by their directories.

    Raises:
        RunError: there is no run, it has made no step yet, or a file of it is damaged.
    """
    paths = [run.path if isinstance(run, Run) else Path(run) for run in runs]
    compare_runs: CompareRuns = load(our_offers("async_rl.python")["compare"])
    return Comparison(paths, *compare_runs(paths))
