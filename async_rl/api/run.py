"""``Run``: the figures, rollouts and files of a run, read from its directory, also while the run goes on."""

from __future__ import annotations

import base64
import html
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.config.config import Config
from async_rl.config.loading import load_run_config
from async_rl.errors import RunError
from async_rl.launch.status import status_of_run
from async_rl.launch.summary import summary
from async_rl.registry import load, our_offers
from async_rl.run.directory import RunDir, step_files
from async_rl.run.figures.progress import is_step_row
from async_rl.run.records.step_log import Row, eval_figures, iter_metrics, last_step
from async_rl.terminal import visible

if TYPE_CHECKING:
    from pandas import DataFrame

logger = logging.getLogger(__name__)

WritePage = Callable[[Sequence[Path], Path], str]
"""What is offered as ``report`` of ``async_rl.python``: it writes a page about runs, given their directories, to a
file, which is replaced. It returns what the page leaves out, in words. Raises RunError: a file of a run is damaged, or
the page can't be written.
"""


class Run:
    """A run in a directory on this machine. In a notebook it shows its summary and its picture.

    Methods read the files anew at each call. Iterators read row by row, so a long run needs no more memory.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Find the run in the directory ``path``.

        Raises:
            RunError: there is none.
        """
        self._dir = RunDir(Path(path))
        if not self._dir.config.is_file():
            raise RunError(f"expected a run directory, which has a config.toml, at {path}, got none; correct the path")

    @property
    def path(self) -> Path:
        return self._dir.path

    @cached_property
    def config(self) -> Config:
        """The run's config with all defaults, as it was when it was first read."""
        return load_run_config(self._dir.config)

    @property
    def is_finished(self) -> bool:
        """Whether the run has trained its last step and written all its files."""
        return self._dir.is_finished

    @property
    def last_step(self) -> int:
        """The number of trained steps."""
        return last_step(self._dir.metrics)

    @property
    def export_path(self) -> Path | None:
        """The trained model as a Hugging Face directory. None if the run has not written it."""
        return self._dir.export if self._dir.export.exists() else None

    def ledger(self) -> dict[str, Any]:
        """Return what became of all groups, rollouts and tokens. It is empty before the queue server has written it."""
        return self._dir.read_ledger()

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Return what ``async-rl status`` shows: of a running run, the answer of its queue server.

        Raises:
            AsyncRLError: the run is not finished, and its queue server does not answer within ``timeout_s`` seconds.
        """
        return status_of_run(self.path, timeout_s, None)

    def metrics(self) -> Iterator[Row]:
        """Yield the figures of each step (docs/metrics.md)."""
        return filter(is_step_row, iter_metrics(self._dir.metrics))

    def metrics_frame(self) -> DataFrame:
        """Return ``metrics`` as a table, with the step as index."""
        return _frame(self.metrics(), ["step"])

    def evaluations(self) -> Iterator[Row]:
        """Yield the figures of each evaluation, with the name of its ``set``.

        ``step`` is that after which it began, ``time_s`` the seconds from the start of the run to its end.
        """
        for row in iter_metrics(self._dir.metrics):
            for name, figures in eval_figures(row).items():
                yield {"step": row["step"], "set": name, "time_s": row.get("time_s"), **figures}

    def evaluations_frame(self) -> DataFrame:
        """Return ``evaluations`` as a table, with the set and the step as index."""
        return _frame(self.evaluations(), ["set", "step"])

    def rollouts(self, step: int | None = None) -> Iterator[Row]:
        """Yield the logged rollouts that ``step`` trained on, or those of all steps: text, reward parts, versions.

        ``log.rollouts_every`` and ``log.rollouts_groups`` decide which are logged.
        """
        return _records(self._dir.rollouts, "", step)

    def rollouts_frame(self, step: int | None = None) -> DataFrame:
        """Return ``rollouts`` as a table."""
        return _frame(self.rollouts(step), [])

    def answers(self, set_name: str, step: int | None = None) -> Iterator[Row]:
        """Yield the answers to the evaluation set ``set_name`` after ``step``, or those of all its evaluations."""
        return _records(self._dir.eval, set_name, step)

    def picture(self) -> Path:
        """Draw the run's curves as they are now, and return the path of the picture, a PNG.

        Raises:
            RunError: the run has no step yet.
        """
        write_curve = load(our_offers("async_rl.python")["picture"])
        if not write_curve(self._dir):
            raise RunError(f"expected a run with a step or an evaluation in {self.path}, got none yet; wait for one")
        return self._dir.curve

    def report(self, out: str | PathLike[str] | None = None) -> Path:
        """Write the page that ``async-rl report`` writes, and return its path. If ``out`` is unset, ``report.html`` of
        the run directory. What the page leaves out is logged.

        Raises:
            RunError: a file of the run is damaged, or ``out`` can't be written.
        """
        return _write_page([self.path], self._dir.report if out is None else Path(out))

    def summary(self) -> str:
        """Return the lines that ``launch`` prints at the end of a run."""
        return "\n".join(map(visible, summary(self._dir)))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {'finished' if self.is_finished else 'not finished'}, {self.last_step} steps"

    def _repr_html_(self) -> str:
        text = f"<pre>{html.escape(self.summary())}</pre>"
        if next(iter_metrics(self._dir.metrics), None) is None:
            return text
        encoded = base64.b64encode(self.picture().read_bytes()).decode()
        return f'{text}<img alt="curves of the run" style="max-width: 100%" src="data:image/png;base64,{encoded}">'


def compare(*runs: Run | str | PathLike[str], report: str | PathLike[str] | None = None) -> dict[str, Any]:
    """Print what ``async-rl compare`` prints about runs, given as ``Run`` or by their directories, and return what it
    prints with ``--json``: ``pandas.DataFrame(compare(...)["runs"])`` has a row for each run.

    If ``report`` is set, write the page that ``async-rl report`` writes about all of them there, too.

    Raises:
        RunError: there is no run, it has made no step yet, a file of it is damaged, or ``report`` can't be written.
    """
    paths = [run.path if isinstance(run, Run) else Path(run) for run in runs]
    lines, figures = load(our_offers("async_rl.python")["compare"])(paths)
    print("\n".join(map(visible, lines)))  # noqa: T201
    if report is not None:
        _write_page(paths, Path(report))
    return figures


def _write_page(paths: Sequence[Path], out: Path) -> Path:
    """Write the page about the runs in the directories ``paths`` to ``out``, and return it. Log what it leaves out."""
    write_page: WritePage = load(our_offers("async_rl.python")["report"])
    if left_out := write_page(paths, out):
        logger.warning("%s", left_out)
    return out


def _records(folder: Path, set_name: str, step: int | None) -> Iterator[Row]:
    """Yield the lines of the files of ``set_name`` in ``folder``, each with its step."""
    for name, number, path in step_files(folder):
        if name == set_name and step in (None, number):
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    yield {"step": number, **json.loads(line)}


def _frame(rows: Iterable[Row], index: list[str]) -> DataFrame:
    import pandas  # here, because few need it, and its import takes half a second

    frame = pandas.DataFrame(list(rows))
    return frame.set_index(index) if index and len(frame) else frame
