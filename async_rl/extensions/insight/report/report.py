"""Make the report of runs, as a file: ``write_report`` reads the run directories and writes one HTML page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from async_rl.errors import RunError
from async_rl.extensions.insight.comparison.table import short_names
from async_rl.extensions.insight.report.figures import Plain, read_run
from async_rl.extensions.insight.report.page import blob, render
from async_rl.extensions.insight.report.rollouts import index_data, packed_chunks, read_index
from async_rl.output import Progress
from async_rl.run.directory import RunDir, write_atomically

MAX_BYTES = 14_000_000
"""Size of a page. What doesn't fit is left out, and the page says so."""
_BASE_BYTES = 400_000
"""Room for the page itself: templates, curves and settings."""

_MAX_RUNS = 6
"""The page has as many colours."""


def read_all(runs: Sequence[Path]) -> list[Plain]:
    """Return the figures of ``runs``, which have names that tell them apart.

    Raises:
        RunError: there is no run, one of its files is damaged, or they are too many.
    """
    if len(runs) > _MAX_RUNS:
        raise RunError(f"expected at most {_MAX_RUNS} runs in one report, got {len(runs)}; compare shows more")
    names = short_names([os.path.realpath(path) for path in runs])
    return [{**read_run(path), "name": name} for path, name in zip(runs, names, strict=True)]


def write_report(
    runs: Sequence[Path], out: Path, *, max_bytes: int = MAX_BYTES, progress: Progress | None = None
) -> str:
    """Write the report of ``runs`` to the file ``out``, which is replaced. Return what the page leaves out, in words.

    Args:
        runs: run directories, finished or running.
        out: an HTML file. A reader never sees half of it.
        max_bytes: size of the file; rollouts beyond it are left out, evenly over the steps.
        progress: shows what is being done. None: nobody does.

    Raises:
        RunError: there is no run, one of its files is damaged, or ``out`` can't be written.
    """
    progress = progress or Progress(quiet=True)
    blobs, counts = dict[str, str](), list[int]()
    num_recorded = num_packed = 0
    progress.show("reading the metrics")
    figures = read_all(runs)
    for number, path in enumerate(runs):
        progress.show("packing the rollouts", number, len(runs))
        index, chunks = read_index(RunDir(path))
        room = (max_bytes - _BASE_BYTES) // len(runs) - len(blob(index_data(index, None)))
        packed = packed_chunks(chunks, max(0, room))
        blobs[f"index-{number}"] = blob(index_data(index, packed))
        blobs |= {f"chunk-{number}-{place}": text for place, text in packed.items()}
        counts.append(len(index))
        num_recorded += sum(chunk.end - chunk.start for chunk in chunks)
        num_packed += sum(chunks[place].end - chunks[place].start for place in packed)
    left_out = ""
    if num_packed < num_recorded:
        left_out = (
            f"It has the text of {num_packed:,} of the {num_recorded:,} recorded rollouts and answers; async-rl report "
            f"--serve shows all of them."
        )
    progress.show(f"writing {out}")
    try:
        write_atomically(out, render(figures, counts, blobs, left_out=left_out))
    except OSError as error:
        raise RunError(f"can't write the report {out}: {error.strerror or error}; choose another --out") from error
    return left_out
